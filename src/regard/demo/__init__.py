"""The embedded default: a corpus that needs no download, and a run on it."""
