"""Runs: start or resume a training, load a trained model, evaluate it."""
