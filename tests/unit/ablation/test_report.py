"""The table in all its forms."""

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from regard.ablation import page
from regard.ablation.report import Line, Mean, Report, _line, _state, quantity
from regard.ablation.results import DONE
from regard.ablation.rows import Row
from regard.ablation.statistics import BETTER, NONE, WORSE, compare
from regard.presets import preset

VERDICTS = {"good": -1.0, "same": 0.0, "bad <b>": 2.0, "other": 0.01, "more": 0.0}


def made(failed: bool = True) -> Report:
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


def test_markdown_has_a_row_for_every_row() -> None:
    text = made().markdown()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 7
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "| 1,234,567 |" in text
    assert f"{BETTER} |" in next(line for line in table if line.startswith("| good"))
    assert f"{WORSE} |" in next(line for line in table if line.startswith("| bad"))
    assert NONE in next(line for line in table if line.startswith("| same"))
    assert "left out: no encoder" in text
    assert "smallest effect found with 80% power" in text


def test_json_can_be_read_back() -> None:
    record = json.loads(json.dumps(made().json(), allow_nan=False))
    assert record["rows"][1]["effect"]["verdict"] == BETTER
    assert record["detectable"] > 0
    assert record["base_seeds"] == 9
    assert set(record["rows"][1]["losses"]) == {"1", "2", "3"}


@pytest.mark.parametrize(("width", "narrow"), [(80, True), (160, False)])
def test_the_terminal_table_is_whole(width: int, narrow: bool) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(made().table(narrow))
    text = console.export_text()
    assert "…" not in text
    assert "bad <b>" in text
    assert "[" in text  # intervals are no markup


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_the_page_needs_nothing_else_and_its_pictures_have_titles() -> None:
    report = made()
    text = page.html(report.json(), report.cells(), report.sentences())
    without = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", without)
    assert "prefers-color-scheme: dark" in text
    assert "bad &lt;b&gt;" in text
    assert "<b>" not in text
    pictures = svgs(text)
    assert len(pictures) == 2
    space = "{http://www.w3.org/2000/svg}"
    for picture in pictures:
        assert picture.get("role") == "img"
        assert picture.find(f"{space}title") is not None
        _, _, width, height = map(float, str(picture.get("viewBox")).split())
        for part in picture.iter():
            for name, most in (
                ("x", width),
                ("x1", width),
                ("x2", width),
                ("cx", width),
                ("y", height),
                ("cy", height),
            ):
                assert 0 <= float(part.get(name, 0)) <= most
    assert len(list(pictures[0].iter(f"{space}circle"))) == len(VERDICTS)
    titles = [title.text or "" for group in pictures[0].iter(f"{space}g") for title in group.iter(f"{space}title")]
    assert titles[0].startswith("good")
    curves = list(pictures[1].iter(f"{space}polyline"))
    assert len(curves) == 1 + len(VERDICTS)
    assert curves[-1].get("class") == "curve base"


def test_a_report_is_saved_in_three_forms(tmp_path: Path) -> None:
    made().save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.html", "table.json", "table.md"]


def test_an_empty_page_is_a_page() -> None:
    report = Report([made().lines[-1]], None, 3, 100, 10, 20, "", [], complete=False)
    text = page.html(report.json(), report.cells(), report.sentences())
    assert "No row has an effect yet" in text
    assert "goes on" in text
    assert report.detectable is None


def test_one_outlier_does_not_press_the_others_together() -> None:
    report = made()
    record = report.json()
    record["rows"][3]["effect"] |= {"effect": 500.0, "low": 499.0, "high": 501.0}
    drawn = page.effects(record["rows"])
    assert "(+500.00)" in drawn
    places = [float(x) for x in re.findall(r'cx="([\d.]+)"', drawn)]
    assert places[1] - places[0] > 20


def test_what_went_wrong_is_the_cell() -> None:
    ok = {"status": DONE, "loss": 1.0}
    assert _state({}) == "not run yet"
    assert _state({1: ok, 2: None}) == "not run yet"
    assert _state({1: ok}) == ""
    assert _state({1: ok, 2: {"status": "diverged", "error": "nan"}}) == "diverged, 1 of 2 runs: nan"
    assert _state({1: {"status": "failed", "error": "out of memory"}}) == "failed, 1 of 1 runs: out of memory"
    row = Row("gelu", preset("transformer_tiny"), 5, 7.0, note="not matched")
    line = _line(row, {1: None}, None, {"gelu": 2.0}, False, "bleu")
    assert (line.verdict, line.note, line.final) == ("not run yet", "not matched, rate x 2", None)
    left = _line(Row("gelu", None, left_out="no feed-forward"), {}, None, {}, False, "bleu")
    assert (left.verdict, left.parameters) == ("left out: no feed-forward", None)


@pytest.mark.parametrize(("value", "text"), [(5.0, "5"), (4.59e6, "4.59M"), (1.1e13, "11T"), (0.0, "0"), (999, "999")])
def test_quantities(value: float, text: str) -> None:
    assert quantity(float(value)) == text


@pytest.mark.parametrize(("low", "high"), [(-0.3, 0.3), (0, 400), (1.2, 5.9), (0, 1e6)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = page.ticks(float(low), float(high))
    assert 3 <= len(found) <= 8
    assert low - 1e-9 <= found[0] <= found[-1] <= high + 1e-9
