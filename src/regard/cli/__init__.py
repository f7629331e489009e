"""The command line. Everything heavy is imported inside the command that needs it: `--help` must not wait for torch."""

from regard.cli import inside, study, train, use
from regard.cli.base import app, main

__all__ = ["app", "inside", "main", "study", "train", "use"]
