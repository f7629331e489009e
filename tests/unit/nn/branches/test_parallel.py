from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.errors import SpecError
from regard.nn.branches.convolution import LightConv
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.evolved import EvolvedDecoderConv
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.parallel import Parallel
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.cache import KVCache, Rows, StaticKV
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.residual import PreNorm
from regard.nn.trace import Trace
from tests.unit.nn.branches.random_branch import branch_of

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
D, T, S = 12, 5, 4


def context(mask: Mask, memory: torch.Tensor, trace: Trace | None = None) -> Context:
    cross = View(Mask(), T, S, CPU)
    return Context(View(mask, T, T, CPU), cross, Memory((memory,)), trace=trace)


def test_output_is_the_sum_of_the_branches(site: MakeSite) -> None:
    spec = Parallel((SelfAttention(heads=6, d_head=4), CrossAttention(), FeedForward(7)))
    branch, x, trace = branch_of(spec, site()), torch.randn(2, T, D), Trace()
    ctx = context(Mask(causal=True), torch.randn(2, S, D), trace)
    expected = sum(part(x, ctx) for part in branch.branches)
    trace.weights.clear()
    torch.testing.assert_close(branch(x, ctx), expected)
    assert {name: [w.shape[1] for w in weights] for name, weights in trace.weights.items()} == {
        "decoder.self": [6],
        "decoder.cross": [3],
    }


def test_single_branch_is_unchanged(site: MakeSite) -> None:
    single = branch_of(FeedForward(7), site())
    branch = Parallel((FeedForward(7),)).build(site())
    branch.branches[0].load_state_dict(single.state_dict())  # type: ignore[reportIndexIssue]
    x = torch.randn(2, T, D)
    ctx = context(Mask(), torch.randn(2, S, D))
    assert torch.equal(branch(x, ctx), single(x, ctx))


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_decoding_steps_equal_the_full_pass(static: bool, site: MakeSite) -> None:
    spec = Parallel((SelfAttention(), CrossAttention(), FeedForward(7), LightConv(3), EvolvedDecoderConv()))
    branch, x = branch_of(spec, site()), torch.randn(2, T, D)
    memory = torch.randn(2, S, D)
    full = branch(x, context(Mask(causal=True), memory))
    rows = Rows(torch.zeros(2, dtype=torch.int64), T, uniform=not static, static=static)
    ctx = context(Mask(), memory)
    state, outputs = branch.start(rows, ctx), []
    assert isinstance(state[0], KVCache)
    assert isinstance(state[1], StaticKV)
    assert state[2] is None
    for step in (2, 1, 2):
        at, reach = rows.bound, rows.reach(step)
        view = View(rows.mask(step), step, reach, CPU)
        outputs.append(branch(x[:, at : at + step], Context(view, ctx.cross, ctx.memory), state))
        rows.advance(step, None)
    torch.testing.assert_close(torch.cat(outputs, 1), full, rtol=0, atol=1e-12)


def test_a_residual_rule_wraps_parallel_branches(site: MakeSite) -> None:
    """GPT-J: x + attention(norm(x)) + feedforward(norm(x)), with one norm."""
    spec = Parallel((SelfAttention(), FeedForward(7)))
    branch, x = spec.build(site()), torch.randn(2, T, D)
    residual: Any = PreNorm().wrap(branch, site())
    ctx = context(Mask(causal=True), torch.randn(2, S, D))
    normed = residual.norm(x)
    torch.testing.assert_close(residual(x, ctx), x + sum(part(normed, ctx) for part in residual.branch.branches))
    state = residual.start(Rows(torch.zeros(2, dtype=torch.int64), T), ctx)
    assert isinstance(state[0], KVCache)
    assert state[1] is None


def test_refusals(site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^branches: needs at least one branch"):
        Parallel(())
    with pytest.raises(SpecError, match=r"^here\.branches\[1\]\.kv_heads: 2 key-value heads do not divide 3"):
        Parallel((FeedForward(7), SelfAttention(kv_heads=2))).build(site(path="here"))
