"""Mask: who sees whom, as a description. A kernel lowers it to what it needs, once per stack."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.nn.pattern import AttentionPattern


@dataclass(frozen=True, slots=True)
class Mask:
    """A key is visible iff it is in the query's segment, not after the query when causal, and within sight.

    visible(i, j) = seg_i == seg_j != 0
                    and (not causal or prefix_j or pos_j <= pos_i)        (pos_j < pos_i when strict)
                    and sight(pos_i, pos_j)
                    and shown_ij

    Everything is optional; what is None costs nothing. Defaults are None or primitives: torch.compile cannot build
    instances of user classes as defaults inside a traced forward pass.
    """

    causal: bool = False
    strict: bool = False  # j < i only, as COMP7607 writes it; the first query then sees nothing
    start: int = 0  # position of the first query where q_pos is None
    q_pos: Int[Tensor, "#b T"] | None = None  # None: start, start + 1, ...
    k_pos: Int[Tensor, "#b S"] | None = None  # None: 0, 1, ...
    q_seg: Int[Tensor, "B T"] | None = None  # 0 is padding; None: all real
    k_seg: Int[Tensor, "B S"] | None = None
    packed: bool = False  # False promises that a row is one segment followed by padding
    prefix: Bool[Tensor, "B S"] | None = None  # keys that everybody in their segment sees: prefix LM
    attention_pattern: AttentionPattern | None = None
    segments: int = 1  # most segments in a row: a fixed size, so that packed batches compile once
    longest: int | None = None  # no segment is longer than this; None: it may fill the row
    # Pair by pair, (b, T, S): the slots that a beam's text runs through. Made on demand, as there is a shorter way.
    shown: Callable[[], Tensor] | None = None
    told: bool = False  # promises that nothing is shown that comes later: causality says nothing new

    def is_plain(self, T: int, S: int) -> bool:
        """Whether `causal` says it all, so that a kernel needs a flag and no tensor.

        Right padding needs no tensor either: a real query never looks to its right.
        """
        aligned = self.start == 0 and self.q_pos is None and self.k_pos is None and T == S
        return self.causal and aligned and not self._has_pattern()

    def sees_everything(self, S: int) -> bool:
        """Whether no key is hidden from any query: cross-attention without padding, or one token after its past."""
        if self._has_pattern():
            return False
        if self.causal:
            return self.q_pos is None and self.k_pos is None and self.start >= S - 1
        return self.k_seg is None

    def _has_pattern(self) -> bool:
        past = self.causal and (self.strict or self.prefix is not None)
        return past or self.packed or self.attention_pattern is not None or self.shown is not None

    def _ordered(self) -> bool:
        """Whether order alone hides the padding at the end of a row from its real tokens."""
        return self.causal and self.k_pos is None and self.prefix is None

    def may_hide_all(self) -> bool:
        """Whether a query may be left without any key: the first of a strict mask, the padding of packed rows.

        Padding that stands out of sight of all real tokens is another.
        """
        if self.attention_pattern is not None and (
            self.attention_pattern.may_hide_all or (self.k_seg is not None and not self.causal)
        ):
            return True
        return self.packed or (self.causal and self.strict)

    def bound(self, S: int) -> int:
        """A host-side number above every position: the longest segment where they count within it, or all of S."""
        return self.longest if self.k_pos is not None and self.longest is not None else S

    def positions(self, T: int, S: int, device: torch.device) -> tuple[Int[Tensor, "#b T"], Int[Tensor, "#b S"]]:
        """Where the queries and the keys are, as tensors."""
        q = self.queries(T, device)
        k = self.k_pos if self.k_pos is not None else torch.arange(S, device=device)[None]
        return q, k

    def queries(self, T: int, device: torch.device) -> Int[Tensor, "#b T"]:
        """Where the queries are."""
        return self.q_pos if self.q_pos is not None else torch.arange(self.start, self.start + T, device=device)[None]

    def dense(self, T: int, S: int, device: torch.device) -> Bool[Tensor, "b 1 t S"] | None:
        """The visibility of every pair, or None if all is visible. Axes that do not matter have size 1."""
        if self.sees_everything(S):
            return None
        terms: list[Tensor] = []
        if self.packed:
            assert self.q_seg is not None
            assert self.k_seg is not None
            terms.append((self.q_seg[:, :, None] == self.k_seg[:, None, :]) & (self.k_seg != 0)[:, None, :])
        elif self.k_seg is not None and not self._ordered():
            terms.append((self.k_seg != 0)[:, None, :])
        if self.causal or self.attention_pattern is not None:
            q, k = self.positions(T, S, device)
            q, k = q[:, :, None], k[:, None, :]
            if self.causal and (self.strict or not self.told):
                past = k < q if self.strict else k <= q
                terms.append(past if self.prefix is None else past | self.prefix[:, None, :])
            if self.attention_pattern is not None:
                terms.append(self.attention_pattern.visible(q, k))
        if self.shown is not None:
            terms.append(self.shown())
        visible = terms[0]
        for term in terms[1:]:
            visible = visible & term
        return visible[:, None]

    def predicate(self, T: int, S: int, device: torch.device) -> Callable[[Any, Any, Any, Any], Tensor]:
        """The same as a FlexAttention `mask_mod(b, h, i, j)`."""
        q_pos, k_pos = self.positions(T, S, device)
        q_row, k_row = q_pos.shape[0] > 1, k_pos.shape[0] > 1
        shown = None if self.shown is None else self.shown()

        @no_type_check  # FlexAttention counts the arguments, which a checking wrapper would hide
        def visible(b: Any, h: Any, i: Any, j: Any) -> Tensor:  # noqa: ARG001  # the signature is FlexAttention's
            q, k = q_pos[b if q_row else 0, i], k_pos[b if k_row else 0, j]
            seen = torch.ones_like(q == k)
            if self.packed:
                assert self.q_seg is not None
                assert self.k_seg is not None
                seen = seen & (self.q_seg[b, i] == self.k_seg[b, j]) & (self.k_seg[b, j] != 0)
            elif self.k_seg is not None and not self._ordered():
                seen = seen & (self.k_seg[b, j] != 0)
            if self.causal:
                past = k < q if self.strict else k <= q
                seen = seen & (past if self.prefix is None else past | self.prefix[b, j])
            if self.attention_pattern is not None:
                seen = seen & self.attention_pattern.visible(q, k)
            if shown is not None:
                seen = seen & shown[b, i, j]
            return seen

        return visible

    def lengths(self, T: int, S: int, rows: int, device: torch.device) -> tuple[Int[Tensor, " r"], Int[Tensor, " r"]]:
        """Cumulative lengths of the segments of all rows laid end to end, for kernels that take them (varlen).

        Segments must be numbered 1, 2, ... along a row, padding (0) last; query and key rows must number alike. The
        result has a fixed size: segments that a row lacks are empty, and padding is more sequences, none of which is
        longer than `longest` either (a kernel would leave the rest of it unwritten).
        """
        piece = self.longest or max(T, S)
        pieces = -(-max(T, S) // piece)
        return tuple(  # type: ignore[reportReturnType]
            self._cumulative(seg, width, rows, piece, pieces, device)
            for seg, width in ((self.q_seg, T), (self.k_seg, S))
        )

    def _cumulative(
        self, seg: Tensor | None, width: int, rows: int, piece: int, pieces: int, device: torch.device
    ) -> Int[Tensor, " r"]:
        if seg is None:
            seg = torch.ones(rows, width, dtype=torch.int64, device=device)
        slots = self.segments + pieces
        padding = seg == 0
        slot = torch.where(padding, self.segments + (padding.cumsum(1) - 1) // piece, seg.long() - 1)
        slot = slot + slots * torch.arange(rows, device=device)[:, None]
        ones = torch.ones_like(slot, dtype=torch.int32).flatten()
        counts = torch.zeros(rows * slots + 1, dtype=torch.int32, device=device)
        return counts.scatter_add(0, slot.flatten() + 1, ones).cumsum(0, dtype=torch.int32)
