"""regard bench length: the exponents, the counts of memory and FLOPs, the recall task, and models that fail."""

import json
import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from regard.bench import length as bench
from regard.bench.length import WORKS, LengthRow, LengthWork, exponent, exponents, measure, run, work_on
from regard.bench.length_tables import tables
from regard.bench.live_memory import peak_bytes
from regard.bench.long_flops import step_flops, visible_pairs
from regard.bench.long_models import FULL, MODELS, LongModel, Size, parameters, select
from regard.bench.recall import KEYS, NOISE, VALUES, RecallTask, recall, rows
from regard.errors import SpecError
from regard.models.build import build
from regard.models.cost import cost
from regard.nn.big_bird import BigBird, CausalBigBird
from regard.nn.mask import Mask, View
from regard.nn.pattern import AttentionPattern, Window

CPU = torch.device("cpu")
TINY = Size(2, 16, 2, 16, 8, 8, vocab=16)
WORK = LengthWork(CPU, TINY, 512, 256, 256, 30.0, 2)


def silent(_: str) -> None: ...


@pytest.fixture
def short() -> LengthWork:
    """Sequences of 32, 64 and 128 tokens."""
    return replace(WORK, shortest=32, longest=128, rounds=1)


def test_exponent_of_a_power_law_is_exact() -> None:
    lengths = [256, 512, 1024, 4096]
    assert exponent(lengths, [3e-7 * n**1.7 for n in lengths]) == pytest.approx(1.7)
    assert exponent([256], [1.0]) is None


def test_exponent_is_the_least_squares_slope_of_the_logarithms() -> None:
    lengths, values = [256, 512, 1024], [1.0, 3.0, 3.5]
    expected = np.polyfit(np.log(lengths), np.log(values), 1)[0]
    assert exponent(lengths, values) == pytest.approx(expected)


def test_exponents_leave_out_short_lengths_and_missing_numbers() -> None:
    seconds = {256: 9.0, 1024: 1.0, 2048: 2.0, 4096: 4.0, 8192: None}
    listed = [LengthRow("full", "full", n, 1, 1, s, None if s is None else 100) for n, s in seconds.items()]
    fits = exponents([*listed, LengthRow("lstm", "LSTM", 1024, 1, 1, failed="out of memory")], 1024)
    assert fits == {
        "full": {"seconds": pytest.approx(1.0), "peak_bytes": pytest.approx(0.0)},
        "lstm": {"seconds": None, "peak_bytes": None},
    }


def test_batches_fill_the_device_at_the_shortest_length_of_the_fit() -> None:
    gpu = WORKS["cuda"]
    assert gpu.lengths == [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]
    assert (gpu.fitted_from, gpu.rows) == (8192, 4)
    small = replace(gpu, longest=3000)
    assert small.lengths == [256, 512, 1024, 2048, 3000]
    assert (small.fitted_from, small.rows) == (1024, 32)
    assert work_on(CPU, None, None, 7).rounds == 7
    assert work_on(CPU, 256, 0.5, None).lengths == [256]
    assert work_on(CPU, 4000, None, None, 1000).lengths == [1000, 2000, 4000]


def test_all_models_have_the_parameters_of_full_attention() -> None:
    count = parameters(build(FULL.spec(TINY, 64), device="meta"))
    for model in MODELS:
        positions = 8 * 64 if model.name == "linformer" else 0
        assert parameters(build(model.spec(TINY, 64), device="meta")) - positions == pytest.approx(count, rel=0.06)
    assert [type(layer).kind for layer in select(["hybrid"])[0].mixers(replace(TINY, depth=4), 1)] == [
        *["gated_delta"] * 3, "self_attention"
    ]  # fmt: skip


def test_peak_memory_is_that_of_the_tensors_alive_at_once() -> None:
    x = torch.zeros(1000, dtype=torch.float32)

    def work() -> None:
        y = x + 1  # 4,000 bytes
        z = y.view(10, 100) * 2  # 4,000 more; a view has none of its own
        del y
        w = z + x.view(10, 100)  # 8,000 again
        del w, z

    assert peak_bytes(work, CPU) == 8000


