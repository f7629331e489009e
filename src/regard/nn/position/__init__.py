"""Position schemes, which add vectors to the input or terms to attention."""
