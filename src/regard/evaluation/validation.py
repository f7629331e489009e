"""Validation: the likelihood of held-out examples, and metrics of the model's outputs for the same examples."""

from collections.abc import Sequence
from dataclasses import dataclass

from regard.data.batching import Batching
from regard.data.objectives import Objective
from regard.data.token_store import Table
from regard.data.tokenizer import Tokenizer
from regard.decoding.length_limit import LengthLimit
from regard.decoding.loops import find_loop
from regard.decoding.search import Search
from regard.errors import DataError, SpecError, nearest
from regard.evaluation.likelihood_metrics import LOSS
from regard.evaluation.loss import likelihood
from regard.evaluation.metric import Likelihood, Metric
from regard.evaluation.metrics import METRICS, metric
from regard.evaluation.significance import standard_error
from regard.fast import beam_search
from regard.inference.text import Output, Texts, classify
from regard.models.base import Classifier, Generator, Model
from regard.training.degenerate import REPEATING, UNFINISHED
from regard.training.selection import ERROR
from regard.training.spec import TrainSpec

Values = dict[str, float]


@dataclass(frozen=True)
class HeldOut:
    """Held-out examples, as tokens and as text, and what is needed to evaluate a model on them."""

    objective: Objective
    table: Table
    texts: Sequence[tuple[str, ...]]
    tokenizers: dict[str, Tokenizer]
    batching: Batching
    bytes: int  # the size of the text that the model predicts
    max_len: int
    length_limit: LengthLimit | None = None  # for translations


def measured(objective: Objective, tokenize: str, *more: Metric) -> list[Metric]:
    """Return the metrics that validation measures in addition to the loss: the task's usual metrics, and `more`."""
    usual = [METRICS[name]().with_tokenizer(tokenize) for name in objective.metrics]
    names = {each.name for each in usual} | {"loss"}
    return usual + [each for each in more if each.name not in names]


def metric_for(objective: Objective, name: str | None, decode: int, trust_code: bool = False) -> Metric:
    """Return the metric of an experiment; refuse a metric that the task has no inputs for.

    If `name` is None, it is the first usual metric of the task that can be measured.
    """
    provided = [need for need in objective.provides if decode or need != "text"]
    if name is None:
        name = next(each for each in objective.metrics if METRICS[each].needs in provided)
    found = None if ":" not in name and name not in METRICS else metric(name, trust_code, "--metric")
    if found is None or found.needs not in provided or found.name == "loss":
        known = [each for each in METRICS if METRICS[each].needs in provided and each != "loss"]
        raise SpecError("--metric", f"{name!r} is not measured here; {nearest(name, known)}")
    return found


def criterion_of(train: TrainSpec, objective: Objective, trust_code: bool = False) -> Metric:
    """Return the metric that ranks checkpoints; refuse a metric that validation does not measure."""
    name = objective.criterion if train.criterion == "auto" else train.criterion
    found = metric(name, trust_code, "train.criterion")
    if name != "loss" and found.needs not in objective.provides:
        raise SpecError("train.criterion", f"{name!r} is not measured for {objective.kind}")
    if found.needs == "text" and not train.decode:
        raise SpecError("train.criterion", f"{name!r} needs translations; set train.decode above 0")
    return found.with_tokenizer(train.bleu_tokenize)


def validate(
    model: Model,
    held_out: HeldOut,
    search: Search,
    decode: int,
    metrics: Sequence[Metric],
    criterion: Metric = LOSS,
    outputs: list[str] | None = None,
) -> Values:
    """Return the loss and the values of `metrics`, keyed by name.

    Metrics of text are measured on the first `decode` examples, which `search` decodes. The result also contains the
    standard error of `criterion`, if it can be measured, and two percentages of decoded outputs: `repeating` for
    outputs that contain a loop, and `unfinished` for outputs that reach the length limit without an end token. The
    decoded texts are appended to `outputs`, unless it is None.
    """
    objective = held_out.objective
    found = likelihood(model, held_out.table, objective, held_out.batching)
    found = Likelihood(found.nll, found.tokens, held_out.bytes)
    values = {"loss": found.loss}
    decoded, references = list[str](), list[str]()
    pairs = [objective.pair(record) for record in held_out.texts]
    if objective.labelled:
        decoded, references = classified(model, held_out, [text for text, _ in pairs]), [label for _, label in pairs]
    elif "text" in objective.provides and (pairs := pairs[:decode]):
        translations = translated(model, held_out, search, [source for source, _ in pairs])
        decoded, references = [output.text for output in translations], [target for _, target in pairs]
        values[REPEATING] = 100 * sum(find_loop(output.ids) is not None for output in translations) / len(pairs)
        values[UNFINISHED] = 100 * sum(not output.ended for output in translations) / len(pairs)
    if outputs is not None:
        outputs += decoded
    for each in metrics:
        if each.needs == "likelihood":
            values[each.name] = each.score([found]).value
        elif decoded:
            values[each.name] = each.score(decoded, references).value
    if criterion.needs != "likelihood" and decoded:
        values[ERROR] = standard_error(decoded, references, criterion)
    return values


def translated(model: Model, held_out: HeldOut, search: Search, sources: Sequence[str]) -> list[Output]:
    """Return the best translation of each source."""
    if not isinstance(model, Generator):
        raise DataError("a model that translates is a generator; choose another family")
    tokenizers, device = held_out.tokenizers, next(model.parameters()).device
    limit = held_out.length_limit
    texts = Texts([model], tokenizers["source"], tokenizers["target"], held_out.max_len, device, length_limit=limit)
    batch_size = 64 if device.type == "cpu" else 256
    outputs = [best[0] for best in texts.translate(sources, search, batch_size)]
    beam_search.release()  # training needs the memory
    return outputs


def classified(model: Model, held_out: HeldOut, texts: Sequence[str]) -> list[str]:
    """Return the predicted label of each text."""
    assert isinstance(model, Classifier)
    device, objective = next(model.parameters()).device, held_out.objective
    predictions = classify(model, objective, texts, held_out.tokenizers, device, held_out.max_len, 64)
    return [prediction.label for prediction in predictions]
