"""The modules of a Transformer, each built by a spec (a frozen dataclass)."""
