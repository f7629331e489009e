"""Ablations: train a model with and without a modification over several seeds, and compare the results."""