def test_peak_memory_includes_what_the_backward_pass_needs() -> None:
    layers = nn.Sequential(*(nn.Tanh() for _ in range(5)))
    x = torch.zeros(1000, dtype=torch.float32, requires_grad=True)

    def work() -> None:
        layers(x).sum().backward()

    peak = peak_bytes(work, CPU)
    assert 5 * 4000 <= peak <= 8 * 4000  # the five outputs are saved


@pytest.mark.parametrize("pattern", [None, Window(50), CausalBigBird(16, 2, 2), BigBird(16, 3, 2)])
@pytest.mark.parametrize("length", [64, 300])
def test_visible_pairs_are_counted_exactly(pattern: AttentionPattern | None, length: int) -> None:
    causal = not isinstance(pattern, BigBird)
    view = View(Mask(causal=causal, attention_pattern=pattern), length, length, CPU)
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    shown = i >= j if causal else torch.ones(length, length, dtype=torch.bool)
    if pattern is not None:
        shown = shown & pattern.visible_in(i, j, torch.tensor(length))
    assert visible_pairs(view) == int(shown.sum())


def test_flops_are_three_forward_passes_with_visible_pairs_alone() -> None:
    spec = FULL.spec(TINY, 256)
    dense = cost(spec, 256).flops_per_token * 256
    hidden = 256 * 255 / 2 * 2 * TINY.d_model * 2 * TINY.depth  # pairs in which the key comes later
    assert step_flops(FULL, TINY, 256) == pytest.approx(3 * (dense - hidden))


def test_flops_of_a_linear_model_grow_linearly_and_those_of_attention_faster() -> None:
    lstm, window, compressed = (step_flops(m, TINY, 1024) / step_flops(m, TINY, 512) for m in select(
        ["lstm", "window", "compressed"]
    ))  # fmt: skip
    assert lstm == pytest.approx(2.0)
    assert 2.0 < window < 2.05
    groups = sum(1 + i // 3 for i in range(512)) * 4 * TINY.d_model * TINY.depth * 3  # pairs of a query and a group
    others = step_flops(select(["compressed"])[0], TINY, 512) - groups
    more = sum(1 + i // 3 for i in range(1024)) * 4 * TINY.d_model * TINY.depth * 3
    assert compressed == pytest.approx((2 * others + more) / (others + groups))


def test_report_has_a_row_per_model_and_length(short: LengthWork) -> None:
    report = run(MODELS, replace(short, longest=32), None, silent).json()
    assert [row["name"] for row in report["rows"]] == [model.name for model in MODELS]
    for row in report["rows"]:
        assert row["failed"] is None, row
        assert row["length"] == 32
        assert row["seconds"] > 0.0
        assert row["peak_bytes"] > 4 * 32 * TINY.d_model
        assert row["flops"] > 0.0
    assert report["exponents"].keys() == {model.name for model in MODELS}
    assert (report["recall"], report["accuracy"], report["batch_rows"]) == (None, {}, 8)
    json.dumps(report)


def failing(name: str, error: Exception) -> LongModel:
    def mixers(size: Size, length: int) -> Any:
        if length > 256:
            raise error
        return FULL.mixers(size, length)

    return LongModel(name, f"the {name} model", mixers)


def test_model_that_fails_gets_a_row_that_says_so_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, short: LengthWork
) -> None:
    made = bench.training_step

    def training_step(model: LongModel, work: LengthWork, length: int) -> Any:
        if model.name == "large" and length == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        if model.name == "broken" and length == 64:
            raise ValueError("no\nkernel")
        return made(model, work, length)

    monkeypatch.setattr(bench, "training_step", training_step)
    models = [replace(FULL, name=name, title=f"the {name} model") for name in ("large", "broken", "good")]
    report = run(models, short, None, silent)
    large, broken, good = (report.rows[i : i + 3] for i in (0, 3, 6))
    assert [row.failed for row in large] == [None, *["out of memory at 64 tokens"] * 2]
    assert broken[1].failed == "error at 64 tokens: ValueError: no kernel"
    assert large[1].seconds is None
    assert all(row.seconds and row.failed is None for row in good)
    assert report.failures()[0] == "the large model was not measured from 64 tokens on: out of memory at 64 tokens"
    cells = {line[0]: line[1:] for line in tables(report.json())[0][1]}
    assert cells["the large model"][1:] == ("memory", "memory", "-")
    assert cells["the broken model"][2] == "error"
    assert "e" not in cells["the good model"][2]


def test_model_that_would_take_too_long_is_left_out_at_longer_lengths(short: LengthWork) -> None:
    listed = measure([FULL], replace(short, limit=1e-9), silent)
    assert listed[0].seconds
    assert listed[0].rounds == 1
    for row in listed[1:]:
        assert row.seconds is None
        assert row.failed is not None
        assert row.failed.startswith("out of time: a step takes")
        assert "at 32 tokens" in row.failed


def test_models_are_left_out_when_the_time_is_over(short: LengthWork) -> None:
    task = RecallTask(length=64, distances=(4, 32), tokens=64, steps=1, test=2)
    report = run([FULL], replace(short, deadline=0.0), task, silent).json()
    assert {row["failed"] for row in report["rows"]} == {"out of time: --max-time was over"}
    assert [row["failed"] for row in report["recall"]["rows"]] == ["out of time: --max-time was over"]
    assert all("time" in cells[1] for _, cells in tables(report)[:3])


def test_round_that_has_begun_is_completed_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, short: LengthWork
) -> None:
    clock = iter([0.0, 0.0, 2.0, 2.0, 2.0, 2.0])  # at each length, and between rounds
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    listed = measure([FULL], replace(short, rounds=3, longest=64, deadline=1.0), silent)
    assert [(row.rounds, row.failed) for row in listed] == [(2, None), (0, "out of time: --max-time was over")]


