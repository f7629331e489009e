"""Position schemes: added to the input, or handed to attention as terms."""
