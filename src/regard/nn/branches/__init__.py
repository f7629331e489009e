"""Branches: the functions in a block that the residual connections wrap."""
