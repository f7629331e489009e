"""Branches: the sublayers of a block, such as attention and feed-forward."""
