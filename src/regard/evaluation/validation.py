"""What a model is worth on held-out records: likelihood, and what it says when it is asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regard.data.batching import Batching
from regard.data.objectives import Classification, Objective, Translation
from regard.data.token_store import Table
from regard.data.tokenizer import Tokenizer
from regard.decoding.length_limit import LengthLimit
from regard.decoding.repetition import find_loop
from regard.decoding.search import Search
from regard.errors import DataError
from regard.evaluation import metrics
from regard.evaluation.loss import likelihood
from regard.evaluation.significance import proportion_error, standard_error
from regard.fast import beam_search as searching
from regard.inference.text import Texts, classify
from regard.models.base import Classifier, Generator, Model
from regard.training.degenerate import REPEATING, UNFINISHED
from regard.training.selection import ERROR

Values = dict[str, float]
ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class HeldOut:
    """Records that a model has not learned from, as tokens and as text."""

    objective: Objective
    table: Table
    texts: Sequence[tuple[str, ...]]
    tokenizers: dict[str, Tokenizer]
    batching: Batching
    bytes: int  # of the text that is to be said
    max_len: int
    length_limit: LengthLimit | None = None  # of a translation


def validate(
    model: Model,
    held_out: HeldOut,
    search: Search,
    decode: int,
    tokenize: str,
    rouge: bool = False,
    said: list[str] | None = None,
    criterion: str = "loss",
) -> Values:
    """All that is measured during training, by name; `decode` records are translated with `search`.

    `rouge` adds ROUGE, for summaries; `said` is given the translations. `standard_error` is that of the `criterion` on
    these records.
    """
    found = likelihood(model, held_out.table, held_out.objective, held_out.batching)
    values = {"loss": found.loss}
    if isinstance(held_out.objective, Translation):
        outputs = [] if said is None else said
        values |= translated(model, held_out, search, decode, tokenize, rouge, outputs)
        if criterion in values and criterion != "loss":
            settings: dict[str, Any] = {"tokenize": tokenize} if criterion == "bleu" else {}
            references = [record[1] for record in held_out.texts[:decode]]
            values[ERROR] = standard_error(outputs, references, criterion, **settings)
    elif isinstance(held_out.objective, Classification):
        values |= classified(model, held_out)
    else:
        values |= {"bits_per_byte": metrics.bits_per_byte(found.nll, held_out.bytes).value}
    if not isinstance(held_out.objective, Classification):
        values["perplexity"] = metrics.perplexity(found.nll, found.tokens).value
    return values


def translated(
    model: Model,
    held_out: HeldOut,
    search: Search,
    count: int,
    tokenize: str,
    rouge: bool = False,
    said: list[str] | None = None,
) -> Values:
    """BLEU, chrF and exact matches of the first `count` records, and ROUGE if asked for.

    Also the percentage of outputs that are degenerate: `repeating` that contain a loop, `unfinished` that reach the
    length limit without an end.
    """
    records = held_out.texts[:count]
    if not records:
        return {}
    if not isinstance(model, Generator):
        raise DataError("a model that translates is a generator; choose another family")
    tokenizers, device = held_out.tokenizers, next(model.parameters()).device
    limit = held_out.length_limit
    texts = Texts([model], tokenizers["source"], tokenizers["target"], held_out.max_len, device, length_limit=limit)
    batch_size = 64 if device.type == "cpu" else 256
    outputs = [best[0] for best in texts.translate([record[0] for record in records], search, batch_size)]
    found = [output.text for output in outputs]
    searching.forget()  # the memory is training's again
    if said is not None:
        said += found
    wanted = [record[1] for record in records]
    summaries = zip(ROUGE, metrics.rouge(found, wanted, "unicode"), strict=True) if rouge else ()
    return {name: score.value for name, score in summaries} | {
        "bleu": metrics.bleu(found, wanted, tokenize).value,
        "chrf": metrics.chrf(found, wanted).value,
        "exact_match": metrics.exact_match(found, wanted).value,
        REPEATING: 100 * sum(find_loop(output.ids) is not None for output in outputs) / len(outputs),
        UNFINISHED: 100 * sum(not output.ended for output in outputs) / len(outputs),
    }


def classified(model: Model, held_out: HeldOut) -> Values:
    """Accuracy, and its standard error."""
    objective = held_out.objective
    assert isinstance(objective, Classification)
    assert isinstance(model, Classifier)
    device = next(model.parameters()).device
    texts = [text for _, text in held_out.texts]
    guesses = classify(model, objective, texts, held_out.tokenizers["text"], device, held_out.max_len, 64)
    labels = [label for label, _ in held_out.texts]
    accuracy = metrics.accuracy([guess.label for guess in guesses], labels).value
    return {"accuracy": accuracy, ERROR: proportion_error(round(accuracy * len(labels) / 100), len(labels))}
