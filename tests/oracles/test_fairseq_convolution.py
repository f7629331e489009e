"""Lightweight and dynamic convolutions equal those of fairseq with the same weights, in encoder and decoder."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fairseq.modules import DynamicConv1dTBC, LightweightConv1dTBC

from regard.nn.branches.convolution import SharedDynamicConv, SharedLightConv
from regard.nn.core import Site
from regard.nn.init import Xavier
from regard.nn.linear import Dense
from regard.nn.mask import Context, Mask, View

pytestmark = pytest.mark.oracle

B, T, D, H = 2, 17, 12, 3  # T exceeds all filters: fairseq normalises truncated dynamic filters


def site(causal: bool) -> Site:
    return Site(
        d_model=D,
        heads=H,
        d_head=4,
        d_value=4,
        side="decoder" if causal else "encoder",
        causal=causal,
        layer=0,
        depth=1,
        encoder_depth=1,
        decoder_depth=1,
        branches=5,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        linear_=Dense(),
        init_=Xavier(),
    )


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("width", [3, 5, 15])
@pytest.mark.parametrize("dynamic", [False, True], ids=["light", "dynamic"])
def test_a_branch_equals_fairseq(dynamic: bool, width: int, causal: bool) -> None:
    """GLU, convolution and projection, as in fairseq's LightConv layers, which set padding to zero before."""
    torch.manual_seed(0)
    spec = SharedDynamicConv(width) if dynamic else SharedLightConv(width)
    ours: Any = spec.build(site(causal)).double()
    kind = DynamicConv1dTBC if dynamic else LightweightConv1dTBC
    padding = width - 1 if causal else width // 2
    theirs = kind(D, width, padding_l=padding, num_heads=H, weight_softmax=True).double()
    for parameter in (*ours.parameters(), *theirs.parameters()):
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        if dynamic:  # in fairseq the taps of a head are adjacent, here the heads of a tap
            rows = theirs.weight_linear.weight.view(H, width, D).transpose(0, 1)
            ours.filters.predict.weight.copy_(rows.reshape(H * width, D))
        else:
            ours.filters.weight.copy_(theirs.weight.view(H, width))
        x = torch.randn(B, T, D, dtype=torch.float64)
        seg = torch.tensor([[1] * T, [1] * 4 + [0] * (T - 4)])
        g = F.glu(ours.gated(x), -1)
        zeroed = g if causal else g.masked_fill((seg == 0)[:, :, None], 0.0)
        y = theirs(zeroed.transpose(0, 1).contiguous()).transpose(0, 1)
        actual = ours(x, Context(View(Mask(causal=causal, q_seg=seg, k_seg=seg), T, T, x.device)))
    # fairseq always computes the softmax of a learned filter in float32.
    torch.testing.assert_close(actual[seg != 0], ours.output(y)[seg != 0], rtol=0, atol=1e-9 if dynamic else 1e-6)
