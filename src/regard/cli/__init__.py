"""The command line. Each command imports torch and other slow packages itself, so that `--help` is fast."""

# The help lists its panels and commands in this order.
# isort: off
from regard.cli import show, check, variants, ablate, compare, ladder, bench, train, inference, export  # noqa: F401

# isort: on
from regard.cli.base import app, main

__all__ = ["app", "main"]
