"""Model FLOP utilisation: how much of what a GPU could multiply goes into the model (Chowdhery et al. 2022).

    MFU = 3 * forward FLOPs per token * tokens per second / peak

A backward pass costs two forward ones. What is computed for padding, or twice, is no use and is not counted.
"""

from types import MappingProxyType

import torch

# Dense bfloat16 FLOP/s on tensor cores, as the data sheets say; the first name that a device's name contains.
PEAKS = MappingProxyType(
    {
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
)


def peak(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """What a device could multiply in half precision; None if that is not known, or not what it is used in."""
    if device.type != "cuda" or dtype is None:
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in PEAKS.items() if known in name), None)


def utilisation(flops_per_token: float, tokens_per_second: float, peak: float) -> float:
    """The share of the peak that training the model takes up."""
    return 3 * flops_per_token * tokens_per_second / peak
