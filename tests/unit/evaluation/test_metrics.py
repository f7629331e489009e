"""Scores agree with sacreBLEU and with formulas by hand; lists of different lengths are refused."""

import builtins
import json
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from itertools import combinations
from typing import Any

import pytest
from rouge_score.rouge_scorer import RougeScorer

from regard.errors import DataError, SpecError
from regard.evaluation import metrics
from regard.evaluation.metric import Metric
from regard.evaluation.metrics import (
    Score,
    accuracy,
    bits_per_byte,
    bleu,
    chrf,
    exact_match,
    matthews,
    perplexity,
    rouge,
    ter,
)

HYPOTHESES = ["The cat sat on the mat.", "A dog barked at noon, loudly.", "It rained."]
REFERENCES = ["The cat is sitting on the mat.", "The dog barked loudly at noon.", "It rained."]
OTHERS = ["There is a cat on the mat.", "A dog barked at noon, loudly.", "Rain fell."]


@pytest.mark.parametrize(("score", "name"), [(bleu, "corpus_bleu"), (chrf, "corpus_chrf"), (ter, "corpus_ter")])
def test_scores_are_those_of_the_functions_of_sacrebleu(score: Any, name: str) -> None:
    import sacrebleu

    assert score(HYPOTHESES, REFERENCES).value == getattr(sacrebleu, name)(HYPOTHESES, [REFERENCES]).score
    both = [REFERENCES, OTHERS]
    assert score(HYPOTHESES, both).value == getattr(sacrebleu, name)(HYPOTHESES, both).score
    assert score(HYPOTHESES, both).value != score(HYPOTHESES, REFERENCES).value


def test_bleu_by_hand() -> None:
    # Five tokens; matches 4/5, 3/4, 2/3, 1/2; equal lengths, so no penalty.
    value = bleu(["a b c d x"], ["a b c d e"], tokenize="none").value
    assert value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_ter_by_hand() -> None:
    assert ter(["a b x d"], ["a b c d"]).value == 25  # one of four words substituted
    assert ter(["A b"], ["a b"]).value == 0
    assert ter(["A b"], ["a b"], case_sensitive=True).value == 50


def test_signatures_record_the_settings() -> None:
    import sacrebleu

    version = f"version:{sacrebleu.__version__}"
    assert bleu(HYPOTHESES, REFERENCES).signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{version}"
    lower = bleu(HYPOTHESES, [REFERENCES, OTHERS], tokenize="intl", lowercase=True)
    assert lower.signature == f"nrefs:2|case:lc|eff:no|tok:intl|smooth:exp|{version}"
    assert lower.name == "BLEU"
    assert chrf(HYPOTHESES, REFERENCES).name == "chrF2"
    assert chrf(HYPOTHESES, REFERENCES, word_order=2).name == "chrF2++"
    assert "case:lc" in chrf(HYPOTHESES, REFERENCES, lowercase=True).signature
    assert ter(HYPOTHESES, REFERENCES).name == "TER"
    assert "case:mixed" in ter(HYPOTHESES, REFERENCES, case_sensitive=True).signature


def test_tokenizers_and_case_count() -> None:
    assert bleu(["don't go there now"], ["don 't go there now"], tokenize="13a").value < 100
    assert bleu(["x ."], ["x."], tokenize="char").value == bleu(["x."], ["x ."], tokenize="char").value
    assert bleu(["The cat sat down"], ["the cat sat down"]).value < 100
    assert bleu(["The cat sat down"], ["the cat sat down"], lowercase=True).value == pytest.approx(100)
    assert bleu(["我在北京的家里"], ["我在北京的家中"], tokenize="zh").value > 50
    assert bleu(["我在北京的家里"], ["我在北京的家中"], tokenize="13a").value == 0


def test_an_unknown_tokenizer_names_its_neighbour() -> None:
    with pytest.raises(SpecError, match=r"^tokenize: unknown tokenizer '13'; did you mean '13a'\?$"):
        bleu(HYPOTHESES, REFERENCES, tokenize="13")


def test_a_tokenizer_that_cannot_be_made_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from sacrebleu.metrics import bleu as inside

    def missing(name: str) -> None:
        raise RuntimeError("\nJapanese needs more.\n\n   pip install sacrebleu[ja]\n")

    monkeypatch.setattr(inside, "_get_tokenizer", missing)
    with pytest.raises(SpecError) as caught:
        bleu(HYPOTHESES, REFERENCES, tokenize="ja-mecab")
    assert str(caught.value) == (
        "tokenize: sacreBLEU cannot use 'ja-mecab' here: Japanese needs more. pip install sacrebleu[ja]"
    )


