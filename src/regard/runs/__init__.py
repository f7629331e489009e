"""Runs: start or resume a training run, load a trained model, evaluate it."""
