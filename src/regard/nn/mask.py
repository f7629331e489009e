"""Mask: which key each query may attend to; View and Context carry it through a forward pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.nn.pattern import AttentionPattern


@dataclass(frozen=True, slots=True)
class Mask:
    """A description of the visible (query, key) pairs; attention turns it into a tensor, once per stack.

    visible(i, j) = seg_i == seg_j != 0
                    and (not causal or prefix_j or pos_j <= pos_i)        (pos_j < pos_i when strict)
                    and attention_pattern(pos_i, pos_j)

    Every field is optional. Defaults are None or primitives: torch.compile cannot build instances of user classes as
    defaults inside a traced forward pass.
    """

    causal: bool = False
    strict: bool = False  # j < i only, as COMP7607 writes it; the first query then attends to nothing
    start: int = 0  # position of the first query where q_pos is None
    q_pos: Int[Tensor, "#b T"] | None = None  # None: start, start + 1, ...
    k_pos: Int[Tensor, "#b S"] | None = None  # None: 0, 1, ...
    q_seg: Int[Tensor, "B T"] | None = None  # segment of each token, 0 is padding; None: no padding
    k_seg: Int[Tensor, "B S"] | None = None
    packed: bool = False  # False: a row is one segment followed by padding
    prefix: Bool[Tensor, "B S"] | None = None  # keys visible to their whole segment: prefix LM
    attention_pattern: AttentionPattern | None = None
    segments: int = 1  # the most segments in a row
    longest: int | None = None  # the most tokens in a segment; None: up to the whole row

    def is_causal_only(self, T: int, S: int) -> bool:
        """Whether the mask is the lower triangle. Padding on the right is invisible to real queries anyway."""
        aligned = self.start == 0 and self.q_pos is None and self.k_pos is None and T == S
        return self.causal and aligned and not self._is_irregular()

    def hides_nothing(self, S: int) -> bool:
        """Whether every key is visible to every query, as in cross-attention without padding."""
        if self._is_irregular():
            return False
        if self.causal:
            return self.q_pos is None and self.k_pos is None and self.start >= S - 1
        return self.k_seg is None

    def _is_irregular(self) -> bool:
        past = self.causal and (self.strict or self.prefix is not None)
        return past or self.packed or self.attention_pattern is not None

    def order_hides_padding(self) -> bool:
        """Whether causality alone hides the padding at the end of a row from its real tokens."""
        return self.causal and self.k_pos is None and self.prefix is None

    def may_hide_all(self) -> bool:
        """Whether some query may see no key: the first of a strict mask, padding of packed rows or of a pattern."""
        pattern = self.attention_pattern
        if pattern is not None and (pattern.may_hide_all or (self.k_seg is not None and not self.causal)):
            return True
        return self.packed or (self.causal and self.strict)

    def bound(self, S: int) -> int:
        """A host-side number above every position."""
        return self.longest if self.k_pos is not None and self.longest is not None else S

    def positions(self, T: int, S: int, device: torch.device) -> tuple[Int[Tensor, "#b T"], Int[Tensor, "#b S"]]:
        """The positions of queries and keys."""
        k = self.k_pos if self.k_pos is not None else torch.arange(S, device=device)[None]
        return self.queries(T, device), k

    def queries(self, T: int, device: torch.device) -> Int[Tensor, "#b T"]:
        """The positions of queries."""
        return self.q_pos if self.q_pos is not None else torch.arange(self.start, self.start + T, device=device)[None]

    def dense(self, T: int, S: int, device: torch.device) -> Bool[Tensor, "b 1 t S"] | None:
        """The visibility of every pair, or None if nothing is hidden. Axes that do not matter have size 1."""
        if self.hides_nothing(S):
            return None
        terms = self._terms(T, S, device)
        visible = terms[0]
        for term in terms[1:]:
            visible = visible & term
        return visible[:, None]

    def _terms(self, T: int, S: int, device: torch.device) -> list[Bool[Tensor, "b t S"]]:
        terms: list[Tensor] = []
        if self.packed:
            assert self.q_seg is not None
            assert self.k_seg is not None
            terms.append((self.q_seg[:, :, None] == self.k_seg[:, None, :]) & (self.k_seg != 0)[:, None, :])
        elif self.k_seg is not None and not self.order_hides_padding():
            terms.append((self.k_seg != 0)[:, None, :])
        if self.causal or self.attention_pattern is not None:
            q, k = self.positions(T, S, device)
            q, k = q[:, :, None], k[:, None, :]
            if self.causal:
                past = k < q if self.strict else k <= q
                terms.append(past if self.prefix is None else past | self.prefix[:, None, :])
            if self.attention_pattern is not None:
                terms.append(self.attention_pattern.visible(q, k))
        return terms


@dataclass(frozen=True, slots=True)
class Terms:
    """The contribution of a position scheme to attention; each field is one way to take part."""

    rotation: Callable[[Tensor], Tensor] | None = None  # of queries and keys (B, H, T, K)
    offset: Float[Tensor, "b T W"] | None = None  # added to queries, keys and values
    bias: Float[Tensor, "b H T S"] | None = None  # added to the scores, independent of the content
    content: Callable[[Tensor], Tensor] | None = None  # scores that depend on the query: (B, H, T, K) -> (B, H, T, S)
    context: Callable[[Tensor], Tensor] | None = None  # values that depend on distance: weights -> (B, H, T, V)


@dataclass(frozen=True, slots=True)
class View:
    """T queries attending to S keys: the mask and the position terms.

    `lowered` caches the tensors made of it, `shared` those made of its mask alone: the layers of a stack make them
    once, and layers with position terms of their own still share those of the mask.
    """

    mask: Mask
    T: int
    S: int
    device: torch.device
    terms: Terms | None = None
    lowered: dict[Any, Any] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)
    by_heads: Mapping[int, "View"] = field(default_factory=dict)  # for attentions of another number of heads

    def at(self, heads: int) -> "View":
        """The view of an attention with this number of heads."""
        return self.by_heads.get(heads, self)

    def with_terms(self, terms: Terms | None) -> "View":
        """The same pairs with other position terms."""
        return replace(self, terms=terms, lowered={}, by_heads={})

    def with_mask(self, **changes: Any) -> "View":
        """The same positions with another mask; made once for all layers that need the same."""
        if all(getattr(self.mask, name) == value for name, value in changes.items()):
            return self
        key = ("mask", *changes.items())
        if key not in self.lowered:
            mask = replace(self.mask, **changes)
            self.lowered[key] = replace(self, mask=mask, lowered={}, shared={}, by_heads={})
        return self.lowered[key]

    def with_positions(
        self,
        position: Callable[["View"], Terms] | None,
        by_heads: Mapping[int, Callable[["View"], Terms]] | None = None,
    ) -> "View":
        """The view with the terms of a stack's position, and of those for other numbers of heads."""
        view = self if position is None else self.with_terms(position(self))
        others = {heads: self.with_terms(other(self)) for heads, other in (by_heads or {}).items()}
        return replace(view, by_heads=others) if others else view

    def shift(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        """Add the position offset, if there is one."""
        return x if self.terms is None or self.terms.offset is None else x + self.terms.offset

    def rotate(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        """Apply the rotary position, if there is one."""
        return x if self.terms is None or self.terms.rotation is None else self.terms.rotation(x)


@dataclass(frozen=True, slots=True)
class Memory:
    """The output of an encoder, for the decoder."""

    x: tuple[Float[Tensor, "b S D"], ...]  # one for all blocks, or one per decoder call
    seg: Int[Tensor, "b S"] | None = None


class Trace:
    """Attention weights recorded beside the forward pass: `weights["decoder.cross"][n]` belongs to the n-th call.

    In a decoding the calls of every step follow each other, each with the rows of that step.
    """

    def __init__(self) -> None:
        self.weights: dict[str, list[Tensor]] = {}

    def add(self, name: str, weights: Float[Tensor, "B H T S"]) -> None:
        """Record one call."""
        self.weights.setdefault(name, []).append(weights)


@dataclass(frozen=True, slots=True)
class Context:
    """All that a branch may read besides its input x. Built once per stack."""

    own: View
    cross: View | None = None
    memory: Memory | None = None
    losses: list[Tensor] | None = None  # auxiliary losses: a list in training, else None
    trace: Trace | None = None  # set to record attention weights

    def block(self, call: int) -> "Context":
        """The context of one call; differs only if every block has a memory of its own."""
        if self.memory is None or len(self.memory.x) == 1:
            return self
        return replace(self, memory=replace(self.memory, x=(self.memory.x[call],)))
