"""Memory-compressed attention equals that of memory-compressed-attention (lucidrains), for lengths divisible by 3.

What has to be mapped: the package shares one grouped convolution between keys and values, which is a block-diagonal
matrix per token here; it scales scores by the model width, has no bias in the projections, and always has a learned
null key. It pads a text on the left to a multiple of 3, so that its groups depend on the length of the text.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_compressed_attention import MemoryCompressedAttention
from torch import Tensor, nn

from regard.models.build import build
from regard.nn.branches.compressed_attention import CompressedAttention, CompressedAttentionModule
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.mask import Context, Mask, View
from regard.testing import tiny
from regard.tree import swap
from regard.weights import copy_from

pytestmark = pytest.mark.oracle

D, H, C = 16, 4, 3


def block_diagonal(weight: Tensor) -> Tensor:
    """Return the weight of a convolution with H groups (D, D / H, C) as a matrix (D, C D) over a group of tokens."""
    taps = [torch.block_diag(*tap.chunk(H)) for tap in weight.unbind(-1)]
    return torch.cat(taps, 1)


def copied(theirs: Any) -> dict[str, Tensor]:
    convolution = theirs.compress_fn.conv
    state = {
        "qkv.weight": theirs.to_qkv.weight,
        "qkv.bias": torch.zeros(3 * D, dtype=torch.float64),
        "null": torch.cat((theirs.null_k, theirs.null_v), -1).flatten(),
        "output.weight": theirs.to_out.weight,
        "output.bias": theirs.to_out.bias,
    }
    for name in ("key", "value"):
        state[f"compress.{name}.weight"] = block_diagonal(convolution.weight)
        state[f"compress.{name}.bias"] = convolution.bias
    return state


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_attention_equals_memory_compressed_attention(causal: bool) -> None:
    torch.manual_seed(0)
    spec = CompressedAttention(C, sink="null", inclusive=causal, scale=D**-0.5)
    model = swap(tiny.decoder_only() if causal else tiny.encoder_only(), SelfAttention, lambda _: spec)
    model = build(replace(model, d_model=D, heads=H)).double().eval()  # type: ignore[reportCallIssue]
    ours = next(module for module in model.modules() if isinstance(module, CompressedAttentionModule))
    theirs = MemoryCompressedAttention(D, heads=H, causal=causal, compression_factor=C).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    copy_from(ours, copied(theirs))
    for T in (3, 6, 21):
        x = torch.randn(2, T, D, dtype=torch.float64)
        with torch.no_grad():
            actual = ours(x, Context(View(Mask(causal=causal), T, T, x.device)))
            torch.testing.assert_close(actual, theirs(x), rtol=0, atol=1e-12)
