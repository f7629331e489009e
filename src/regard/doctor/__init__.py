"""The doctor: examine training text before training, and training runs during and after it."""
