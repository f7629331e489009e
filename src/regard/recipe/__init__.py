"""Recipes: one record for a model, its data, its training and its decoding, which `--set` can edit."""
