"""Use a trained model: text in and text out, by our own search or by another engine (CTranslate2)."""
