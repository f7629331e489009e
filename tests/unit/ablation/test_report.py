"""The report of an ablation: Markdown, JSON, terminal table and HTML page."""

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from regard.ablation import page, plots
from regard.ablation.report import Line, Mean, Report, _line, _state
from regard.ablation.results import DONE
from regard.ablation.rows import Row
from regard.ablation.statistics import BETTER, NONE, WORSE, compare
from regard.ablation.tables import quantity
from regard.presets import preset

VERDICTS = {"good": -1.0, "same": 0.0, "bad <b>": 2.0, "other": 0.01, "more": 0.0}


def example(failed: bool = True) -> Report:
    rng = np.random.default_rng(0)
    base = {seed: float(2 + 0.05 * rng.standard_normal()) for seed in range(1, 10)}
    rows = {
        name: {seed: float(2 + shift + 0.05 * rng.standard_normal()) for seed in (1, 2, 3)}
        for name, shift in VERDICTS.items()
    }
    effects, spread = compare(base, rows)

    def line(name: str, losses: dict[int, float]) -> Line:
        mean = Mean.of(list(losses.values()))
        curve = [(step, 6.0 - (6.0 - mean.value) * step / 100) for step in range(10, 101, 10)]
        effect = effects.get(name)
        verdict = effect.verdict if effect else "the base"
        return Line(name, "", 1234567, 4.2e6, 12.0, Mean(5.0, 0.1), mean, mean, losses, curve, effect, verdict, "")

    lines = [line("base", base), *(line(name, losses) for name, losses in rows.items())]
    if failed:
        lines.append(Line("a|b", "", None, None, None, None, None, None, {}, [], None, "left out: no encoder", ""))
    return Report(lines, spread, 3, 100, 10, 20, "bleu", ["cpu"])


def test_markdown_has_one_line_per_model() -> None:
    text = example().markdown()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 7
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "| 1,234,567 |" in text
    assert f"{BETTER} |" in next(line for line in table if line.startswith("| good"))
    assert f"{WORSE} |" in next(line for line in table if line.startswith("| bad"))
    assert NONE in next(line for line in table if line.startswith("| same"))
    assert "left out: no encoder" in text
    assert "smallest effect detected with 80% power" in text


def test_json_has_effects_and_seeds() -> None:
    record = json.loads(json.dumps(example().json(), allow_nan=False))
    assert record["rows"][1]["effect"]["verdict"] == BETTER
    assert record["detectable"] > 0
    assert record["base_seeds"] == 9
    assert set(record["rows"][1]["losses"]) == {"1", "2", "3"}


@pytest.mark.parametrize(("width", "narrow"), [(80, True), (160, False)])
def test_the_terminal_table_cuts_no_cell(width: int, narrow: bool) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(example().table(narrow))
    text = console.export_text()
    assert "…" not in text
    assert "bad <b>" in text
    assert "[" in text  # intervals are not read as markup


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def labels(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")]


def test_the_page_needs_no_other_file_and_its_pictures_have_titles() -> None:
    report = example()
    facts = (("Data", "translation of <x>"), ("Model", "encoder decoder"), ("Command", "regard ablate --out x"))
    text = page.html(report.json(), report.cells(), report.sentences(), facts)
    without = re.sub(r"http://www.w3.org/(2000/svg|1999/xlink)|url\(#", "", text)
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", without)
    assert "prefers-color-scheme: dark" in text
    assert "<dt>Data</dt><dd>translation of &lt;x&gt;</dd>" in text
    assert "<dt>Command</dt><dd>regard ablate --out x</dd>" in text
    assert "bad &lt;b&gt;" in text
    assert "<b>" not in text
    effects, curves = pictures = svgs(text)
    for picture in pictures:
        assert picture.get("role") == "img"
        assert picture.get("aria-label")
        assert not re.search(r"#0[1-7]0[1-7]0[1-7]|#000000", ElementTree.tostring(picture, encoding="unicode"))
    assert next(label for label in labels(effects) if label in VERDICTS) == "good"
    assert {*VERDICTS.keys() - {"bad <b>"}, "bad <b> (+1.96)"} <= set(labels(effects))  # one effect is off the scale
    assert {"base", *VERDICTS, "training steps"} <= set(labels(curves))
    assert "var(--base)" in ElementTree.tostring(curves, encoding="unicode")


def test_without_matplotlib_the_page_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda _: None)
    report = example()
    text = page.html(report.json(), report.cells(), report.sentences())
    assert 'pip install "regard[plot]"' in text
    assert not svgs(text)
    assert "<table" in text


def test_a_report_is_saved_in_three_forms(tmp_path: Path) -> None:
    example().save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.html", "table.json", "table.md"]


def test_a_page_without_results() -> None:
    report = Report([example().lines[-1]], None, 3, 100, 10, 20, "", [], complete=False)
    text = page.html(report.json(), report.cells(), report.sentences())
    assert "No row has an effect yet" in text
    assert "run the same command again" in text
    assert report.detectable is None


