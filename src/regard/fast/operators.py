"""Custom operators: register our kernels with torch, which cannot trace into them."""

from functools import partial

import torch

NAMES = (
    "layer_norm", "layer_norm_backward", "linear_relu", "relu_backward",
    "attend_segments", "attend_segments_backward", "attend_joint", "attend_joint_backward",
)  # fmt: skip

# Declare a function that changes none of its tensors as an operator; kernels rely on the strides of their arguments.
# A kernel is launched on the device of its tensors (`torch.cuda.device_of`): Triton takes the current device.
operator = partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.needs_exact_strides,))


def introduce() -> None:
    """Announce our operators to torch.compile before it traces them.

    Before 2.13 torch formats an unknown operator for its log, with the whole graph before it; a value that is used
    twice is formatted twice. Each norm of a sum doubles the work, so that compiling would never end.
    """
    if torch.__version__ < "2.13":  # compares numbers
        from torch._inductor.lowering import FALLBACK_ALLOW_LIST  # noqa: PLC0415  # takes seconds

        for name in NAMES:
            FALLBACK_ALLOW_LIST.add(f"regard::{name}")
