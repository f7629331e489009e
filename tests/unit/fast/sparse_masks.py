"""Masks with attention patterns, for tests of sparse kernels: padded, packed, strict and prefix masks of two rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.nn.big_bird import BigBird, CausalBigBird
from regard.nn.mask import Mask
from regard.nn.pattern import (
    AnyOf,
    AttentionPattern,
    Blocks,
    DilatedWindow,
    GlobalTokens,
    KeepPrefix,
    Sinks,
    Window,
)

T = 200  # two tiles of 128 or four of 64, the last one shorter
PATTERNS: dict[str, AttentionPattern | None] = {
    "no pattern": None,
    "window": Window(50),
    "dilated window": DilatedWindow(20, 3),
    "blocks": Blocks(33),
    "blocks and neighbours": Blocks(40, 1),
    "global tokens": GlobalTokens(3),
    "sinks": Sinks(40, 5),
    "window and global tokens": AnyOf((Window(30), GlobalTokens(2))),
    "big bird": BigBird(16, 3, 2),
    "big bird and window": AnyOf((BigBird(16, 3, 2), Window(5))),
    "large blocks of big bird": BigBird(64),
    "causal big bird": CausalBigBird(16, 2, 2),
    "prefix kept": KeepPrefix(Window(20)),
}


def segments(lengths: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    """Return (segment numbers, positions) of rows with texts of these lengths, followed by padding."""
    seg, pos = torch.zeros(len(lengths), T, dtype=torch.int64), torch.zeros(len(lengths), T, dtype=torch.int64)
    for b, row in enumerate(lengths):
        at = 0
        for n, length in enumerate(row, 1):
            seg[b, at : at + length], pos[b, at : at + length] = n, torch.arange(length)
            at += length
    return seg, pos


def masks() -> Iterator[tuple[str, Mask]]:
    """Yield every pattern in every kind of mask in which it can be used, with a name."""
    padded, (packed, pos) = segments(((170,), (60,)))[0], segments(((60, 80, 45), (10, 130)))
    prefix = torch.arange(T) < torch.tensor([[70], [33]])
    kinds = {
        "": {},
        "padded": {"q_seg": padded, "k_seg": padded},
        "packed": {
            **{"q_seg": packed, "k_seg": packed, "q_pos": pos, "k_pos": pos},
            **{"packed": True, "segments": 3, "longest": 130},
        },
        "strict": {"strict": True},
        "prefix": {"prefix": prefix},
    }
    for name, pattern in PATTERNS.items():
        for causal in (False, True):
            for kind, options in kinds.items():
                if kind in ("strict", "prefix") and not causal:
                    continue
                if pattern is not None and pattern.refusal(causal, kind == "prefix") is not None:
                    continue
                yield (
                    f"{name}, {kind or 'plain'}{', causal' if causal else ''}",
                    Mask(
                        causal=causal,
                        attention_pattern=pattern,
                        **options,
                    ),
                )
