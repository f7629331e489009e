"""Processes of our own: the command line that every one of them is started with."""

import sys


def python(module: str) -> list[str]:
    """The command that runs a module of regard in a new process of this Python.

    `-m` alone puts the working folder first on the path, and imports a `torch.py` that lies there in place of torch.
    `-P` keeps the folder out; PYTHONPATH holds as ever.
    """
    return [sys.executable, "-P", "-m", module]
