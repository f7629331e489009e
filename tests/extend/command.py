"""Run commands in the folder of a user's own Python module, in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from regard import cli

SMALL = (
    "--set", "model.d_model=16", "--set", "model.encoder.depth=1", "--set", "model.decoder.depth=1",
    "--set", "data.tokenizer=bytes", "--set", "data.batching.tokens=200", "--set", "data.held_out=20",
    "--set", "train.decode=8",
)  # fmt: skip


class Result(NamedTuple):
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class User:
    """A folder with a user's Python module and a corpus (pairs.tsv), in which commands are run."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, module: str, code: str) -> "User":
        (folder / f"{module}.py").write_text(code)
        pairs = [f"{a} {b}\t{b} {a}" for a in ("one", "two", "red", "big", "old") for b in ("house", "dog", "cat")]
        (folder / "pairs.tsv").write_text("\n".join(pairs * 8) + "\n")
        return cls(folder)

    def command(self, *words: str) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["regard", *words])
            patch.setenv("NO_COLOR", "1")
            patch.chdir(self.folder)
            with pytest.raises(SystemExit) as exit_info:
                cli.main()
        return Result(int(exit_info.value.code or 0), out.getvalue(), err.getvalue())

    def run(self, *words: str) -> Result:
        result = self.command(*words)
        assert result.code == 0, result.err
        return result

    def train(self, out: str, steps: int, *words: str) -> Result:
        settings = ("--set", f"train.steps={steps}", *words)
        return self.run("train", "--tsv", "pairs.tsv", *SMALL, *settings, "--trust-code", "--out", out)

    def refusal(self, *words: str) -> str:
        """Run a command that must fail, and return its error message."""
        result = self.command(*words)
        assert result.code == 2, result.out + result.err
        assert "Traceback" not in result.err
        return result.err.splitlines()[-1]
