"""Measurements on single steps: the worst batch, memory, the largest token budget."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.data.batching import Buckets, Packing
from regard.data.loader import BatchLoader, Examples
from regard.data.objectives import Translation
from regard.data.token_store import Column, Table
from regard.doctor.forecast import duration, forecast, gigabytes
from regard.doctor.probe import Probe, probe
from regard.doctor.resources import available_memory, disk_space
from regard.doctor.trial import Trial, Worst, batch_sizes, bisect
from regard.presets import preset
from regard.runs.request import request_from_options
from regard.training.checkpoint import RunFolder
from regard.training.trainer import Trainer
from tests.unit.training.test_trainer import bucketed, spec_of, tiny


def loader(batching: Buckets | Packing) -> BatchLoader:
    rng = np.random.default_rng(1)
    rows = [[1, *range(3, 3 + n), 2] for n in rng.integers(1, 30, 200).tolist()]
    table = Table({"source": Column.of([row[1:] for row in rows]), "target": Column.of(rows)})
    return BatchLoader(Examples([table], [1.0], Translation()), batching, seed=1)


def test_batch_sizes_equal_those_of_the_batches() -> None:
    each = loader(Buckets(100))
    plan = each.plan(0)
    sizes, longest, rows = batch_sizes(each, plan)
    for number in range(len(plan)):
        item = each.item(plan, number)
        assert item.batch.source is not None
        assert rows[number] == len(item.batch.target)
        assert longest["source"][number] == item.batch.source.shape[1]
        assert longest["target"][number] == item.batch.target.shape[1] + 1  # the last token is a label only
        assert sizes[number] == rows[number] * sum(values[number] for values in longest.values())


def test_packed_batches_all_have_one_size() -> None:
    each = loader(Packing(256, 64))
    sizes, _, _ = batch_sizes(each, each.plan(0))
    assert set(sizes.tolist()) == {2 * 256}


def test_the_batch_with_the_longest_example_is_tried_if_another_may_need_more(tmp_path: Path) -> None:
    rows = [[1, *range(3, 3 + n), 2] for n in [8] * 200 + [100]]
    table = Table({"source": Column.of([row[1:] for row in rows]), "target": Column.of(rows)})
    batches = BatchLoader(Examples([table], [1.0], Translation()), Buckets(190), seed=1)
    model: Any = preset("transformer_tiny", vocab=200)
    trial = Trial(Trainer(tiny(), spec_of(2), batches, RunFolder(tmp_path)), model)
    (_, likely), (_, longest) = trial.worst(190)
    assert likely.rows > 10
    assert (longest.rows, max(longest.longest.values())) == (1, trial.longest)
    assert len(trial.worst(102)) == 1  # the longest example needs the most itself


@pytest.mark.parametrize("limit", [10, 64, 1000, 1700, 5000])
def test_bisection_is_within_five_percent_and_never_above(limit: int) -> None:
    tried: list[int] = []

    def fits(budget: int) -> bool:
        tried.append(budget)
        return budget <= limit

    found = bisect(fits, 10, 2000)
    assert found <= limit
    assert found >= min(limit, 2000) / 1.06 - 1
    assert len(tried) <= 20


def test_available_memory_is_at_most_that_of_the_machine() -> None:
    assert 1e8 < available_memory(torch.device("cpu")) < 1e14


def made(**changes: Any) -> Probe:
    sizes = {"peak": 10**9, "available": 4 * 10**9, "largest": 800, "checkpoint": 10**6, "disk": 10**7}
    counts = {"parameters": 10, "steps": 100, "tokens": 400, "longest": 6, "left_out": 0, "examples": 100}
    flags = {"measured": True, "largest_measured": True, "capped": False, "timed": True}
    others = {"device": "cpu", "worst": Worst(2, {"source": 5, "target": 6}, 22), "seconds": 7200.0, "limit": None}
    usual: dict[str, Any] = sizes | counts | flags | others | {"plan": ()}
    return Probe(**usual | changes)


def test_a_batch_that_fits_is_a_note_with_the_largest_budget() -> None:
    memory, time, disk = forecast(made(), free=10**12)
    assert {finding.level for finding in (memory, time, disk)} == {"note"}
    assert "2 rows of 5 + 6 tokens" in memory.evidence[0]
    assert "800 tokens" in memory.evidence[1]
    assert "2.0 hours" in time.message


def test_a_batch_that_does_not_fit_is_an_error_with_a_smaller_budget() -> None:
    memory = next(forecast(made(peak=None, largest=150), free=10**12))
    assert memory.level == "error"
    assert memory.advice == "--set data.batching.tokens=150 --set train.accumulate=3"
    alone = next(forecast(made(peak=5 * 10**9, largest=None), free=10**12))
    assert "the longest example has 6 tokens" in alone.advice


def test_too_little_disk_space_and_many_long_examples_are_warnings() -> None:
    findings = list(forecast(made(left_out=30), free=10**6))
    assert [finding.level for finding in findings] == ["note", "note", "warning", "warning"]


def test_disk_space_includes_every_resumable_checkpoint_and_the_one_being_written(tmp_path: Path) -> None:
    trainer = Trainer(tiny(), spec_of(4, keep=1, keep_state=3), bucketed(), RunFolder(tmp_path))
    trainer.fit()
    fewer = Trainer(tiny(), spec_of(4, keep=1, keep_state=1), bucketed(), RunFolder(tmp_path))
    fewer.optimizer = trainer.optimizer
    state = sum(tensor.nbytes for tensor in trainer.optimizer.state().values())
    several, single = (disk_space(each, trainer.folder)[1] for each in (trainer, fewer))
    assert several - single == 2 * state > 0


def test_a_time_limit_is_stated_as_such() -> None:
    assert "the whole time limit, 10 min" in list(forecast(made(limit=600.0), free=10**12))[1].message


def test_sizes_and_durations_are_readable() -> None:
    assert [gigabytes(size) for size in (2.5e9, 3e7, 10.0)] == ["2.5 GB", "30 MB", "1 MB"]
    assert [duration(seconds) for seconds in (0.2, 40.0, 600.0, 7200.0)] == ["1 s", "40 s", "10 min", "2.0 hours"]


def test_the_probe_runs_the_batch_with_a_planted_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)
    pairs = [(f"one two {i}", f"eins zwei {i}") for i in range(300)]
    pairs[100] = (" ".join(["one"] * 900), " ".join(["eins"] * 900))
    for name, side in (("a", 0), ("b", 1)):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in pairs))
    changes = ["model.d_model=16", "model.heads=2", "model.encoder.depth=1", "model.decoder.depth=1"]
    changes += ["data.tokenizer.vocab=270", "data.max_len=2000", "data.held_out=0", "train.steps=7"]
    request = request_from_options(
        source=tmp_path / "a", target=tmp_path / "b", preset="transformer_tiny", changes=changes
    )
    found = probe(request, "cpu")
    assert found.longest > 900
    assert found.tokens >= found.longest  # the longest example must fit in a batch
    assert max(found.worst.longest.values()) == found.longest
    assert found.fits
    assert found.measured
    assert found.largest is not None
    assert found.largest >= found.longest
    assert found.seconds > 0
    assert found.disk > found.checkpoint > 0
    monkeypatch.setattr("regard.doctor.probe.available_memory", lambda _: 100_000)
    small = probe(request, "cpu")
    assert not small.fits
    assert not small.measured  # a step that cannot fit is not run on a CPU
    assert small.largest is None
