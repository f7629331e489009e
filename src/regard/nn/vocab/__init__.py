"""Vocabulary: embedding tables, and output heads."""
