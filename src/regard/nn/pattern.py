"""Attention patterns, such as a sliding window: restrictions of attention in addition to causality and padding."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, no_type_check

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.nn.checks import check_count, require
from regard.tree import Spec

if TYPE_CHECKING:
    from regard.nn.mask import Mask


LONGEST = 2**31 - 1  # the largest size, in tokens: products of two of them fit into 64 bits


class Span(NamedTuple):
    """The first and the last position of each tile, a group of adjacent tokens that a sparse kernel processes at once.

    The positions of a tile's tokens lie between the two, and need not increase by 1.
    """

    first: Int[Tensor, "*#n"]
    last: Int[Tensor, "*#n"]
    size: int | None = None  # upper bound of last - first + 1, if it is known without reading the tensors
    prefix: Bool[Tensor, "*#n"] | None = None  # in a prefix LM: whether any key of the tile belongs to the prefix


class AttentionPattern(Spec):
    """Abstract base class of attention patterns: specs that select, by position, the keys each query attends to."""

    __slots__ = ()
    may_hide_all: ClassVar[bool] = True  # whether a query may have no visible key, not even itself
    causal: ClassVar[bool | None] = None  # the stacks it is for: causal, bidirectional (False) or both (None)
    keeps_prefix: ClassVar[bool] = False  # whether it has an effect in prefix language models alone

    @property
    def reach(self) -> int | None:
        """Largest distance from a query to a visible earlier key, except the `first` keys. None means no limit."""
        return None

    @property
    def first(self) -> int:
        """Number of keys at the start of a sequence that queries may attend to even at distances above `reach`."""
        return 0

    @property
    def reads_length(self) -> bool:
        """True if the visible keys depend on the length of the sequence."""
        return False

    @property
    def needs_order(self) -> bool:
        """True if `tiles` hides tiles only where positions increase by 1 (along a row, or a text of a packed row)."""
        return False

    @abstractmethod
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        """Return whether queries at positions q attend to keys at positions k. The shapes of q and k are broadcast."""

    @no_type_check  # FlexAttention traces this function for a single pair and cannot trace a shape check
    def visible_in(
        self,
        q: Int[Tensor, "*#n"],
        k: Int[Tensor, "*#n"],
        length: Int[Tensor, "*#n"] | None = None,  # noqa: ARG002
        prefix: Bool[Tensor, "*#n"] | None = None,  # noqa: ARG002
    ) -> Bool[Tensor, "*#n"]:
        """Return `visible(q, k)` in a sequence with `length` tokens. `prefix` is True if k belongs to its prefix.

        `length` is None if the pattern does not read it. `prefix` is None if the model is not a prefix LM.
        """
        return self.visible(q, k)

    def tiles(
        self,
        q: Span,
        k: Span,
        length: Int[Tensor, "*#n"] | None,  # noqa: ARG002
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        """Return two masks over the pairs of tiles: `some` (a query may attend to a key) and `all` (all attend to all).

        If `some` is False, a kernel skips the pair of tiles. If `all` is True, a kernel does not evaluate the mask of
        the pair. If the answer is not known, `some` is True and `all` is False. This is the default for every pair.
        """
        pairs = (q.first + k.first).bool()
        return torch.ones_like(pairs), torch.zeros_like(pairs)

    def refusal(self, causal: bool, prefix: bool) -> str | None:
        """Return why the pattern cannot be used in a causal stack or in a prefix language model, or None if it can."""
        if self.causal is not None and self.causal != causal:
            fits, found = ("causal", "bidirectional") if self.causal else ("bidirectional", "causal")
            return f"{self.kind!r} is for {fits} attention, and this stack is {found}; use another pattern"
        if self.keeps_prefix and not prefix:
            return f"{self.kind!r} has no effect without a prefix; use it in a prefix language model, or leave it out"
        return None


def visible_under(
    mask: "Mask", pattern: AttentionPattern, q: Int[Tensor, "#b T 1"], k: Int[Tensor, "#b 1 S"], S: int
) -> Bool[Tensor, "c T S"]:
    """Return which keys the pattern of a mask makes visible, given the positions of its queries and of its S keys."""
    length = text_lengths(mask, S, q.device)[..., None] if pattern.reads_length else None
    return pattern.visible_in(q, k, length, None if mask.prefix is None else mask.prefix[:, None, :])


def text_lengths(mask: "Mask", S: int, device: torch.device) -> Int[Tensor, "#B #T"]:
    """Return the number of tokens in the text of each query: in its segment of a packed row, or in its row."""
    if mask.k_seg is None:
        return torch.full((1, 1), S, device=device)  # filled there: a copy would wait for a GPU
    if not mask.packed:
        return (mask.k_seg != 0).sum(1, keepdim=True)
    assert mask.q_seg is not None
    seg = mask.k_seg.long()
    counts = seg.new_zeros(seg.shape[0], mask.segments + 1).scatter_add(1, seg, torch.ones_like(seg))
    return counts.gather(1, mask.q_seg.long())


@dataclass(frozen=True, slots=True)
class Window(AttentionPattern):
    """Sliding window: |i - j| < size. A causal query attends to the last `size` positions (CS 182, 17.4)."""

    kind = "window"
    may_hide_all = False
    size: int = 256

    def check(self) -> None:
        require(self.size >= 1, "size", f"a window must hold at least one position, not {self.size}")
        check_count("size", self.size, LONGEST)

    @property
    def reach(self) -> int:
        return self.size - 1

    @no_type_check  # FlexAttention traces this function for a single pair and cannot trace a shape check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        return (q - k).abs() < self.size

    def tiles(
        self,
        q: Span,
        k: Span,
        length: Int[Tensor, "*#n"] | None,  # noqa: ARG002
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        least, most = distances(q, k)
        return (least < self.size) & (most > -self.size), (most < self.size) & (least > -self.size)


@dataclass(frozen=True, slots=True)
class DilatedWindow(AttentionPattern):
    """Sliding window with gaps (Beltagy et al. 2020): |i - j| < size * dilation and (i - j) mod dilation = 0."""

    kind = "dilated_window"
    may_hide_all = False
    size: int = 256
    dilation: int = 2

    def check(self) -> None:
        check_count("size", self.size, LONGEST)
        check_count("dilation", self.dilation, LONGEST)

    @property
    def reach(self) -> int:
        return (self.size - 1) * self.dilation

    @no_type_check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        distance = (q - k).abs()
        return (distance < self.size * self.dilation) & (distance % self.dilation == 0)

    def tiles(
        self, q: Span, k: Span, length: Int[Tensor, "*#n"] | None
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        some, every = Window(self.reach + 1).tiles(q, k, length)
        return some, every & (self.dilation == 1)


@dataclass(frozen=True, slots=True)
class Blocks(AttentionPattern):
    """Block-local attention (Liu et al. 2018): a query attends to keys of its own block of `size` positions.

    It also attends to `neighbours` blocks before its own and, if the stack is not causal, to as many after it. Block b
    holds the positions b * size ... (b + 1) * size - 1.
    """

    kind = "blocks"
    may_hide_all = False
    size: int = 256
    neighbours: int = 0

    def check(self) -> None:
        check_count("size", self.size, LONGEST)
        check_count("neighbours", self.neighbours, LONGEST, least=0)

    @property
    def reach(self) -> int:
        return (self.neighbours + 1) * self.size - 1

    @no_type_check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        return (q // self.size - k // self.size).abs() <= self.neighbours

    def tiles(
        self, q: Span, k: Span, length: Int[Tensor, "*#n"] | None
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        return Window(self.neighbours + 1).tiles(blocks_of(q, self.size), blocks_of(k, self.size), length)


@dataclass(frozen=True, slots=True)
class GlobalTokens(AttentionPattern):
    """Global tokens (Beltagy et al. 2020): the first `tokens` positions attend to all, and all attend to them.

    Other queries do not even attend to themselves. Combine it with a window: AnyOf((Window(256), GlobalTokens(1))).
    """

    kind = "global_tokens"
    tokens: int = 1

    def check(self) -> None:
        check_count("tokens", self.tokens, LONGEST)

    @property
    def reach(self) -> int:
        return 0  # a later query attends to the first tokens alone

    @property
    def first(self) -> int:
        return self.tokens

    @no_type_check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        return (q < self.tokens) | (k < self.tokens)

    def tiles(
        self,
        q: Span,
        k: Span,
        length: Int[Tensor, "*#n"] | None,  # noqa: ARG002
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        return (q.first < self.tokens) | (k.first < self.tokens), (q.last < self.tokens) | (k.last < self.tokens)


@dataclass(frozen=True, slots=True)
class Sinks(AttentionPattern):
    """Attention sinks (Xiao et al. 2024): a window of `size` positions, and the first `sinks` positions."""

    kind = "sinks"
    may_hide_all = False
    size: int = 256
    sinks: int = 4

    def check(self) -> None:
        check_count("size", self.size, LONGEST)
        check_count("sinks", self.sinks, LONGEST)

    @property
    def reach(self) -> int:
        return self.size - 1

    @property
    def first(self) -> int:
        return self.sinks

    @no_type_check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        return ((q - k).abs() < self.size) | (k < self.sinks)

    def tiles(
        self, q: Span, k: Span, length: Int[Tensor, "*#n"] | None
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        some, every = Window(self.size).tiles(q, k, length)
        return some | (k.first < self.sinks), every | (k.last < self.sinks)


@dataclass(frozen=True, slots=True)
class AnyOf(AttentionPattern):
    """Union of patterns: a query attends to the keys that are visible in at least one of `patterns`."""

    kind = "any_of"
    patterns: tuple[AttentionPattern, ...]

    def check(self) -> None:
        require(len(self.patterns) >= 2, "patterns", "a union needs at least two patterns; give two, or one by itself")

    @property
    def reach(self) -> int | None:
        reaches = [pattern.reach for pattern in self.patterns]
        return None if None in reaches else max(reach for reach in reaches if reach is not None)

    @property
    def first(self) -> int:
        return max(pattern.first for pattern in self.patterns)

    @property
    def reads_length(self) -> bool:
        return any(pattern.reads_length for pattern in self.patterns)

    @property
    def needs_order(self) -> bool:
        return any(pattern.needs_order for pattern in self.patterns)

    @no_type_check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        return self.visible_in(q, k, k.amax() + 1)

    @no_type_check
    def visible_in(
        self,
        q: Int[Tensor, "*#n"],
        k: Int[Tensor, "*#n"],
        length: Int[Tensor, "*#n"] | None = None,
        prefix: Bool[Tensor, "*#n"] | None = None,
    ) -> Bool[Tensor, "*#n"]:
        shown = self.patterns[0].visible_in(q, k, length, prefix)
        for pattern in self.patterns[1:]:
            shown = shown | pattern.visible_in(q, k, length, prefix)
        return shown

    def tiles(
        self, q: Span, k: Span, length: Int[Tensor, "*#n"] | None
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        some, every = self.patterns[0].tiles(q, k, length)
        for pattern in self.patterns[1:]:
            also, wholly = pattern.tiles(q, k, length)
            some, every = some | also, every | wholly
        return some, every

    def refusal(self, causal: bool, prefix: bool) -> str | None:
        return next(filter(None, (pattern.refusal(causal, prefix) for pattern in self.patterns)), None)


@dataclass(frozen=True, slots=True)
class KeepPrefix(AttentionPattern):
    """`pattern` for a prefix language model, in which the keys of the prefix are visible at any distance."""

    kind = "keep_prefix"
    keeps_prefix = True
    pattern: AttentionPattern = Window()

    @property
    def reads_length(self) -> bool:
        return self.pattern.reads_length

    @no_type_check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        return self.pattern.visible(q, k)

    @no_type_check
    def visible_in(
        self,
        q: Int[Tensor, "*#n"],
        k: Int[Tensor, "*#n"],
        length: Int[Tensor, "*#n"] | None = None,
        prefix: Bool[Tensor, "*#n"] | None = None,
    ) -> Bool[Tensor, "*#n"]:
        shown = self.pattern.visible_in(q, k, length, prefix)
        return shown if prefix is None else shown | prefix

    @property
    def needs_order(self) -> bool:
        return self.pattern.needs_order

    def tiles(
        self, q: Span, k: Span, length: Int[Tensor, "*#n"] | None
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        some, every = self.pattern.tiles(q, k, length)
        return some | (True if k.prefix is None else k.prefix), every

    def refusal(self, causal: bool, prefix: bool) -> str | None:
        return self.pattern.refusal(causal, prefix) or AttentionPattern.refusal(self, causal, prefix)


def distances(q: Span, k: Span) -> tuple[Int[Tensor, "*#n"], Int[Tensor, "*#n"]]:
    """Return the least and the greatest distance i - j from a position j of tile k to a position i of tile q."""
    return q.first - k.last, q.last - k.first


def blocks_of(tile: Span, size: int) -> Span:
    """Return the first and the last block of `size` positions that have a position of each tile."""
    blocks = None if tile.size is None else (tile.size - 2) // size + 2
    return Span(tile.first // size, tile.last // size, blocks)
