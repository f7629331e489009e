"""The parts of a Transformer, each chosen by a spec."""