def test_a_negative_word_order_is_refused() -> None:
    with pytest.raises(SpecError, match="word_order: must be 0"):
        chrf(HYPOTHESES, REFERENCES, word_order=-1)


@pytest.mark.parametrize("score", [bleu, chrf, ter, exact_match, rouge])
def test_lists_of_different_lengths_are_refused(score: Any) -> None:
    with pytest.raises(DataError, match="hypotheses: 3 lines, but references has 2"):
        score(HYPOTHESES, REFERENCES[:2])
    with pytest.raises(DataError, match="hypotheses: 3 lines, but reference list 2 has 4"):
        score(HYPOTHESES, [REFERENCES, [*OTHERS, "one more"]])
    with pytest.raises(DataError, match="hypotheses: 0 lines and references has 0"):
        score([], [])
    with pytest.raises(DataError, match="hypotheses: 0 lines, but references has 3"):
        score([], REFERENCES)
    with pytest.raises(DataError, match="hypotheses: 3 lines, but references has 0"):
        score(HYPOTHESES, [])
    with pytest.raises(DataError, match="lists of lines"):
        score("ab", "ab")


def test_a_metric_by_name_takes_only_its_own_settings() -> None:
    assert "|tok:intl|" in metrics.metric("bleu", tokenize="intl").signature(1)
    with pytest.raises(SpecError, match=r"^tokenize: chrf has no such setting"):
        metrics.metric("chrf", tokenize="13a")
    with pytest.raises(SpecError, match=r"^metric: unknown metric 'belu'; did you mean 'bleu'"):
        metrics.metric("belu")


def test_exact_match() -> None:
    assert exact_match(["a", "b ", "c", "D"], ["a", " b", "x", "d"]) == Score(50.0, "", "exact match")
    assert exact_match(["a", "b"], [["x", "b"], ["a", "y"]]).value == 100


def test_accuracy_and_matthews_by_hand() -> None:
    predictions, labels = [1, 1, 0, 0, 1, 0, 1, 1], [1, 0, 0, 0, 1, 1, 1, 0]
    assert accuracy(predictions, labels).value == 62.5
    tp, tn, fp, fn = 3, 2, 2, 1
    by_hand = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert matthews(predictions, labels).value == pytest.approx(by_hand)
    assert matthews(["a", "b"], ["b", "a"]).value == -1
    assert matthews(list("abcab"), list("abcab")).value == pytest.approx(1)
    assert matthews([1, 1, 1], [1, 0, 1]).value == 0
    with pytest.raises(DataError, match="predictions: 1 lines, but labels has 2"):
        accuracy([1], [1, 2])
    with pytest.raises(DataError, match="nothing to score"):
        matthews([], [])


def test_matthews_of_several_classes_is_the_correlation_of_their_indicators() -> None:
    predictions, labels = list("abcabccab"), list("abccbaacb")

    def covariance(x: list[str], y: list[str]) -> float:
        n = len(x)
        return sum(
            sum((a == k) * (b == k) for a, b in zip(x, y, strict=True)) / n - x.count(k) * y.count(k) / n**2
            for k in "abc"
        )

    expected = covariance(predictions, labels) / math.sqrt(
        covariance(predictions, predictions) * covariance(labels, labels)
    )
    assert matthews(predictions, labels).value == pytest.approx(expected)