def test_recall_rows_repeat_a_key_at_the_distance_and_expect_its_value() -> None:
    task = RecallTask(length=128)
    for at in (None, (4, 16, 100)):
        made = rows(task, 20, 128, np.random.default_rng(3), at)
        row, query = made.distances.nonzero()
        distance = made.distances[row, query]
        assert len(row) > 200
        assert distance.min() >= 2
        assert at is None or set(distance.tolist()) == set(at)
        keys = made.ids[row, query]
        assert (keys < KEYS).all()
        assert (made.ids[row, query - distance] == keys).all()
        assert (made.ids[row, query - distance + 1] == made.values[row, query]).all()
        assert ((made.values[row, query] >= KEYS) & (made.values[row, query] < NOISE)).all()
        assert (made.values[made.distances == 0] == 0).all()


def test_recall_rows_have_one_value_per_key_and_pairs_that_are_not_queried() -> None:
    task = RecallTask(length=128, distractors=0.1)
    made = rows(task, 20, 128, np.random.default_rng(3))
    for ids, distances in zip(made.ids, made.distances, strict=True):
        counts = np.bincount(ids, minlength=NOISE + 1)[:KEYS]
        assert counts.max() <= 2
        assert (counts == 2).sum() == (distances > 0).sum()
        assert (counts == 1).sum() >= 8  # distractors
        places = np.flatnonzero((ids < KEYS) & (distances == 0))
        assert ((ids[places + 1] >= KEYS) & (ids[places + 1] < NOISE)).all()
    assert NOISE == KEYS + VALUES


def test_recall_by_a_model_of_each_kind_has_an_accuracy_per_distance() -> None:
    task = RecallTask(length=64, distances=(4, 32), tokens=128, steps=2, test=4)
    report = recall(MODELS, task, CPU, silent)
    assert [row.name for row in report.rows] == [model.name for model in MODELS]
    for row in report.rows:
        assert row.failed is None
        assert row.accuracy.keys() == {4, 32}
        assert all(0.0 <= value <= 1.0 for value in row.accuracy.values())
    assert report.chance == 1 / VALUES


def test_recall_of_a_model_that_fails_is_reported() -> None:
    broken = failing("broken", RuntimeError("no kernel"))
    task = RecallTask(length=512, distances=(4, 32), tokens=512, steps=1, test=2)
    with pytest.raises(RuntimeError):
        build(broken.spec(task.size, 512))
    report = recall([broken, FULL], task, CPU, silent)
    assert (report.rows[0].failed, report.rows[0].accuracy) == ("RuntimeError: no kernel", {})
    assert report.rows[1].failed is None


