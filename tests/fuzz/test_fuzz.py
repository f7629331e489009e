"""A small version of `make test-fuzz`, in a process of its own with limited memory."""

import json
import subprocess
import sys
from pathlib import Path


def test_damaged_files_are_refused_without_a_traceback(tmp_path: Path) -> None:
    script = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, str(script), "--inputs", "2000", "--seed", "20261119", "--keep", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    outcomes = json.loads(result.stdout)["outcomes"]
    for kind in ("corpora", "recipes", "load", "resume"):
        assert outcomes[f"{kind}: accepted"], "the change did not matter"
        assert outcomes[f"{kind}: refused"]
