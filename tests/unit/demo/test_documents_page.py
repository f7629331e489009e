"""docs/results/documents.py: the models, the page that it writes from saved results, and its ROUGE-L."""

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.evaluation.metrics import rouge

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("documents_script", ROOT / "docs" / "results" / "documents.py")
assert SPEC is not None
assert SPEC.loader is not None
script: Any = importlib.util.module_from_spec(SPEC)
sys.modules["documents_script"] = script  # its dataclasses look themselves up
SPEC.loader.exec_module(script)

MACHINE = {"gpu": "NVIDIA H200", "cpu": "x", "cores": 16, "threads": 1, "versions": {"torch": "2.11.0"}}


def result(device: str = "cuda") -> dict[str, Any]:
    """A result with two trained models at two lengths, of which one is missing, and one measured model."""
    settings = replace(script.FULL, lengths=(64, 4096))
    optimum = {str(n): settings.task.optimal_perplexity(n) for n in settings.lengths}
    rows = [
        {
            "model": model,
            "length": n,
            "parameters": 4_751_872,
            "perplexity": p,
            "rougeL": 80.5,
            "training_seconds": 41.2,
        }
        for model, n, p in [
            ("transformer_d", 64, optimum["64"]),
            ("transformer_d", 4096, 1.25),
            ("transformer_ed", 64, 2),
        ]
    ]
    steps = [{"length": n, "bytes": n * 10**5, "seconds": n / 10**4} for n in (64, 128, 4096, 8192)]
    facts = {"device": device, "date": "2026-01-02", "jobs": 6, "machine": MACHINE, "settings": asdict(settings)}
    steps = [{"model": "transformer_d", "rows": steps, "limit": "memory"}]
    guess = settings.task.optimal_perplexity(1)
    return json.loads(json.dumps(facts | {"optimum": optimum, "guess": guess, "rows": rows, "steps": steps}))


def cells(page: str, title: str) -> dict[str, list[str]]:
    """The rows of the table with this title, by their first cell."""
    table = page.split(f"**{title}")[1].split("\n\n")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {first: rest for first, *rest in rows}


def test_page_compares_the_models_with_the_optimum() -> None:
    page = script.page([result()])
    assert page.startswith("# Models of long documents\n")
    assert "NVIDIA H200, torch 2.11.0, 2026-01-02. Documents of 1,023 paragraphs with 10 facts" in page
    assert "6 trainings at a time" in page
    perplexity = cells(page, "Perplexity")
    assert perplexity["L"] == ["64", "4,096"]
    assert perplexity["the best possible"] == ["1.710", "1.000"]
    assert perplexity["a model that finds no fact"] == ["2.446", "2.446"]
    assert perplexity["Transformer-D"] == ["1.710", "1.250"]
    assert perplexity["Transformer-ED"] == ["2.000", "-"]
    assert perplexity["Transformer-DMCA"] == ["-", "-"]
    assert cells(page, "Facts found")["Transformer-D"] == ["100", "75"]
    assert cells(page, "ROUGE-L")["Transformer-ED"] == ["80.5", "-"]
    steps = cells(page, "Peak memory")
    assert steps[""] == ["parameters", "64", "4,096", "8,192", "longest L", "limited by"]
    assert steps["Transformer-D"] == ["4,751,872", "6", "410", "819", "8,192", "memory"]
    assert max(map(len, page.splitlines())) < 700


def test_results_of_other_devices_are_kept() -> None:
    old, new = [result("cpu"), result("cuda") | {"date": "old"}], [result("cuda")]
    assert [(each["device"], each["date"]) for each in script.merged(old, new)] == [
        ("cuda", "2026-01-02"),
        ("cpu", "2026-01-02"),
    ]
    assert script.page(script.merged(old, new)).count("\n## ") == 2


@pytest.mark.parametrize("settings", [script.FULL, script.QUICK])
def test_models_are_the_presets_in_small(settings: Any) -> None:
    counts = {}
    for model in script.MODELS:
        spec = replace(script.spec_of(model.preset, settings), vocab=50)
        counts[model.preset] = sum(parameter.numel() for parameter in regard.build(spec, device="meta").parameters())
        record = script.recipe_of(model.preset, settings.lengths[0], settings)
        assert record["model"]["kind"] == regard.preset(model.preset).kind
        assert "dropout': 0.1" not in str(record)
        assert "post_norm" not in str(record)
        if model.preset != "lstm_attention":
            assert record["model"]["input"]["position"] is None
            assert "rotary" in str(record["model"]["decoder"])
    dense = [count for name, count in counts.items() if name not in ("lstm_attention", "transformer_dmca_moe")]
    assert max(dense) < 1.6 * min(dense)
    assert all(3e6 < count < 9e6 for count in dense) == (settings is script.FULL)


def test_documents_fit_the_greatest_length() -> None:
    for settings in (script.FULL, script.QUICK):
        assert settings.task.words <= settings.lengths[-1]
        assert settings.task.optimal_perplexity(settings.lengths[-1]) == 1


def test_rouge_l_equals_the_metric() -> None:
    references = ["e1 a0 v5 e1 a1 v4", "e2 a0 v1 e2 a1 v1", "e3 a0 v0"]
    outputs = ["e1 a0 v4 e1 a1 v4", "a0 e2 v1 v1 e2 a1 a1", ""]
    expected = {each.name: each.value for each in rouge(outputs, references, tokenize="unicode")}
    assert script.rouge_l(outputs, references) == pytest.approx(expected.get("rougeL", expected.get("ROUGE-L")))
