"""Families of models, each a spec and the module it builds."""
