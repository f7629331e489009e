"""The command line. Everything heavy is imported inside the command that needs it: `--help` must not wait for torch."""

# isort: off  # the help lists its panels in this order
from regard.cli import inside, study, train, use

# isort: on
from regard.cli.base import app, main

__all__ = ["app", "inside", "main", "study", "train", "use"]
