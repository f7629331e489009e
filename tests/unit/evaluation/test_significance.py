"""The paired bootstrap agrees with a bootstrap computed line by line, and with sacreBLEU's own test."""

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest, Result

from regard.errors import DataError, SpecError
from regard.evaluation import significance
from regard.evaluation.metrics import exact_match, metric
from regard.evaluation.significance import compare_lines, paired_bootstrap, standard_error, verdict

WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "house", "red", "big", "small", "ran", "away", "home", "."]
METRICS: dict[str, Callable[[], Any]] = {"bleu": BLEU, "chrf": CHRF, "ter": TER}


def outputs(lines: int, first: float, second: float, seed: int = 0) -> tuple[list[str], list[str], list[str]]:
    """Return references and two outputs, in which the given shares of words are replaced."""
    rng = random.Random(seed)
    references = [" ".join(rng.choices(WORDS, k=rng.randint(3, 12))) for _ in range(lines)]

    def noisy(share: float) -> list[str]:
        return [
            " ".join(rng.choice(WORDS) if rng.random() < share else word for word in line.split())
            for line in references
        ]

    return references, noisy(first), noisy(second)


@pytest.mark.parametrize("metric", METRICS)
def test_every_resample_is_scored_as_a_corpus(metric: str) -> None:
    references, first, second = outputs(12, 0.3, 0.25)
    others = [line.replace("cat", "dog") for line in references]
    comparison = paired_bootstrap(first, second, [references, others], metric, resamples=100, seed=7)
    rng = np.random.default_rng(7)
    drawn = rng.choice(12, size=(100, 12), replace=True)

    def score(output: list[str], lines: Any) -> float:
        streams = [[stream[i] for i in lines] for stream in (references, others)]
        return METRICS[metric]().corpus_score([output[i] for i in lines], streams).score

    differences = [score(second, lines) - score(first, lines) for lines in drawn]
    whole = score(second, range(12)) - score(first, range(12))
    assert comparison.difference == pytest.approx(whole)
    assert (comparison.low, comparison.high) == pytest.approx(tuple(np.quantile(differences, [0.025, 0.975])))
    assert comparison.p_value == (sum(d * whole <= 0 for d in differences) + 1) / 101
    assert (comparison.lines, comparison.resamples, comparison.seed) == (12, 100, 7)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("second", [0.3, 0.28, 0.25, 0.2])
def test_agrees_with_the_paired_test_of_sacrebleu(metric: str, second: float) -> None:
    references, old, new = outputs(250, 0.3, second, seed=3)
    signatures, results = PairedTest(
        [("old", old), ("new", new)], {metric: METRICS[metric]()}, [references], test_type="bs", n_samples=1000
    )()
    (name,) = signatures
    old_result, new_result = results[name]
    assert isinstance(old_result, Result)
    assert isinstance(new_result, Result)
    comparison = paired_bootstrap(old, new, references, metric)
    assert (comparison.first, comparison.second) == pytest.approx((old_result.score, new_result.score))
    assert comparison.metric == name
    assert comparison.signature == str(signatures[name])
    # The same draws, and another estimate of the tail: sacreBLEU takes it from the far side of |difference|.
    theirs = new_result.p_value
    assert theirs is not None
    assert comparison.p_value == pytest.approx(theirs, abs=0.02 if theirs < 0.05 else 0.12)


def test_a_small_chunk_draws_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    references, old, new = outputs(31, 0.3, 0.2)
    at_once = paired_bootstrap(old, new, references, resamples=200)
    monkeypatch.setattr(significance, "CHUNK", 31 * 7)
    assert paired_bootstrap(old, new, references, resamples=200) == at_once


@pytest.mark.parametrize("metric", [*METRICS, "exact_match"])
def test_an_output_is_no_better_than_itself(metric: str) -> None:
    references, old, _ = outputs(40, 0.3, 0.2)
    comparison = paired_bootstrap(old, old, references, metric, resamples=100)
    assert (comparison.difference, comparison.low, comparison.high, comparison.p_value) == (0, 0, 0, 1)


