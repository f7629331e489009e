"""Training resumes from the newest whole checkpoint; damaged ones are named. The result is the same, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.errors import DataError
from regard.training.checkpoint import FORMAT, RunFolder
from regard.training.recovery import newest_whole
from regard.training.tensor_files import read_about, read_tensors, write_weights
from regard.training.trainer import Trainer
from tests.unit.training.test_trainer import (
    Recorder,
    bucketed,
    held_out_loss,
    same,
    spec_of,
    stopping,
    tiny,
)

SPEC = spec_of(14, accumulate=2, validate_every=4, save_every=3, ema=0.7, average=2)
FILES = ("weights-00000013.safetensors", "trainer-00000013.safetensors", "trainer-00000013.json")


def trainer(path: Path, recorder: Recorder | None = None, seed: int = 1) -> Trainer:
    path.mkdir(exist_ok=True)
    return Trainer(tiny(0.3, seed), SPEC, bucketed(), RunFolder(path), held_out_loss, [recorder] if recorder else ())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], RunFolder]:
    """Return a function that returns the folder of an uninterrupted run. It trains with the dtype of the tests."""
    path = tmp_path_factory.mktemp("straight")

    def folder() -> RunFolder:
        if not RunFolder(path).final.exists():
            trainer(path).fit()
        return RunFolder(path)

    return folder


def stopped(path: Path, step: int = 13) -> RunFolder:
    """Return the folder of a run that stopped at `step`: its checkpoints are those of steps 12 and 13."""
    first = trainer(path)
    first.fit(stopping(first, {step}))
    return first.folder


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_used(
    tmp_path: Path, straight: Callable[[], RunFolder], name: str, how: str
) -> None:
    folder, recorder = stopped(tmp_path / "run"), Recorder()
    assert folder.checkpoints() == [12, 13]
    damage(folder.path / name, how)
    resumed = trainer(folder.path, recorder, seed=7)
    assert resumed.resume()
    assert resumed.progress.step == 12
    if (how, name) == ("missing", FILES[2]):  # without its JSON file, a checkpoint is not complete
        assert recorder.events == []
    else:
        (event,) = recorder.of("damaged")
        assert event["problem"].startswith(str(folder.path / name))
        assert event["problem"].endswith("; training resumes from the checkpoint of step 12")
        assert event["step"] == 12
    resumed.fit()
    expected = straight()
    assert same(read_tensors(folder.final), read_tensors(expected.final))
    assert read_about(folder.final) == read_about(expected.final)
    assert folder.steps() == expected.steps()


def test_training_repeated_after_a_fall_back_overwrites_the_damaged_checkpoint(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run")
    damage(folder.weights(13), "flipped")
    resumed = trainer(folder.path, seed=7)
    resumed.resume()
    resumed.fit(stopping(resumed, {13}))
    recovery = newest_whole(folder)
    assert recovery is not None
    assert (recovery.checkpoint.step, recovery.damaged) == (13, ())


def test_every_retained_checkpoint_has_the_weights_that_it_needs(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run")
    damage(folder.weights(13), "missing")
    recovery = newest_whole(folder)
    assert recovery is not None
    assert {*recovery.progress.saved, *recovery.progress.best} <= {*folder.steps()}


def test_without_a_whole_checkpoint_the_error_is_one_sentence(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run")
    damage(folder.weights(12), "truncated")
    damage(folder.trainer(13, "json"), "flipped")
    with pytest.raises(DataError) as error:
        newest_whole(folder)
    assert str(error.value) == (
        f"{folder.trainer(13, 'json')} has changed since it was saved, and none of the 2 checkpoints is whole; "
        "restore it from a copy"
    )


def test_a_checkpoint_of_a_newer_version_is_refused_rather_than_passed_over(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run")
    path = folder.trainer(13, "json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    with pytest.raises(DataError, match="by a newer regard"):
        newest_whole(folder)


def test_a_run_without_checkpoints_has_nothing_to_recover(tmp_path: Path) -> None:
    assert newest_whole(RunFolder(tmp_path)) is None


def test_the_final_weights_are_chosen_without_damaged_checkpoints(tmp_path: Path) -> None:
    """Of the two best checkpoints, one is damaged before the end of training."""
    recorder = Recorder()
    run = trainer(tmp_path / "run", recorder)
    run.fit(stopping(run, {13}))
    first, second = run.progress.best
    damage(run.folder.weights(second), "flipped")
    resumed = trainer(tmp_path / "run", recorder)
    resumed.resume()
    resumed.progress.step = resumed.progress.steps = 13  # the end
    resumed.fit()
    (event,) = recorder.of("damaged")
    assert str(run.folder.weights(second)) in event["problem"]
    assert json.loads(read_about(run.folder.final)["steps"]) == [first]


def test_no_final_weights_are_made_of_damaged_checkpoints_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run")
    run.fit(stopping(run, {13}))
    for step in run.folder.steps():
        other = read_tensors(run.folder.weights(step))
        write_weights(run.folder.weights(step), other)
        damage(run.folder.weights(step), "flipped")
    with pytest.raises(DataError, match="has no checkpoint whose weights are whole; restore one from a copy"):
        run.whole_checkpoints()