def test_page_has_the_newest_result_of_each_device_with_its_tables(tmp_path: Path, short: LengthWork) -> None:
    script: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "results" / "length.py"))
    task = RecallTask(length=64, distances=(4, 32), tokens=64, steps=1, test=2)
    report = run(select(["full", "window"]), short, task, silent)
    saved = json.loads(json.dumps(script["dated"](report.json() | {"date": "2026-01-02"})))
    gpu = saved | {"device": "cuda", "machine": saved["machine"] | {"gpu": "H200"}}
    results = script["merged"]([saved | {"date": "2026-01-01"}], [saved, gpu])
    assert [(result["device"], result["date"]) for result in results] == [("cuda", "2026-01-02"), ("cpu", "2026-01-02")]
    script["write"](results, tmp_path)
    text = (tmp_path / "length.md").read_text()
    for words in (
        "## On a GPU",
        "## On a CPU",
        "**Seconds per training step**",
        "| full attention |",
        "H200",
        "| exponent |",
    ):
        assert words in text
    assert "**Accuracy of associative recall in 64 tokens; guessing: 0.06**" in text
    assert (tmp_path / "length-cpu.png").stat().st_size > 10_000
    assert math.isclose(json.loads((tmp_path / "length.json").read_text())[1]["rows"][0]["length"], 32)


def test_rows_of_models_and_lengths_that_were_measured_before_are_kept() -> None:
    script: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "results" / "length.py"))

    def result(rows: list[tuple[str, int, float]], batch_rows: int = 4) -> dict[str, Any]:
        fields = ("name", "length", "seconds")
        listed = [dict(zip(fields, row, strict=True)) | {"batch_rows": batch_rows} for row in rows]
        common = {"device": "cuda", "recall": None, "accuracy": {}, "batch_rows": batch_rows}
        return common | {"rows": listed, "exponents": {name: {"seconds": time} for name, _, time in rows}}

    old = result([("full", 256, 1.0), ("full", 512, 2.0), ("window", 256, 3.0)])
    new = result([("full", 512, 4.0), ("full", 1024, 5.0)])
    (merged,) = script["merged"]([old], [new])
    times = [(row["name"], row["length"], row["seconds"]) for row in merged["rows"]]
    assert times == [("full", 256, 1.0), ("full", 512, 4.0), ("full", 1024, 5.0), ("window", 256, 3.0)]
    assert merged["exponents"] == {"full": {"seconds": 5.0}, "window": {"seconds": 3.0}}
    (merged,) = script["merged"]([old], [result([("full", 512, 4.0)], batch_rows=8)])
    assert len(merged["rows"]) == 1


def test_parts_that_are_measured_separately_are_merged_by_device(tmp_path: Path, short: LengthWork) -> None:
    script: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "results" / "length.py"))
    task = RecallTask(length=64, distances=(4, 32), tokens=64, steps=1, test=2)
    costs = script["dated"](run([FULL], short, None, silent).json() | {"date": "2026-01-02"})
    recalled = script["dated"](run([FULL], short, task, silent, costs=False).json() | {"date": "2026-01-01"})
    assert (recalled["rows"], recalled["exponents"], recalled["accuracy"].keys()) == ([], {}, {"full"})
    for old, new in ((costs, recalled), (recalled, costs)):
        (result,) = script["merged"]([old], [new])
        assert (result["rows"], result["date"]) == (costs["rows"], "2026-01-02")
        assert (result["recall"], result["accuracy"]) == (recalled["recall"], recalled["accuracy"])
        assert result["recall"]["date"] == "2026-01-01"
    assert script["merged"]([result], [costs, recalled | {"device": "cuda"}])[1] == result
    recalled |= {"machine": costs["machine"]}
    script["write"](json.loads(json.dumps([recalled])), tmp_path)  # a page without times
    text = (tmp_path / "length.md").read_text()
    assert "accuracy by distance](length-cpu.png)" in text
    assert "1 training steps on 2026-01-01" in text
    assert "**Seconds per training step**" not in text
    assert (tmp_path / "length-cpu.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select(["ful"]), "--models: unknown model 'ful'; did you mean 'full'?"),
        (lambda: work_on(CPU, 128, None, None), "--max: must be at least 256"),
        (lambda: work_on(CPU, None, None, None, 100), "--min: must be at least 256"),
        (lambda: work_on(CPU, 512, None, None, 1024), "--max: must be at least 1024, the shortest sequence"),
        (lambda: work_on(CPU, 512, 0.0, None), "--limit: must be more than 0"),
    ],
)
def test_invalid_options_are_refused(call: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("?", r"\?")):
        call()
