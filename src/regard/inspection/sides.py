"""The inputs of the encoder and the decoder: ids, tokens and words of one row of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from regard.batch import Batch, require_data
from regard.data.tokenizer import Tokenizer
from regard.inspection.predictions import Names
from regard.inspection.words import word_indices
from regard.models.base import Classifier, Model


def only_row(batch: Batch, row: int) -> Batch:
    """Return a batch with one row of `batch`, without padding."""
    require_data(not batch.packed, "packed: a recording is of one text; use a padded batch")
    rows = batch.target.shape[0]
    require_data(0 <= row < rows, f"row: the batch has {rows} rows, counted from 0, and no row {row}")
    changes: dict[str, Any] = {}
    for side in ("target", "source"):
        values, seg = getattr(batch, side), getattr(batch, f"{side}_seg")
        if values is not None:
            length = values.shape[1] if seg is None else int((seg[row] != 0).sum())
            names = [side, f"{side}_seg", f"{side}_pos"]
            names += ["labels", "weights", "prefix", "types"] if side == "target" else []
            for name in names:
                value = getattr(batch, name)
                if value is not None:
                    changes[name] = value[row : row + 1] if value.dim() == 1 else value[row : row + 1, :length]
    return replace(batch, **changes)


@dataclass(frozen=True, slots=True)
class Sides:
    """The ids, tokens and words that the encoder and the decoder read, and the names of predicted ids."""

    ids: dict[str, list[int]]
    tokens: dict[str, list[str]]
    words: dict[str, list[int]]
    names: Names

    @classmethod
    def of(cls, model: Model, batch: Batch, tokenizers: Mapping[str, Tokenizer], labels: Sequence[str]) -> "Sides":
        """Return the sides of a model that reads a batch of one row."""
        last = tokenizers.get("target") or next(iter(tokenizers.values()), None)
        target = _read(batch.target, last)
        made = {side: target for side in ("encoder", "decoder") if hasattr(model, side)}
        if batch.source is not None:
            source = _read(batch.source, tokenizers.get("source", last))
            if hasattr(model, "encoder"):
                made = {"encoder": source, "decoder": target}
            else:
                offset = 1 + max(source[2], default=-1)
                made = {
                    "decoder": (
                        source[0] + target[0],
                        source[1] + target[1],
                        source[2] + [w + offset for w in target[2]],
                    )
                }
        names = _names(labels) if isinstance(model, Classifier) else _token_names(last)
        ids, tokens, words = ({side: values[i] for side, values in made.items()} for i in range(3))
        return cls(ids, tokens, words, names)  # type: ignore[reportArgumentType]


def _read(values: Tensor, tokenizer: Tokenizer | None) -> tuple[list[int], list[str], list[int]]:
    """Return the ids, tokens and word indices of one row. Vectors have no ids and are numbered from 1."""
    count = values.shape[1]
    if values.is_floating_point():
        return [], [str(number + 1) for number in range(count)], list(range(count))
    ids = values[0].tolist()
    return (
        ids,
        list(_token_names(tokenizer)(ids)),
        list(range(count)) if tokenizer is None else word_indices(tokenizer, ids),
    )


def _token_names(tokenizer: Tokenizer | None) -> Names:
    if tokenizer is None:
        return lambda ids: [str(i) for i in ids]
    # A model may have more ids than its tokenizer.
    return lambda ids: [tokenizer.tokens([i])[0] if i < tokenizer.size else f"<none-{i}>" for i in ids]


def _names(labels: Sequence[str]) -> Names:
    return lambda ids: [labels[i] if i < len(labels) else str(i) for i in ids]
