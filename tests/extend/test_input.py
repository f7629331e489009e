"""A user-defined task and input that are not text: a classifier reads measurements as vectors."""

import json

import pytest
import torch

import regard
from regard.batch import Batch
from regard.testing import examine, tiny
from regard.tree import swap

from .command import User

SIGNALS = '''
"""Classify a signal, written as `0.1,0.9 0.3,0.7 ...`: two channels at every step."""

from dataclasses import dataclass
from types import MappingProxyType

from regard.data.objectives import Classification
from regard.data.token_store import Column
from regard.errors import DataError


@dataclass(frozen=True, slots=True)
class Signals(Classification):
    kind = "signals"
    encoded = MappingProxyType({})  # nothing is tokenized
    channels: int = 2

    def inputs(self, texts, tokenizers):
        try:
            signals = [[[float(x) for x in step.split(",")] for step in text.split()] for text in texts]
        except ValueError as error:
            raise DataError(f"a signal is numbers, such as 0.1,0.9 0.3,0.7: {error}") from None
        return Column.of_vectors(signals, self.channels)

    def model_changes(self):
        return {"input": {"kind": "vectors", "channels": self.channels}}
'''
PATCHES = '''
from dataclasses import dataclass

from torch import nn

from regard.nn.input import Input, InputSpec


@dataclass(frozen=True, slots=True)
class Patches(InputSpec):
    """W x: the patches of an image, without positions."""

    kind = "patches"
    size: int = 4

    @property
    def vector_channels(self):
        return self.size * self.size

    def build(self, site):
        return PatchesModule(site.linear(self.size * self.size, {"other": site.d_model}))


class PatchesModule(Input):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, values, table, positions, bound, types=None):
        return self.linear(values.to(next(self.linear.parameters()).dtype))
'''
TRAIN = (
    "train", "--labelled", "signals.tsv", "--set", "data.objective=signals:Signals", "--set", "data.held_out=8",
    "--set", "train.steps=4", "--set", "train.validate_every=4", "--set", "model.d_model=16", "--out", "run",
)  # fmt: skip


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    """A user's folder with two modules and a corpus of rising and falling signals."""
    user = User.of(tmp_path_factory.mktemp("input"), "signals", SIGNALS)
    (user.folder / "patches.py").write_text(PATCHES)
    steps = [[f"{k / 10},{n / 50}" for k in range(4 + n % 3)] for n in range(40)]
    lines = [f"up\t{' '.join(row)}\ndown\t{' '.join(reversed(row))}\n" for row in steps]
    (user.folder / "signals.tsv").write_text("".join(lines))
    return user


@pytest.mark.slow
def test_classifier_of_vectors_on_the_command_line(user: User) -> None:
    user.run(*TRAIN, "--trust-code", "--json")
    record = json.loads((user.folder / "run" / "recipe.json").read_text())
    assert record["model"]["input"]["kind"] == "vectors"
    assert record["data"]["objective"] == {"kind": "signals:Signals", "labels": ["down", "up"], "channels": 2}
    (user.folder / "in.txt").write_text("0.0,0.1 0.1,0.1 0.2,0.1\n")
    assert user.run("classify", "run", "in.txt", "--trust-code").out.split()[0] in ("up", "down")
    (user.folder / "words.txt").write_text("no signal\n")
    assert "a signal is numbers" in user.refusal("classify", "run", "words.txt", "--trust-code")
    assert "--trust-code" in user.refusal("classify", "run", "in.txt")


def test_classifier_of_vectors_in_python(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(user.folder))
    folder = user.folder
    changes = [word for word in TRAIN if "=" in word]
    run = regard.train(folder / "python", labelled=folder / "signals.tsv", changes=changes, trust_code=True)
    signals = ["0.0,0.1 0.1,0.1", "0.3,0.1 0.2,0.1 0.1,0.1"]
    together, alone = run.classify(signals), [run.classify(signal) for signal in signals]
    assert [p.probabilities["up"] for p in together] == pytest.approx([p.probabilities["up"] for p in alone], abs=1e-6)
    batch = run.batch([("up", signals[0])])
    assert torch.equal(batch.target, torch.tensor([[[0.0, 0.1], [0.1, 0.1]]]))


def test_user_input_keeps_the_laws(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(user.folder))
    from patches import Patches  # type: ignore[reportMissingImports]

    spec = swap(tiny.families()["sentence_classifier"], regard.nn.input.InputSpec, lambda _: Patches())
    laws = ("padding", "packing", "batch", "parameters", "storage", "fast")
    outcomes = {verdict.law: verdict.outcome for verdict in examine("patches", spec, laws)}
    assert outcomes == dict.fromkeys(laws, "kept") | {"packing": "not applicable"}
    record = regard.to_record(spec)
    assert record["input"] == {"kind": "patches:Patches", "size": 4}
    model = regard.build(regard.from_record(record, trust_code=True))
    assert model(Batch(torch.zeros(2, 3, 16))).shape == (2, 3)
