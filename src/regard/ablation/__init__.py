"""What a modification is worth: the same training with and without it, over seeds, and a verdict."""
