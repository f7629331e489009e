"""One report of a run on a test text, or of two on the same: what `regard evaluate` prints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.data.batching import Windows
from regard.data.objectives import Classification, Translation
from regard.data.text import TSV, Labelled, Lines, ParallelFiles, lines
from regard.data.token_store import Column, Table
from regard.decoding.search import Search
from regard.errors import DataError, SpecError
from regard.evaluation import metrics
from regard.evaluation.loss import Likelihood, likelihood, stream_likelihood
from regard.evaluation.significance import Comparison, paired_bootstrap
from regard.evaluation.target_text import bleu_tokenizer

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Test:
    """The files of a test, as the command line names them."""

    source: str | None = None
    reference: str | None = None
    tsv: str | None = None
    text: str | None = None
    labelled: str | None = None
    tokenize: str | None = None
    batch_size: int = 32
    stride: int | None = None  # tokens between the windows of a stream; None: half a window

    def only(self, *names: str) -> None:
        """Refuse files that this test would ignore."""
        for name in ("source", "reference", "tsv", "text", "labelled"):
            if name not in names and getattr(self, name) is not None:
                raise SpecError(f"--{name}", "would be ignored here; leave it out")

    @cached_property  # read once: it may be a pipe
    def pairs(self) -> list[tuple[str, str]]:
        """Source and reference."""
        self.only(*(("tsv",) if self.tsv is not None else ("source", "reference")))
        if self.tsv is not None:
            return list(TSV(self.tsv).records())
        if self.source is None or self.reference is None:
            raise SpecError(
                "", "a translation is measured on two aligned files; give --source and --reference, or --tsv"
            )
        return list(ParallelFiles(self.source, self.reference).records())

    @cached_property
    def examples(self) -> list[tuple[str, str]]:
        """Label and text."""
        self.only("labelled")
        if self.labelled is None:
            raise SpecError("", "a classifier is measured on labelled text; give --labelled")
        return list(Labelled(self.labelled).records())

    def remarks(self) -> list[str]:
        """Return warnings about how the files are read."""
        if self.tsv is not None:
            return TSV(self.tsv).remarks()
        return [] if self.labelled is None else Labelled(self.labelled).remarks()

    def lines(self) -> list[tuple[str]]:
        """Text alone."""
        self.only("text")
        if self.text is None:
            raise SpecError("", "a language model is measured on text; give --text")
        return list(Lines(self.text).records())


@dataclass(frozen=True)
class Answers:
    """What one system says to a test: a run that is asked, or a file that holds its outputs."""

    name: str
    said: list[str]
    facts: dict[str, Any]


def evaluate_run(
    load: Callable[[str], "TrainedModel"],
    name: str,
    against: str | None,
    test: Test,
    search_of: Callable[["TrainedModel"], Search],
    samples: int = 1000,
    warn: Warn = lambda _: None,
) -> dict[str, Any]:
    """The report: scores of a run, or of two and their difference."""
    first = None if holds_outputs(name) else load(name)
    if first is not None and not isinstance(first.objective, Translation | Classification):
        if against is not None:
            raise SpecError("--against", "compares what systems say; measure each language model by itself")
        return _language_model(first, test)
    classifies = first is not None and isinstance(first.objective, Classification)
    wanted = [label for label, _ in test.examples] if classifies else [target for _, target in test.pairs]
    for remark in test.remarks():
        warn(remark.removeprefix("warning: "))

    def answers(path: str, run: "TrainedModel | None") -> Answers:
        if run is None and Path(path).is_dir():
            run = load(path)
        if run is None:
            return Answers(path, _outputs(path, len(wanted)), {})
        return _classified(run, test, warn) if classifies else _translated(run, test, search_of(run), warn)

    one = answers(name, first)
    tokenize = test.tokenize or (first.recipe.train.bleu_tokenize if first is not None else "auto")
    if tokenize == "auto":
        tokenize = "13a" if classifies else bleu_tokenizer(wanted)
    report = {"run": one.name} | _scores(one.said, wanted, tokenize, classifies) | one.facts
    if against is None:
        return report
    two = answers(against, None)
    other = {"run": two.name} | _scores(two.said, wanted, tokenize, classifies) | two.facts
    return report | {
        "against": other,
        "difference": _difference(one.said, two.said, wanted, tokenize, classifies, samples),
    }


def holds_outputs(path: str) -> bool:
    """Return whether a path names outputs, in a file or in a pipe, and not the folder of a run."""
    return Path(path).exists() and not Path(path).is_dir()


def _outputs(path: str, count: int) -> list[str]:
    said = list(lines(path))
    if len(said) != count:
        raise DataError(f"{path} has {len(said)} lines and the reference {count}; they must be aligned")
    return said


def _translated(run: "TrainedModel", test: Test, search: Search, warn: Warn) -> Answers:
    pairs = test.pairs
    outputs = run.translations([source for source, _ in pairs], search, test.batch_size, warn=warn)
    said = [best[0].text for best in outputs]
    scores = run.score(pairs, test.batch_size)
    nll, tokens = -sum(s.log_prob for s in scores), sum(s.tokens for s in scores)
    facts = {"perplexity": metrics.perplexity(nll, tokens).value, "lines": len(pairs), "step": run.step}
    return Answers(str(run.path), said, facts)


def _classified(run: "TrainedModel", test: Test, warn: Warn) -> Answers:
    examples = test.examples
    guesses = run.classify([text for _, text in examples], test.batch_size, warn)
    return Answers(str(run.path), [guess.label for guess in guesses], {"lines": len(examples), "step": run.step})


def _language_model(run: "TrainedModel", test: Test) -> dict[str, Any]:
    """Perplexity and bits per byte of a text, read as the model was trained: as one stream, or line by line.

    Windows of a stream overlap by half, so that what is measured is the model and not the cuts: validation during
    training, whose windows do not overlap, shows a higher loss.
    """
    records = test.lines()
    objective, tokenizers = run.objective, run.tokenizers
    table = objective.limit(objective.table(records, tokenizers), run.recipe.data.longest).table
    if objective.stream:
        table = Table({"target": Column(table["target"].ids, table["target"].offsets[[0, -1]])})
    batching = run.recipe.data.batching
    assert batching is not None
    if isinstance(batching, Windows):
        found = _of_stream(run, table["target"], batching, test.stride)
    else:
        if test.stride is not None:
            raise SpecError("--stride", "a text that is read line by line has no windows; leave it out")
        found = likelihood(run.model, table, objective, batching)
    size = sum(len(record[0].encode()) + objective.stream for record in records)
    characters = sum(len(record[0]) + objective.stream for record in records)
    return {
        "run": str(run.path),
        "loss": found.loss,
        "perplexity": metrics.perplexity(found.nll, found.tokens).value,
        "bits_per_byte": metrics.bits_per_byte(found.nll, size).value,
        "nats_per_character": found.nll / characters,
        "tokens": found.tokens,
        "step": run.step,
    }


def _of_stream(run: "TrainedModel", text: Column, batching: Windows, stride: int | None) -> Likelihood:
    length = batching.length
    stride = max(1, length // 2) if stride is None else stride
    if not 1 <= stride <= length:
        raise SpecError("--stride", f"must be from 1 to {length}, the length of a window, or tokens would be left out")
    if len(text.ids) < 2:
        raise DataError("--text: the text has no token to predict; give more")
    rows = max(1, (batching.tokens or length) // length)
    return stream_likelihood(run.model, text, run.objective, length, stride, rows)


def _scores(said: Sequence[str], wanted: Sequence[str], tokenize: str, classifies: bool) -> dict[str, Any]:
    if classifies:
        return {
            "accuracy": metrics.accuracy(said, wanted).value,
            "matthews": metrics.matthews(said, wanted).value,
        }
    bleu, chrf, ter = metrics.bleu(said, wanted, tokenize), metrics.chrf(said, wanted), metrics.ter(said, wanted)
    return {
        "bleu": bleu.value,
        "chrf": chrf.value,
        "ter": ter.value,
        "exact_match": metrics.exact_match(said, wanted).value,
        "signature": bleu.signature,
        "signatures": {"bleu": bleu.signature, "chrf": chrf.signature, "ter": ter.signature},
    }


def _difference(
    one: Sequence[str], two: Sequence[str], wanted: Sequence[str], tokenize: str, classifies: bool, samples: int
) -> dict[str, Any]:
    """`one` minus `two` by each metric, with its interval: positive where the run is better than what it is against."""
    if classifies:
        return {"accuracy": _shown(paired_bootstrap(two, one, wanted, "exact_match", samples))}
    return {
        "bleu": _shown(paired_bootstrap(two, one, wanted, "bleu", samples, tokenize=tokenize)),
        "chrf": _shown(paired_bootstrap(two, one, wanted, "chrf", samples)),
    }


def _shown(found: Comparison) -> dict[str, Any]:
    return {
        "difference": found.difference,
        "low": found.low,
        "high": found.high,
        "p_value": found.p_value,
        "resamples": found.resamples,
        "seed": found.seed,
    }
