"""Faults: killed saves, damaged files, full, read-only and vanished disks, and signals. Nothing is lost or wrong."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.training import tensor_files
from regard.training.checkpoint import RunFolder

from .conftest import complaint, process, regard, training

LIMIT = 600  # seconds for a test; on a machine that is not busy, each takes less than 30
ROOT = Path(__file__).parents[2]
FEW = (
    "--set", "train.steps=8", "--set", "train.validate_every=4", "--set", "train.save_every=2", "--set",
    "train.decode=2", "--set", "train.ema=0.9", "--set", "train.accumulate=2", "--set", "model.dropout=0.1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Fail a test that hangs."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"the test took more than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def digest(run: Path) -> str:
    summary = json.loads(regard("show", str(run), "--json").stdout)
    assert summary["finished"]
    return summary["weights_sha256"]


# -- killed saves


def test_a_save_killed_at_any_file_boundary_loses_at_most_that_save(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.killed_saves", str(tmp_path)],
        capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert len(results) > 30, "the kills were not at every file boundary"
    assert results[-1]["code"] == 0
    assert {each["code"] for each in results[:-1]} == {-signal.SIGKILL}
    assert {each["resumed_code"] for each in results} == {0}
    assert {each["sha256"] for each in results} == {results[-1]["sha256"]}
    assert [each["damaged"] for each in results] == [[]] * len(results)
    resumed = [each["resumed"] for each in results]
    assert resumed == sorted(resumed)  # no kill loses an earlier checkpoint
    assert set(resumed) == {0, 2, 4, 6}


# -- damaged files


@pytest.fixture(scope="module")
def whole(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert regard(*training(corpus, run, *FEW, "-q")).returncode == 0
    return run


@pytest.fixture(scope="module")
def stopped(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped after its second checkpoint that can be resumed."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    assert regard(*training(corpus, run, *FEW, "--max-time", "0.01s", "-q")).returncode == 0
    assert regard("resume", str(run), "--max-time", "0.01s", "-q").returncode == 0
    assert RunFolder(run).checkpoints() == [1, 2]
    return run


def flip(path: Path, share: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(share * len(data)), len(data) - 1)] ^= 1
    path.write_bytes(data)


HARMLESS = ("log.jsonl", "environment.json", "baselines.json", "events.out")  # not part of the numbers of a model


def damageable(run: Path) -> list[Path]:
    files = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    return [path for path in files if not path.name.startswith(HARMLESS)]


@pytest.mark.slow
def test_a_flipped_byte_in_any_file_of_an_unfinished_run_is_named_or_harmless(
    whole: Path, stopped: Path, tmp_path: Path
) -> None:
    """Resuming gives the same weights, or one sentence that names the file."""
    expected, outcomes = digest(whole), dict[str, str]()
    for name in damageable(stopped):
        run = tmp_path / "run"
        shutil.copytree(stopped, run)
        flip(run / name)
        result = regard("resume", str(run))
        message = " ".join(result.stderr.split())
        if result.returncode == 0:
            assert digest(run) == expected, name
            outcomes[str(name)] = (
                "resumed before" if f"{name}" in message and "training resumes from" in message else "same"
            )
        else:
            assert result.returncode == 2, (name, message)
            assert "Traceback" not in message
            named = name.parts[0] if name.parts[0] == "data" else name.name
            assert named in message or (named == "checksums.json"), (name, message)
            outcomes[str(name)] = "refused"
        shutil.rmtree(run)
    for name in ("weights-00000002.safetensors", "trainer-00000002.safetensors", "trainer-00000002.json"):
        assert outcomes[name] == "resumed before", outcomes
    refused = ("recipe.json", "request.json", "tokenizer.json", "checksums.json", "data/train-0/target.ids")
    assert {name: outcomes[name] for name in refused} == dict.fromkeys(refused, "refused")
    assert all(outcome == "refused" for name, outcome in outcomes.items() if name.startswith("data/")), outcomes


@pytest.mark.parametrize("name", ["weights-final.safetensors", "recipe.json", "tokenizer.json", "checksums.json"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.999])
def test_a_flipped_byte_in_a_finished_run_gives_the_same_output_or_an_error(
    whole: Path, tmp_path: Path, name: str, share: float
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    words = ("translate", str(run), "--beam", "1", "--device", "cpu")
    expected = regard(*words, stdin=b"one two\nthree\n").stdout
    flip(run / name, share)
    result = regard(*words, stdin=b"one two\nthree\n")
    if result.returncode == 0:
        assert (name, result.stdout) == ("checksums.json", expected)
    else:
        assert result.returncode == 2
        assert result.stderr.startswith("regard: ")
        assert name in result.stderr or name == "checksums.json"


def test_damaged_final_weights_are_made_again_by_resume(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    flip(run / "weights-final.safetensors", 0.9)
    message = complaint("translate", str(run), stdin=b"one\n")
    assert "weights-final.safetensors has changed since it was saved" in message
    (run / "weights-final.safetensors").unlink()
    assert regard("resume", str(run), "-q").returncode == 0
    assert digest(run) == digest(whole)


# -- disks


def mounted(path: Path, options: str) -> bool:
    """Mount a tmpfs at `path`, and return whether this is permitted."""
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk in memory."""
    path = tmp_path / "disk"
    if shutil.which("mount") is None or not mounted(path, "size=64m"):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield path
    while subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False).returncode == 0:
        pass


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True, capture_output=True)


