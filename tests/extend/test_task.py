"""A task from outside the package: denoising, trained from plain text by the command line and from Python."""

import json
from pathlib import Path

import pytest

import regard
from regard.errors import SpecError

from .user import command, refusal

DENOISING = '''
"""Denoising (Lewis et al. 2020, BART): restore a text of which words are masked."""

from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from regard.data.objectives import Translation


@dataclass(frozen=True, slots=True)
class Denoising(Translation):
    kind = "denoising"
    texts = ("text",)  # a record is one line of text
    output_text = 0
    encoded = MappingProxyType({"source": 0, "target": 0})  # both columns are tokenized like this text
    share: float = 0.3  # of the words are masked

    def pair(self, record):
        """The text that the model reads, and the text that it should predict."""
        chance = Random(record[0])  # the same mask in every epoch
        words = ["_" if chance.random() < self.share else word for word in record[0].split()]
        return " ".join(words), record[0]
'''
SMALL = (
    "--set", "model.d_model=16", "--set", "model.encoder.depth=1", "--set", "model.decoder.depth=1",
    "--set", "data.tokenizer=bytes", "--set", "data.batching.tokens=300", "--set", "data.held_out=8",
    "--set", "train.steps=8", "--set", "train.decode=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a module and a corpus."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "denoising.py").write_text(DENOISING)
    lines = [f"the {a} {b} is {c}" for a in ("red", "big", "old") for b in ("house", "dog", "cat") for c in "xyz"]
    (folder / "lines.txt").write_text("\n".join(lines * 4) + "\n")
    return folder


TRAIN = ("train", "--text", "lines.txt", *SMALL, "--set", "data.objective=denoising:Denoising", "--out", "run")


@pytest.mark.slow
def test_a_task_is_trained_and_used_by_the_command_line(folder: Path) -> None:
    result = command(folder, *TRAIN, "--trust-code", "--json")
    assert result.returncode == 0, result.stderr
    record = json.loads((folder / "run" / "recipe.json").read_text())
    assert record["data"]["objective"] == {"kind": "denoising:Denoising", "share": 0.3}
    assert record["decode"]["kind"] == "beam"
    assert record["model"]["kind"] == "encoder_decoder"
    (folder / "in.txt").write_text("the red _ is x\n")
    assert len(command(folder, "translate", "run", "in.txt", "--trust-code").stdout.splitlines()) == 1
    assert "--trust-code" in refusal(folder, "translate", "run", "in.txt")


def test_a_task_is_refused_unless_its_code_is_trusted(folder: Path) -> None:
    assert "data.objective.kind: 'denoising:Denoising' would import code; add --trust-code" in refusal(folder, *TRAIN)


def test_a_task_is_trained_from_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    changes = ["data.objective=denoising:Denoising", *SMALL[1::2]]
    with pytest.raises(SpecError, match="would import code"):
        regard.train(folder / "python", text=folder / "lines.txt", changes=changes)
    run = regard.train(folder / "python", text=folder / "lines.txt", changes=changes, trust_code=True)
    assert run.command == "translate"
    batch = run.batch([("the red house is x",)])
    assert batch.source is not None
    assert run.tokenizer.decode(batch.target[0].tolist()) == "the red house is x"
    assert "_" in run.tokenizer.decode(batch.source[0].tolist())
