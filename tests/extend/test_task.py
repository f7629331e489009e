"""A user-defined task, denoising, trained on plain text from the command line and from Python."""

import json

import pytest

import regard
from regard.errors import SpecError

from .command import User

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
    "--set", "data.tokenizer=bytes", "--set", "data.batching.tokens=200", "--set", "data.held_out=8",
    "--set", "train.steps=4", "--set", "train.decode=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    user = User.of(tmp_path_factory.mktemp("task"), "denoising", DENOISING)
    lines = [f"the {a} {b} is {c}" for a in ("red", "big", "old") for b in ("house", "dog", "cat") for c in "xyz"]
    (user.folder / "lines.txt").write_text("\n".join(lines * 4) + "\n")
    return user


TRAIN = ("train", "--text", "lines.txt", *SMALL, "--set", "data.objective=denoising:Denoising", "--out", "run")


@pytest.mark.slow
def test_user_task_trains_and_translates_on_the_command_line(user: User) -> None:
    user.run(*TRAIN, "--trust-code", "--json")
    record = json.loads((user.folder / "run" / "recipe.json").read_text())
    assert record["data"]["objective"] == {"kind": "denoising:Denoising", "share": 0.3}
    assert record["decode"]["kind"] == "beam"
    assert record["model"]["kind"] == "encoder_decoder"
    (user.folder / "in.txt").write_text("the red _ is x\n")
    assert len(user.run("translate", "run", "in.txt", "--trust-code").out.splitlines()) == 1
    assert "--trust-code" in user.refusal("translate", "run", "in.txt")


def test_user_task_needs_trust_code(user: User) -> None:
    assert "data.objective.kind: 'denoising:Denoising' would import code; add --trust-code" in user.refusal(*TRAIN)


def test_user_task_trains_from_python(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(user.folder))
    folder = user.folder
    changes = ["data.objective=denoising:Denoising", *SMALL[1::2]]
    with pytest.raises(SpecError, match="would import code"):
        regard.train(folder / "python", text=folder / "lines.txt", changes=changes)
    run = regard.train(folder / "python", text=folder / "lines.txt", changes=changes, trust_code=True)
    assert run.command == "translate"
    batch = run.batch([("the red house is x",)])
    assert batch.source is not None
    assert run.tokenizer.decode(batch.target[0].tolist()) == "the red house is x"
    assert "_" in run.tokenizer.decode(batch.source[0].tolist())
