"""bench/defaults.py: splits of texts, scores, the formulas of the competitors, the table and the page."""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.runs.options import seconds

BENCH = Path(__file__).parents[3] / "bench"
FOLDERS = (str(BENCH), str(BENCH / "competitors"))


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    """Import a script of bench/ by name, as Python does when it is run."""
    before = set(sys.modules)
    sys.path[:0] = FOLDERS
    yield importlib.import_module
    del sys.path[: len(FOLDERS)]
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


def test_no_key_of_a_text_is_in_two_parts(load: Any) -> None:
    texts = load("texts")
    records = [(f"source {n}", f"target {n % 5000}") for n in range(10_000)]
    parts = texts.split(records, lambda pair: pair[1], 4_000)
    keys = {name: {target for _, target in part} for name, part in parts.items()}
    assert {name: len(keys[name]) for name in ("valid", "test")} == {"valid": texts.SIZE, "test": texts.SIZE}
    assert len(parts["train"]) == 4_000
    assert not keys["train"] & keys["valid"]
    assert not keys["train"] & keys["test"]
    assert not keys["valid"] & keys["test"]


def test_a_split_does_not_depend_on_the_order_of_its_records(load: Any) -> None:
    records = [(f"source {n}", f"target {n}") for n in range(3_000)]
    shuffled = random.Random(7).sample(records, len(records))
    split = load("texts").split
    assert split(records, lambda pair: pair[1], None) == split(shuffled, lambda pair: pair[1], None)


def test_every_text_that_is_written_can_be_measured(load: Any) -> None:
    defaults, page = load("defaults"), load("defaults_page")
    assert set(defaults.TEXTS) == set(load("texts").NAMES)
    assert {text.metric for text in defaults.TEXTS.values()} == set(page.METRICS)
    assert {name for usual, _ in defaults.USUAL.values() for name in usual} == set(defaults.TEXTS)
    for _, time in defaults.USUAL.values():
        assert seconds(time)


@pytest.mark.parametrize(("budget", "formatted"), [(30, "30 s"), (90, "90 s"), (60, "1 min"), (300, "5 min")])
def test_time_budget_as_text(load: Any, budget: float, formatted: str) -> None:
    assert load("defaults_page").clock(budget) == formatted


def test_learning_rate_warms_up_over_steps_and_falls_to_zero_with_the_time(load: Any) -> None:
    script = load("script")
    rate = script.learning_rate
    assert rate(0, 0.0, 1e-3) == pytest.approx(1e-3 / script.WARM_UP)
    assert rate(script.WARM_UP - 1, 0.0, 1e-3) == pytest.approx(1e-3)
    assert rate(5_000, 0.5, 1e-3) == pytest.approx(0.5e-3)
    assert rate(5_000, 1.0, 1e-3) == pytest.approx(0.0)
    assert rate(5_000, 1.2, 1e-3) == pytest.approx(0.0)


def test_batches_hold_every_example_once_and_no_more_than_their_tokens(load: Any) -> None:
    rng = random.Random(0)
    examples = [([n] * rng.randint(1, 40), [n] * rng.randint(1, 40)) for n in range(500)]
    result = load("script").batches(examples, 200, random.Random(1))
    assert sorted(example for batch in result for example in batch) == sorted(examples)
    assert all(len(batch) * max(max(map(len, example)) for example in batch) <= 200 for batch in result)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_kneser_ney_sums_to_one_after_every_context(load: Any, order: int) -> None:
    rng = np.random.default_rng(0)
    size = 12  # the last two do not occur
    text = rng.choice(size - 2, 2_000, p=np.arange(1, size - 1) / np.arange(1, size - 1).sum())
    model = load("ngram").KneserNey.counted(text, size, order)
    for context in (text[50:58], np.array([size - 1] * 8), np.concatenate([text[:4], [size - 2], text[9:11]])):
        last = [model.probabilities(np.append(context, word))[-1] for word in range(size)]
        assert sum(last) == pytest.approx(1.0)
        assert min(last) > 0


def test_kneser_ney_predicts_a_repeated_text_better_with_a_higher_order(load: Any) -> None:
    ngram = load("ngram")
    text = np.array([0, 1, 2, 0, 2, 1] * 200)
    assert ngram.nats(text, text, 3, 3) < 0.2 * ngram.nats(text, text, 3, 1)


