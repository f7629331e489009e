"""Trivial baselines, which train in seconds on the training text. Their scores are stored in `baselines.json`."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from regard.data.extraction import paragraphs, sentences
from regard.data.prepare import Prepared
from regard.data.token_store import Column
from regard.data.tokenizer import Tokenizer
from regard.errors import DataError
from regard.evaluation import metrics
from regard.evaluation.bag_of_words import BagOfWords
from regard.evaluation.likelihood_metrics import LOSS
from regard.evaluation.metric import Metric
from regard.evaluation.metrics import METRICS
from regard.evaluation.ngram import KneserNey
from regard.evaluation.validation import measured
from regard.training.checkpoint import RunFolder, read_json, write_json
from regard.training.spec import TrainSpec

ORDER = 4  # the order of the n-gram model
# Maximum sizes of the text samples, with which the baselines take seconds on one core.
NGRAM_TOKENS = 3_000_000
BAG_TOKENS = 1_500_000
BAG_WORK = 20_000_000  # the maximum of tokens x classes
TARGET_TOKENS = 10_000_000
BLOCKS = 64  # the number of blocks in a sample of a stream
Print = Callable[[str], None]
PREFERRED = ("accuracy", "rougeL", "bleu", "chrf", "exact_match", "loss")  # compared if the criterion was not measured


@dataclass(frozen=True, slots=True)
class Baseline:
    """A trivial baseline and its scores on the validation text."""

    name: str
    metrics: dict[str, float]
    share: float = 1.0  # the share of the training text that was used

    @classmethod
    def of(cls, record: Any) -> "Baseline":
        """Return the baseline that is stored in a JSON object; raise TypeError or ValueError if it is invalid."""
        baseline = cls(**record)
        numbers = (*baseline.metrics.values(), baseline.share)
        if not isinstance(baseline.name, str) or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise TypeError("a baseline is a name and numbers")
        if not baseline.metrics.keys() & {*PREFERRED}:
            raise ValueError("a baseline has no metric")
        return baseline


def measure(data: Prepared, train: TrainSpec, criterion: Metric = LOSS) -> list[Baseline]:
    """Train and evaluate the baselines for a task. Without validation text or examples to decode, return []."""
    if data.valid is None or not data.valid.rows:
        return []
    if data.objective.model == "sequence_to_sequence":
        return _translation(data, train, criterion)
    return _classification(data) if data.objective.labelled else _language_model(data)


def _classification(data: Prepared) -> list[Baseline]:
    """Return two baselines: the most frequent class, and logistic regression on a bag of words."""
    assert data.valid is not None
    classes = len(data.objective.labels)
    labels = np.concatenate([np.asarray(table["label"].ids[:]) for table in data.train])
    references = np.asarray(data.valid["label"].ids[:])
    majority = int(np.bincount(labels, minlength=classes).argmax())
    accuracy = metrics.accuracy([majority] * len(references), references.tolist()).value
    baselines = [Baseline("majority class", {"accuracy": accuracy})]
    if "text" not in data.tokenizers:  # the model reads vectors
        return baselines
    most = min(BAG_TOKENS, BAG_WORK // classes)
    train, train_rows, share = _rows([table["text"] for table in data.train], most)
    valid, valid_rows, _ = _rows([data.valid["text"]], most)
    bag = BagOfWords(_texts(train, data.tokenizers["text"]), labels[train_rows], classes)
    predictions = bag.predict(_texts(valid, data.tokenizers["text"]))
    accuracy = metrics.accuracy(predictions.tolist(), references[valid_rows].tolist()).value
    return [*baselines, Baseline("bag of words", {"accuracy": accuracy}, share)]


def _translation(data: Prepared, train: TrainSpec, criterion: Metric) -> list[Baseline]:
    """Return two baselines, the source itself and the most frequent target, scored on the decoded examples.

    For a summary, the first sentence of the source takes the place of the whole source.
    """
    pairs = [data.objective.pair(record) for record in data.valid_texts[: train.decode]]
    if not pairs:
        return []
    sources, references = zip(*pairs, strict=True)
    target, share = _most_frequent(data)
    of_text = [m for m in measured(data.objective, train.bleu_tokenize, criterion) if m.needs == "text"]

    def scores(outputs: Sequence[str]) -> dict[str, float]:
        return {metric.name: metric.score(outputs, references).value for metric in of_text}

    copied = Baseline("copying the source", scores(sources))
    if data.objective.summarizes:
        copied = Baseline("first sentence", scores([sentences(paragraphs(source)[0])[0] for source in sources]))
    return [
        copied,
        Baseline("most frequent target", scores([target] * len(pairs)), share),
    ]


def _most_frequent(data: Prepared) -> tuple[str, float]:
    """Return the most frequent training target, and the share of the text that was counted."""
    targets, _, share = _rows([table["target"] for table in data.train], TARGET_TOKENS)
    raw, ends = np.asarray(targets.ids).astype("<u4").tobytes(), (4 * targets.offsets).tolist()
    ((ids, _),) = Counter(raw[first:last] for first, last in pairwise(ends)).most_common(1)
    return data.tokenizers["target"].decode(np.frombuffer(ids, "<u4").tolist()), share


def _language_model(data: Prepared) -> list[Baseline]:
    """Return one baseline, an n-gram model. As in validation, the first token of a text is not predicted."""
    assert data.valid is not None
    stream, size = data.objective.stream, data.tokenizers["target"].size
    train, _, share = _rows([table["target"] for table in data.train], NGRAM_TOKENS, stream)
    valid, _, _ = _rows([data.valid["target"]], NGRAM_TOKENS, stream)
    log_probs = KneserNey(train, size, ORDER).log_probs(valid)
    if not len(log_probs):
        return []
    loss, tokens = -float(log_probs.mean()), int((data.valid["target"].lengths - 1).sum())
    values = {
        "loss": loss,
        "perplexity": metrics.perplexity(loss * tokens, tokens).value,
        "bits_per_byte": metrics.bits_per_byte(loss * tokens, data.valid_survey.bytes).value,
    }
    return [Baseline(f"{ORDER}-gram model", values, share)]


def _rows(columns: Sequence[Column], most: int, stream: bool = False) -> tuple[Column, np.ndarray, float]:
    """Return a sample of texts with about `most` tokens, their indices, and their share of all tokens.

    The texts of all columns are numbered consecutively, and are sampled at random with a fixed seed. A stream is one
    long text, so the sample consists of evenly spaced blocks of the stream.
    """
    total = sum(len(column.ids) for column in columns)
    share = min(1.0, most / max(1, total))
    rng, samples, numbers, first = np.random.default_rng(0), list[Column](), list[np.ndarray](), 0
    for column in columns:
        rows = np.arange(len(column))
        if stream and share < 1:
            starts = np.linspace(0, len(column.ids), BLOCKS, endpoint=False).astype(np.int64)
            samples.append(column.spans(starts, starts + int(share * len(column.ids)) // BLOCKS))
        else:
            if share < 1:
                rows = np.sort(rng.permutation(rows)[: math.ceil(share * len(rows))])
            samples.append(column.take(rows))
        numbers.append(first + rows)
        first += len(column)
    ids = np.concatenate([column.ids[:] for column in samples])
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([column.lengths for column in samples]))])
    return Column(ids, offsets), np.concatenate(numbers), len(ids) / max(1, total)


def _texts(column: Column, tokenizer: Tokenizer) -> list[str]:
    return tokenizer.decode_batch([row.tolist() for row in column])


def report(
    folder: RunFolder, data: Prepared, train: TrainSpec, criterion: Metric, log: Callable[..., None], print_line: Print
) -> None:
    """Measure the baselines, and store, log and print their scores. If scores are stored already, do nothing."""
    if _intact(folder):
        return
    began = time.perf_counter()
    if baselines := measure(data, train, criterion):
        record = {"baselines": [asdict(baseline) for baseline in baselines]}
        write_json(folder.baselines, record)
        log("baselines", seconds=time.perf_counter() - began, **record)
        print_line(f"baselines on the validation text: {sentence(baselines, criterion.name)}")


def compare(folder: RunFolder, scores: Mapping[str, float], criterion: Metric, print_line: Print) -> None:
    """Print a warning if the best baseline is better than the model. `scores` are the final scores of the model."""

    def metric_of(baseline: Baseline) -> Metric:
        name = _metric(baseline, criterion.name)
        return criterion if name == criterion.name else METRICS[name]()

    def cost(baseline: Baseline, values: Mapping[str, float]) -> float:
        metric = metric_of(baseline)
        return -values[metric.name] if metric.higher_is_better else values[metric.name]

    known = [baseline for baseline in _intact(folder) if metric_of(baseline).name in scores]
    best = min(known, key=lambda baseline: cost(baseline, baseline.metrics), default=None)
    if best is not None and cost(best, best.metrics) < cost(best, scores):
        metric = metric_of(best)
        print_line(
            f"warning: the model's {metric.title} on the validation text, {metric.text(scores[metric.name])}, is worse "
            f"than that of a trivial baseline ({best.name}: {metric.text(best.metrics[metric.name])}); train for "
            "longer or on more text (docs/training.md, section Trivial baselines)"
        )


def stored(folder: RunFolder) -> list[Baseline]:
    """Return the baselines stored in a run folder, or an empty list if the folder has no baselines file."""
    if not folder.baselines.exists():
        return []
    record = read_json(folder.baselines)
    try:
        return [Baseline.of(baseline) for baseline in record["baselines"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder.baselines} is damaged ({error}); delete it, nothing else depends on it") from None


def _intact(folder: RunFolder) -> list[Baseline]:
    """Return the stored baselines. If the file is damaged, return an empty list: training does not need the file."""
    try:
        return stored(folder)
    except DataError:
        return []


def sentence(baselines: Sequence[Baseline], criterion: str) -> str:
    """Return the baselines as text, for example `majority class 22.1 %, bag of words 88.4 % accuracy`."""
    parts, samples = [], []
    for baseline in baselines:
        name = _metric(baseline, criterion)
        value = baseline.metrics[name]
        parts.append(f"{baseline.name} {METRICS[name]().text(value) if name in METRICS else f'{value:.1f}'}")
        if baseline.share < 1:
            samples.append(f" ({baseline.name}: from {100 * baseline.share:.3g} % of the training text)")
    name = _metric(baselines[-1], criterion)
    return f"{', '.join(parts)} {METRICS[name].title if name in METRICS else name}{''.join(samples)}"


def _metric(baseline: Baseline, criterion: str) -> str:
    """Return the metric by which a baseline is compared: `criterion` if measured, else one of `PREFERRED`."""
    return criterion if criterion in baseline.metrics else next(n for n in PREFERRED if n in baseline.metrics)
