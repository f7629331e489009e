"""A killed and resumed run has the same weights as an uninterrupted run, bit for bit."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import complaint, process, regard, training

KILLS = int(os.environ.get("REGARD_KILLS", "3"))  # make test-kills: 20
STEPS = (
    "--set",
    f"train.steps={max(60, 60 * KILLS // 3)}",
    "--set",
    "train.save_every=4",
    "--set",
    "train.validate_every=25",
)
VALIDATED = [*range(25, max(60, 60 * KILLS // 3), 25), max(60, 60 * KILLS // 3)]
MORE = ("--set", "train.ema=0.9", "--set", "model.dropout=0.1", "--set", "train.average=2", "--set", "train.decode=4")
# With gradient accumulation and early stopping, which may end training.
KILLED = (*MORE, "--set", "train.accumulate=2", "--set", "train.patience=3")


def digest(run: Path) -> str:
    summary = json.loads(regard("show", str(run), "--json").stdout)
    assert summary["finished"]
    return summary["weights_sha256"]


def begun(run: Path, events: int) -> bool:
    """Return whether training has logged at least this number of events."""
    log = run / "log.jsonl"
    return log.exists() and log.read_text().count('"event"') >= events


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(corpus: dict[str, str], tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert regard(*training(corpus, straight, *STEPS, *KILLED, "-q")).returncode == 0
    assert json.loads((straight / "recipe.json").read_text())["data"]["batching"]["kind"] == "buckets"
    rng, moments = random.Random(7), []
    words = training(corpus, killed, *STEPS, *KILLED, "-q")
    for number in range(KILLS):
        running = process(*words)
        while not (killed / "request.json").exists() and running.poll() is None:
            time.sleep(0.01)
        # One kill in five comes while data are prepared or loaded, the others during training.
        after, pause = (0 if number % 5 == 0 else lines_of(killed) + 1), rng.uniform(0.0, 1.0)
        while not begun(killed, after) and running.poll() is None:
            time.sleep(0.01)
        time.sleep(pause)
        running.send_signal(signal.SIGKILL)
        _, stderr = running.communicate()
        assert running.returncode in (0, -signal.SIGKILL), stderr.decode()
        moments.append(lines_of(killed))
        words = ("resume", str(killed), "-q")
    assert len(set(moments)) > KILLS // 2, f"the kills were not spread over the training: {moments}"
    result = regard("resume", str(killed), "-q")
    assert result.returncode == 0, result.stderr
    assert digest(killed) == digest(straight)
    validated = [validations(run) for run in (killed, straight)]
    assert validated[0] == validated[1]
    assert [step for step, _ in validated[0]] == VALIDATED[: len(validated[0])]
    assert not list(killed.glob(".*"))


def validations(run: Path) -> list[tuple[int, float]]:
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(event["step"], event["loss"]) for event in log if event["event"] == "valid"]


def lines_of(run: Path) -> int:
    log = run / "log.jsonl"
    return log.read_text().count('"event"') if log.exists() else 0


def test_an_interrupted_run_saves_and_prints_how_to_resume(corpus: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = process(*training(corpus, run, "--set", "train.steps=100000", "--set", "train.validate_every=100000"))
    deadline, log = time.monotonic() + 60, run / "log.jsonl"
    while time.monotonic() < deadline and not (log.exists() and '"start"' in log.read_text()):
        time.sleep(0.1)
    time.sleep(2.0)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130, stderr.decode()
    assert f"regard resume {run}" in stderr.decode()
    assert list(run.glob("trainer-*.json"))
    assert regard("translate", str(run), "--beam", "1", stdin=b"one\n").returncode == 0  # it can be used as it is


def test_a_run_resumed_after_its_time_limit_is_the_same(corpus: dict[str, str], tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    few = ("--set", "train.steps=30", "--set", "train.validate_every=10", *MORE)
    assert regard(*training(corpus, straight, *few, "-q")).returncode == 0
    result = regard(*training(corpus, stopped, *few, "--max-time", "0.01s", "--json"))
    assert result.returncode == 0
    assert json.loads(result.stdout)["finished"] is False
    assert json.loads(result.stdout)["step"] == 1
    assert regard("resume", str(stopped), "--max-time", "0.01", "-q").returncode == 0
    assert regard("resume", str(stopped), "-q").returncode == 0
    assert digest(stopped) == digest(straight)
    assert "finished" in regard("resume", str(stopped)).stderr


def test_a_damaged_checkpoint_is_refused(corpus: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    regard(*training(corpus, run, "--set", "train.steps=30", "--max-time", "0.01", "-q"))
    weights = next(run.glob("weights-*.safetensors"))
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert "has changed since it was saved" in complaint("resume", str(run))


def test_a_full_disk_leaves_the_previous_checkpoint(corpus: dict[str, str], tmp_path: Path) -> None:
    """A limit on file sizes simulates a full disk: the second checkpoint cannot be written."""
    run = tmp_path / "run"
    few = ("--set", "train.steps=40", "--set", "train.validate_every=20", "--set", "train.choose=last")
    assert regard(*training(corpus, run, *few, "--max-time", "0.01", "-q")).returncode == 0
    before = {path.name: path.read_bytes() for path in run.glob("*-00000001.*")}
    limited = 'ulimit -f 100; exec "$@"'
    done = subprocess.run(
        ["bash", "-c", limited, "bash", os.sys.executable, "-m", "regard", "resume", str(run), "-q"],  # type: ignore[attr-defined]
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cannot save" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in run.glob("*-00000001.*")} == before
    assert not (run / ".saving").exists()
    assert regard("resume", str(run), "-q").returncode == 0
