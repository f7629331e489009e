"""Measures of attention heads: entropy, and attention to distances, neighbours, equal tokens, delimiters and spans.

All functions take attention weights (B, H, T, S) of texts without padding. Row t of a head is the distribution of
query t over S keys.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.batch import Batch
from regard.errors import DataError
from regard.inspection.record import attention
from regard.models.base import Model

Weights = Float[Tensor, "B H T S"]
NAMES = ("entropy", "distance", "previous", "next", "current", "same_token", "delimiter")


@dataclass(frozen=True)
class HeadPatterns:
    """Means over all queries, as one tensor (heads,) per layer. None: not defined for this kind of attention.

    `entropy` is in nats. `distance` is the mean of |j - i| for query i and key j. The others are attention weights: to
    the `previous` and the `next` token, to the query's own position (`current`), to other positions with the `same`
    token (queries without such a position are left out), and to delimiters. The decoder of a translator attends to
    the tokens that it has read, so `current` is the last token before the one that it predicts.
    """

    entropy: Tensor
    distance: Tensor | None
    previous: Tensor | None
    next: Tensor | None
    current: Tensor | None
    same_token: Tensor | None
    delimiter: Tensor | None


def entropy(weights: Weights) -> Float[Tensor, "B H T"]:
    """Return the entropy of the attention of every query, -sum_j w_j log w_j, in nats."""
    return torch.special.entr(weights).sum(-1)


def distance_profile(weights: Weights, width: int) -> Float[Tensor, "H W"]:
    """Return the mean attention by offset j - i of key j from query i, for the offsets -width, ..., width.

    For each offset, the mean is over the queries that have a key at this offset; it is 0 if there are none.
    """
    T, S = weights.shape[-2:]
    columns = []
    for offset in range(-width, width + 1):
        diagonal = weights.diagonal(offset, -2, -1) if -T < offset < S else weights[..., :0, 0]
        columns.append(diagonal.mean((0, 2)) if diagonal.shape[-1] else weights.new_zeros(weights.shape[1]))
    return torch.stack(columns, -1)


def span_attention(
    weights: Float[Tensor, "H T S"], queries: Sequence[int], candidates: Sequence[Sequence[int]]
) -> Float[Tensor, "H n"]:
    """Return the attention of a span of queries to each candidate span of keys, for every head.

    Attention is summed over the keys of a candidate, and averaged over the queries. For example, `queries` are the
    positions of a pronoun, and `candidates` are those of its antecedent and of a distractor.
    """
    for name, span, size in (
        ("queries", queries, weights.shape[1]),
        *(("candidates", c, weights.shape[2]) for c in candidates),
    ):
        if not len(span) or not all(0 <= position < size for position in span):
            raise DataError(f"{name}: {list(span)} is not a span of positions in 0 .. {size - 1}; give at least one")
    rows = weights[:, list(queries)].mean(1)
    return torch.stack([rows[:, list(candidate)].sum(1) for candidate in candidates], -1)


def antecedent_score(
    weights: Float[Tensor, "H T S"], pronoun: Sequence[int], antecedent: Sequence[int], distractor: Sequence[int]
) -> Float[Tensor, " H"]:
    """Return the share a / (a + d) of the attention from a pronoun that its antecedent receives, for every head.

    a and d are the attention to the antecedent and to the distractor, each divided by its number of tokens. A head
    that attends to neither has the score 0.5.
    """
    spans = span_attention(weights, pronoun, (antecedent, distractor))
    per_token = spans / torch.tensor([len(antecedent), len(distractor)], device=spans.device)
    total = per_token.sum(-1)
    return torch.where(total > 0, per_token[:, 0] / total.masked_fill(total == 0, 1.0), 0.5)


def head_patterns(
    model: Model, batches: Iterable[Batch], delimiters: Collection[int] = ()
) -> dict[str, list[HeadPatterns]]:
    """Return the patterns of every attention layer, on batches of one text without padding each.

    `delimiters` are the ids of tokens such as eos and punctuation.
    """
    sums: dict[tuple[str, int], dict[str, Tensor]] = {}
    counts: dict[tuple[str, int], dict[str, int]] = {}
    for batch in batches:
        if batch.target.shape[0] != 1:
            raise DataError("batches: patterns are measured on one text at a time; give batches of one row")
        for kind, layers in attention(model, batch).items():
            for n, weights in enumerate(layers):
                keys = _keys(kind, batch, weights.shape[-1])
                for name, (total, count) in _sums(weights, keys, kind.endswith(".self"), delimiters).items():
                    own = sums.setdefault((kind, n), {})
                    own[name] = own.get(name, 0) + total.double().cpu()
                    tally = counts.setdefault((kind, n), {})
                    tally[name] = tally.get(name, 0) + count
    patterns: dict[str, list[HeadPatterns]] = {}
    for (kind, n), totals in sums.items():
        means = {name: total / max(1, counts[kind, n][name]) for name, total in totals.items()}
        patterns.setdefault(kind, []).append(HeadPatterns(*(means.get(name) for name in NAMES)))  # type: ignore[reportArgumentType]
    return patterns


def _keys(kind: str, batch: Batch, S: int) -> Int[Tensor, "1 S"] | None:
    """Return the tokens at the keys of one kind of attention, or None if the keys are not tokens."""
    source, target = batch.source, batch.target
    options = [target] if source is None else [source, target, torch.cat((source, target), 1)]
    if kind.endswith(".cross") or (kind == "encoder.self" and source is not None):
        options = [source]
    elif source is not None:  # of a decoder-only translator, the sequence is the source and then the target
        options = [target, torch.cat((source, target), 1)]
    return next((ids for ids in options if ids is not None and ids.shape[1] == S and ids.dim() == 2), None)


def _sums(
    weights: Weights, keys: Int[Tensor, "1 S"] | None, own: bool, delimiters: Collection[int]
) -> dict[str, tuple[Tensor, int]]:
    """Return, for each pattern, its sum over queries for every head, and the number of queries."""
    T, S = weights.shape[-2:]
    sums = {"entropy": (entropy(weights).sum((0, 2)), T)}
    if keys is None:
        return sums
    ends = torch.isin(keys, torch.tensor(sorted(delimiters), dtype=keys.dtype, device=keys.device))
    sums["delimiter"] = ((weights * ends[:, None, None]).sum((0, 2, 3)), T)
    if not own or T != S:
        return sums
    at = torch.arange(S, device=weights.device)
    distance = (at - at[:, None]).abs().to(weights.dtype)
    sums["distance"] = ((weights * distance).sum((0, 2, 3)), T)
    for name, offset in (("previous", -1), ("current", 0), ("next", 1)):
        sums[name] = (weights.diagonal(offset, -2, -1).sum((0, 2)), T - abs(offset))
    equal = (keys[:, :, None] == keys[:, None, :]) & (at != at[:, None]) & _visible(weights)
    sums["same_token"] = ((weights * equal[:, None]).sum((0, 2, 3)), int(equal.any(-1).sum()))
    return sums


def _visible(weights: Weights) -> Bool[Tensor, "B T S"]:
    """Return which keys each query may attend to: those with a nonzero weight in at least one head."""
    return (weights > 0).any(1)
