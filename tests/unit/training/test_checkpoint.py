"""The folder of a training run: checkpoints round-trip, and unfinished or damaged ones are not used."""

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import DataError, RegardError
from regard.files import file_digest
from regard.training import checkpoint as module
from regard.training import tensor_files
from regard.training.checkpoint import (
    FINAL,
    FORMAT,
    RunFolder,
    SaveError,
    newer,
    read_json,
    write_json,
)
from regard.training.log import Log
from regard.training.tensor_files import read_about, read_tensors, weights_digest

Tensors = dict[str, Tensor]


def weights_of(step: int) -> Tensors:
    generator = torch.Generator().manual_seed(step)
    return {
        "b": torch.randn(3, 2, generator=generator, dtype=torch.float32),
        "a": torch.randn(4, generator=generator, dtype=torch.float64),
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "whole": torch.tensor(step),
        "none": torch.zeros(0, 3),
    }


def trainer_of(step: int) -> Tensors:
    return {"optimizer.adamw.0.exp_avg": torch.full((2, 2), float(step))}


def saved(path: Path, *steps: int) -> RunFolder:
    folder = RunFolder(path)
    for step in steps:
        folder.save(step, weights_of(step), trainer_of(step), {"epoch": step // 10})
    return folder


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def intact(folder: RunFolder, step: int) -> bool:
    checkpoint = folder.latest()
    assert checkpoint is not None
    weights, trainer = folder.load(checkpoint)
    return checkpoint.step == step and same(weights, weights_of(step)) and same(trainer, trainer_of(step))


def test_checkpoint_round_trips(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10)
    checkpoint = folder.latest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.state["epoch"], checkpoint.state["format"]) == (10, 1, FORMAT)
    assert intact(folder, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trainer-00000010.json",
        "trainer-00000010.safetensors",
        "weights-00000010.safetensors",
    ]


def test_the_newest_checkpoint_is_the_latest(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10, 9, 100, 20)
    assert intact(folder, 100)
    assert folder.steps() == [9, 10, 20, 100]
    assert RunFolder(tmp_path / "nowhere").latest() is None
    assert RunFolder(tmp_path / "nowhere").steps() == []


def test_a_checkpoint_exists_once_its_json_does(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10, 20)
    folder.trainer(20, "json").unlink()
    assert intact(folder, 10)
    folder.trainer(10, "json").unlink()
    assert folder.latest() is None


def test_the_json_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    rename, sync = Path.rename, module.sync

    def recording_rename(self: Path, to: Path) -> Path:
        order.append(to.name)
        return rename(self, to)

    def recording_sync(path: Path) -> None:
        order.append(f"sync {path.name}")
        sync(path)

    monkeypatch.setattr(Path, "rename", recording_rename)
    monkeypatch.setattr(module, "sync", recording_sync)
    monkeypatch.setattr(tensor_files, "sync", recording_sync)
    saved(tmp_path, 3)
    folder_sync = f"sync {tmp_path.name}"
    assert order == [
        *("sync weights", "sync trainer"),
        *("weights-00000003.safetensors", "trainer-00000003.safetensors"),
        *(folder_sync, "trainer-00000003.json", folder_sync),
    ]


@pytest.mark.parametrize(
    "at", ["weights-00000020.safetensors", "trainer-00000020.safetensors", "trainer-00000020.json"]
)
def test_killed_save_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    class KilledError(BaseException):
        """Simulates a killed process."""

    folder = saved(tmp_path, 10)
    rename = Path.rename

    def killed(self: Path, to: Path) -> Path:
        if to.name == at:
            raise KilledError
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KilledError):
            saved(tmp_path, 20)
    assert intact(folder, 10)
    saved(tmp_path, 20)
    assert intact(folder, 20)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_respect_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        folder = saved(tmp_path, 10)
        folder.save_final(weights_of(1), {"steps": "[1]"})
        write_json(folder.recipe, {})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


def test_a_file_of_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10)
    for name in ("weights-00000010 (copy).safetensors", "weights-20.safetensors", "weights-00000030.safetensors.bak"):
        (tmp_path / name).write_bytes(b"")
    for name in ("trainer-00000010 (copy).json", "trainer-00000020.json~", "trainer-20.json", "trainer-.json"):
        (tmp_path / name).write_text("{}")
    assert folder.steps() == [10]
    assert intact(folder, 10)
    folder.prune((), 10)
    assert len(list(tmp_path.iterdir())) == 3 + 7


