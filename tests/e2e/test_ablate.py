"""regard ablate: tables, continuation of killed runs, and invalid options."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from regard.ablation import plan
from tests.learning import Learned

from .conftest import complaint, process, regard, write

SMALL = (
    "--set", "model.d_model=16", "--set", "model.encoder.depth=1", "--set", "model.decoder.depth=1",
    "--set", "data.tokenizer.vocab=290", "--set", "data.batching.tokens=200", "--set", "data.held_out=50",
    "--set", "train.decode=4", "--steps", "48",
)  # fmt: skip
ROWS = ("--rows", "gelu,swiglu", "--seeds", "1")


def ablation(corpus: dict[str, str], out: Path, *options: str) -> tuple[str, ...]:
    files = ("--source", corpus["source"], "--target", corpus["target"])
    return ("ablate", *files, "--out", str(out), *SMALL, *options)


def table(out: Path) -> dict[str, Any]:
    """Return the table without speeds, which depend on how busy the machine was."""
    output = json.loads((out / "table.json").read_text())
    for row in output["rows"]:
        del row["speed"]
    return output


def listed(out: Path) -> list[str]:
    """Return the hashes of finished runs; a partly written last line is skipped."""
    path = out / "results.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["hash"] for line in lines]


@pytest.fixture(scope="module")
def straight(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ablation") / "straight"
    result = regard(*ablation(corpus, out, *ROWS, "--jobs", "1"))
    assert result.returncode == 0, result.stderr
    assert "5/5" in result.stderr
    assert "swiglu" in result.stdout
    assert "needs at least 2 seeds" in " ".join(result.stdout.split())
    return out


def test_the_table_has_all_columns(straight: Path, learned: Learned) -> None:
    output = json.loads((straight / "table.json").read_text())
    assert output["complete"]
    assert [row["name"] for row in output["rows"]] == ["base", "gelu", "swiglu"]
    assert [len(row["losses"]) for row in output["rows"]] == [3, 1, 1]
    for row in output["rows"]:
        assert row["parameters"] > 0
        assert row["operations"] > 0
        assert row["speed"] > 0
        learned("share of the loss removed", 1 - row["final"]["value"] / row["early"]["value"], above=0.01, broken=0.0)
        assert row["curve"][-1] == [48, pytest.approx(row["final"]["value"])]
    assert output["metric"] == "bleu"
    assert "<svg" in (straight / "table.html").read_text()
    assert (straight / "table.md").read_text().count("\n| ") == 5
    assert not list(straight.rglob("*.safetensors"))
    assert sorted(listed(straight)) == sorted(path.name for path in (straight / "runs").iterdir())


def children(pid: int) -> list[int]:
    """Return the child processes of all threads of a process."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" in status.read_text()
    except OSError:
        return True