def test_line_ends_count_as_words_and_characters(load: Any) -> None:
    units = load("ngram").units_of("a b\n\n = c = \n", "words")
    assert units == ["a", "b", "\n", "\n", "=", "c", "=", "\n"]
    result = load("defaults").likelihood(8 * np.log(7), "a b\n\n = c = \n")
    assert result["perplexity_per_word"] == pytest.approx(7)
    assert result["nats_per_character"] == pytest.approx(8 * np.log(7) / 13)


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("A.A.A.A.A.A.A.A.A.A", True),
        ("the man the man the man the man the man", True),
        ("it ends in a loop of of of of of of of of", True),
        ("Wait for it ...", False),
        ("neunhundertneunundneunzigtausendneunhundertneunundneunzig", False),
        ("no no no", False),
        ("", False),
    ],
)
def test_loops_at_the_end_of_an_output(load: Any, text: str, loops: bool) -> None:
    assert load("defaults").ends_in_loop(text) is loops


def test_degenerate_outputs_reach_the_limit_or_loop(load: Any) -> None:
    outputs = [("fine", True), ("cut off", False), ("ha" * 30, True), ("fine too", True)]
    assert load("defaults").degenerate([{"text": text, "ended": ended} for text, ended in outputs]) == 50


def line(**changes: Any) -> dict[str, Any]:
    """Return a result, as in a line of the results file."""
    usual = {"text": "tatoeba", "part": "test", "system": "regard", "metric": "bleu", "device": "cpu", "threads": 2}
    usual |= {"time": 300.0, "seed": 1, "score": 28.0, "steps": 2000, "wall_seconds": 298.0, "within_10_percent": True}
    usual |= {
        "degenerate_percent": 0.5,
        "baselines": [{"name": "copying the source", "metrics": {"bleu": 2.5}, "share": 1.0}],
        "error": None,
        "commit": "abc",
        "gpu": None,
    }
    return usual | {"cpu": "a processor", "versions": {"Python": "3.11", "scikit-learn": None}} | changes


def test_table_compares_systems_and_names_what_is_missing(load: Any) -> None:
    table = load("defaults_page").table
    nothing = {"score": None, "steps": None, "wall_seconds": None, "error": "not installed: scikit-learn"}
    results = [
        line(score=26.0),  # replaced by the next
        line(),
        line(seed=2, score=30.0, wall_seconds=340.0, within_10_percent=False),
        line(system="script", score=24.0, baselines=None),
        line(text="trec", metric="accuracy", score=90.0, degenerate_percent=None),
        line(text="trec", metric="accuracy", system="bag", **nothing),
        line(text="wikitext", metric="perplexity_per_word", score=95.0),
        line(text="wikitext", metric="perplexity_per_word", system="ngram", score=90.0),
    ]
    head, _, tatoeba, trec, wikitext = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table(results))
    column = {name: number for number, name in enumerate(head)}
    assert tatoeba[column["regard"]] == "**29.0 (28.0 to 30.0, 2 seeds)**"
    assert tatoeba[column["Hugging Face script"]] == "24.0"
    assert tatoeba[column["trivial"]] == "copying the source 2.50"
    assert tatoeba[column["seconds"]] == "340 (over)"
    assert trec[column["TF-IDF + logistic regression"]] == "not installed: scikit-learn"
    assert trec[column["degenerate, %"]] == ""
    assert wikitext[column["n-gram"]] == "**90.0**"
    assert wikitext[column["regard"]] == "95.0"


def test_page_publishes_test_parts_of_each_machine(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    defaults = load("defaults")
    results = [line(), line(part="valid", score=77.7), line(text="imdb", metric="accuracy", device="cuda", gpu="a GPU")]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    monkeypatch.setattr(defaults, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["defaults.py", "--page", "--out", str(tmp_path / "results.jsonl")])
    defaults.main()
    page = (tmp_path / "defaults.md").read_text()
    assert page.startswith("# Accuracy with default options, compared with hand-written scripts\n")
    assert "\n## CPU: a processor, 2 cores\n" in page
    assert "\n## GPU: a GPU\n" in page
    assert "77.7" not in page
    assert "With Python 3.11." in page
    assert max(map(len, page.split("\n## ")[0].split("\n"))) <= 120