def test_scores_per_line() -> None:
    first, second = [True] * 50 + [False] * 50, [True] * 70 + [False] * 30
    comparison = compare_lines(first, second, "accuracy")
    assert (comparison.first, comparison.second, comparison.metric, comparison.signature) == (50, 70, "accuracy", "")
    assert comparison.difference == pytest.approx(20)
    # 20 of 100 lines gained, none lost: the standard error is sqrt(0.2 * 0.8 / 100) = 4 points.
    assert (comparison.low, comparison.high) == pytest.approx((20 - 1.96 * 4, 20 + 1.96 * 4), abs=1)
    assert comparison.p_value == 1 / 1001
    fractions = compare_lines([0.1] * 30, [0.3, -0.1] * 15, "F1")  # equal means, up to rounding
    assert fractions.p_value == 1


def test_exact_match_is_a_score_per_line() -> None:
    references, old, new = outputs(80, 0.1, 0.05)
    comparison = paired_bootstrap(old, new, references, "exact_match", resamples=300, seed=1)
    assert comparison.first == exact_match(old, references).value
    assert comparison.second == exact_match(new, references).value
    same = compare_lines(
        [o == r for o, r in zip(old, references, strict=True)],
        [n == r for n, r in zip(new, references, strict=True)],
        "exact match",
        resamples=300,
        seed=1,
    )
    assert comparison == same


def test_settings_reach_the_metric() -> None:
    references, old, new = outputs(20, 0.3, 0.2)
    shouted = [line.upper() for line in old]
    assert paired_bootstrap(shouted, new, references, resamples=100).first < 5
    lower = paired_bootstrap(shouted, new, references, resamples=100, lowercase=True, tokenize="char")
    assert lower.first > 20
    assert "|tok:char|" in lower.signature
    assert "|bs:100|seed:12345|" in lower.signature


def test_a_seed_gives_one_result_and_another_seed_another() -> None:
    references, old, new = outputs(40, 0.3, 0.25)
    comparison = paired_bootstrap(old, new, references, resamples=200, seed=5)
    assert paired_bootstrap(old, new, references, resamples=200, seed=5) == comparison
    assert paired_bootstrap(old, new, references, resamples=200, seed=6).low != comparison.low
    assert asdict(comparison)["p_value"] == comparison.p_value


def test_invalid_comparisons_are_refused() -> None:
    with pytest.raises(SpecError, match="metric: unknown metric 'bleo'; did you mean 'bleu'"):
        paired_bootstrap(["a", "b"], ["a", "b"], ["a", "b"], "bleo")
    with pytest.raises(SpecError, match="tokenize: ter has no such setting"):
        paired_bootstrap(["a", "b"], ["a", "b"], ["a", "b"], "ter", tokenize="13a")
    with pytest.raises(SpecError, match="lowercase: exact_match has no such setting; leave it out"):
        paired_bootstrap(["a", "b"], ["a", "b"], ["a", "b"], "exact_match", lowercase=True)
    with pytest.raises(DataError, match="hypotheses: 1 lines, but references has 2"):
        paired_bootstrap(["a", "b"], ["a"], ["a", "b"])
    with pytest.raises(DataError, match="BLEU: 1 lines cannot be resampled"):
        paired_bootstrap(["a"], ["a"], ["a"])
    with pytest.raises(DataError, match="accuracy: 2 lines in the first output and 3 in the second"):
        compare_lines([1, 0], [1, 0, 1], "accuracy")
    with pytest.raises(DataError, match="F1: line 2 of the second output has the score nan"):
        compare_lines([1.0, 0.0], [1.0, float("nan")], "F1")
    with pytest.raises(SpecError, match="resamples: must be at least 100"):
        compare_lines([1, 0], [1, 0], "accuracy", resamples=99)
    with pytest.raises(SpecError, match="seed: must be 0 or more"):
        compare_lines([1, 0], [1, 0], "accuracy", seed=-1)


