"""Recipes: all settings of a model, its data, its training and its decoding, which `--set` can edit."""
