"""Helpers that run single operations in float32, whatever the dtype of the activations."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def widen(x: Tensor) -> Tensor:
    """Return x in at least float32. In half precision, squares, exponentials and sums overflow or lose digits."""
    return x.float() if x.dtype in HALVES else x


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that disables autocast, for computations in which rounding errors matter."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
