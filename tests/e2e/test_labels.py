"""A classifier that is fine-tuned on other text keeps the meaning of its classes."""

import json
import os
from pathlib import Path

import pytest
import torch

import regard as package

from .conftest import complaint, regard, write

TINY = ("--set", "train.steps=1", "--set", "train.average=1", "-q")
SHAPE = (
    "--set",
    "model.d_model=16",
    "--set",
    "model.heads=2",
    "--set",
    "model.encoder.depth=1",
    "--set",
    "data.tokenizer=bytes",
)
STILL = ("--set", "train.optimizer.learning_rate=1e-9")  # so that predictions hardly change


def text_of(path: Path, *labels: str) -> str:
    return write(path, [f"{labels[i % len(labels)]}\ttext number {i}" for i in range(60)])


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    words = ("train", "--labelled", text_of(folder / "text", "m", "q", "d"), "--out", str(folder / "run"))
    result = regard(*words, *TINY, *SHAPE)
    assert result.returncode == 0, result.stderr
    return folder / "run"


def probabilities(run: Path) -> dict[str, float]:
    return package.load(run, "cpu").classify(["a text"])[0].probabilities


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("q", "d", "m"), ("d", "m", "q")),  # another order
        (("q", "m"), ("d", "m", "q")),  # fewer
        (("q",), ("d", "m", "q")),
        (("a", "q", "z", "e"), ("d", "m", "q", "a", "e", "z")),  # others
    ],
    ids=",".join,
)
def test_fine_tuning_keeps_classes_and_their_order(
    parent: Path, tmp_path: Path, labels: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    text = text_of(tmp_path / "text", *labels)
    result = regard("train", "--labelled", text, "--from", str(parent), "--out", str(out), *TINY[:-1], *STILL)
    assert result.returncode == 0, result.stderr
    if new := expected[3:]:
        assert f"Labels: {len(new)} new, untrained so far: {', '.join(new)}" in result.stderr
    if missing := [label for label in expected[:3] if label not in labels]:
        assert f"do not occur in this text, and are kept: {', '.join(missing)}" in result.stderr
    assert json.loads((out / "recipe.json").read_text())["data"]["objective"]["labels"] == list(expected)
    before, after = probabilities(parent), probabilities(out)
    assert tuple(after) == expected
    total = sum(after[label] for label in before)
    for label, probability in before.items():
        assert after[label] / total == pytest.approx(probability, rel=1e-4)
    weights, tuned = package.load(parent, "cpu").model.state_dict(), package.load(out, "cpu").model.state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tuned[name][: len(tensor)] if tensor.dim() else tuned[name], tensor, rtol=0, atol=1e-6
        )


def test_labels_are_not_read_from_a_pipe(parent: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    words = (
        "train",
        "--labelled",
        str(tmp_path / "pipe"),
        "--from",
        str(parent),
        "--out",
        str(tmp_path / "out"),
        *TINY,
    )
    assert "pipe: can be read only once" in complaint(*words)


def test_given_labels_must_begin_with_those_of_the_parent(parent: Path, tmp_path: Path) -> None:
    text = text_of(tmp_path / "text", "q", "d")
    words = ("train", "--labelled", text, "--from", str(parent), "--out", str(tmp_path / "out"), *TINY, *STILL)
    refused = complaint(*words, "--set", 'data.objective.labels=["q","d"]')
    assert "data.objective.labels: --from keeps the classes of" in refused
    assert not (tmp_path / "out").exists()
    result = regard(*words, "--set", 'data.objective.labels=["d","m","q","x"]')
    assert result.returncode == 0, result.stderr
    assert tuple(probabilities(tmp_path / "out")) == ("d", "m", "q", "x")
