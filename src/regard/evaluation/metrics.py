"""Metrics of outputs against references: translation through sacreBLEU, summaries, classes, language models."""

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from regard.errors import DataError, SpecError, nearest

References = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Score:
    """One number: its name, and the signature that says how it was computed (empty if the name says all)."""

    value: float
    signature: str
    name: str


def bleu(hypotheses: Sequence[str], references: References, tokenize: str = "13a", lowercase: bool = False) -> Score:
    """BLEU of a corpus (Papineni et al., 2002) in percent, as sacreBLEU computes it.

    References are one line for each hypothesis, or several such lists (each as long as the hypotheses).
    """
    return corpus_score(bleu_metric(tokenize, lowercase), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: References, word_order: int = 0, lowercase: bool = False) -> Score:
    """The character n-gram F-score (Popovic, 2015) in percent; `word_order=2` is chrF++."""
    return corpus_score(chrf_metric(word_order, lowercase), hypotheses, references)


def ter(hypotheses: Sequence[str], references: References, case_sensitive: bool = False) -> Score:
    """The translation edit rate (Snover et al., 2006) in percent of the reference's words: lower is better."""
    return corpus_score(ter_metric(case_sensitive), hypotheses, references)


def bleu_metric(tokenize: str = "13a", lowercase: bool = False) -> Any:
    """sacreBLEU's BLEU with these settings."""
    from sacrebleu.metrics.bleu import BLEU  # noqa: PLC0415  # 0.2 s that only a score should cost

    if tokenize not in BLEU.TOKENIZERS:
        raise SpecError("tokenize", f"unknown tokenizer {tokenize!r}; {nearest(tokenize, BLEU.TOKENIZERS)}")
    try:
        # force: no warning at every validation that lines end in a tokenized period.
        return BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SpecError("tokenize", f"sacreBLEU cannot use {tokenize!r} here: {reason}") from None


def chrf_metric(word_order: int = 0, lowercase: bool = False) -> Any:
    """sacreBLEU's chrF with these settings."""
    from sacrebleu.metrics.chrf import CHRF  # noqa: PLC0415  # as above

    if word_order < 0:
        raise SpecError("word_order", f"must be 0 (chrF) or more (2 is chrF++), not {word_order}")
    return CHRF(word_order=word_order, lowercase=lowercase)


def ter_metric(case_sensitive: bool = False) -> Any:
    """sacreBLEU's TER with these settings."""
    from sacrebleu.metrics.ter import TER  # noqa: PLC0415  # as above

    return TER(case_sensitive=case_sensitive)


CORPUS_METRICS: dict[str, Callable[..., Any]] = {"bleu": bleu_metric, "chrf": chrf_metric, "ter": ter_metric}


def corpus_metric(name: str, **settings: Any) -> Any:
    """A metric of sacreBLEU by name; a setting that it does not have is refused."""
    if name not in CORPUS_METRICS:
        raise SpecError("metric", f"unknown metric {name!r}; {nearest(name, CORPUS_METRICS)}")
    known = inspect.signature(CORPUS_METRICS[name]).parameters
    for setting in settings:
        if setting not in known:
            raise SpecError(setting, f"{name} has no such setting; {nearest(setting, known)}")
    return CORPUS_METRICS[name](**settings)


def corpus_score(metric: Any, hypotheses: Sequence[str], references: References) -> Score:
    """The score of a whole corpus, with its signature."""
    streams = reference_streams(hypotheses, references)
    score = metric.corpus_score(list(hypotheses), streams)
    return Score(score.score, metric.get_signature().format(), score.name)


def reference_streams(hypotheses: Sequence[str], references: References) -> list[list[str]]:
    """References as lists that are each as long as the hypotheses, or a sentence about what does not fit."""
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise DataError("hypotheses and references are lists of lines, not one text; split it into lines")
    single = not references or isinstance(references[0], str)
    streams = [[str(line) for line in stream] for stream in ([references] if single else references)]
    for number, stream in enumerate(streams, start=1):
        which = "references" if single else f"reference list {number}"
        _check_lines("hypotheses", hypotheses, which, stream)
    return streams


def _check_lines(name: str, lines: Sequence[Any], other: str, others: Sequence[Any]) -> None:
    if len(lines) != len(others):
        raise DataError(f"{name}: {len(lines)} lines, but {other} has {len(others)}; every line needs its partner")
    if not len(lines):
        raise DataError(f"{name}: 0 lines and {other} has 0; there is nothing to score")


def exact_match(hypotheses: Sequence[str], references: References) -> Score:
    """Percent of lines that equal one of their references, white space at the ends apart."""
    matches = line_matches(hypotheses, references)
    return Score(100 * sum(matches) / len(matches), "", "exact match")


