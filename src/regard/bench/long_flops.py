"""The FLOPs of a training step on long sequences. Pairs of query and key that a mask hides do not count."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard.batch import Batch
from regard.bench.long_models import LongModel, Size, smaller
from regard.fast.flex import mask_mod
from regard.fast.tiles import tiles
from regard.models.base import Model
from regard.models.build import build
from regard.models.cost import CountedForward
from regard.nn.mask import View

SHORT = 64  # tokens of the sequence in which the FLOPs outside attention are counted
TILE = 64
AT_ONCE = 2**24  # pairs whose mask is evaluated at once
TRAINING = 3  # a backward pass costs two forward passes


@dataclass(frozen=True)
class Call:
    """A call of attention: the FLOPs of each visible pair, and the number of visible pairs of a sequence."""

    flops_per_pair: int
    pairs: int


def step_flops(model: LongModel, size: Size, length: int) -> float:
    """Return the FLOPs of a training step per sequence of `length` tokens: three times those of a forward pass.

    A multiply-add counts as two. Matrix products outside attention are counted for a sequence of 64 tokens, and
    multiplied by length / 64. Attention costs 2 (d_head + d_value) for each head and each visible pair of a query and a
    key. The number of visible pairs is exact: it is counted in a narrow model with the same masks. Elementwise
    operations do not count, and neither do light and dynamic convolutions (see `models/cost.py`).
    """
    calls, count = _per_sequence(model, size)
    attention = 0
    if calls:
        narrow = build(model.attention_only().spec(smaller(size), length)).eval()
        pairs = [call.pairs for call in _recorded(narrow, length, torch.device("cpu"))[0]]
        attention = sum(call.flops_per_pair * number for call, number in zip(calls, pairs, strict=True))
    return TRAINING * (count * length / SHORT + attention)


@cache
def _per_sequence(model: LongModel, size: Size) -> tuple[list[Call], int]:
    """Return the calls of attention, and the FLOPs outside attention, of a forward pass over `SHORT` tokens."""
    whole = build(model.spec(size, max(SHORT, size.rank)), device="meta").eval().requires_grad_(False)
    return _recorded(whole, SHORT, torch.device("meta"))


def _recorded(model: Model, length: int, device: torch.device) -> tuple[list[Call], int]:
    """Run the model on one sequence without attention. Return the calls of attention, and the FLOPs of all the rest."""
    calls: list[Call] = []
    counted: dict[int, tuple[View, int]] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, view: View, **_: Any) -> Tensor:
        if id(view.mask) not in counted:  # layers with the same mask share the count; `view` keeps the mask alive
            counted[id(view.mask)] = view, visible_pairs(view) if device.type == "cpu" else 0
        heads, widths = q.shape[1], k.shape[-1] + v.shape[-1]
        calls.append(Call(2 * heads * widths, counted[id(view.mask)][1]))
        return q.new_zeros(*q.shape[:3], v.shape[-1])

    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = attend  # type: ignore[reportArgumentType]  # an attribute of this module alone
    ids = torch.zeros(1, length, dtype=torch.int64, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        CountedForward(model)(Batch(ids))
    return calls, counter.get_total_flops()


def visible_pairs(view: View) -> int:
    """Return the number of pairs (query, key) in which the mask of `view` makes the key visible, in one sequence."""
    mask = view.mask
    if not mask.causal and mask.attention_pattern is None and mask.k_seg is None:
        return view.T * view.S
    pairs = tiles(view, TILE)
    rows, columns = (pairs.some & ~pairs.every)[0].nonzero(as_tuple=True)
    return int(pairs.every.sum()) * TILE**2 + sum(_in_tiles(view, rows, columns))


def _in_tiles(view: View, rows: Tensor, columns: Tensor) -> Iterator[int]:
    shown, inside = mask_mod(view), torch.arange(TILE)
    for row, column in zip(rows.split(AT_ONCE // TILE**2), columns.split(AT_ONCE // TILE**2), strict=True):
        i, j = (row[:, None] * TILE + inside)[:, :, None], (column[:, None] * TILE + inside)[:, None, :]
        real = (i < view.T) & (j < view.S)
        yield int((shown(0, None, i.clamp(max=view.T - 1), j.clamp(max=view.S - 1)) & real).sum())
