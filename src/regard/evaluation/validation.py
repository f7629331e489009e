"""Validation: the likelihood of held-out examples, and metrics of the model's outputs for the same examples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from regard.evaluation.metric import Metric
from regard.evaluation.metrics import METRICS, metric
from regard.evaluation.significance import standard_error
from regard.fast import beam_search
from regard.inference.text import Output, Texts, classify
from regard.models.base import Classifier, Generator, Model
from regard.training.degenerate import REPEATING, UNFINISHED
from regard.training.ranking import ERROR
from regard.training.spec import TrainSpec

Values = dict[str, float]


@dataclass(frozen=True)
class HeldOut:
    """Held-out examples, as tokens and as text, with the tokenizers and limits for evaluating a model on them."""

    objective: Objective
    table: Table
    texts: Sequence[tuple[str, ...]]
    tokenizers: dict[str, Tokenizer]
    batching: Batching
    bytes: int  # the size of the text that the model predicts
    max_len: int
    length_limit: LengthLimit | None = None  # for translations
    extracts: bool = False  # whether paragraphs of long sources are ranked by tf-idf (data.long=extract)


def measured(objective: Objective, tokenize: str, *more: Metric) -> list[Metric]:
    """Return the metrics that validation measures besides the loss.

    These are the default metrics of the task, apart from those whose package is not installed, and the metrics in
    `more`. Each metric is returned once.
    """
    usual = [METRICS[name]().with_tokenizer(tokenize) for name in objective.metrics if METRICS[name].installed()]
    names = {each.name for each in usual} | {"loss"}
    return usual + [each for each in more if each.name not in names]


def metric_for(objective: Objective, name: str | None, decode: int, trust_code: bool = False) -> Metric:
    """Return the metric `name`, or the default metric of the task. Raise SpecError if it does not fit the task."""
    provided = [need for need in objective.provides if decode or need != "text"]
    if name is None:
        usual = [each for each in objective.metrics if METRICS[each].installed()]
        name = next(each for each in usual if METRICS[each].needs in provided)
    chosen = metric(name, trust_code, "--metric") if ":" in name or name in METRICS else None
    if chosen is None or chosen.needs not in provided or chosen.name == "loss":
        known = [each for each in METRICS if METRICS[each].needs in provided and each != "loss"]
        raise SpecError("--metric", f"{name!r} is not available for this task; {nearest(name, known)}")
    return chosen


def criterion_of(train: TrainSpec, objective: Objective, trust_code: bool = False) -> Metric:
    """Return the metric that ranks checkpoints; raise SpecError if validation does not measure this metric."""
    name = objective.criterion if train.criterion == "auto" else train.criterion
    criterion = metric(name, trust_code, "train.criterion")
    if name != "loss" and criterion.needs not in objective.provides:
        raise SpecError("train.criterion", f"{name!r} is not available for {objective.kind}")
    if criterion.needs == "text" and not train.decode:
        raise SpecError("train.criterion", f"{name!r} needs translations; set train.decode above 0")
    if not criterion.installed():
        missing = f"{name!r} needs the package {criterion.package}, which is not installed"
        raise SpecError("train.criterion", f"{missing}; pip install 'regard[metrics]', or leave the criterion out")
    return criterion.with_tokenizer(train.bleu_tokenize)


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
    standard error of `criterion`, if it can be measured, the percentage of decoded outputs with a loop (`repeating`),
    and the percentage cut at the length limit (`unfinished`). If `outputs` is a list, the decoded texts are appended
    to it.
    """
    objective = held_out.objective
    of_labels = likelihood(model, held_out.table, objective, held_out.batching)
    of_labels = replace(of_labels, bytes=held_out.bytes)
    values = {"loss": of_labels.loss}
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
            values[each.name] = each.score([of_labels]).value
        elif decoded:
            values[each.name] = each.score(decoded, references).value
    if criterion.needs != "likelihood" and decoded:
        values[ERROR] = standard_error(decoded, references, criterion)
    return values


def translated(model: Model, held_out: HeldOut, search: Search, sources: Sequence[str]) -> list[Output]:
    """Return the best translation of each source."""
    if not isinstance(model, Generator):
        raise DataError(f"a {type(model).__name__} generates no text; choose another model family")
    tokenizers, device = held_out.tokenizers, next(model.parameters()).device
    texts = Texts(
        [model],
        tokenizers["source"],
        tokenizers["target"],
        held_out.max_len,
        device,
        length_limit=held_out.length_limit,
        extracts=held_out.extracts,
    )
    batch_size = 64 if device.type == "cpu" else 256
    outputs = [best[0] for best in texts.translate(sources, search, batch_size)]
    beam_search.release()  # training needs the memory
    return outputs


def classified(model: Model, held_out: HeldOut, texts: Sequence[str]) -> list[str]:
    """Return the predicted label of each text."""
    assert isinstance(model, Classifier)
    device, objective = next(model.parameters()).device, held_out.objective
    # Without a backward pass, a batch of this size needs less memory than a batch of training.
    tokens = 4 * (getattr(held_out.batching, "tokens", None) or held_out.max_len)
    predictions = classify(model, objective, texts, held_out.tokenizers, device, held_out.max_len, 64, tokens=tokens)
    return [prediction.label for prediction in predictions]
