"""docs/results/table.py: the page with our table and the published one."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from regard.variants import VARIANTS

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("table", ROOT / "docs" / "results" / "table.py")
assert SPEC is not None
assert SPEC.loader is not None
table: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(table)


def published() -> dict[str, dict[str, str]]:
    lines = (ROOT / "docs" / "results" / "narang2021.tsv").read_text().splitlines()
    names = lines[0].split("\t")
    return {line.split("\t")[0]: dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:]}


def test_published_rows_equal_our_rows_in_order() -> None:
    numbers = {name: variant.row.number for name, variant in VARIANTS.items() if variant.row is not None}
    assert [numbers[name] for name in published()] == list(range(1, 53))
    for name, row in published().items():  # the published count is one of our two exact counts, rounded
        known = VARIANTS[name].row
        assert known is not None
        assert any(abs(exact / 1e6 - float(row["params_m"])) < 1 for exact in (known.parameters, known.learned)), name


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 2, 3, 4], [10, 20, 30, 40], 1.0), ([1, 2, 3, 4], [4, 3, 2, 1], -1.0), ([1, 1, 2], [1, 2, 3], 0.8660254)],
)
def test_rank_correlation(a: list[float], b: list[float], expected: float) -> None:
    correlation, p_value = table.correlation(a, b, draws=50)
    assert correlation == pytest.approx(expected)
    assert 0 < p_value <= 1


def test_a_page_of_an_incomplete_table(tmp_path: Path) -> None:
    mean = {"value": 2.0, "sd": 0.1}
    row = {"parameters": 10**7, "operations": 1e9, "speed": 20.0, "early": mean, "metric": mean, "effect": None}
    rows = [
        row | {"name": name, "final": {"value": value, "sd": None}, "verdict": "better", "note": ""}
        for name, value in (("base", 2.0), ("swiglu", 1.9), ("elu", 2.2))
    ]
    rows[1]["effect"], rows[2]["effect"] = {"effect": -0.1, "steady": True}, {"effect": 0.2, "steady": False}
    rows.append({"name": "gelu", "final": None, "verdict": "diverged"})
    facts = {"rows": rows, "metric": "bleu", "steps": 500, "seeds": 3, "base_seeds": 9, "detectable": 0.05}
    page = table.page(json.loads(json.dumps(facts | {"devices": ["cuda"]})), published())
    assert "| `swiglu` | 10.0M | 1.00G | 20.0 | 2.000 ± 0.100 | 1.900 |" in page
    assert "compared by their own variance: `elu`." in page
    assert "over the 3 rows of both tables" in page
    assert "| final loss | final loss | +1.00 |" in page
    gelu = next(line for line in page.splitlines() if line.startswith("| `gelu`"))
    assert "diverged" in gelu
    assert page.count("not run yet") == 48
