"""From what is asked for to a recipe; training in a folder leaves alone what is not its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.prepare import prepare
from regard.data.tokenizer import BPE
from regard.errors import DataError
from regard.nn.branches.self_attention import SelfAttention
from regard.planner.models import of_ngrams
from regard.recipe.recipe import Recipe, asked
from regard.runs.request import request_from_options
from regard.runs.resolve import resolve
from regard.runs.train import start_run
from regard.training.optim import AdamW, Muon
from regard.tree import walk


@pytest.mark.parametrize("lock", ["", "of another program"])
def test_training_that_is_refused_removes_nothing(tmp_path: Path, lock: str) -> None:
    text, folder = tmp_path / "text.tsv", tmp_path / "folder"
    text.write_text("a\tb\n")
    folder.mkdir()
    wanted = asked({"data": {"train": [{"kind": "tsv", "path": str(text)}]}})
    names = {".lock": lock, ".saving": "precious", ".photos-making": "precious", "thesis.tex": "precious"}
    for name, content in names.items():
        (folder / name).write_text(content)
    for _ in range(2):
        with pytest.raises(DataError, match=r"exists; .*choose another folder"):
            start_run(wanted, folder)
        left = {path.name: path.read_text() for path in folder.iterdir() if path.name != "asked.json"}
        assert left == names or (not lock and left == {name: names[name] for name in names if name != ".lock"})
        (folder / "asked.json").write_text("{}")  # now it looks like a run


LABELLED = "".join(
    f"{label}\tthe {word} number {n}\n" for n in range(30) for label, word in [("x", "odd"), ("y", "even")]
)


def resolved(tmp_path: Path, *changes: str) -> Recipe:
    """The recipe that is planned for a small labelled text."""
    text = tmp_path / "labels.tsv"
    text.write_text(LABELLED)
    wanted = request_from_options(labelled=text, changes=["train.steps=5", *changes])
    data = prepare(wanted.data, tmp_path / "data", seed=1)
    return resolve(wanted, data, torch.device("cpu"), lambda _: None)


def test_a_setting_of_attention_asks_for_a_model_that_has_attention(tmp_path: Path) -> None:
    assert of_ngrams(resolved(tmp_path).model)
    for change in ("heads=2", "attention_dropout=0.2"):
        model: Any = resolved(tmp_path, change).model
        assert any(isinstance(part, SelfAttention) for part in walk(model))
        assert str(getattr(model, change.split("=")[0])) == change.split("=")[1]


def test_an_edit_of_the_optimizer_is_one_of_adamw(tmp_path: Path) -> None:
    text = tmp_path / "text.tsv"
    text.write_text("".join(f"a{n}\tb{n} c\n" for n in range(50)))
    assert request_from_options(tsv=text).train.optimizer is None
    assert request_from_options(tsv=text, changes=["train.optimizer.learning_rate=1e-3"]).train.optimizer == AdamW(
        learning_rate=1e-3
    )
    lines = request_from_options(text=text, changes=["train.optimizer.betas=[0.9, 0.95]"]).train.optimizer
    assert lines == AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    assert request_from_options(tsv=text, changes=["train.optimizer=muon"]).train.optimizer == Muon()


def test_pieces_of_a_language_model_are_those_of_one_language(tmp_path: Path) -> None:
    text = tmp_path / "text.tsv"
    text.write_text("".join(f"a{n} b\tc{n} d\n" for n in range(60)))
    for tokenizer in ([], ["data.tokenizer=bpe"]):
        wanted = [request_from_options(text=text, changes=tokenizer), request_from_options(tsv=text, changes=tokenizer)]
        found = [prepare(one.data, tmp_path / f"{number}{len(tokenizer)}", seed=1) for number, one in enumerate(wanted)]
        assert [data.spec.tokenizer for data in found] == [BPE(languages=1), BPE(languages=2)]
