"""The command line. Every command imports torch and other slow packages when it runs, so that `--help` is fast."""

# `regard --help` lists panels and commands in the order of these imports.
# isort: off
from regard.cli import show, check, variants, ablate, compare, ladder, bench, doctor, train, runs  # noqa: F401
from regard.cli import inference, export, attention, heads, align, prune, lens, serve  # noqa: F401

# isort: on
from regard.cli.base import app, main

__all__ = ["app", "main"]