def test_one_outlier_does_not_compress_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    report, scales = example(), []
    record = report.json()
    record["rows"][3]["effect"] |= {"effect": 500.0, "low": 499.0, "high": 501.0}
    monkeypatch.setattr(plots, "to_svg", lambda figure, _: scales.append(figure.axes[0].get_xlim()) or "")
    plots.effects(record["rows"])
    assert scales[0][1] < 20
    monkeypatch.undo()
    assert "(+500.00)" in plots.effects(record["rows"])


def test_the_verdict_names_the_failure() -> None:
    ok = {"status": DONE, "loss": 1.0}
    assert _state({}) == "not run yet"
    assert _state({1: ok, 2: None}) == "not run yet"
    assert _state({1: ok}) == ""
    assert _state({1: ok, 2: {"status": "diverged", "error": "nan"}}) == "diverged, 1 of 2 runs: nan"
    assert _state({1: {"status": "failed", "error": "out of memory"}}) == "failed, 1 of 1 runs: out of memory"
    row = Row("gelu", preset("transformer_tiny"), 5, 7.0, note="not matched")
    line = _line(row, {1: None}, None, {"gelu": 2.0}, False, "bleu")
    assert (line.verdict, line.note, line.final) == ("not run yet", "not matched, learning rate x 2", None)
    left = _line(Row("gelu", None, left_out="no feed-forward"), {}, None, {}, False, "bleu")
    assert (left.verdict, left.parameters) == ("left out: no feed-forward", None)


@pytest.mark.parametrize(("value", "text"), [(5.0, "5"), (4.59e6, "4.59M"), (1.1e13, "11T"), (0.0, "0"), (999, "999")])
def test_quantity_has_three_digits_and_a_letter(value: float, text: str) -> None:
    assert quantity(float(value)) == text


ODD = st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324, 1e-300, 1e308, -1e308, math.nan, math.inf, -math.inf])
LOSS = st.one_of(st.floats(), st.floats(0.0, 10.0), ODD)
CURVE = st.lists(LOSS, max_size=6).map(lambda losses: [(10 * i, loss) for i, loss in enumerate(losses)])


def check_numbers(text: str) -> None:
    """Check that plots are XML without NaN or infinite numbers."""
    for picture in svgs(text):
        for part in picture.iter():
            for name, value in part.attrib.items():
                assert name == "aria-label" or not re.search(r"\b(nan|inf)\b", value), (name, value)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(CURVE, LOSS, LOSS, LOSS), min_size=1, max_size=4))
def test_a_page_is_drawn_whatever_the_numbers_are(rows: list[Any]) -> None:
    report = example(failed=False)
    known_effect = report.lines[1].effect
    assert known_effect is not None
    lines = [
        replace(
            report.lines[i % 6],
            name=f"row {i}",
            curve=curve,
            final=Mean.of([final, final]),
            effect=None if i == 0 else replace(known_effect, effect=effect, low=low, high=effect),
        )
        for i, (curve, final, effect, low) in enumerate(rows)
    ]
    report.lines[:] = lines
    text = page.html(report.json(), report.cells(), report.sentences())
    check_numbers(text)
    json.dumps(report.json(), allow_nan=False)
    assert report.markdown()
    rungs = [
        line.json() | {"metric": final, "low": low, "high": effect, "buckets": [{"value": low, "lines": 3}] * 2}
        for line, (_, final, effect, low) in zip(lines, rows, strict=True)
    ]
    check_numbers(plots.bars(rungs, "BLEU") + plots.lengths(rungs, ["1-5", "6-9"], "BLEU"))


@pytest.mark.parametrize("end", [2.0, 2.5, 2.5000000001, 3.0, 9.0])
def test_a_loss_that_rises_is_drawn(end: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "to_svg", lambda figure, _: drawn.append(figure.axes[0]) or "")
    plots.curves([{"name": "a", "verdict": "", "curve": [(10, 2.5), (20, end)]}])
    (axes,) = drawn
    low, high = axes.get_ylim()
    first, last = axes.get_lines()[0].get_ydata()
    assert (last > first) == (end > 2.5)
    assert low <= min(first, last) <= max(first, last) <= high


def test_a_failed_page_leaves_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example().save(tmp_path)

    def fails(*_: Any) -> str:
        raise ZeroDivisionError("no range")

    monkeypatch.setattr(plots, "curves", fails)
    messages: list[str] = []
    report = example()
    report.lines[0] = replace(report.lines[0], note="later")
    report.save(tmp_path, messages.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.json", "table.md"]
    assert "later" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "table.html could not be drawn (ZeroDivisionError: no range)" in messages[0]


def test_one_seed_gives_no_verdict() -> None:
    run = {"status": DONE, "loss": 1.0, "early": {"loss": 2.0}, "scores": {"bleu": 3.0}, "curve": []}
    row = Row("gelu", preset("transformer_tiny"), 5, 7.0)
    line = _line(row, {1: run | {"steps_per_second": 1.0}}, None, {}, False, "bleu")
    assert line.verdict == "needs at least 2 seeds"
    assert Mean.of([math.inf, 1.0]).sd is None
