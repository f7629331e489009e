"""Stacks: how the blocks of an encoder or decoder are connected."""
