"""Run folders of untrained models, for tests of the command line and of `regard.load`."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from regard import cli, preset
from regard.data.batching import Buckets, Windows
from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.data.prepare import DataSpec
from regard.data.text import TSV, Labelled, Lines
from regard.data.tokenizer import BPE
from regard.decoding.beam import Beam
from regard.decoding.search import Search
from regard.models.build import build
from regard.recipe.recipe import Recipe
from regard.training.checkpoint import FORMAT, RunFolder, write_json
from regard.training.spec import TrainSpec
from regard.variants import combine

TEXT = ["abcd efgh ijkl", "mnop abcd", "efgh efgh ijkl mnop"] * 20
LINES = LanguageModelling("lines")
STREAM = LanguageModelling("stream")
TWO = Classification(("bad", "good"))
WINDOW = 24
USUAL = Beam()
SMALL: Mapping[str, Any] = {"d_model": 16, "heads": 2}
POSITIONS: Mapping[str, Any] = {"input.position": {"kind": "learned", "max_len": WINDOW}}


def untrained(
    path: Path,
    objective: Objective,
    decode: Search = USUAL,
    max_len: int = 20,
    variants: Sequence[str] = (),
    **changes: Any,
) -> Path:
    """Write a run folder with an untrained model. `changes` are edits of the model's spec."""
    tokenizer = BPE(272).learn(TEXT)
    corpus = {Translation: TSV("x"), LanguageModelling: Lines("x"), Classification: Labelled("x")}[type(objective)]
    batching = Windows(WINDOW * 8, WINDOW) if objective.stream else Buckets(4000)
    data = DataSpec((corpus,), objective=objective, tokenizer=BPE(272), max_len=max_len, batching=batching)
    sizes = {"vocab": tokenizer.size, **SMALL}
    if isinstance(objective, Translation):
        model = preset("transformer_tiny", **sizes, **{"encoder.depth": 1, "decoder.depth": 1, **changes})
    elif isinstance(objective, LanguageModelling):
        model = preset("gpt2_small", **sizes, **{"decoder.depth": 1, **changes})
    else:
        task = {"kind": "sentence_classifier", "classes": 2}
        model = preset("lstm_classifier", vocab=tokenizer.size, **{"task": task, "d_model": 16, **changes})
    model = combine(variants, model)
    folder = RunFolder(path)
    path.mkdir(parents=True)
    write_json(folder.recipe, {"format": FORMAT} | Recipe(model, data, TrainSpec(), decode).record())
    tokenizer.save(path / "tokenizer.json")
    weights = build(model, seed=1).state_dict()
    # Larger weights make outputs differ from line to line.
    folder.save_final({name: 3 * each for name, each in weights.items()}, {"steps": "[1]", "scores": "{}"})
    return path


def regard(*words: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, and return its exit code and output."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["regard", *map(str, words)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "100")
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as left:
            cli.main()
        signal.signal(signal.SIGINT, handler)
    return subprocess.CompletedProcess(words, int(left.value.code or 0), out.getvalue(), err.getvalue())


def printed(*words: str | Path, stdin: bytes = b"") -> str:
    """Return the standard output of a command that succeeds."""
    result = regard(*words, stdin=stdin)
    assert result.returncode == 0, result.stderr
    return result.stdout


def complaint(*words: str | Path, stdin: bytes = b"") -> str:
    """Return the error message of a command that fails with exit code 2 and prints nothing else."""
    result = regard(*words, stdin=stdin)
    assert result.returncode == 2, result.stdout + result.stderr
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    return result.stderr


def started(*words: str | Path) -> "subprocess.Popen[str]":
    """Start the command line as a separate process with a pipe as standard input."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command: Sequence[str] = [sys.executable, "-P", "-m", "regard", *map(str, words)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, encoding="utf-8"
    )
