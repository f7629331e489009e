"""All metrics by name, including user-defined ones (`module:Class`), and functions for the common metrics."""

import inspect
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from regard.errors import SpecError, nearest
from regard.evaluation.label_metrics import Accuracy, Matthews
from regard.evaluation.likelihood_metrics import BitsPerByte, Loss, Perplexity
from regard.evaluation.metric import Likelihood, Metric, References, Score
from regard.evaluation.text_metrics import Bleu, Chrf, ChrfPlusPlus, ExactMatch, Rouge1, Rouge2, RougeL, Ter
from regard.tree import load

METRICS: dict[str, type[Metric]] = {
    metric.name: metric
    for metric in (
        Accuracy,
        BitsPerByte,
        Bleu,
        Chrf,
        ChrfPlusPlus,
        ExactMatch,
        Loss,
        Matthews,
        Perplexity,
        Rouge1,
        Rouge2,
        RougeL,
        Ter,
    )
}


def metric_class(name: str, trust_code: bool = False, path: str = "metric") -> type[Metric]:
    """Return a metric class by name: one of `METRICS`, or a user-defined class named `module:Class`."""
    if ":" not in name:
        if name not in METRICS:
            raise SpecError(path, f"unknown metric {name!r}; {nearest(name, METRICS)}")
        return METRICS[name]
    if not trust_code:
        raise SpecError(path, f"{name!r} would import code; add --trust-code if you trust it")
    loaded = load(name, path)
    if not (isinstance(loaded, type) and issubclass(loaded, Metric)) or inspect.isabstract(loaded):
        raise SpecError(path, f"{name!r} is not a Metric class (regard.evaluation.metric)")
    for attribute in ("name", "title"):
        if not isinstance(getattr(loaded, attribute, None), str):
            raise SpecError(path, f"{name!r} has no {attribute}; add the class attribute {attribute} = '...'")
    if loaded.name in METRICS:
        raise SpecError(path, f"{name!r} has the name {loaded.name!r}, which is another metric; choose another name")
    return loaded


def metric(name: str, trust_code: bool = False, path: str = "metric", **settings: Any) -> Metric:
    """Return the metric `name` with the given settings; raise SpecError for an unknown setting."""
    kind = metric_class(name, trust_code, path)
    known = inspect.signature(kind).parameters
    for setting in settings:
        if setting not in known:
            hint = nearest(setting, known) if known else "leave it out"
            raise SpecError(setting, f"{name} has no such setting; {hint}")
    return kind(**settings)


def metric_heading(name: str) -> str:
    """Return the table heading of a metric. For a user-defined metric, this is the name."""
    return METRICS[name].heading if name in METRICS else name


def bleu(hypotheses: Sequence[str], references: References, tokenize: str = "13a", lowercase: bool = False) -> Score:
    """Return the BLEU of a corpus (Papineni et al., 2002) in percent, as sacreBLEU computes it.

    `references` is a list with one line for each hypothesis, or several such lists.
    """
    return Bleu(tokenize, lowercase).score(hypotheses, references)


def chrf(hypotheses: Sequence[str], references: References, word_order: int = 0, lowercase: bool = False) -> Score:
    """Return chrF, the character n-gram F-score (Popovic, 2015), in percent; `word_order=2` gives chrF++."""
    return Chrf(word_order, lowercase).score(hypotheses, references)


def ter(hypotheses: Sequence[str], references: References, case_sensitive: bool = False) -> Score:
    """Return the translation edit rate (Snover et al., 2006) in percent of the reference's words; lower is better."""
    return Ter(case_sensitive).score(hypotheses, references)


def exact_match(hypotheses: Sequence[str], references: References) -> Score:
    """Return the percentage of lines that equal one of their references, apart from white space at the ends."""
    return ExactMatch().score(hypotheses, references)


def rouge(
    hypotheses: Sequence[str],
    references: References,
    tokenize: Literal["english", "unicode"] = "english",
    stem: bool = False,
) -> tuple[Score, Score, Score]:
    """Return (ROUGE-1, ROUGE-2, ROUGE-L) in percent (Lin, 2004): mean F-scores, with the best reference per line."""
    first, second, longest = (kind(tokenize, stem).score(hypotheses, references) for kind in (Rouge1, Rouge2, RougeL))
    return first, second, longest


def accuracy(predictions: Sequence[Hashable], labels: Sequence[Hashable]) -> Score:
    """Return the percentage of predictions that are equal to the label."""
    return Accuracy().score(predictions, labels)


def matthews(predictions: Sequence[Hashable], labels: Sequence[Hashable]) -> Score:
    """Return the correlation (-1 to 1) of predicted and true classes (Matthews, 1975; for K classes Gorodkin, 2004)."""
    return Matthews().score(predictions, labels)


def perplexity(nll_sum: float, tokens: int) -> Score:
    """Return the perplexity exp(nll_sum / tokens), with the summed negative log-likelihood `nll_sum` in nats."""
    return Perplexity().score([Likelihood(nll_sum, tokens)])


def bits_per_byte(nll_sum: float, byte_count: int) -> Score:
    """Return nll_sum / (byte_count * ln 2), with the summed negative log-likelihood `nll_sum` in nats."""
    return BitsPerByte().score([Likelihood(nll_sum, 1, byte_count)])
