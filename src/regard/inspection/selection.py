"""The choice of what a recording stores, and the limit of its memory."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import DataError, SpecError, nearest
from regard.nn.trace import Trace

PARTS = ("attention", "routing", "states", "norms", "predictions", "logit_lens")
KINDS = ("encoder.self", "decoder.self", "decoder.cross", "encoder.mixtures", "decoder.mixtures")
LIMIT = 2**30  # bytes


@dataclass(frozen=True, slots=True)
class Selection:
    """What a recording stores. `parts` are names from `PARTS`.

    `kinds`, `layers` and `queries` restrict the attention that is stored; None means no restriction.
    """

    parts: frozenset[str]
    kinds: frozenset[str] | None = None
    layers: frozenset[int] | None = None
    queries: slice | None = None

    @classmethod
    def of(cls, keep: Iterable[str] | None, layers: Iterable[int] | None, queries: slice | None = None) -> "Selection":
        """Return the selection for the arguments `keep`, `layers` (counted from 0) and `queries` of `record`.

        A kind such as "decoder.cross" in `keep` selects only the attention of this kind. If `keep` is None, all parts
        are stored.
        """
        names = PARTS if keep is None else (keep,) if isinstance(keep, str) else tuple(keep)
        for name in names:
            if name not in PARTS and "." not in name:
                raise SpecError("keep", f"there is no part {name!r} of a recording; {nearest(name, (*PARTS, *KINDS))}")
        kinds = frozenset(name for name in names if "." in name)
        parts = frozenset(name for name in names if name in PARTS) | ({"attention"} if kinds else set())
        numbers = None if layers is None else frozenset(layers)
        negative = sorted(number for number in numbers or () if number < 0)
        if negative:
            raise SpecError("layers", f"are counted from 0; {negative[0]} is below 0")
        if queries is not None and queries.step not in {None, 1}:
            raise SpecError("queries", f"needs a range of neighbouring tokens, not {queries}; leave out the step")
        return cls(parts, None if "attention" in names or not kinds else kinds, numbers, queries)

    def has_attention(self, kind: str, layer: int) -> bool:
        """Return whether the attention weights of this kind and layer are stored."""
        return "attention" in self.parts and (self.kinds is None or kind in self.kinds) and self.has_layer(layer)

    def has_layer(self, layer: int) -> bool:
        """Return whether attention and routing of this layer are stored."""
        return self.layers is None or layer in self.layers


@dataclass
class Budget:
    """The memory that a recording may still allocate, in bytes."""

    limit: int
    spent: int = 0

    def claim(self, shape: Sequence[int], size: int, what: str) -> None:
        """Count a tensor before it is allocated. Raise an error if the recording would exceed its limit."""
        self.spent += math.prod(shape) * size
        if self.spent > self.limit:
            raise DataError(
                f"recording {what} for {shape[-2]:,} tokens would bring the recording to {_bytes(self.spent)}, above "
                f"its limit of {_bytes(self.limit)}; record less (keep, layers, queries) or raise the limit"
            )


def _bytes(number: int) -> str:
    """Return a number of bytes in a readable unit."""
    power = min(3, (max(number, 1).bit_length() - 1) // 10)
    return f"{number / 1024**power:,.4g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


@dataclass
class SelectiveTrace(Trace):
    """Trace of the selected layers only. It raises an error before weights above the memory limit are computed.

    `layers["decoder.cross"]` has the layer number of each entry of `weights["decoder.cross"]`, counted from 0 over the
    layers that have this kind of attention. The entries of `routes` are numbered in the same way.
    """

    selection: Selection
    budget: Budget
    size: int = 4  # bytes of a weight
    layers: dict[str, list[int]] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)  # number of layers so far
    expected: list[str] = field(default_factory=list)  # layers whose weights were asked for and have not come yet
    queries: dict[str, tuple[int, int]] = field(default_factory=dict)  # first query and end, if not all are recorded

    def __post_init__(self) -> None:
        super().__init__()
        self.rows = self.selection.queries

    def wants(self, name: str, shape: Sequence[int]) -> bool:
        layer = self.seen.get(name, 0)
        self.seen[name] = layer + 1
        if not self.selection.has_attention(name, layer):
            return False
        if self.rows is not None:
            first, end, _ = self.rows.indices(shape[2])
            if end <= first:
                raise SpecError("queries", f"none of the {shape[2]} queries of {name} is in the range; change it")
            if self.queries.setdefault(name, (first, end)) != (first, end):
                raise SpecError("queries", f"the layers of {name} have different numbers of queries; leave it out")
            shape = (*shape[:2], end - first, shape[3])
        self.budget.claim(shape, self.size, f"the attention weights of {name}, layer {layer},")
        self.layers.setdefault(name, []).append(layer)
        self.expected.append(name)
        return True

    def add(self, name: str, weights: Float[Tensor, "B H T S"]) -> None:
        # A layer from outside the package may add its weights without a call of `wants`.
        if name in self.expected or self.wants(name, weights.shape):
            self.expected.remove(name)
            first, end = self.queries.get(name, (0, weights.shape[2]))
            whole = weights.shape[2] != end - first  # from a layer that computes the weights of all queries
            super().add(name, weights[:, :, first:end].clone() if whole else weights)

    def check(self) -> None:
        """Raise an error if a selected kind or layer of attention, or layer of experts, does not exist."""
        kinds = [kind for kind in self.seen if kind not in self.routes]
        for kind in sorted(self.selection.kinds or ()):
            if kind not in kinds:
                hint = nearest(kind, kinds) if kinds else "this model has no attention"
                raise SpecError("kind", f"there is no {kind!r} attention; {hint}")
        chosen = self.selection.kinds or self.seen.keys()
        most = max((self.seen[kind] for kind in chosen), default=0)
        missing = sorted(layer for layer in self.selection.layers or () if layer >= most)
        if missing and most and self.selection.parts & {"attention", "routing"}:
            raise SpecError("layer", f"there is no layer {missing[0]}; there are {most}, counted from 0")

    def route(self, name: str, chosen: Int[Tensor, "B T H K"], weights: Float[Tensor, "B T H K"], total: int) -> None:
        layer = self.seen.get(name, 0)
        self.seen[name] = layer + 1
        if "routing" in self.selection.parts and self.selection.has_layer(layer):
            self.layers.setdefault(name, []).append(layer)
            super().route(name, chosen, weights, total)
