"""Numerical precision of single operations: float32 inside, whatever the type of the activations."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def widen(x: Tensor) -> Tensor:
    """x in at least float32: squares, exponentials and sums overflow or lose digits in half precision."""
    return x.float() if x.dtype in HALVES else x


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast: for scores whose small differences decide where a token is routed."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