def test_steps_of_nine_digits_are_later(tmp_path: Path) -> None:
    assert intact(saved(tmp_path, 99_999_999, 100_000_000), 100_000_000)


def test_final_weights_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    """The safetensors library writes metadata in another order each time."""
    folder, about = RunFolder(tmp_path), {name: name for name in ("steps", "scores", "sha256", "a", "b", "c")}
    digests = set()
    for names in [list(about), list(reversed(about))] * 5:
        folder.save_final(weights_of(1), {name: about[name] for name in names})
        digests.add(file_digest(folder.final))
    assert len(digests) == 1


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """Links in the folder with the names of files, also of temporary files of earlier versions, are not followed."""
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    run.mkdir()
    (outside / "file").write_text("mine")
    for name in (".environment.json-making", ".log.jsonl-making", "environment.json", "log.jsonl", FINAL):
        (run / name).symlink_to(outside / "file")
    (run / ".saving").symlink_to(outside)
    folder = saved(run, 10)
    folder.save_final(weights_of(1), {"steps": "[1]"})
    write_json(run / "environment.json", {})
    Log(run / "log.jsonl").note({"event": "step", "step": 1})
    assert intact(folder, 10)
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("file", "mine")]
    (run / "log.jsonl").unlink()
    (run / "log.jsonl").symlink_to(outside / "new")
    with pytest.raises(SaveError, match="cannot save to"):
        append_to(run / "log.jsonl")
    assert not (outside / "new").exists()


def append_to(path: Path) -> None:
    log = object.__new__(Log)  # like a log that was opened before the link was created
    log.path = path
    log.note({"event": "step", "step": 1})


def test_old_checkpoints_are_pruned(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10, 20, 30, 40)
    folder.prune({20, 99}, 40)
    assert folder.steps() == [20, 40]
    assert sorted(path.name for path in tmp_path.glob("trainer-*")) == [
        "trainer-00000040.json",
        "trainer-00000040.safetensors",
    ]
    assert same(read_tensors(folder.weights(20)), weights_of(20))
    assert intact(folder, 40)


def test_the_last_checkpoints_stay_resumable(tmp_path: Path) -> None:
    """With the weights that each of them may need later: those that it lists as recent or as best."""
    folder = RunFolder(tmp_path)
    for step in (10, 20, 30, 40, 50):
        folder.save(step, weights_of(step), trainer_of(step), {"saved": [step - 10, step], "best": [10]})
        folder.prune({step - 10, step}, step, resumable=2)
    assert folder.checkpoints() == [40, 50]
    assert folder.steps() == [10, 30, 40, 50]
    assert all(folder.load(folder.checkpoint(step)) for step in (40, 50))


def test_checkpoints_after_the_last_one_are_pruned(tmp_path: Path) -> None:
    """They are left by a run that has resumed from an earlier checkpoint, because they were damaged."""
    folder = saved(tmp_path, 10, 20, 30)
    saved(tmp_path, 15)
    folder.prune((), 15, resumable=2)
    assert folder.checkpoints() == folder.steps() == [10, 15]


def test_a_damaged_checkpoint_does_not_prevent_pruning(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10, 20, 30)
    folder.trainer(20, "json").write_text("{")
    folder.prune((), 30, resumable=2)
    assert folder.checkpoints() == [20, 30]
    folder.prune((), 30)
    assert folder.checkpoints() == [30]


def test_remains_of_a_killed_save_are_pruned(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10, 20)
    folder.trainer(20, "json").unlink()
    saved(tmp_path, 15)
    folder.prune({10}, 15)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("trainer-00000015.json", "trainer-00000015.safetensors"),
        *("weights-00000010.safetensors", "weights-00000015.safetensors"),
    ]


@pytest.mark.parametrize("name", ["weights-00000010.safetensors", "trainer-00000010.safetensors"])
@pytest.mark.parametrize("place", [0, 9, -1])
def test_flipped_bit_is_detected(tmp_path: Path, name: str, place: int) -> None:
    folder = saved(tmp_path, 10)
    data = bytearray((tmp_path / name).read_bytes())
    data[place] ^= 1
    (tmp_path / name).write_bytes(data)
    checkpoint = folder.latest()
    assert checkpoint is not None
    with pytest.raises(DataError, match="has changed since it was saved"):
        folder.load(checkpoint)


