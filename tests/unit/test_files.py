"""Folders that one process at a time writes to, and files that are never written through a link."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from regard import files
from regard.errors import DataError
from regard.files import LOCK, locked, new_folder, replace_text, temporary
from regard.training.checkpoint import RunFolder

HOLDER = "import sys, time, pathlib\nfrom regard.files import locked\nwith locked(pathlib.Path(sys.argv[1])):\n"


def test_second_process_is_refused(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(DataError, match=f"{tmp_path} is in use by another process"),
        locked(tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())
    with locked(tmp_path / "a" / "new"):
        assert [path.name for path in (tmp_path / "a" / "new").iterdir()] == [LOCK]
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER + "    print('held', flush=True)\n    time.sleep(60)", str(tmp_path)],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DataError, match="another process"), locked(tmp_path):
            pass
        half = temporary(tmp_path / "recipe.json")
        half.write_text("{")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / LOCK).exists()  # nobody was left to remove it
    with locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_waiting_process_gets_the_lock_next(tmp_path: Path) -> None:
    """Several threads wait for a folder, which is removed whenever it is empty; only one has the lock at a time."""
    inside: list[int] = []
    numbers_inside: list[int] = []

    def work(n: int) -> None:
        for _ in range(20):
            with locked(tmp_path / "run", wait=lambda: None):
                (tmp_path / "run" / "work").write_text("")
                inside.append(n)
                numbers_inside.append(len(inside))
                time.sleep(0.0005)
                inside.remove(n)
                (tmp_path / "run" / "work").unlink()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert numbers_inside == [1] * 120


def test_link_in_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").mkdir()
    for name in ("tensorboard", ".saving", "data", "log.jsonl"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "outside")
        with (
            pytest.raises(DataError, match=f"run/{name} is a link, and nothing is written through links"),
            locked(tmp_path / "run"),
        ):
            pass
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "outside" / "made")
    with pytest.raises(DataError, match="cannot write to"), locked(tmp_path / "run"):
        pass
    assert not list((tmp_path / "outside").iterdir())
    (tmp_path / "run" / LOCK).unlink()
    (tmp_path / "link").symlink_to(tmp_path / "run")  # the folder itself may be a link, because the user gave its path
    with locked(tmp_path / "link"):
        assert (tmp_path / "run" / LOCK).exists()


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for folder in (temporary(tmp_path / "data"), tmp_path / ".saving", tmp_path / ".data-making"):
        folder.mkdir()
        (folder / "weights").write_bytes(b"half")
    for name in (".log.jsonl-making", ".mine", "making", ".git"):
        (tmp_path / name).write_text("")
    with locked(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", ".mine", "making"]


def test_links_are_refused_at_any_depth_of_written_paths(tmp_path: Path) -> None:
    run, outside = RunFolder(tmp_path / "run"), tmp_path / "outside"
    (run.path / "tensorboard").mkdir(parents=True)
    outside.mkdir()
    run.recipe.touch()
    (run.path / "best").symlink_to("weights-00001000.safetensors")
    run.data.symlink_to(outside)  # only read, once there is a recipe
    with locked(run.path, writes=run.writes):
        pass
    with pytest.raises(DataError, match="best is a link"), locked(run.path):
        pass
    for name in ("log.jsonl", "tensorboard/events", ".saving", "weights-00001000.safetensors", "tokenizer.source.json"):
        (run.path / name).symlink_to(outside)
        with pytest.raises(DataError, match=f"{name} is a link"), locked(run.path, writes=run.writes):
            pass
        (run.path / name).unlink()
    run.recipe.unlink()
    with pytest.raises(DataError, match="data is a link"), locked(run.path, writes=run.writes):
        pass


def test_refused_folder_keeps_all_files(tmp_path: Path) -> None:
    for name in (".saving", ".photos-making", "mine"):
        (tmp_path / name).write_text("precious")

    def refuse() -> None:
        raise DataError("not ours")

    with pytest.raises(DataError, match="not ours"), locked(tmp_path, refuse):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".photos-making", ".saving", "mine"]
    (tmp_path / LOCK).write_text("of another program")
    with pytest.raises(DataError, match="not ours"), locked(tmp_path, refuse):
        pass
    assert (tmp_path / LOCK).read_text() == "of another program"


class NoLocks:
    """A file system without locks."""

    LOCK_EX = LOCK_NB = 0

    @staticmethod
    def flock(*_: object) -> None:
        raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("locks", [None, NoLocks])  # None: as on Windows
def test_platform_without_locks_keeps_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: type[NoLocks] | None
) -> None:
    monkeypatch.setattr(files, "fcntl", locks)
    with locked(tmp_path / "run"):
        live, old = temporary(tmp_path / "run" / "data"), temporary(tmp_path / "run" / "old")
        for path in (live, old):
            path.mkdir()
        os.utime(old, (1, 1))
        with locked(tmp_path / "run"):
            assert not old.exists()
        assert live.exists()
        assert (tmp_path / "run" / LOCK).exists()
        live.rmdir()
    assert not (tmp_path / "run").exists()


def test_windows_does_not_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, opens = [], os.open

    def windows(path: Path, flags: int, *mode: int) -> int:
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        opened.append(flags)
        return opens(path, flags, *mode)

    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(os, "open", windows)
    replace_text(tmp_path / "a", "whole")
    files.sync(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "whole"
    assert opened[-1] == os.O_RDWR  # a file that is only read cannot be flushed there


def test_waiting_for_a_lock_calls_wait(tmp_path: Path) -> None:
    calls: list[str] = []
    first = locked(tmp_path)
    first.__enter__()

    def wait() -> None:
        calls.append("waiting")
        first.__exit__(None, None, None)

    with locked(tmp_path, wait=wait):
        assert calls == ["waiting"]
    with locked(tmp_path, wait=wait):
        assert calls == ["waiting"]


def test_folder_that_cannot_be_created_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot create the folder"), locked(tmp_path / "file" / "run"):
        pass


def test_replace_text_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = tmp_path / "a", tmp_path / "b"
    target.write_text("other")
    path.symlink_to(target)
    replace_text(path, "new\n")
    assert (path.read_bytes(), path.is_symlink(), target.read_text()) == (b"new\n", False, "other")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "newer")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]
    assert path.read_text() == "new\n"


def test_new_folder_is_atomic(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").write_text("")
    (tmp_path / "data").symlink_to(tmp_path / "outside")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "data"):
        raise ZeroDivisionError
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data", "outside"]
    with new_folder(tmp_path / "data") as making:
        (making / "x").write_text("")
    assert not (tmp_path / "data").is_symlink()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["x"]
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["mine"]