# -- the verdict


@pytest.mark.parametrize(
    ("name", "better"), [("bleu", "better"), ("chrf++", "better"), ("ter", "better"), ("exact_match", "better")]
)
def test_the_verdict_names_the_better_system_in_one_sentence(name: str, better: str) -> None:
    references, bad, good = outputs(200, 0.4, 0.05)
    chosen = metric(name)
    comparison = paired_bootstrap(bad, good, references, chosen)
    sentence = verdict(comparison, chosen, "B", "A")
    scores = f"{chosen.title} {chosen.text(comparison.second)} against {chosen.text(comparison.first)}"
    interval = f"95 % interval {comparison.low:.1f} to {comparison.high:.1f}"
    assert (
        sentence == f"A is {better} than B: {scores}, difference {comparison.difference:.1f} ({interval}, p = 0.001)."
    )
    assert verdict(paired_bootstrap(good, bad, references, chosen), chosen, "A", "B").startswith("B is worse than A: ")


def test_the_verdict_on_equal_systems_is_no_difference() -> None:
    references, first, second = outputs(60, 0.3, 0.3)
    chosen = metric("bleu")
    sentence = verdict(paired_bootstrap(first, second, references, chosen), chosen, "B", "A")
    assert sentence.startswith("No difference beyond chance between A and B: BLEU ")


def test_classes_are_compared_by_accuracy_and_matthews_correlation() -> None:
    labels, first, second = ["x", "y"] * 60, ["x"] * 120, ["x", "y"] * 50 + ["x"] * 20
    for name in ("accuracy", "matthews"):
        chosen = metric(name)
        comparison = paired_bootstrap(first, second, labels, chosen, resamples=200)
        assert comparison.second == pytest.approx(chosen.score(second, labels).value)
        assert verdict(comparison, chosen, "B", "A").startswith(f"A is better than B: {chosen.title} ")


# -- the standard error of one score


def test_the_standard_error_of_a_proportion_is_that_of_the_binomial() -> None:
    lines = ["a"] * 40 + ["b"] * 60
    assert standard_error(lines, ["a"] * 100, "exact_match") == pytest.approx(4.89, abs=0.02)  # 100 sqrt(.4 .6 / 100)
    assert 0 < standard_error(["b"] * 100, ["a"] * 100, "exact_match") < 1.1  # none right does not mean none ever


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_the_standard_error_falls_with_the_square_root_of_the_lines(metric: str) -> None:
    rng = np.random.default_rng(0)
    words = np.array(["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "big", "small", "red"])
    references = [" ".join(rng.choice(words, 12)) for _ in range(1600)]
    outputs = [" ".join(w if rng.random() < 0.7 else "x" for w in line.split()) for line in references]
    few, many = (standard_error(outputs[:n], references[:n], metric) for n in (100, 1600))
    assert 2.8 < few / many < 5.6  # 4, and the chance of which lines


def test_the_standard_error_of_a_single_line_is_100() -> None:
    assert standard_error(["a b c d e"], ["a b c d f"], "bleu") == 100.0


@pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL"])
def test_rouge_of_every_resample_is_the_mean_of_its_lines(name: str) -> None:
    references, first, second = outputs(12, 0.5, 0.2)
    comparison = paired_bootstrap(first, second, references, metric(name), resamples=100, seed=7)
    scorer = metric(name)
    by_line = [
        scorer.score([b], [reference]).value - scorer.score([a], [reference]).value
        for a, b, reference in zip(first, second, references, strict=True)
    ]
    drawn = np.random.default_rng(7).choice(12, size=(100, 12), replace=True)
    means = np.asarray(by_line)[drawn].mean(1)
    assert comparison.difference == pytest.approx(np.mean(by_line))
    assert (comparison.low, comparison.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
