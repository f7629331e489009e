"""The command line as a user runs it, in a folder with modules of the user's own."""

import os
import subprocess
import sys
from pathlib import Path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `regard` in a folder."""
    run = [sys.executable, "-P", "-m", "regard", *words]
    environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(run, cwd=folder, env=environment, check=False, capture_output=True, text=True)


def refusal(folder: Path, *words: str) -> str:
    """The one-sentence error of a command."""
    result = command(folder, *words)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr
