"""The report of `regard evaluate`: the scores of one or two systems on test text, and the score differences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from regard.data.batching import Windows
from regard.data.objectives import Objective
from regard.data.text import JSONL, TSV, Labelled, Lines, ParallelFiles, lines
from regard.data.token_store import Column, Table
from regard.decoding.search import Search
from regard.errors import DataError, SpecError
from regard.evaluation.likelihood_metrics import BitsPerByte, Loss, Perplexity
from regard.evaluation.loss import likelihood, stream_likelihood
from regard.evaluation.metric import Likelihood, Metric
from regard.evaluation.metrics import METRICS, metric, perplexity
from regard.evaluation.significance import paired_bootstrap, verdict
from regard.evaluation.target_text import bleu_tokenizer
from regard.evaluation.window import with_weights, with_window
from regard.inference.text import Warn
from regard.models.base import Model
from regard.runs.options import LoadOptions, one_best, search_from_options, several

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel


@dataclass(frozen=True)
class Test:
    """The test files and settings of an evaluation, named like the options of `regard evaluate`."""

    source: str | None = None
    reference: str | None = None
    tsv: str | None = None
    jsonl: str | None = None
    text: str | None = None
    labelled: str | None = None
    tokenize: str | None = None
    batch_size: int = 32
    stride: int | None = None  # tokens between the windows of a stream; None: half a window
    windows: tuple[int, ...] = ()  # attention windows with which a language model is evaluated, too

    def only(self, *names: str) -> None:
        """Raise an error if a file option that is not listed in `names` is given, because it would be ignored."""
        for name in ("source", "reference", "tsv", "jsonl", "text", "labelled"):
            if name not in names and getattr(self, name) is not None:
                raise SpecError(f"--{name}", "would be ignored here; leave it out")

    @cached_property  # the file is read only once, because it may be a pipe
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs (source, reference) on which a translation model is evaluated."""
        if self.tsv is not None:
            self.only("tsv")
            return list(TSV(self.tsv).records())
        if self.jsonl is not None:
            self.only("jsonl")
            return list(JSONL(self.jsonl).records())
        self.only("source", "reference")
        if self.source is None or self.reference is None:
            raise SpecError(
                "", "a translation is evaluated on two aligned files; give --source and --reference, --tsv or --jsonl"
            )
        return list(ParallelFiles(self.source, self.reference).records())

    @cached_property
    def examples(self) -> list[tuple[str, str]]:
        """Pairs (label, text) on which a classifier is evaluated."""
        self.only("labelled")
        if self.labelled is None:
            raise SpecError("", "a classifier is evaluated on labelled text; give --labelled")
        return list(Labelled(self.labelled).records())

    def remarks(self) -> list[str]:
        """Return warnings about the content of the test files."""
        if self.tsv is not None:
            return TSV(self.tsv).remarks()
        return [] if self.labelled is None else Labelled(self.labelled).remarks()

    def lines(self) -> list[tuple[str]]:
        """Return the lines of text on which a language model is evaluated."""
        self.only("text")
        if self.text is None:
            raise SpecError("", "a language model is evaluated on text; give --text")
        return list(Lines(self.text).records())


@dataclass(frozen=True)
class Outputs:
    """The outputs of a trained model with facts about the model, or the outputs of any system from a file."""

    name: str
    texts: list[str]
    facts: dict[str, Any]
    likelihood: list[Likelihood]  # of each reference; empty if unknown


# The default metrics. The difference between two systems is tested for those in COMPARED.
TRANSLATION = ("bleu", "chrf", "ter", "exact_match")
SUMMARIZATION = ("rougeL", "rouge1", "rouge2", "chrf")
CLASSIFICATION = ("accuracy", "matthews")
COMPARED = ("bleu", "chrf", "accuracy", "rougeL", "rouge1", "rouge2")


def evaluate_run(
    load: Callable[[str], "TrainedModel"],
    name: str,
    against: str | None,
    test: Test,
    search_of: Callable[["TrainedModel"], Search],
    samples: int = 1000,
    warn: Warn = lambda _: None,
    metrics: Sequence[Metric] = (),
) -> dict[str, Any]:
    """Return the scores of a system. With `against`, also return the scores of a second system and the differences.

    `name` and `against` are run folders or files of outputs. If `metrics` is empty, the usual metrics are computed.
    """
    first = None if holds_outputs(name) else load(name)
    if first is not None and first.objective.model == "language_model":
        if against is not None:
            raise SpecError("--against", "compares outputs; evaluate each language model by itself")
        return _language_model(first, test, metrics)
    classifies = first is not None and first.objective.labelled
    references = [label for label, _ in test.examples] if classifies else [target for _, target in test.pairs]
    for remark in test.remarks():
        warn(remark.removeprefix("warning: "))

    def outputs(path: str, run: "TrainedModel | None") -> Outputs:
        if run is None and Path(path).is_dir():
            run = load(path)
        if run is None:
            return Outputs(path, _outputs(path, len(references)), {}, [])
        return _classified(run, test, warn) if classifies else _translated(run, test, search_of(run), warn)

    own = outputs(name, first)
    tokenize = test.tokenize or (first.recipe.train.bleu_tokenize if first is not None else "auto")
    if tokenize == "auto":
        tokenize = "13a" if classifies else bleu_tokenizer(references)
    usual = CLASSIFICATION if classifies else TRANSLATION
    if first is not None and first.objective.summarizes:
        usual = tuple(each for each in SUMMARIZATION if METRICS[each].installed())
    scored = [each.with_tokenizer(tokenize) for each in metrics or map(metric, usual)]
    report = {"run": own.name} | _scores(own, references, scored, classifies) | own.facts
    if against is None:
        return report
    other = outputs(against, None)
    compared = [each for each in scored if metrics or each.name in COMPARED]
    differences = {each.name: _difference(own, other, references, each, classifies, samples) for each in compared}
    return report | {
        "against": {"run": other.name} | _scores(other, references, scored, classifies) | other.facts,
        "difference": differences,
        "verdict": next(iter(differences.values()))["verdict"],
    }


def holds_outputs(path: str) -> bool:
    """Return True if `path` is a file or a pipe (of outputs), and False if it is a run folder."""
    return Path(path).exists() and not Path(path).is_dir()


def _outputs(path: str, count: int) -> list[str]:
    outputs = list(lines(path))
    if len(outputs) != count:
        raise DataError(f"{path} has {len(outputs)} lines and the reference {count}; they must be aligned")
    return outputs


def _translated(run: "TrainedModel", test: Test, search: Search, warn: Warn) -> Outputs:
    pairs = test.pairs
    sources = [source for source, _ in pairs]
    outputs = run.translations(sources, search=search, batch_size=test.batch_size, warn=warn)
    texts = [best[0].text for best in outputs]
    scores = run.score(pairs, test.batch_size)
    likelihood = [
        Likelihood(-score.log_prob, score.tokens, len(target.encode()))
        for score, (_, target) in zip(scores, pairs, strict=True)
    ]
    nll, tokens = -sum(score.log_prob for score in scores), sum(score.tokens for score in scores)
    facts = {"perplexity": perplexity(nll, tokens).value, "lines": len(pairs), "step": run.step}
    return Outputs(str(run.path), texts, facts, likelihood)


def _classified(run: "TrainedModel", test: Test, warn: Warn) -> Outputs:
    examples = test.examples
    labels = [each.label for each in run.classify([text for _, text in examples], test.batch_size, warn)]
    return Outputs(str(run.path), labels, {"lines": len(examples), "step": run.step}, [])


def _language_model(run: "TrainedModel", test: Test, chosen: Sequence[Metric]) -> dict[str, Any]:
    """Return the scores of a language model on test text: by default loss, perplexity, and bits per byte.

    The test text is read as in training, as one stream of tokens or line by line. A stream is cut into windows. They
    overlap by half, or as `test.stride` specifies, so that every predicted token has enough context. In the validation
    during training, windows do not overlap, so the validation loss is higher.
    """
    records = test.lines()
    objective, tokenizers = run.objective, run.tokenizers
    table = objective.limit(objective.table(records, tokenizers), run.recipe.data.longest).table
    if objective.stream:
        table = Table({"target": Column(table["target"].ids, table["target"].offsets[[0, -1]])})
    batching = run.recipe.data.batching
    assert batching is not None
    longest = batching.length if isinstance(batching, Windows) else int(table["target"].lengths.max(initial=0))
    _check_windows(test.windows, longest)
    if test.stride is not None and not isinstance(batching, Windows):
        raise SpecError("--stride", "applies only to a text that is read as one stream, not line by line; leave it out")

    def read_by(model: Model) -> Likelihood:
        if isinstance(batching, Windows):
            return _of_stream(model, objective, table["target"], batching, test.stride)
        return likelihood(model, table, objective, batching)

    narrow = {size: with_window(run.model.spec, size) for size in test.windows}  # refused before anything is computed
    total = read_by(run.model)
    size = sum(len(record[0].encode()) + objective.stream for record in records)
    characters = sum(len(record[0]) + objective.stream for record in records)
    for each in chosen:
        if each.needs != "likelihood":
            raise SpecError("--metric", f"{each.name!r} needs {each.needs}, which a language model does not output")

    def values(total: Likelihood) -> dict[str, float]:
        likelihoods = [Likelihood(total.nll, total.tokens, size)]
        usual = [Loss(), Perplexity(), BitsPerByte()]
        scores = {each.name: each.score(likelihoods).value for each in chosen or usual}
        return scores if chosen else scores | {"nats_per_character": total.nll / characters}

    report = {"run": str(run.path)} | values(total) | {"tokens": total.tokens, "step": run.step}
    if not narrow:
        return report
    plain = not any(type(module).__module__.startswith("regard.fast") for module in run.model.modules())
    windows = [{"window": w} | values(read_by(with_weights(s, run.model, plain))) for w, s in narrow.items()]
    return report | {"windows": windows}


def _check_windows(windows: Sequence[int], longest: int) -> None:
    for size in windows:
        if size >= longest:
            raise SpecError(
                "--windows",
                f"{size} tokens limit nothing, because the model reads at most {longest} at once; choose a smaller one",
            )


