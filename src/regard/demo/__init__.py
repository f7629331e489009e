"""The built-in demo: a corpus that needs no download, and a training run on it."""
