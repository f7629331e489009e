import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.attention_heads import beams_apart
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.cache import Rows, StaticKV
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.rms_norm import RMSNorm
from regard.nn.trace import Trace
from tests.unit.nn.branches.random_branch import branch_of

MakeSite = Callable[..., Site]
Naive = Callable[..., Tensor]
CPU = torch.device("cpu")
T, S = 4, 6
SEG = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def context(memory: Tensor, T: int = T, mask: Mask | None = None, **more: Any) -> Context:
    view = View(mask or Mask(k_seg=SEG), T, memory.shape[1], CPU)
    return Context(view, view, Memory((memory,)), **more)


VARIANTS = {
    "plain": CrossAttention(),
    "multi-query": CrossAttention(kv_heads=1),
    "d_value free": CrossAttention(d_head=5, d_value=7),
    "no output projection": CrossAttention(output=False),
    "unscaled, no biases": CrossAttention(scale="none", bias=False),
    "query-key norm": CrossAttention(query_key_norm=RMSNorm()),
}


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=list(VARIANTS))
def test_by_formula(spec: CrossAttention, site: MakeSite, naive: Naive) -> None:
    """C50: queries from x, keys and values from the memory."""
    branch: Any = branch_of(spec, site())
    x, memory = torch.randn(2, T, 12), torch.randn(2, S, 12)
    G, H = branch.kv_heads, branch.heads
    K, V = branch.widths[0] // G, branch.widths[1] // G

    def heads(y: Tensor, count: int, width: int, norm: Any = None) -> Tensor:
        y = torch.stack([y[:, :, h * width : (h + 1) * width] for h in range(count)], 1)
        if norm is None or isinstance(norm, nn.Identity):
            return y
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    q = heads(branch.query(x), H, K, branch.query_norm)
    kv = branch.kv(memory)
    k, v = heads(kv[:, :, : G * K], G, K, branch.key_norm), heads(kv[:, :, G * K :], G, V)
    y = naive(q, k, v, Mask(k_seg=SEG), 1.0 if spec.scale == "none" else 1 / math.sqrt(K))
    merged = torch.cat([y[:, h] for h in range(H)], -1)
    torch.testing.assert_close(branch(x, context(memory)), branch.output(merged), rtol=0, atol=1e-12)


def test_permuting_the_memory_changes_nothing(site: MakeSite) -> None:
    branch, x, memory = branch_of(CrossAttention(), site()), torch.randn(2, T, 12), torch.randn(2, S, 12)
    order = torch.randperm(S)
    permuted = context(memory[:, order], mask=Mask(k_seg=SEG[:, order]))
    torch.testing.assert_close(branch(x, permuted), branch(x, context(memory)))


def test_no_gradient_reaches_padding(site: MakeSite) -> None:
    branch, memory = branch_of(CrossAttention(), site()), torch.randn(2, S, 12, requires_grad=True)
    branch(torch.randn(2, T, 12), context(memory)).square().sum().backward()
    assert memory.grad is not None
    assert bool((memory.grad[1, 3:] == 0).all())
    assert bool((memory.grad[SEG == 1] != 0).any(-1).all())


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("spec", VARIANTS.values(), ids=list(VARIANTS))
def test_beams_share_the_memory_of_their_source(spec: CrossAttention, beams: int, steps: int, site: MakeSite) -> None:
    """Folding beams into queries equals repeating the memory for each beam, also in the trace."""
    branch, memory = branch_of(spec, site()), torch.randn(2, S, 12)
    x, folded_trace, repeated_trace = torch.randn(2 * beams, steps, 12), Trace(), Trace()
    state = branch.start(Rows(torch.zeros(2 * beams, dtype=torch.int64), 9), context(memory))
    assert isinstance(state, StaticKV)
    assert state.keys.shape[0] == 2  # never copied
    folded = branch(x, context(memory, beams * steps, trace=folded_trace), state)
    repeated = branch(
        x,
        context(
            memory.repeat_interleave(beams, 0),
            steps,
            Mask(k_seg=SEG.repeat_interleave(beams, 0)),
            trace=repeated_trace,
        ),
    )
    torch.testing.assert_close(folded, repeated, rtol=0, atol=1e-12)
    torch.testing.assert_close(folded_trace.weights["decoder.cross"], repeated_trace.weights["decoder.cross"])


def test_beams_apart_returns_one_row_per_beam() -> None:
    y = torch.randn(2, 3, 4 * 5, 6)
    rows = beams_apart(y, 4, 5)
    for b in range(2):
        for beam in range(4):
            assert torch.equal(rows[4 * b + beam], y[b, :, 5 * beam : 5 * beam + 5])
    assert beams_apart(y, 1, 20) is y


def test_cross_attention_without_encoder_is_refused(site: MakeSite) -> None:
    for changes in ({"side": "encoder"}, {"encoder_depth": 0}):
        with pytest.raises(
            SpecError, match=r"^stack\.pattern\[0\]\.kind: cross-attention needs an encoder to attend to"
        ):
            CrossAttention().build(site(path="stack.pattern[0]", **changes))


def test_without_output_projection_the_heads_must_add_up_to_d_model(site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^output: .* d_model 12, not 3 x 5"):
        CrossAttention(output=False, d_value=5).build(site())


def test_sizes_must_be_positive() -> None:
    with pytest.raises(SpecError, match=r"^d_head: must be at least 1, not 0"):
        CrossAttention(d_head=0)
