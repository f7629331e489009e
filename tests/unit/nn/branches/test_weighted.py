"""The Weighted Transformer, compared with its formula head by head, and with attention."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.models.build import build, count
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.synthesizer import Synthesizer
from regard.nn.branches.weighted import Weighted, WeightedSimplex
from regard.nn.cache import Rows, StaticKV
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.norm import LayerNorm
from regard.nn.position.rotary import Rotary
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace
from regard.presets import preset
from regard.tree import swap, walk
from regard.variants import apply
from tests.unit.nn.branches.random_branch import branch_of

MakeSite = Callable[..., Site]
Naive = Callable[..., Tensor]
Kind = type[Weighted] | type[WeightedSimplex]
CPU = torch.device("cpu")
T, S = 4, 6
KINDS: tuple[Kind, ...] = (Weighted, WeightedSimplex)
SEG = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
SELF, CROSS = SelfAttention(output=False), CrossAttention(output=False)
FEEDFORWARD = FeedForward(7)


def self_context(mask: Mask) -> Context:
    return Context(View(mask, T, T, CPU))


def cross_context(memory: Tensor, T: int = T, seg: Tensor = SEG, **more: Any) -> Context:
    view = View(Mask(k_seg=seg), T, memory.shape[1], CPU)
    return Context(view, view, Memory((memory,)), **more)


def weighted_sum(branch: Any, kind: Kind, heads: Tensor) -> Tensor:
    """Return sum_i alpha_i FFN_i(kappa_i head_i W_i), head by head, for heads (B, H, T, V)."""
    kappa, alpha = branch.kappa, branch.alpha
    if kind is WeightedSimplex:
        kappa, alpha = (w.exp() / w.exp().sum() for w in (kappa, alpha))
    total = torch.zeros(2, T, 12)
    for i in range(3):
        f = branch.feedforwards[i] if kind is WeightedSimplex else branch.feedforward
        o = heads[:, i] @ branch.output[:, 4 * i : 4 * i + 4].T
        hidden = (kappa[i] * o @ f.up.weight.T + f.up.bias).clamp(min=0)
        total = total + alpha[i] * (hidden @ f.down.weight.T + f.down.bias)
    return total


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, strict=True)], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_self_by_formula(kind: Kind, mask: Mask, site: MakeSite, naive: Naive) -> None:
    branch, x = branch_of(kind(SELF, FEEDFORWARD), site()), torch.randn(2, T, 12)
    projected = x @ branch.attention.qkv.weight.T + branch.attention.qkv.bias
    q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in projected.split(12, -1))
    expected = weighted_sum(branch, kind, naive(q, k, v, mask, 1 / math.sqrt(4)))
    outputs = branch(x, self_context(mask))
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    parameters = list(branch.parameters())
    gradients, expected_gradients = (torch.autograd.grad(y.square().sum(), parameters) for y in (outputs, expected))
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_cross_by_formula_with_padding(kind: Kind, site: MakeSite, naive: Naive) -> None:
    branch, x, memory = branch_of(kind(CROSS, FEEDFORWARD), site()), torch.randn(2, T, 12), torch.randn(2, S, 12)
    inner = branch.attention
    q = inner.query(x).unflatten(-1, (3, 4)).transpose(1, 2)
    k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in inner.kv(memory).split(12, -1))
    expected = weighted_sum(branch, kind, naive(q, k, v, Mask(k_seg=SEG), 1 / math.sqrt(4)))
    torch.testing.assert_close(branch(x, cross_context(memory)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_identity_feedforwards_make_it_attention(kind: Kind, site: MakeSite) -> None:
    """With identity feed-forwards and equal weights of 1 (Weighted) or 1 / 3 (WeightedSimplex), it sums the heads."""
    spec = kind(SELF, FeedForward(12, "linear", bias=False))
    branch, attention = branch_of(spec, site()), SelfAttention().build(site())
    simplex = kind is WeightedSimplex
    for f in branch.feedforwards if simplex else [branch.feedforward]:
        for linear in (f.up, f.down):
            nn.init.eye_(linear.weight)
    for weights in (branch.kappa, branch.alpha):
        nn.init.ones_(weights)
    attention.load_state_dict(
        {
            **{f"qkv.{k}": v for k, v in branch.attention.qkv.state_dict().items()},
            "output.weight": branch.output.detach(),
            "output.bias": torch.zeros(12),
        }
    )
    x = torch.randn(2, T, 12)
    expected = attention(x, self_context(Mask(causal=True))) / (9 if simplex else 1)
    torch.testing.assert_close(branch(x, self_context(Mask(causal=True))), expected, rtol=0, atol=1e-12)


def test_initial_weights(site: MakeSite) -> None:
    free: Any = Weighted(SELF, FEEDFORWARD).build(site(heads=1000, d_head=1, d_value=1, d_model=1000))
    for weights in (free.kappa, free.alpha):
        assert bool((weights >= 0).all() and (weights < 1).all())
        assert abs(weights.mean().item() - 0.5) < 0.05
    equal: Any = WeightedSimplex(SELF, FEEDFORWARD).build(site())
    for weights in equal.weights():
        torch.testing.assert_close(weights, torch.full((3,), 1 / 3))


def test_weights_on_the_simplex_stay_there(site: MakeSite) -> None:
    branch = branch_of(WeightedSimplex(SELF, FEEDFORWARD), site())
    optimizer = torch.optim.SGD(branch.parameters(), 1.0)
    branch(torch.randn(2, T, 12), self_context(Mask())).square().sum().backward()
    optimizer.step()
    for weights in branch.weights():
        assert bool((weights >= 0).all())
        assert abs(weights.sum().item() - 1) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_beams_share_the_memory_of_their_source(kind: Kind, site: MakeSite) -> None:
    branch, memory, trace = branch_of(kind(CROSS, FEEDFORWARD), site()), torch.randn(2, S, 12), Trace()
    x = torch.randn(6, 1, 12)
    state = branch.start(Rows(torch.zeros(6, dtype=torch.int64), 9), cross_context(memory))
    assert isinstance(state, StaticKV)
    folded = branch(x, cross_context(memory, 3, trace=trace), state)
    repeated = branch(x, cross_context(memory.repeat_interleave(3, 0), 1, SEG.repeat_interleave(3, 0)))
    torch.testing.assert_close(folded, repeated, rtol=0, atol=1e-12)
    assert [weights.shape for weights in trace.weights["decoder.cross"]] == [(6, 3, 1, S)]


@pytest.mark.parametrize(
    ("attention", "feedforward", "message"),
    [
        (SelfAttention(), FEEDFORWARD, "^attention.output: each head is projected separately here; set it to false"),
        (FEEDFORWARD, FEEDFORWARD, "^attention: needs a self_attention or a cross_attention, not 'feedforward'"),
        (Synthesizer(), FEEDFORWARD, "^attention: needs a self_attention or a cross_attention, not 'synthesizer'"),
        (SELF, SELF, "^feedforward: needs a feedforward, not 'self_attention'"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind: Kind, attention: Any, feedforward: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        kind(attention, feedforward)


def test_heads_need_not_add_up_to_d_model(site: MakeSite) -> None:
    """Each head is projected separately, so 3 heads of 5 channels fit a d_model of 12."""
    branch: Any = Weighted(replace(SELF, d_head=5), FEEDFORWARD).build(site())
    assert branch.output.shape == (12, 15)


def test_the_variant_moves_the_feedforward_into_every_attention() -> None:
    changed = apply("weighted", preset("narang_base"))
    ff = FeedForward(3072, bias=True)
    inner = Weighted(SelfAttention(scale="none", output=False), ff)
    across = Weighted(CrossAttention(scale="none", output=False), ff)
    residual = PreNorm(LayerNorm(eps=1e-6))
    blocks = [part for part in walk(changed) if isinstance(part, Block)]
    assert blocks == [Block((inner,), residual), Block((inner, across), residual)]
    model: Any = build(changed, device="meta")
    assert sum(isinstance(module, nn.LayerNorm) for module in model.modules()) == 38
    assert sum(p.numel() for name, p in model.named_parameters() if name.endswith(("kappa", "alpha"))) == 36 * 24


def test_the_original_version_has_the_parameters_of_one_feedforward() -> None:
    changed = apply("weighted_ahmed", preset("narang_base"))
    parts = [part for part in walk(changed) if isinstance(part, WeightedSimplex)]
    assert {part.feedforward for part in parts} == {FeedForward(256, bias=True)}
    # Twelve feed-forwards of 256 have eleven more output biases than one of 3072.
    assert count(changed) - count(apply("weighted", preset("narang_base"))) == 36 * 11 * 768


@pytest.mark.parametrize(
    "base", ["t5_base", "transformer_small", "transformer_tiny", "bert_base", "gpt2_small", "sahai"]
)
@pytest.mark.parametrize("name", ["weighted", "weighted_ahmed"])
def test_on_other_bases(name: str, base: str) -> None:
    changed = apply(name, preset(base))
    assert count(changed) > 0
    for block in (part for part in walk(changed) if isinstance(part, Block)):
        assert {type(branch) for branch in block.branches} == {Weighted if name == "weighted" else WeightedSimplex}


def test_residual_rules_of_the_attentions_are_kept() -> None:
    rules = (PreNorm(), PostNorm())
    block = Block((SelfAttention(), FeedForward()), rules)
    base = swap(preset("gpt2_small"), Block, lambda _: block)
    (changed,) = (part for part in walk(apply("weighted", base)) if isinstance(part, Block))
    assert changed.residual == (PreNorm(),)


def test_later_variants_change_the_inner_attention_and_feedforward() -> None:
    changed = apply("rotary", apply("swiglu", apply("weighted", preset("transformer_small"))))
    assert {(f.gated, f.activation) for f in walk(changed) if isinstance(f, FeedForward)} == {(True, "swish")}
    assert {stack.position for stack in walk(changed) if isinstance(stack, Plain)} == {Rotary()}
    assert count(changed) > 0


@pytest.mark.parametrize("branches", [(SelfAttention(),), (SelfAttention(), FeedForward(), FeedForward())])
def test_blocks_without_one_feedforward_are_refused(branches: Any) -> None:
    base = swap(preset("gpt2_small"), Block, lambda _: Block(branches))
    with pytest.raises(SpecError, match=r"^decoder.pattern\[0\].branches: .* one feed-forward"):
        apply("weighted", base)