@pytest.mark.slow
def test_a_killed_ablation_continues_to_the_same_table(corpus: dict[str, str], straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    words = ablation(corpus, out, *ROWS, "--jobs", "2", "-q")
    deadline = time.monotonic() + 120
    with process(*words) as running:
        while not listed(out) and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        workers = children(running.pid)
        running.send_signal(signal.SIGKILL)
        _, result = running.communicate()
    assert len(workers) == 2, result.decode()
    done = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    assert 1 <= len(done) < 5, "killed in the middle"
    while not all(gone(worker) for worker in workers):  # workers end with the command
        assert time.monotonic() < deadline
        time.sleep(0.02)
    again = regard(*words)
    assert again.returncode == 0, again.stderr
    assert table(out) == table(straight)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(listed(out)) == len(set(listed(out))) == 5


def started(out: Path) -> dict[str, int]:
    """Return the latest process of every job of a cluster that has started, by the name of the job's folder."""
    pids = {}
    for path in out.glob("cluster/*/events.jsonl"):
        with suppress(OSError, ValueError, IndexError):  # the job has just finished, or is writing
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            pids[path.parent.name] = [line["started"]["pid"] for line in lines if "started" in line][-1]
    return pids


def signalled(running: subprocess.Popen[bytes], out: Path, signals: Sequence[signal.Signals], seed: int) -> int:
    """Send signals to jobs of a running ablation, SIGKILL at random moments. Return the number of signals sent."""
    rng, seen, sent = random.Random(seed), set[tuple[str, int]](), 0
    while sent < len(signals) and running.poll() is None:
        time.sleep(0.05)
        for job, pid in started(out).items() - seen:
            seen.add((job, pid))
            if sent < len(signals) and rng.random() < 0.7:
                if signals[sent] == signal.SIGKILL:
                    time.sleep(rng.uniform(0.0, 1.5))
                with suppress(ProcessLookupError):
                    os.kill(pid, signals[sent])
                    sent += 1
    return sent


@pytest.mark.slow
def test_a_sweep_on_a_cluster_with_interrupted_jobs_gives_the_same_table(
    corpus: dict[str, str], straight: Path, tmp_path: Path
) -> None:
    """One is killed, and one stops before its time limit. With REGARD_SWEEP=1, 12 runs and two kills."""
    pytest.importorskip("submitit")
    out, rows = tmp_path / "cluster", ROWS
    if full := "REGARD_SWEEP" in os.environ:
        rows, straight = ("--rows", "gelu,swiglu,rms_norm", "--seeds", "2"), tmp_path / "straight"
        result = regard(*ablation(corpus, straight, *rows, "--jobs", "1", "-q"))
        assert result.returncode == 0, result.stderr
    else:  # three of the five runs are finished
        (out / "runs").mkdir(parents=True)
        first = (straight / "results.jsonl").read_text().split("\n")[:3]
        (out / "results.jsonl").write_text("".join(line + "\n" for line in first))
    words = ablation(corpus, out, *rows, "--jobs", "2", "--cluster", "local")
    with process(*words) as running:
        signals = (signal.SIGKILL, signal.SIGKILL if full else signal.SIGUSR2)
        sent = signalled(running, out, signals, seed=int(os.environ.get("REGARD_SWEEP", "1")))
        _, stderr = running.communicate(timeout=600)
    output = stderr.decode()
    assert running.returncode == 0, output
    assert sent == 2
    assert output.count("submitted again as job") <= 2, "a kill may come just after the result"
    assert full or "saved its state and stopped (SIGUSR2, at step" in output
    assert table(out) == table(straight)
    assert len(listed(out)) == len(set(listed(out))) == (12 if full else 5)
    assert not (out / "cluster").exists() or not list((out / "cluster").glob("*/result.json"))


def test_a_cluster_that_is_not_there_is_named_before_anything_is_written(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", "/nowhere")
    out = tmp_path / "out"
    words = ablation(corpus, out, "--rows", "gelu")
    assert "cannot submit jobs to Slurm" in complaint(*words, "--cluster", "slurm")
    assert "--partition: applies to --cluster slurm" in complaint(*words, "--partition", "gpu")
    assert "did you mean 'local'" in complaint(*words, "--cluster", "locale")
    ladder = ("ladder", "--source", corpus["source"], "--target", corpus["target"], "--out", str(out))
    assert "cannot submit jobs to Slurm" in complaint(*ladder, "--cluster", "slurm")
    assert not out.exists()


def test_results_copied_to_another_folder_are_not_repeated(
    corpus: dict[str, str], straight: Path, tmp_path: Path
) -> None:
    """The list of results is enough to continue on another machine."""
    out = tmp_path / "elsewhere"
    (out / "runs").mkdir(parents=True)
    (out / "results.jsonl").write_bytes((straight / "results.jsonl").read_bytes())
    result = regard(*ablation(corpus, out, *ROWS))
    assert result.returncode == 0, result.stderr
    assert "5 runs, 5 of them finished before" in result.stderr
    assert table(out) == table(straight)
    assert not list((out / "runs").iterdir())


def test_the_table_marks_runs_missing_after_the_time_limit(
    corpus: dict[str, str], straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "part"
    (out / "runs").mkdir(parents=True)
    (out / "results.jsonl").write_bytes((straight / "results.jsonl").read_bytes())
    words = ablation(corpus, out, "--rows", "gelu,swiglu,reglu,glu", "--seeds", "1")
    result = regard(*words, "--max-time", "0.001", "--json")
    output = json.loads(result.stdout)
    assert not output["complete"]
    assert [row["verdict"] for row in output["rows"][-2:]] == ["not run yet"] * 2
    assert output["rows"][1]["verdict"] == "needs at least 2 seeds"
    assert output["rows"][1]["final"] is not None


def test_other_tasks_with_searched_rates_and_matched_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FACTORS", (1.0, 2.0))
    lines = [f"the {word} is {'good' if i % 2 else 'bad'}" for i, word in enumerate(["dog", "cat", "sun", "sea"] * 60)]
    text = write(tmp_path / "text", lines)
    labelled = write(tmp_path / "labelled", [f"{i % 2}\t{line} {i}" for i, line in enumerate(lines)])
    small = ("--set", "model.d_model=16", "--set", "data.tokenizer=bytes", "--seeds", "1", "--jobs", "1", "--json")
    result = regard(
        "ablate", "--text", text, "--rows", "norm", "--search-rates", "--out", str(tmp_path / "lm"), *small,
        "--set", "decoder.depth=1", "--set", "data.batching.length=32", "--set", "data.batching.tokens=64",
        "--time", "0.2s",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert output["metric"] == "perplexity"
    by_name = {row["name"]: row for row in output["rows"]}
    assert by_name["rms_norm"]["final"] is not None
    assert by_name["pre_norm"]["verdict"].startswith("left out: ")
    assert any((tmp_path / "lm" / "steps.json").read_text())
    trained = [row for row in output["rows"] if row["final"] is not None]
    assert len(trained) > 2
    assert len(listed(tmp_path / "lm")) == 2 * len(trained) + 3 + len(trained) - 1  # rates, three of the base, one each
    result = regard(
        "ablate", "--labelled", labelled, "--rows", "reglu", "--match", "compute", "--out", str(tmp_path / "c"),
        *small, "--set", "encoder.depth=1", "--steps", "16",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert output["metric"] == "accuracy"
    base, row = output["rows"]
    assert row["operations"] == pytest.approx(base["operations"], rel=0.011)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rows", "swigloo"), "did you mean 'swiglu'?"),
        (("--rows", "gelu,"), "names nothing"),
        (("--seeds", "0"), "--seeds: must be at least 1"),
        (("--rows", "post_norm", "--variant", "post_norm"), "changes nothing"),
        (("--rows", "gelu,post_norm", "--base", "transformer_tiny"), "'post_norm' does not apply here"),
        (("--match", "size"), "--match: unknown value 'size'"),
        (("--time", "5s"), "give one of them"),
        (("--time", "5x"), "--time: '5x' is not a time"),
        (("--set", "train.validate_every=3"), "train.validate_every: is not used here"),
        (("--set", "data.held_out=0"), "held-out text"),
        (("--base", "gpt2_small", "--rows", "gelu"), "cannot learn"),
        (("--device", "tpu"), "--device"),
    ],
)
def test_invalid_options_are_refused_without_a_folder(
    corpus: dict[str, str], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    command = list(ablation(corpus, out, "--rows", "gelu"))
    if "--base" in words:
        cut = command.index("--set")
        command[cut : cut + 6] = []
    if "data.held_out=0" in words:
        cut = command.index("data.held_out=50")
        command[cut - 1 : cut + 1] = []
    assert message in complaint(*command, *words)
    assert not out.exists()


def test_rows_that_do_not_fit_the_task_are_refused(tmp_path: Path) -> None:
    labelled = write(tmp_path / "labelled", [f"{i % 2}\tline {i}" for i in range(100)])
    result = complaint("ablate", "--labelled", labelled, "--rows", "tied_inputs", "--out", str(tmp_path / "out"))
    assert "'tied_inputs' does not apply here: only an encoder-decoder has source and target" in result
    assert not (tmp_path / "out").exists()


def test_the_folder_must_be_an_ablation(corpus: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "letter", ["dear"])
    assert "is not the folder of an ablation" in complaint(*ablation(corpus, tmp_path, "--rows", "gelu"))
    assert "--out" in complaint("ablate", "--rows", "gelu")
