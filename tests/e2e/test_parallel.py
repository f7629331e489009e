"""Training in several processes from the command line: started, killed, resumed, and started wrongly."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import SECONDS, Ranks, command

from .conftest import complaint, regard, training
from .test_resume import lines_of

KILLS = int(os.environ.get("REGARD_KILLS", "2"))  # make test-kills: 20
LAST = 20 * max(KILLS, 2)
SETTINGS = (
    "--set", "train.save_every=4", "--set", "train.validate_every=20",
    "--set", "train.accumulate=2", "--set", "train.ema=0.9", "--set", "model.dropout=0.1", "--set", "train.decode=4",
    "--set", "train.patience=1000", "--set", "data.batching.tokens=200", "-q",
)  # fmt: skip


def weights(run: Path) -> str:
    summary = json.loads(regard("show", str(run), "--json").stdout)
    assert summary["finished"]
    return summary["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "kills"), [("replicate", KILLS), ("shard", KILLS // 4)] if KILLS > 2 else [("replicate", KILLS)]
)
def test_two_ranks_killed_at_random_moments_and_resumed(
    corpus: dict[str, str], tmp_path: Path, parallel: str, kills: int
) -> None:
    """With accumulation, a moving average, buckets and early stopping. As torchrun does, every other kill restarts."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    settings = (*SETTINGS, "--set", f"train.parallel={parallel}", "--set", f"train.steps={20 * kills}")
    codes = Ranks(tmp_path, 2, command, [*training(corpus, straight, *settings)]).codes(5 * SECONDS)
    assert codes == {0: 0, 1: 0}
    rng, moments = random.Random(11), []
    train, resume = [*training(corpus, killed, *settings)], ["resume", str(killed), "-q"]
    for number in range(kills):
        words, restarts = (resume, 0) if number % 2 else (train, number)
        ranks = Ranks(tmp_path / str(number), 2, command, words, TORCHELASTIC_RESTART_COUNT=str(restarts))
        after, pause = (0 if number % 5 == 4 else lines_of(killed) + 1), rng.uniform(0.0, 0.5)
        while ranks.running() and not (killed / "request.json").exists():
            time.sleep(0.01)
        while ranks.running() and lines_of(killed) < after:
            time.sleep(0.01)
        time.sleep(pause)
        for rank in rng.choice([(0,), (1,), (0, 1)]):
            ranks.kill(rank)
        ranks.codes()
        moments.append(lines_of(killed))
    assert len({*moments}) > kills // 2, moments
    last = Ranks(tmp_path / "last", 2, command, train, TORCHELASTIC_RESTART_COUNT="99")
    assert last.codes(5 * SECONDS) == {0: 0, 1: 0}, last.errors(0) + last.errors(1)
    assert weights(killed) == weights(straight)
    assert not list(killed.glob(".*"))


@pytest.mark.slow
@pytest.mark.skipif(KILLS <= 2, reason="starts torch eight times: make test-kills")
def test_torchrun_restarts_a_killed_group(corpus: dict[str, str], tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert regard(*training(corpus, straight, *SETTINGS, "--set", "train.steps=200", "--ranks", "2")).returncode == 0
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3", "-m"]
    with subprocess.Popen(
        [*words, "regard", *training(corpus, run, *SETTINGS, "--set", "train.steps=200")], stderr=subprocess.PIPE
    ) as torchrun:
        for lines in (3, 12):
            while torchrun.poll() is None and lines_of(run) < lines:
                time.sleep(0.01)
            os.kill(rank_process(torchrun.pid), 9)
            time.sleep(1.0)
        _, errors = torchrun.communicate(timeout=3 * SECONDS)
    assert torchrun.returncode == 0, errors.decode()
    assert weights(run) == weights(straight)


def rank_process(parent: int) -> int:
    """Return the number of a process that torchrun has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[-1])


@pytest.mark.slow
def test_ranks_share_the_batch_of_a_recipe(corpus: dict[str, str], tmp_path: Path) -> None:
    """The recipe has as many tokens per step as for one process, and rank 0 alone prints."""
    run = tmp_path / "run"
    words = [*training(corpus, run, "--set", "train.steps=4", "--set", "train.validate_every=4")]
    ranks = Ranks(tmp_path, 2, command, words)
    assert ranks.codes() == {0: 0, 1: 0}
    assert "A step has 2 batches of 200 tokens (before: 1 of 400)" in ranks.errors(0)
    assert f"regard translate {run}" in ranks.errors(0)
    assert ranks.errors(1) == ""
    recipe = json.loads((run / "recipe.json").read_text())
    assert recipe["train"]["accumulate"] == 2
    assert recipe["data"]["batching"]["tokens"] == 200
    about = json.loads((run / "environment.json").read_text())
    assert about["processes"] == 2
    steps = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    finished = Ranks(tmp_path / "again", 2, command, ["resume", str(run)])
    assert finished.codes() == {0: 0, 1: 0}
    assert "Already finished" in finished.errors(0)
    assert finished.errors(1) == ""
    assert regard("translate", str(run), "--beam", "1", stdin=b"one\n").returncode == 0


def test_an_error_is_printed_once(corpus: dict[str, str], tmp_path: Path) -> None:
    """In options, which are checked before other processes start, and in data that only rank 0 reads."""
    missing = training(corpus | {"source": str(tmp_path / "nothing")}, tmp_path / "run")
    assert "nothing" in complaint(*missing, "--ranks", "2")
    broken = tmp_path / "broken"
    broken.write_text("one line\n")
    uneven = training(corpus | {"source": str(broken)}, tmp_path / "run")
    ranks = Ranks(tmp_path, 2, command, [*uneven])
    assert ranks.codes() == {0: 2, 1: 2}
    assert str(broken) in ranks.errors(0)
    assert ranks.errors(1) == ""
    assert not (tmp_path / "run").exists()
    few = ("--set", "train.steps=30", "--max-time", "0.01", "-q")
    assert regard(*training(corpus, tmp_path / "one", *few)).returncode == 0
    resumed = Ranks(tmp_path / "again", 2, command, ["resume", str(tmp_path / "one"), "-q"])
    assert resumed.codes() == {0: 2, 1: 2}
    sentence = "train.accumulate: a step has 1 batch, which 2 processes cannot share; start 1 of them"
    assert sentence in resumed.errors(0) + resumed.errors(1)
    assert "Traceback" not in resumed.errors(0) + resumed.errors(1)


@pytest.mark.parametrize("size", [2, 3])
def test_a_wrong_number_of_processes_ends_within_the_timeout(corpus: dict[str, str], tmp_path: Path, size: int) -> None:
    began = time.monotonic()
    words, present = [*training(corpus, tmp_path / "run")], [*range(size - 1)]
    ranks = Ranks(tmp_path, size, command, words, present=present, timeout=2.0)
    assert ranks.codes() == dict.fromkeys(range(size - 1), 2)
    assert time.monotonic() - began < SECONDS / 2
    assert f"but rank {size - 1} did not start; start exactly {size} processes" in ranks.errors(0)
    assert "Traceback" not in ranks.errors(0)
    assert not (tmp_path / "run").exists()


def test_gpus_that_are_missing_are_named(corpus: dict[str, str], tmp_path: Path) -> None:
    message = complaint(*training(corpus, tmp_path / "run", "--gpus", "64"))
    assert message.startswith("--gpus: this machine has ")
    assert complaint("resume", str(tmp_path), "--ranks", "2", "--device", "cuda").startswith(
        "--ranks: trains on the CPU"
    )
