"""Recipes: a model, its data, its training and its decoding, as one record that `--set` edits."""
