"""Training in a run folder: it starts, stops, resumes, and never touches files that are not its own."""

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from regard.errors import DataError
from regard.recipe.recipe import request_from_record
from regard.runs.request import request_from_options
from regard.runs.train import (
    TrainingOptions,
    continues_launch,
    described_change,
    inside_warmup,
    resume,
    resume_run,
    start_run,
    train,
)
from regard.training.checkpoint import FORMAT, RunFolder, write_json
from regard.training.parallel.group import Group
from regard.training.parallel.joining import OtherRankError
from regard.training.schedule import Constant, Cosine
from regard.training.spec import TrainSpec

train_module = importlib.import_module("regard.runs.train")
SMALL = ("model.d_model=16", "model.heads=2", "model.encoder.depth=1", "model.decoder.depth=1")
SHORT = ("train.steps=4", "train.validate_every=2", "train.decode=4", "data.tokenizer=characters")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.tsv"
    path.write_text("".join(f"a{n % 7} b{n % 5} c\tx{n % 7} y{n % 5}\n" for n in range(100)))
    return path


def options(text: Path, *changes: str) -> dict[str, Any]:
    return {"tsv": text, "preset": "transformer_small", "changes": [*SHORT, *SMALL, *changes]}


def weights(run: Any) -> dict[str, Tensor]:
    return run.model.state_dict()


@pytest.mark.parametrize("lock", ["", "of another program"])
def test_training_that_is_refused_removes_nothing(tmp_path: Path, lock: str) -> None:
    text, folder = tmp_path / "text.tsv", tmp_path / "folder"
    text.write_text("a\tb\n")
    folder.mkdir()
    request = request_from_record({"data": {"train": [{"kind": "tsv", "path": str(text)}]}})
    expected = {".lock": lock, ".saving": "precious", ".photos-making": "precious", "thesis.tex": "precious"}
    for name, content in expected.items():
        (folder / name).write_text(content)
    for _ in range(2):
        with pytest.raises(DataError, match=r"exists; .*choose another folder"):
            start_run(request, folder)
        contents = {path.name: path.read_text() for path in folder.iterdir() if path.name != "request.json"}
        assert contents == expected or (
            not lock and contents == {name: expected[name] for name in expected if name != ".lock"}
        )
        (folder / "request.json").write_text("{}")  # now it looks like a run


def test_a_run_folder_holds_request_recipe_and_weights(text: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", cache=False, device="cpu", **options(text))
    assert (run.step, run.finished) == (4, True)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"request.json", "recipe.json", "tokenizer.json", "weights-final.safetensors", "log.jsonl", "data"} <= names
    assert json.loads((tmp_path / "run" / "request.json").read_text())["start"] is None


def test_resume_continues_to_the_same_weights(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path / "whole", cache=False, device="cpu", **options(text))
    request = request_from_options(**options(text))
    limit = TrainingOptions("cpu", max_time=0.0, cache=False)
    run, outcome = start_run(request, tmp_path / "parts", limit)
    assert (outcome.finished, run.step) == (False, 1)
    assert outcome.why == f"time limit reached. Continue: regard resume {tmp_path / 'parts'}"
    (tmp_path / "parts" / "request.json").rename(tmp_path / "parts" / "asked.json")  # its former name
    resumed = resume(tmp_path / "parts", "cpu")
    assert resumed.weights_sha256 == whole.weights_sha256
    again, outcome = resume_run(tmp_path / "parts", TrainingOptions("cpu"))
    assert (outcome.finished, outcome.why) == (True, "it was finished")
    assert again.weights_sha256 == whole.weights_sha256


class Waiting(Group):
    """A group that records whether rank 0 is inside `alone`, where it gives signs of life to the others."""

    inside = False

    def alone(self, function: Callable[[], Any]) -> Any:
        before, self.inside = self.inside, True
        try:
            return function()
        finally:
            self.inside = before


