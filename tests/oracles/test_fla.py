"""The gated delta rule equals the reference functions of flash-linear-attention, by its authors, in float32."""

from typing import Any

import pytest
import torch
from fla.ops.gated_delta_rule import naive

from regard.fast.gated_delta import chunked_gated_delta_rule
from regard.nn.branches.gated_delta import gated_delta_rule, unit

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("ours", [gated_delta_rule, chunked_gated_delta_rule])
@pytest.mark.parametrize("theirs", [naive.naive_recurrent_gated_delta_rule, naive.naive_chunk_gated_delta_rule])
def test_outputs_and_states(ours: Any, theirs: Any) -> None:
    B, H, T, K, V = 2, 3, 150, 8, 6
    torch.manual_seed(0)
    q, k, v = unit(torch.randn(B, H, T, K)), unit(torch.randn(B, H, T, K)), torch.randn(B, H, T, V)
    log_decay, strength, state = -torch.rand(B, H, T), torch.rand(B, H, T), torch.randn(B, H, K, V)
    by_token = {"q": q, "k": k, "v": v, "g": log_decay, "beta": strength}
    y, last = theirs(
        **{name: x.transpose(1, 2) for name, x in by_token.items()}, initial_state=state, output_final_state=True
    )
    mine, mine_last = ours(q * K**-0.5, k, v, log_decay, strength, state)
    torch.testing.assert_close(mine, y.transpose(1, 2), rtol=0, atol=1e-5)
    torch.testing.assert_close(mine_last, last, rtol=0, atol=1e-5)
