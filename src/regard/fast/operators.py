"""Register our kernels as custom operators of torch: it cannot trace Triton, and would unroll loops over chunks."""

from functools import partial

import torch

NAMES = (
    "layer_norm", "layer_norm_backward", "linear_relu", "relu_backward",
    "attend_segments", "attend_segments_backward", "attend_joint", "attend_joint_backward",
    "chunk_states", "chunk_states_backward",
)  # fmt: skip

# A decorator that declares a function as an operator. The function must not change its arguments. The tag keeps the
# strides of the arguments, on which kernels rely. Callers launch a kernel inside `torch.cuda.device_of` for a tensor,
# because Triton uses the current device.
operator = partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.needs_exact_strides,))


def introduce() -> None:
    """Add our operators to the fallback list of `torch.compile`. Otherwise, compilation may never end.

    Before version 2.13, torch formats an unlisted operator for the log, together with the whole graph before it. A
    value that is used twice is formatted twice, so that each norm of a residual sum doubles the work.
    """
    if torch.__version__ < "2.13":  # this comparison is numeric
        from torch._inductor.lowering import FALLBACK_ALLOW_LIST  # noqa: PLC0415  # takes seconds

        for name in NAMES:
            FALLBACK_ALLOW_LIST.add(f"regard::{name}")
