"""Attention masks (`Mask`), and the classes that pass masks to the layers (`View` and `Context`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.nn.memory import Memory
from regard.nn.pattern import AttentionPattern, visible_under
from regard.nn.terms import Terms
from regard.nn.trace import Trace


@dataclass(frozen=True, slots=True)
class Mask:
    """Attention mask, computed from the segments seg (0: padding) and the positions pos of query i and key j.

    visible(i, j) = seg_i == seg_j != 0
                    and (not causal or prefix_j or pos_j <= pos_i)        (pos_j < pos_i when strict)
                    and attention_pattern(pos_i, pos_j)
    """

    causal: bool = False
    strict: bool = False  # j < i only, as in COMP7607; the first query then attends to nothing
    start: int = 0  # position of the first query if q_pos is None
    q_pos: Int[Tensor, "#b T"] | None = None  # None: start, start + 1, ...
    k_pos: Int[Tensor, "#b S"] | None = None  # None: 0, 1, ...
    q_seg: Int[Tensor, "B T"] | None = None  # segment (text) of each token, 0: padding; None: no padding
    k_seg: Int[Tensor, "B S"] | None = None
    packed: bool = False  # whether batch rows may have several segments; False: one segment, then padding
    prefix: Bool[Tensor, "B S"] | None = None  # keys of the prefix in a prefix LM, visible to their whole segment
    attention_pattern: AttentionPattern | None = None
    segments: int = 1  # maximum number of segments in a batch row
    longest: int | None = None  # maximum number of tokens in a segment; None: the length of a row
    columns: int | None = None  # number of positions, if the keys are in the slots of a ring cache, in another order

    def dense(self, T: int, S: int, device: torch.device) -> Bool[Tensor, "b 1 t S"] | None:
        """Return the mask as a tensor (True: visible), or None if all keys are visible. Broadcast axes have size 1."""
        conditions = self.conditions(T, S, device)
        return reduce(torch.logical_and, conditions)[:, None] if conditions else None

    def conditions(self, T: int, S: int, device: torch.device) -> list[Bool[Tensor, "b t S"]]:
        """Return the conditions of the mask as boolean tensors. Conditions that hide no key are left out."""
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
                conditions.append(visible_under(self, self.attention_pattern, q, k, S))
        return conditions

    def order_hides_padding(self) -> bool:
        """Return whether causality suffices to hide the padding at the end of each batch row from real tokens."""
        return self.causal and self.k_pos is None and self.prefix is None

    def follows_all(self, S: int) -> bool:
        """Return whether causality lets every query attend to all S keys, as in a decoding step."""
        return not self.strict and self.q_pos is None and self.k_pos is None and self.start >= S - 1

    def bound(self, S: int) -> int:
        """Return an upper bound of all positions, without a device sync."""
        return self.longest if self.k_pos is not None and self.longest is not None else S

    def positions(self, T: int, S: int, device: torch.device) -> tuple[Int[Tensor, "#b T"], Int[Tensor, "#b S"]]:
        """Return the positions of the T queries and of the S keys."""
        q = torch.arange(self.start, self.start + T, device=device)[None] if self.q_pos is None else self.q_pos
        return q, torch.arange(S, device=device)[None] if self.k_pos is None else self.k_pos


@dataclass(frozen=True, slots=True)
class View:
    """Attention mask and position terms for T queries and S keys. All layers of a stack share a view and its caches."""

    mask: Mask
    T: int
    S: int
    device: torch.device
    terms: Terms | None = None
    lowered: dict[Any, Any] = field(default_factory=dict)  # cache of tensors computed from mask and terms
    shared: dict[Any, Any] = field(default_factory=dict)  # cache of tensors computed from the mask alone
    by_heads: Mapping[int, "View"] = field(default_factory=dict)  # for attention layers with other numbers of heads

    def with_terms(self, terms: Terms | None) -> "View":
        """Return a copy of this view with `terms` as its position terms."""
        return replace(self, terms=terms, lowered={}, by_heads={})

    def with_mask(self, **changes: Any) -> "View":
        """Return a copy of this view with a changed mask. The copy is cached for other layers with the same changes."""
        if all(getattr(self.mask, name) == value for name, value in changes.items()):
            return self
        key = ("mask", *changes.items())
        if key not in self.lowered:
            mask = replace(self.mask, **changes)
            self.lowered[key] = replace(self, mask=mask, lowered={}, shared={}, by_heads={})
        return self.lowered[key]

    def with_positions(self, position: Callable[["View"], Terms] | None, by_heads: Any = None) -> "View":
        """Return a copy with the terms of `position`. `by_heads` has the schemes of layers with other head counts."""
        view = self if position is None else self.with_terms(position(self))
        others = {int(heads): self.with_terms(other(self)) for heads, other in (by_heads or {}).items()}
        return replace(view, by_heads=others) if others else view

    def shift(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        """Add the position offset to x, if the position scheme has one."""
        return x if self.terms is None or self.terms.offset is None else x + self.terms.offset

    def rotate(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        """Rotate x by its positions, if the position scheme is rotary."""
        return x if self.terms is None or self.terms.rotation is None else self.terms.rotation(x)


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs that all layers of a stack share: masks, encoder output, and lists that collect losses and traces."""

    own: View  # for self-attention
    cross: View | None = None  # for cross-attention
    memory: Memory | None = None  # encoder output
    losses: list[Tensor] | None = None  # auxiliary losses: a list in training, otherwise None
    trace: Trace | None = None  # records attention weights; None: no recording
    shared: nn.ModuleDict | None = None  # modules that the layers of the stack share, by kind of layer

    def block(self, call: int) -> "Context":
        """Return the context of the block at depth `call`. It is `self` if all blocks share one encoder output."""
        if self.memory is None or len(self.memory.x) == 1:
            return self
        return replace(self, memory=replace(self.memory, x=(self.memory.x[call],)))
