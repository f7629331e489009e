"""One attention matrix of a recording, with the names of its rows (queries) and columns (keys)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from regard.errors import SpecError, nearest
from regard.inspection.words import by_words, joined


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Attention weights of one head, or the mean of all heads, with the labels of queries (rows) and keys (columns)."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: Float[Tensor, "T S"]


@dataclass(frozen=True, slots=True)
class Axes:
    """The rows and columns of a kind of attention: tokens with their words, or numbered groups.

    `queries` maps a kind of attention to (first, end) if only these queries are recorded.
    """

    tokens: Mapping[str, Sequence[str]]
    words: Mapping[str, Sequence[int]]
    queries: Mapping[str, tuple[int, int]]

    def labels(self, kind: str, weights: Float[Tensor, "... T S"], words: bool) -> tuple[tuple[str, ...], ...]:
        """Return the labels of rows and columns. Queries or keys that are not tokens are numbered from 1."""
        made = []
        for side, here, size in zip(self.sides(kind, weights), self.ranges(kind), weights.shape[-2:], strict=True):
            if side is None:
                made.append(tuple(str(here.start + number + 1) for number in range(size)))
            elif words:
                indices = self.words[side][here]
                made.append(tuple(joined(self.tokens[side][here], [index - indices[0] for index in indices])))
            else:
                made.append(tuple(self.tokens[side][here]))
        return tuple(made)

    def ranges(self, kind: str) -> tuple[slice, slice]:
        """Return the ranges of queries and keys that are recorded, as slices of the tokens."""
        first, end = self.queries.get(kind, (0, None))
        return slice(first, end), slice(0, None)

    def sides(self, kind: str, weights: Float[Tensor, "... T S"]) -> tuple[str | None, str | None]:
        """Return the sides whose tokens are the queries and the keys, or None for those that are not tokens.

        The keys of a Linformer are mixtures of tokens, those of compressed attention are groups, and the deeper layers
        of a funnel have fewer queries than tokens.
        """
        own = kind.partition(".")[0]
        key = None if kind.endswith(".mixtures") else "encoder" if kind.endswith(".cross") else own
        queries, keys = weights.shape[-2:]
        rows = own if queries == len(self.tokens[own][self.ranges(kind)[0]]) else None
        return rows, key if key is not None and keys == len(self.tokens[key]) else None

    def by_word(self, kind: str, weights: Float[Tensor, "... T S"]) -> Float[Tensor, "... W V"]:
        """Return attention between words: the sum over the subwords of a key, the mean over those of a query."""
        indices = []
        for side, here in zip(self.sides(kind, weights), self.ranges(kind), strict=True):
            found = None if side is None else self.words[side][here]
            indices.append(None if found is None else [index - found[0] for index in found])
        return by_words(weights, *indices)


def layer_of(
    attention: Mapping[str, Sequence[Tensor]], layers: Mapping[str, Sequence[int]], kind: str, layer: int
) -> Float[Tensor, "H T S"]:
    """Return the weights of one layer, which is counted from 0; -1 is the last recorded one."""
    if not attention:
        raise SpecError("kind", "no attention is recorded: the model has none, or it was left out (keep)")
    if kind not in attention:
        raise SpecError("kind", f"there is no {kind!r} attention; {nearest(kind, attention)}")
    numbers = list(layers[kind])
    wanted = numbers[layer] if -len(numbers) <= layer < 0 else layer
    if wanted not in numbers:
        recorded = ", ".join(map(str, numbers))
        raise SpecError("layer", f"{kind} has no recorded layer {layer}; recorded (counted from 0): {recorded}")
    return attention[kind][numbers.index(wanted)]


def head_of_layer(weights: Float[Tensor, "H T S"], head: int | None) -> Float[Tensor, "T S"]:
    """Return the weights of one head, counted from 0, or the mean of all heads if `head` is None."""
    if head is None:
        return weights.mean(0)
    heads = weights.shape[0]
    if not -heads <= head < heads:
        raise SpecError("head", f"there is no head {head}; this layer has {heads} (counted from 0)")
    return weights[head]
