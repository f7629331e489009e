"""Inference with a trained model, from text to text, in PyTorch or in another engine (CTranslate2)."""
