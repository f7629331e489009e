"""Multi-head attention equals that of Joey NMT with the same weights."""

import pytest
import torch
from joeynmt.transformer_layers import MultiHeadedAttention

from regard.models.build import build
from regard.nn.mask import Context, Mask, View
from regard.testing import tiny
from regard.weights import cat, copy_from

pytestmark = pytest.mark.oracle


def test_attention_equals_joeynmt() -> None:
    torch.manual_seed(0)
    theirs = MultiHeadedAttention(4, 16, dropout=0.0).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = build(tiny.decoder_only()).double().eval()
    ours = model.get_submodule("decoder.blocks.0.branches.0.branch")
    copy_from(ours, {"qkv": cat("q_layer", "k_layer", "v_layer"), "output": "output_layer"}, theirs)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    mask = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = theirs(x, x, x, mask=mask)[0]
        actual = ours(x, Context(View(Mask(causal=True), 5, 5, torch.device("cpu"))))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
