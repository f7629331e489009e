"""The block of ByteNet equals that of sequence-models (Microsoft) with the same weights."""

from typing import Any

import pytest
import torch
from sequence_models.convolutional import ByteNetBlock
from torch import Tensor, nn

from regard.models.baselines.bytenet import ByteNet
from regard.models.build import build
from regard.nn.cache import ConvolutionCache, Rows
from regard.nn.mask import Mask, View
from regard.weights import copy_from

pytestmark = pytest.mark.oracle

B, T, D = 2, 23, 12


def copied(theirs: Any) -> dict[str, Tensor]:
    """Return their weights under our names; their 1 x 1 convolutions are our projections."""
    first, second = theirs.sequence1, theirs.sequence2
    convolution = getattr(theirs.conv, "conv", theirs.conv)
    state = {f"norms.{i}.{kind}": t for i, norm in enumerate((first[0], first[3], second[0]))
             for kind, t in norm.state_dict().items()}  # fmt: skip
    for name, part in (("narrow", first[2].conv), ("widen", second[2].conv)):
        state |= {f"{name}.weight": part.weight[:, :, 0], f"{name}.bias": part.bias}
    weight = convolution.weight.transpose(1, 2).flatten(1)  # taps before channels
    return state | {"convolution.weight": weight, "convolution.bias": convolution.bias}


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (3, 4), (5, 2), (1, 1)])
def test_a_block_equals_sequence_models(causal: bool, kernel: int, dilation: int) -> None:
    torch.manual_seed(0)
    spec = ByteNet(vocab=9, d_model=D, encoder_blocks=1, decoder_blocks=1, kernel=kernel, dilations=(dilation,))
    model: Any = build(spec).double().eval()
    ours = (model.decoder if causal else model.encoder).blocks[0]
    theirs = ByteNetBlock(D, D // 2, D, kernel, dilation=dilation, causal=causal).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    copy_from(ours, copied(theirs))
    x = torch.randn(B, T, D, dtype=torch.float64)
    seg = torch.tensor([[1] * T, [1] * 11 + [0] * (T - 11)])
    with torch.no_grad():
        expected = theirs(x, input_mask=(seg != 0).double()[:, :, None])
        actual = ours(x, View(Mask(causal=causal, q_seg=seg, k_seg=seg), T, T, x.device))
        torch.testing.assert_close(actual[seg != 0], expected[seg != 0], rtol=0, atol=1e-12)
        if causal:  # and step by step
            rows = Rows(torch.zeros(B, dtype=torch.int64), T)
            ring = ours.start(rows)
            assert (ring is None) == (kernel == 1)
            assert ring is None or isinstance(ring, ConvolutionCache)
            for t in range(T):
                step = ours(x[:, t : t + 1], View(rows.mask(1), 1, t + 1, x.device), ring)
                torch.testing.assert_close(step[0, 0], expected[0, t], rtol=0, atol=1e-12)
                rows.advance(1, None)
