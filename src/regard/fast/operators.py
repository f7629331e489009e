"""Our own operators: how torch is told of kernels that it cannot look into."""

from functools import partial

import torch

NAMES = (
    "layer_norm", "layer_norm_backward", "linear_relu", "relu_backward",
    "attend_segments", "attend_segments_backward", "attend_joint", "attend_joint_backward",
)  # fmt: skip

# Declares a function on tensors, which it does not change, as an operator; kernels count on the strides they are given.
# Whoever launches one does so on the device of its tensors (`torch.cuda.device_of`): Triton takes the current one.
operator = partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.needs_exact_strides,))


def introduce() -> None:
    """Tell torch.compile of our operators before it meets them.

    Before 2.13 it describes an operator that it does not know for its log, wanted or not, with all that leads to it;
    what is used twice is described twice. Each norm of a sum doubles that, so that it would never come to an end.
    """
    if torch.__version__ < "2.13":  # compares numbers
        from torch._inductor.lowering import FALLBACK_ALLOW_LIST  # noqa: PLC0415  # takes seconds

        for name in NAMES:
            FALLBACK_ALLOW_LIST.add(f"regard::{name}")
