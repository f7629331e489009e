"""Vocabulary: tables of vectors, and heads that make distributions of them."""
