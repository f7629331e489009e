"""Model FLOP utilisation: the share of a GPU's peak FLOP/s that the model uses (Chowdhery et al. 2022).

    MFU = 3 * forward FLOPs per token * tokens per second / peak

A backward pass costs two forward passes. Padding and recomputation do not count.
"""

import torch

# Dense bfloat16 FLOP/s of tensor cores, from data sheets. The first key that occurs in the device's name applies.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Return the peak FLOP/s of a device in half precision, or None if it is unknown or `dtype` is None (float32)."""
    if device.type != "cuda" or dtype is None:
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in PEAKS.items() if known in name), None)


def utilisation(flops_per_token: float, tokens_per_second: float, peak: float) -> float:
    """Return the MFU as a fraction of 1. `flops_per_token` counts a forward pass; `peak` is in FLOP/s."""
    return 3 * flops_per_token * tokens_per_second / peak
