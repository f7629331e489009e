"""Vocabulary tables and output heads."""
