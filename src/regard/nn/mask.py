"""Mask: which key each query may attend to; View and Context carry it through a forward pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.nn.memory import Memory
from regard.nn.pattern import AttentionPattern
from regard.nn.terms import Terms
from regard.nn.trace import Trace


@dataclass(frozen=True, slots=True)
class Mask:
    """A description of the visible (query, key) pairs; attention turns it into a tensor, once per stack.

    visible(i, j) = seg_i == seg_j != 0
                    and (not causal or prefix_j or pos_j <= pos_i)        (pos_j < pos_i when strict)
                    and attention_pattern(pos_i, pos_j)
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

    def dense(self, T: int, S: int, device: torch.device) -> Bool[Tensor, "b 1 t S"] | None:
        """The visibility of every pair, or None if nothing is hidden. Axes that do not matter have size 1."""
        conditions = self.conditions(T, S, device)
        return reduce(torch.logical_and, conditions)[:, None] if conditions else None

    def conditions(self, T: int, S: int, device: torch.device) -> list[Bool[Tensor, "b t S"]]:
        """The conditions of the definition that hide at least one key from a query."""
        conditions: list[Tensor] = []
        if self.packed:
            assert self.q_seg is not None
            assert self.k_seg is not None
            conditions.append(self.q_seg[:, :, None] == self.k_seg[:, None, :])
        if self.k_seg is not None and (self.packed or not self.order_hides_padding()):
            conditions.append((self.k_seg != 0)[:, None, :])
        causal = self.causal and not self.follows_all(S)
        if causal or self.attention_pattern is not None:
            q, k = self.positions(T, S, device)
            q, k = q[:, :, None], k[:, None, :]
            if causal:
                past = k < q if self.strict else k <= q
                conditions.append(past if self.prefix is None else past | self.prefix[:, None, :])
            if self.attention_pattern is not None:
                conditions.append(self.attention_pattern.visible(q, k))
        return conditions

    def order_hides_padding(self) -> bool:
        """Return whether causality alone hides the padding at the end of a row from its real tokens."""
        return self.causal and self.k_pos is None and self.prefix is None

    def follows_all(self, S: int) -> bool:
        """Return whether no query precedes any of the S keys, as in a step of decoding."""
        return not self.strict and self.q_pos is None and self.k_pos is None and self.start >= S - 1

    def bound(self, S: int) -> int:
        """An upper bound of all positions, on the host."""
        return self.longest if self.k_pos is not None and self.longest is not None else S

    def positions(self, T: int, S: int, device: torch.device) -> tuple[Int[Tensor, "#b T"], Int[Tensor, "#b S"]]:
        """The positions of queries and keys."""
        return self.queries(T, device), torch.arange(S, device=device)[None] if self.k_pos is None else self.k_pos

    def queries(self, T: int, device: torch.device) -> Int[Tensor, "#b T"]:
        """The positions of queries."""
        return torch.arange(self.start, self.start + T, device=device)[None] if self.q_pos is None else self.q_pos


@dataclass(frozen=True, slots=True)
class View:
    """T queries attending to S keys: mask, position terms and the tensors made of them, shared by a stack's layers."""

    mask: Mask
    T: int
    S: int
    device: torch.device
    terms: Terms | None = None
    lowered: dict[Any, Any] = field(default_factory=dict)  # tensors of mask and terms
    shared: dict[Any, Any] = field(default_factory=dict)  # tensors of the mask alone
    by_heads: Mapping[int, "View"] = field(default_factory=dict)  # for attentions of another number of heads

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

    def with_positions(self, position: Callable[["View"], Terms] | None, by_heads: Any = None) -> "View":
        """The view with the terms of a stack's position, and of those for other numbers of heads."""
        view = self if position is None else self.with_terms(position(self))
        others = {int(heads): self.with_terms(other(self)) for heads, other in (by_heads or {}).items()}
        return replace(view, by_heads=others) if others else view

    def shift(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        """Add the position offset, if there is one."""
        return x if self.terms is None or self.terms.offset is None else x + self.terms.offset

    def rotate(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        """Apply the rotary position, if there is one."""
        return x if self.terms is None or self.terms.rotation is None else self.terms.rotation(x)


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