def test_rouge_by_hand() -> None:
    # Unigrams: 3 of 4 and 3 of 3; bigrams: 1 of 3 and 1 of 2; longest common subsequence: 3.
    rouge1, rouge2, rouge_l = rouge(["the cat the sat"], ["the cat sat"])
    assert rouge1.value == pytest.approx(100 * 2 * (3 / 4) * 1 / (3 / 4 + 1))
    assert rouge2.value == pytest.approx(100 * 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert rouge_l.value == pytest.approx(100 * 2 * (3 / 4) * 1 / (3 / 4 + 1))
    assert [score.name for score in (rouge1, rouge2, rouge_l)] == ["ROUGE-1", "ROUGE-2", "ROUGE-L"]
    assert rouge1.signature.startswith("nrefs:1|tok:english|stem:no|rouge-score:")


def test_rouge_takes_the_best_reference_and_the_mean_of_the_lines() -> None:
    assert rouge(["a b", "c"], [["x", "y"], ["a b", "z"]])[0].value == 50
    assert rouge(["jumps"], ["jumping"])[0].value == 0
    assert rouge(["jumps"], ["jumping"], stem=True)[0].value == 100


def test_rouge_refuses_references_that_its_tokenizer_cannot_read() -> None:
    with pytest.raises(DataError, match="line 2 has no letter from a to z"):
        rouge(["a", "я дома"], ["a", "я дома"])
    assert rouge(["a", "я дома"], ["a", "я дома"], tokenize="unicode")[0].value == 100
    assert rouge(["Öl"], ["Ol"], tokenize="unicode")[0].value == 0
    assert rouge(["O\u0308l"], ["\u00d6l"], tokenize="unicode")[0].value == 100  # one letter, written in two ways
    hindi = "\u0939\u093f\u0928\u094d\u0926"  # different words that differ only in the last vowel sign
    assert rouge([hindi + "\u0940"], [hindi + "\u0941"], tokenize="unicode")[0].value == 0
    assert rouge(["東京で会議"], ["東京の会議"], tokenize="unicode")[0].value == pytest.approx(80)  # 4 of 5 characters
    with pytest.raises(SpecError, match="stem: the stemmer is for English"):
        rouge(["a"], ["a"], tokenize="unicode", stem=True)


def test_rouge_without_its_package_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("rouge_score"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(SpecError) as caught:
        rouge(["a"], ["a"])
    assert str(caught.value) == "ROUGE needs the package rouge-score: pip install 'regard[metrics]'"


def test_perplexity_and_bits_per_byte_by_hand() -> None:
    assert perplexity(3 * math.log(7), 3).value == pytest.approx(7)
    assert perplexity(1e6, 1).value == math.inf
    assert math.isnan(bits_per_byte(math.nan, 1).value)
    assert bits_per_byte(16 * math.log(2), 8).value == pytest.approx(2)
    with pytest.raises(DataError, match="tokens: perplexity needs at least 1, not 0"):
        perplexity(1.0, 0)
    with pytest.raises(DataError, match="byte_count: bits per byte need at least 1 byte, not 0"):
        bits_per_byte(1.0, 0)


def test_a_score_survives_json() -> None:
    score = bleu(HYPOTHESES, REFERENCES)
    assert Score(**json.loads(json.dumps(asdict(score)))) == score


def test_importing_metrics_imports_no_metric_package() -> None:
    code = (
        "import sys, regard.evaluation.metrics; print({'sacrebleu', 'rouge_score', 'nltk', 'torch'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_a_metric_without_segment_is_refused_by_one_sentence() -> None:
    class Unfinished(Metric):
        """A user's metric that lacks the statistics of a segment."""

        name = title = "unfinished"

        def value(self, total: Any) -> float:
            return float(total[0])

    with pytest.raises(SpecError, match=r"^metric: Unfinished has no method segment"):
        Unfinished().score(["a"], ["a"])


def f1(matches: int, output: int, reference: int) -> float:
    return 0.0 if not matches else 200 * matches / (output + reference)  # 2 PR / (P + R) in percent


def longest_common_subsequence(a: list[str], b: list[str]) -> int:
    subsets = (c for size in range(len(a), 0, -1) for c in combinations(a, size))
    return next((len(c) for c in subsets if all(word in rest for rest in [iter(b)] for word in c)), 0)


def test_rouge_equals_the_definition_and_the_package_on_random_lines() -> None:
    rng, words = random.Random(3), ["a", "b", "c", "d", "e", "running", "runs"]
    hypotheses, references = ([" ".join(rng.choices(words, k=rng.randint(1, 8))) for _ in range(30)] for _ in range(2))
    expected = [0.0, 0.0, 0.0]
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        sides = hypothesis.split(), reference.split()
        for n in (1, 2):
            first, second = (Counter(zip(*(side[i:] for i in range(n)), strict=False)) for side in sides)
            expected[n - 1] += f1((first & second).total(), first.total(), second.total()) / 30
        expected[2] += f1(longest_common_subsequence(*sides), *map(len, sides)) / 30
    assert [score.value for score in rouge(hypotheses, references)] == pytest.approx(expected)
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    stemmed = [scorer.score(*pair) for pair in zip(references, hypotheses, strict=True)]
    by_package = [100 * sum(s[name].fmeasure for s in stemmed) / 30 for name in ("rouge1", "rouge2", "rougeL")]
    assert [score.value for score in rouge(hypotheses, references, stem=True)] == pytest.approx(by_package)
