# pyright: reportMissingParameterType=false, reportIndexIssue=false, reportMissingImports=false
"""Random numbers for dropout inside Triton kernels: a counter-based generator, evaluated again in the backward pass.

This module is imported only if there is a GPU, because Triton comes with the CUDA builds of torch.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor


@triton.jit
def keep_mask(seed, index, share):
    """Return a mask that is True at elements that dropout keeps, each with probability 1 - `share`.

    The mask depends only on `seed` and `index`. It is a hash of the index (Wellons' lowbias32), with one half of the
    seed added before the first multiplication and the other half between the two multiplications. Philox, the generator
    of torch and Triton, needs six times as many instructions and would take longer than the kernel's memory access.
    """
    h = index.to(tl.uint32) + seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) + (seed >> 32).to(tl.uint32)
    h *= 0x846CA68B
    return (h ^ (h >> 16)).to(tl.float32) >= share * 4294967296.0


def draw_seed(dropout: float, device: torch.device) -> Int[Tensor, " 1"] | None:
    """Return a random seed for `keep_mask`, drawn on the device, or None if the probability `dropout` is 0."""
    return torch.randint(2**62, (1,), device=device) if dropout > 0.0 else None