def test_the_other_ranks_see_signs_of_life_while_rank_0_reads_a_checkpoint_and_measures_baselines(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(
        request_from_options(**options(text)), tmp_path / "run", TrainingOptions("cpu", max_time=0.0, cache=False)
    )
    group, seen = Waiting(), dict[str, bool]()

    @contextmanager
    def joined(_: str) -> Iterator[Group]:
        yield group

    def recorded(name: str) -> Callable[..., Any]:
        function = getattr(train_module, name)

        def call(*given: Any) -> Any:
            seen[name] = group.inside
            return function(*given)

        return call

    monkeypatch.setattr(train_module, "joined", joined)
    for name in ("newest_whole", "_report_model"):
        monkeypatch.setattr(train_module, name, recorded(name))
    assert resume(tmp_path / "run", device="cpu").finished
    assert seen == {"newest_whole": True, "_report_model": True}


class Restarted(Group):
    restarted = True


class Two(Group):
    size = 2


@pytest.fixture
def begun(text: Path, tmp_path: Path) -> RunFolder:
    """A run that the launch `mine` has begun."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    record = {"format": FORMAT} | request_from_options(**options(text)).absolute().record()
    write_json(folder.request, record)
    write_json(folder.path / "environment.json", {"launch": "mine"})
    return folder


@pytest.mark.parametrize("group", [Restarted(), Two()], ids=["restarted", "same name"])
@pytest.mark.parametrize(
    ("more", "difference"),
    [
        ({"changes": ["train.steps=9"]}, "train.steps = 4, not 9"),
        ({"changes": ["model.heads=4"]}, "model.heads = 2, not 4"),
        ({"preset": "transformer_tiny"}, 'model.preset = "transformer_small", not "transformer_tiny"'),
        ({"variants": ["swiglu"]}, 'variants = [], not ["swiglu"]'),
    ],
)
def test_a_launch_with_other_settings_does_not_continue_a_run(
    begun: RunFolder,
    text: Path,
    group: Group,
    more: dict[str, Any],
    difference: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    changed = [change.partition("=")[0] for change in more.get("changes", ())]
    kept = [change for change in (*SHORT, *SMALL) if change.partition("=")[0] not in changed]
    given: dict[str, Any] = options(text) | more | {"changes": [*kept, *more.get("changes", ())]}
    with pytest.raises(DataError) as error:
        continues_launch(request_from_options(**given), begun, TrainingOptions("cpu"), group)
    folder = begun.path
    assert str(error.value) == (
        f"{folder} was started with {difference}; choose another folder with --out, or continue the run as it is with "
        f"regard resume {folder}"
    )


def test_a_launch_with_the_same_settings_continues_its_run(
    begun: RunFolder, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, given = request_from_options(**options(text)), TrainingOptions("cpu")
    monkeypatch.chdir(text.parent)
    relative = request_from_options(**options(Path(text.name)))
    for same in (request, relative):
        assert continues_launch(same, begun, given, Restarted())
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
        assert continues_launch(same, begun, given, Two())
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
        assert not continues_launch(same, begun, given, Two())
    assert not continues_launch(request, begun, given, Group())
    assert not continues_launch(request, RunFolder(begun.path / "new"), given, Two())


@pytest.mark.parametrize("failed", [True, False])
def test_a_rank_without_the_folder_reports_it_unless_rank_0_has_failed_and_cleared_it(
    failed: bool, tmp_path: Path
) -> None:
    class Second(Group):
        rank = 1

        def failed_elsewhere(self, wait: float = 0.0) -> bool:
            return failed and wait > 0

    folder = RunFolder(tmp_path / "run")
    with pytest.raises(OtherRankError if failed else DataError, match="another rank" if failed else "does not find"):
        train_module._follow(folder, TrainingOptions("cpu"), Second())


def test_watchers_receive_the_events_of_training(text: Path, tmp_path: Path) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.events: list[Any] = []

        def note(self, event: Any) -> None:
            self.events.append(event)

    first, second = Recorder(), Recorder()
    run = train(tmp_path / "run", cache=False, device="cpu", watchers=[first], max_time=0.001, **options(text))
    assert [event["event"] for event in first.events][:2] == ["baselines", "start"]
    assert {"event": "end", "finished": False}.items() <= first.events[-1].items()
    resume(run.path, device="cpu", watchers=[second])
    valid = [event for event in second.events if event["event"] == "valid"]
    assert valid[-1]["step"] == 4
    assert valid[-1]["loss"] > 0
    logged = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    assert [event["event"] for event in second.events] == [event["event"] for event in logged][-len(second.events) :]


@pytest.mark.parametrize("path", ["data.batching", "train.steps", "train.optimizer"])
def test_a_recipe_that_lost_a_setting_is_refused(path: str, text: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", cache=False, device="cpu", max_time=0.001, **options(text))
    record = json.loads((run.path / "recipe.json").read_text())
    section, _, name = path.partition(".")
    record[section][name] = None
    (run.path / "recipe.json").write_text(json.dumps(record))
    (run.path / "checksums.json").unlink()  # as the error about a changed recipe advises
    with pytest.raises(DataError, match=f"{path} is missing"):
        resume(run.path, device="cpu")


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a training run; create one with regard train"):
        resume(tmp_path)


def test_fine_tuning_starts_from_the_weights_of_its_parent(text: Path, tmp_path: Path) -> None:
    parent = train(tmp_path / "parent", cache=False, device="cpu", **options(text))
    changes = ["train.steps=1", "train.decode=0", "train.optimizer=adamw", "train.optimizer.learning_rate=1e-9"]
    child = train(tmp_path / "child", cache=False, device="cpu", tsv=text, start=parent.path, changes=changes)
    for name, tensor in weights(parent).items():
        assert tensor.sub(weights(child)[name]).abs().max() < 1e-6, name
    events = [json.loads(line) for line in (tmp_path / "child" / "log.jsonl").read_text().splitlines()]
    (change,) = [event for event in events if event["event"] == "parent"]
    assert change["before"]["loss"] == pytest.approx(change["after"]["loss"], rel=1e-3)


def test_a_stop_inside_the_warm_up_is_reported() -> None:
    warning = inside_warmup(TrainSpec(schedule=Cosine(warmup=100)), 30)
    assert warning is not None
    assert "inside the learning rate warm-up (step 30 of 100)" in warning
    assert inside_warmup(TrainSpec(schedule=Cosine(warmup=100)), 100) is None
    assert inside_warmup(TrainSpec(schedule=Constant()), 1) is None


def test_a_change_on_the_parent_is_one_sentence() -> None:
    change = {"parent": "runs/a", "before": {"loss": 2.0, "bleu": 30.1}, "after": {"loss": 2.5, "bleu": 25.0}}
    assert described_change(change, "bleu") == (
        "validation text of runs/a: bleu 30.1 before, 25 now, loss 2 before, 2.5 now"
    )


def test_a_former_request_file_is_used(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).request == tmp_path / "request.json"
    (tmp_path / "asked.json").write_text("{}")
    assert RunFolder(tmp_path).request == tmp_path / "asked.json"
