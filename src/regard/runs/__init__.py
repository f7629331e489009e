"""Training runs: start or resume a run, and load, evaluate and use the trained model."""