def _of_stream(model: Model, objective: Objective, text: Column, batching: Windows, stride: int | None) -> Likelihood:
    length = batching.length
    stride = max(1, length // 2) if stride is None else stride
    if not 1 <= stride <= length:
        raise SpecError("--stride", f"must be from 1 to {length}, the length of a window, or tokens would be left out")
    if len(text.ids) < 2:
        raise DataError("--text: the text has no token to predict; give more text")
    rows = max(1, (batching.tokens or length) // length)
    return stream_likelihood(model, text, objective, length, stride, rows)


def _scores(outputs: Outputs, references: Sequence[str], metrics: Sequence[Metric], classifies: bool) -> dict[str, Any]:
    """Return the scores, keyed by metric, and the signatures (settings) of the metrics that have a signature."""
    scores = {each.name: each.score(*_inputs(outputs, references, each, classifies)) for each in metrics}
    signatures = {name: score.signature for name, score in scores.items() if score.signature}
    about = {"signature": next(iter(signatures.values())), "signatures": signatures} if signatures else {}
    return {name: score.value for name, score in scores.items()} | about


def _inputs(
    outputs: Outputs, references: Sequence[str], metric: Metric, classifies: bool
) -> tuple[Sequence[Any], Sequence[str]]:
    """Return the arguments of `metric.score`: (outputs, references), or (likelihoods, ()) for a likelihood metric."""
    if metric.needs == "likelihood":
        if not outputs.likelihood:
            raise SpecError("--metric", f"{metric.name!r} needs a model that translates, which {outputs.name} is not")
        return outputs.likelihood, ()
    if (metric.needs == "labels") != classifies:
        raise SpecError("--metric", f"{metric.name!r} needs {metric.needs}, which {outputs.name} does not output")
    return outputs.texts, references


def _difference(
    own: Outputs, other: Outputs, references: Sequence[str], metric: Metric, classifies: bool, samples: int
) -> dict[str, Any]:
    """Return the score of `own` minus the score of `other`, with the confidence interval and a verdict on `own`."""
    inputs, targets = _inputs(own, references, metric, classifies)
    baseline, _ = _inputs(other, references, metric, classifies)
    comparison = paired_bootstrap(baseline, inputs, targets, metric, samples)
    names = ("difference", "low", "high", "p_value", "resamples", "seed")
    values = {name: getattr(comparison, name) for name in names}
    return values | {"verdict": verdict(comparison, metric, other.name, own.name)}


def evaluate(  # noqa: PLR0913  # the options of the command line
    run: "TrainedModel | str | Path",
    load: Callable[..., "TrainedModel"],
    *,
    source: str | None = None,
    reference: str | None = None,
    tsv: str | None = None,
    jsonl: str | None = None,
    text: str | None = None,
    labelled: str | None = None,
    against: str | None = None,
    tokenize: str | None = None,
    beam: int | None = None,
    changes: str | Sequence[str] = (),
    batch_size: int | None = None,
    stride: int | None = None,
    windows: str | Sequence[int] = (),
    samples: int | None = None,
    metrics: str | Sequence[str] = (),
    warn: Warn = lambda _: None,
    **loading: Unpack[LoadOptions],
) -> dict[str, Any]:
    """Check that no option would be ignored, then return the report of `evaluate_run`.

    `run` is a trained model, a run folder or a file of outputs. A run folder is loaded with `load(path, **loading)`.
    """
    if samples is not None and against is None:
        raise SpecError("--samples", "is an option of a comparison; give --against, or leave it out")
    searching = {"--beam": beam is not None, "--set": bool(several(changes))}
    loaded = None if isinstance(run, str | Path) else run
    name = str(run) if loaded is None else str(loaded.path)
    if loaded is None and all(each is None or holds_outputs(each) for each in (name, against)):
        computing = {
            "--average": loading.get("average") is not None,
            "--batch-size": batch_size is not None,
            "--device": loading.get("device", "auto") != "auto",
            "--plain": loading.get("plain", False),
            "--stride": stride is not None,
            "--windows": bool(windows),
        }
        refuse_ignored(searching | computing, "files of outputs are only compared, nothing is computed")

    def checked(path: str) -> "TrainedModel":
        model = loaded if loaded is not None and path == name else load(path, **loading)
        kind, learns = model.objective.kind, model.objective.model
        if learns != "language_model":
            streaming = {"--stride": stride is not None, "--windows": bool(windows)}
            refuse_ignored(streaming, f"{path} was trained for {kind}, and is no language model")
        if learns != "sequence_to_sequence":
            options = {"--tokenize": tokenize is not None}
            if learns == "language_model":
                options["--batch-size"] = batch_size is not None
            refuse_ignored(searching | options, f"{path} was trained for {kind} and translates nothing")
        return model

    def search_of(model: "TrainedModel") -> Search:
        default = one_best(model.recipe.decode, beam)
        return search_from_options(default, beam=beam, changes=changes, trust_code=model.trust_code)

    files = {"source": source, "reference": reference, "tsv": tsv, "jsonl": jsonl, "text": text, "labelled": labelled}
    test = Test(**files, tokenize=tokenize, batch_size=batch_size or 32, stride=stride, windows=sizes_of(windows))
    chosen = [metric(each, loading.get("trust_code", False), "--metric") for each in several(metrics)]
    return evaluate_run(checked, name, against, test, search_of, samples or 1000, warn, chosen)


def sizes_of(windows: str | Sequence[int]) -> tuple[int, ...]:
    """Return the window sizes that a list or a text such as "16,32,64" names, in ascending order."""
    names = windows.split(",") if isinstance(windows, str) else windows
    try:
        sizes = {int(name) for name in names}
    except ValueError:
        raise SpecError("--windows", f"{windows!r} is not a list of whole numbers, such as 16,32,64") from None
    if sizes and min(sizes) < 1:
        raise SpecError("--windows", f"a window must hold at least one token, not {min(sizes)}")
    return tuple(sorted(sizes))


def refuse_ignored(options: dict[str, bool], why: str) -> None:
    """Raise an error if the user gave one of the `options`, which would be ignored for the reason `why`.

    `options` maps the name of each option to True if the user gave it.
    """
    for name, is_given in options.items():
        if is_given:
            raise SpecError(name, f"would be ignored: {why}; leave it out")
