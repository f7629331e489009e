"""The parts of a Transformer, each behind a slot."""
