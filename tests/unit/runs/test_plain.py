"""`--plain` computes with the readable form of a model, everywhere, and is refused where it would be ignored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import regard as package
from regard import fast
from regard.data.objectives import LanguageModelling, Translation
from regard.fast.install import PREPACKED, REPLACEMENTS
from regard.training.executor import Eager
from regard.training.trainer import Trainer
from tests.unit.decoding.untrained import TWO, complaint, printed, untrained

TEXT = "abcd efgh\nmnop\nijkl abcd\n"
INSTALLED = {replacement.fast for replacement in (*REPLACEMENTS, *PREPACKED)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "translator": untrained(folder / "translator", Translation()),
        "lines": untrained(folder / "lines", LanguageModelling("lines")),
        "classifier": untrained(folder / "classifier", TWO),
    }


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    contents = {"text": TEXT, "tsv": "abcd\tefgh\nijkl\tmnop\n", "labelled": "good\tabcd\nbad\tefgh\n"}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in contents}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that `fast.install` is called with."""
    models, install = [], fast.install
    monkeypatch.setattr(fast, "install", lambda model, *args, **kw: models.append(model) or install(model, *args, **kw))
    return models


COMMANDS: dict[str, Callable[[dict[str, Path], dict[str, Path]], list[Any]]] = {
    "translate": lambda runs, files: ["translate", runs["translator"], files["text"], "--max-len", 5],
    "generate": lambda runs, files: ["generate", runs["lines"], files["text"], "--max-len", 5, "--beam", 2],
    "classify": lambda runs, files: ["classify", runs["classifier"], files["text"]],
    "score": lambda runs, files: ["score", runs["lines"], "--target", files["text"]],
    "evaluate": lambda runs, files: ["evaluate", runs["classifier"], "--labelled", files["labelled"]],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_plain_commands_print_the_same_without_the_fast_form(
    command: str, runs: dict[str, Path], files: dict[str, Path], installed: list[nn.Module]
) -> None:
    words = [str(word) for word in COMMANDS[command](runs, files)]
    expected = printed(*words)
    assert installed
    installed.clear()
    assert printed(*words, "--plain") == expected
    assert not installed


def test_plain_is_refused_where_nothing_is_computed_with_the_model(runs: dict[str, Path], tmp_path: Path) -> None:
    assert "--plain" in complaint("translate", runs["translator"], "--engine", "ctranslate2", "--plain")
    outputs = tmp_path / "outputs"
    outputs.write_text("abcd\n")
    options = ("--against", outputs, "--tsv", tmp_path / "tsv")
    (tmp_path / "tsv").write_text("abcd\tefgh\n")
    assert "--plain" in complaint("evaluate", outputs, *options, "--plain")


def test_plain_loads_the_readable_form(runs: dict[str, Path]) -> None:
    for plain in (False, True):
        model = package.load(runs["translator"], "cpu", plain=plain).model
        assert plain != bool(INSTALLED & {type(module) for module in model.modules()})


def test_plain_training_and_resuming_never_install_the_fast_form(
    files: dict[str, Path], tmp_path: Path, installed: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, fit = [], Trainer.fit

    def watched(self: Trainer, *args: Any) -> Any:
        outcome = fit(self, *args)
        programs.append(type(self.executor))
        return outcome

    monkeypatch.setattr(Trainer, "fit", watched)
    files["tsv"].write_text("".join(f"a{n} b\tb{n} c\n" for n in range(60)))
    common: dict[str, Any] = {"device": "cpu", "cache": False, "preset": "transformer_tiny", "tsv": files["tsv"]}
    losses = []
    for plain in (False, True):
        folder = tmp_path / str(plain)
        changes = ["train.steps=2", "train.decode=0", "model.dropout=0.0"]
        run = package.train(folder, changes=changes, plain=plain, **common)
        assert bool(installed) != plain
        losses.append(run.scores["loss"])
        installed.clear()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert programs == [Eager, Eager]
    package.resume(tmp_path / "True", "cpu", plain=True)  # a finished run is only loaded
    assert not installed


def test_plain_refuses_to_compile(files: dict[str, Path], tmp_path: Path) -> None:
    files["tsv"].write_text("".join(f"a{n} b\tb{n} c\n" for n in range(60)))
    with pytest.raises(package.SpecError, match=r"train\.compile"):
        package.train(
            tmp_path / "run",
            tsv=files["tsv"],
            preset="transformer_tiny",
            changes=["train.steps=2", "train.compile=true"],
            device="cpu",
            cache=False,
            plain=True,
        )
    assert not [path for path in (tmp_path / "run").glob("*") if path.name != ".lock"]
