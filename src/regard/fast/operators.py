"""Register our kernels as custom operators: torch.compile cannot trace Triton, and would unroll loops over chunks."""

from functools import partial

import torch

NAMES = (
    "layer_norm", "layer_norm_backward", "linear_relu", "relu_backward",
    "attend_segments", "attend_segments_backward", "attend_joint", "attend_joint_backward",
    "chunk_states", "chunk_states_backward",
)  # fmt: skip

# A decorator that declares a function as an operator. The function must not change its arguments. Because of the tag,
# torch.compile keeps the strides of the arguments; kernels rely on them. A kernel must be launched inside
# `torch.cuda.device_of(x)` for one of its arguments, because Triton uses the current device.
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
