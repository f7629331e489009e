"""Attention weights and hidden states of a trained model."""