def intact(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.glob("*-0*.*"))}


def test_a_full_disk_leaves_the_checkpoint_before_and_training_goes_on_later(
    stopped: Path, whole: Path, disk: Path
) -> None:
    run = Path(shutil.copytree(stopped, disk / "run"))
    used = shutil.disk_usage(disk).used
    before = intact(run)
    remount(disk, f"size={used + 150_000}")
    message = complaint("resume", str(run), "-q")
    assert "cannot save to" in message
    assert "the disk is full; free disk space, then continue from the last checkpoint with regard resume" in message
    assert intact(run) == before
    assert not [path for path in run.glob(".*") if path.name != ".lock"]
    remount(disk, "size=64m")
    assert regard("resume", str(run), "-q").returncode == 0
    assert digest(run) == digest(whole)


def test_a_read_only_folder_is_one_sentence(stopped: Path, whole: Path, disk: Path) -> None:
    run = Path(shutil.copytree(stopped, disk / "run"))
    before = intact(run)
    remount(disk, "ro")
    assert "Read-only file system" in complaint("resume", str(run), "-q")
    assert intact(run) == before
    remount(disk, "rw")
    assert regard("resume", str(run), "-q").returncode == 0
    assert digest(run) == digest(whole)


def wait_until(condition: Callable[[], bool], running: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not condition() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition(), running.communicate()[1].decode() if running.poll() is not None else "too slow"


LONG = ("--set", "train.steps=100000", "--set", "train.validate_every=100000", "--set", "train.save_every=5", "-q")


def test_a_vanished_disk_ends_training_with_one_sentence(corpus: dict[str, str], disk: Path) -> None:
    run = disk / "run"
    running = process(*training(corpus, run, *LONG))
    wait_until(lambda: len(RunFolder(run).checkpoints()) >= 2, running)
    subprocess.run(["umount", "-l", str(disk)], check=True, capture_output=True)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 2, stderr.decode()
    lines = stderr.decode().splitlines()
    assert len(lines) == 1, stderr.decode()
    assert lines[0].startswith("regard: cannot save to ")
    assert "No such file or directory" in lines[0]


def test_a_full_disk_ends_training_at_the_next_step(
    corpus: dict[str, str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, but on any system: the third checkpoint cannot be written."""
    run, save, calls = tmp_path / "run", tensor_files.save_file, list[Any]()

    def full(tensors: Any, path: Path, **settings: Any) -> None:
        calls.append(path)
        if len(calls) > 4:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(tensors, path, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "save_file", full)
        message = complaint(*training(corpus, run, *FEW, "-q"))
    assert f"cannot save to {run}: the disk is full; free disk space, then continue" in message
    assert RunFolder(run).checkpoints() == [2, 4]
    assert not [path for path in run.glob(".*") if path.name != ".lock"]
    assert regard("resume", str(run), "-q").returncode == 0
    assert digest(run) == digest(whole)


# -- signals


def started(run: Path) -> int:
    """Return how often training has started."""
    log = run / "log.jsonl"
    return log.read_text().count('"start"') if log.exists() else 0


@pytest.mark.slow
def test_signals_save_and_exit_with_their_code(corpus: dict[str, str], tmp_path: Path) -> None:
    """A run is started, and resumed after each signal. At the end, Ctrl-C is pressed twice."""
    run, saved = tmp_path / "run", 0
    words = training(corpus, run, *LONG[:-1])
    for session, number in enumerate((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)):
        running = process(*words)
        wait_until(lambda count=session: started(run) > count, running)
        running.send_signal(number)
        _, stderr = running.communicate(timeout=120)
        message = " ".join(stderr.decode().split())
        assert running.returncode == 128 + number, message
        assert f"Continue: regard resume {run}" in message
        assert max(RunFolder(run).checkpoints()) > saved
        saved = max(RunFolder(run).checkpoints())
        words = ("resume", str(run))
    running = process(*words)
    wait_until(lambda: started(run) > 4, running)
    running.send_signal(signal.SIGINT)
    time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode in (130, -signal.SIGINT)  # the second may arrive when Python has ended
    assert "Traceback" not in stderr.decode()