def line_matches(hypotheses: Sequence[str], references: References) -> list[bool]:
    """For each line whether it equals one of its references, white space at the ends apart."""
    streams = reference_streams(hypotheses, references)
    return [
        line.strip() in {reference.strip() for reference in given}
        for line, given in zip(hypotheses, zip(*streams, strict=True), strict=True)
    ]


def accuracy(predictions: Sequence[Hashable], labels: Sequence[Hashable]) -> Score:
    """Percent of predictions that are the label."""
    _check_lines("predictions", predictions, "labels", labels)
    right = sum(prediction == label for prediction, label in zip(predictions, labels, strict=True))
    return Score(100 * right / len(labels), "", "accuracy")


def matthews(predictions: Sequence[Hashable], labels: Sequence[Hashable]) -> Score:
    """The correlation of predicted and true classes, from -1 to 1 (Matthews, 1975; for K classes Gorodkin, 2004).

    (c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2)) with c of s right, p_k predicted and t_k
    true members of class k; 0 where all predictions or all labels are one class.
    """
    _check_lines("predictions", predictions, "labels", labels)
    s = len(labels)
    c = sum(prediction == label for prediction, label in zip(predictions, labels, strict=True))
    p, t = Counter(predictions), Counter(labels)
    spread = (s * s - sum(n * n for n in p.values())) * (s * s - sum(n * n for n in t.values()))
    value = (c * s - sum(p[k] * t[k] for k in t)) / math.sqrt(spread) if spread else 0.0
    return Score(value, "", "Matthews correlation")


class _Words:
    """Words of any script in lower case: a tokenizer for rouge-score, whose own knows a to z and 0 to 9 only."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())


def rouge(
    hypotheses: Sequence[str],
    references: References,
    tokenize: Literal["english", "unicode"] = "english",
    stem: bool = False,
) -> tuple[Score, Score, Score]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004): mean F-scores of the lines in percent, best reference of each.

    `english` is rouge-score's own tokenizer, which published numbers use: all but a to z and 0 to 9 separates words.
    `unicode` knows the letters of every script.
    """
    streams = reference_streams(hypotheses, references)
    scorer = _rouge_scorer(tokenize, stem)
    if tokenize == "english":
        _check_english(streams)
    kinds = ("rouge1", "rouge2", "rougeL")
    totals = dict.fromkeys(kinds, 0.0)
    for line, given in zip(hypotheses, zip(*streams, strict=True), strict=True):
        scores = scorer.score_multi(given, line)
        for kind in kinds:
            totals[kind] += scores[kind].fmeasure
    version = metadata.version("rouge-score")
    signature = f"nrefs:{len(streams)}|tok:{tokenize}|stem:{'yes' if stem else 'no'}|rouge-score:{version}"
    first, second, longest = (
        Score(100 * totals[kind] / len(hypotheses), signature, f"ROUGE-{kind.removeprefix('rouge')}") for kind in kinds
    )
    return first, second, longest


def _rouge_scorer(tokenize: str, stem: bool) -> Any:
    if tokenize not in ("english", "unicode"):
        raise SpecError("tokenize", f"unknown tokenizer {tokenize!r}; {nearest(tokenize, ('english', 'unicode'))}")
    if stem and tokenize != "english":
        raise SpecError("stem", "the stemmer is an English one; it needs tokenize='english'")
    try:
        from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415  # an extra, and 2 s
    except ImportError:
        raise SpecError("", "ROUGE needs the package rouge-score: pip install 'regard[metrics]'") from None
    words = _Words() if tokenize == "unicode" else None
    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=stem, tokenizer=words)


def _check_english(streams: list[list[str]]) -> None:
    """A line with words of which this tokenizer sees none would be scored 0, whatever the hypothesis."""
    for stream in streams:
        for number, line in enumerate(stream, start=1):
            if re.search(r"\w", line) and not re.search(r"[a-z0-9]", line.lower()):
                raise DataError(
                    f"references: line {number} has no letter from a to z, and ROUGE's English tokenizer sees "
                    "no other; say tokenize='unicode'"
                )


def perplexity(nll_sum: float, tokens: int) -> Score:
    """exp(nll / tokens): the number of equally likely tokens that would surprise as much; `nll_sum` is in nats."""
    if tokens < 1:
        raise DataError(f"tokens: perplexity needs at least 1, not {tokens}")
    mean = nll_sum / tokens
    return Score(math.exp(mean) if mean < 709 else math.inf, "", "perplexity")  # exp(710) is no float64


def bits_per_byte(nll_sum: float, byte_count: int) -> Score:
    """nll / (bytes ln 2): comparable between vocabularies; `nll_sum` is in nats."""
    if byte_count < 1:
        raise DataError(f"byte_count: bits per byte need at least 1 byte, not {byte_count}")
    return Score(nll_sum / (byte_count * math.log(2)), "", "bits per byte")
