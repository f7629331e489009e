"""Stacks: how blocks are wired."""