def test_every_flipped_byte_of_the_json_is_detected_or_harmless(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save(10, weights_of(10), trainer_of(10), {"labels": 123, "scores": {"10": {"loss": 2.5}}})
    path = folder.trainer(10, "json")
    text, whole = path.read_bytes(), folder.checkpoint(10).state
    detected = 0
    for place in range(len(text)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        try:
            state = folder.checkpoint(10).state
        except DataError:
            detected += 1
        else:  # the name of the checksum has changed
            assert whole.items() <= state.items()
    assert detected >= len(text) - len("checksum")


@pytest.mark.parametrize("name", ["weights-00000010.safetensors", "trainer-00000010.safetensors"])
def test_missing_file_is_detected(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, 10)
    (tmp_path / name).unlink()
    checkpoint = folder.latest()
    assert checkpoint is not None
    with pytest.raises(DataError, match="is missing, so the checkpoint of step 10 is unusable"):
        folder.load(checkpoint)


DEEP = ['{"a": ' * 150 + "0" + "}" * 150, "[" * 100_000]
WRONG = ['{"step": 11, "sha256": {"weights": "", "trainer": ""}}', '{"step": 10, "sha256": ""}', '{"format": "x"}']


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"step": 10}', "\xff", *DEEP, *WRONG], ids=lambda text: text[:30]
)
def test_damaged_json_is_detected(tmp_path: Path, text: str) -> None:
    folder = saved(tmp_path, 10)
    folder.trainer(10, "json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"trainer-00000010\.json"):
        folder.latest()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10)
    state = read_json(folder.trainer(10, "json")) | {"format": FORMAT + 1}
    write_json(folder.trainer(10, "json"), state)
    with pytest.raises(DataError, match="by a newer regard; this one reads up to 1: upgrade regard"):
        folder.latest()
    assert str(tmp_path) in newer(tmp_path, 7)


def test_final_weights_have_metadata(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_final(weights_of(1), {"steps": "[1]"})
    assert folder.final.name == "weights-final.safetensors"
    assert same(read_tensors(folder.final), weights_of(1))
    assert read_about(folder.final) == {"steps": "[1]", "sha256": weights_digest(weights_of(1))}
    save_file(weights_of(1), folder.final, {"format": "pt", "steps": "[1]"})  # as earlier versions did
    assert read_about(folder.final) == {"format": "pt", "steps": "[1]"}
    assert folder.steps() == []


# -- a full disk


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("which", [1, 2])
def test_full_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, which: int
) -> None:
    folder = saved(tmp_path, 10)
    calls: list[Any] = []

    def failing(tensors: Tensors, path: Path, **settings: Any) -> None:
        calls.append(path)
        if len(calls) == which:
            Path(path).write_bytes(b"half")
            raise error
        save_file(tensors, path, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "save_file", failing)
        with pytest.raises(
            SaveError, match="the disk is full; free disk space, then continue from the last checkpoint"
        ):
            saved(tmp_path, 20)
        calls[:] = [None] * (which - 1)
        with pytest.raises(SaveError, match="the disk is full"):
            folder.save_final(weights_of(1), {})
    assert intact(folder, 10)
    assert not folder.final.exists()
    assert not list(tmp_path.glob(".*"))
    assert issubclass(SaveError, RegardError)


def test_disk_that_fills_up_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """In a process whose files may not exceed 20 kB."""
    folder = saved(tmp_path, 10)
    code = """
        import resource, sys, torch
        from regard.training.checkpoint import RunFolder, SaveError
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        folder = RunFolder(sys.argv[1])
        small, large = {"a": torch.zeros(10)}, {"a": torch.zeros(10_000)}
        for weights, trainer in ((large, small), (small, large)):
            try:
                folder.save(20, weights, trainer, {})
            except SaveError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"cannot save to {tmp_path}: ") and "File too large" in line for line in lines)
    assert intact(folder, 10)
    assert not list(tmp_path.glob(".*"))


def test_missing_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="cannot save to"):
        saved(tmp_path / "nowhere", 10)
    with pytest.raises(SaveError, match="cannot write"):
        write_json(tmp_path / "nowhere" / "recipe.json", {})


def test_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.json"
    write_json(path, {"a": "\u00e9", "b": [1, None]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "\u00e9", "b": [1, None]}

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveError, match="No space left on device"):
        write_json(path, {"a": "other"})
    assert read_json(path)["a"] == "\u00e9"
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.json"]
