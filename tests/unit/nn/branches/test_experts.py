"""Mixture of experts and Switch: formulas, token by token; capacity, padding, balance loss, counts; variants."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.models.build import build
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.experts import MixtureOfExperts, Switch
from regard.nn.branches.feedforward import FeedForward
from regard.nn.core import Reporting, Site
from regard.nn.init import T5Init
from regard.nn.mask import Context, Mask, View
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.presets import preset
from regard.tree import swap
from regard.variants import apply

MakeSite = Callable[..., Site]
SEG = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]])
BOTH = [MixtureOfExperts(5, 6), Switch(5, 6)]


def context(seg: Tensor | None, T: int, losses: list[Tensor] | None = None) -> Context:
    return Context(View(Mask(q_seg=seg, k_seg=seg), T, T, torch.device("cpu")), losses=losses)


def branch_of(spec: BranchSpec, site: Site, training: bool = False) -> Any:
    """Return a branch with large random weights, so that no two experts have similar probabilities."""
    branch = spec.build(site).train(training)
    for parameter in branch.parameters():
        nn.init.normal_(parameter)
    return branch


def expert(branch: Any, e: int, x: Tensor) -> Tensor:
    return torch.relu(x @ branch.up[e].T) @ branch.down[e].T


def probabilities(branch: Any, x: Tensor) -> list[float]:
    scores = [math.exp(float(x @ row)) for row in branch.router.detach()]
    return [score / sum(scores) for score in scores]


def ranked(p: list[float]) -> list[int]:
    return sorted(range(len(p)), key=lambda e: -p[e])


def naive_top_2(branch: Any, x: Tensor, real: list[bool], limit: int, group: int) -> tuple[Tensor, int, int]:
    """Return (outputs, routed, dropped) for N tokens in groups of `group`, if both experts of a token are used."""
    y, routed, dropped = torch.zeros_like(x), 0, 0
    for first in range(0, len(x), group):
        members = [n for n in range(first, min(first + group, len(x))) if real[n]]
        taken = [0] * len(branch.router)
        for choice in (0, 1):
            for n in members:
                p = probabilities(branch, x[n])
                a, b = ranked(p)[:2]
                e = (a, b)[choice]
                if taken[e] == limit:
                    dropped += 1
                    continue
                taken[e] += 1
                routed += 1
                y[n] += p[e] / (p[a] + p[b] + 1e-9) * expert(branch, e, x[n]).detach()
    return y, routed, dropped


def naive_top_1(branch: Any, x: Tensor, real: list[bool], limit: int, group: int) -> tuple[Tensor, int, int]:
    y, routed, dropped = torch.zeros_like(x), 0, 0
    for first in range(0, len(x), group):
        taken = [0] * len(branch.router)
        for n in range(first, min(first + group, len(x))):
            if not real[n]:
                continue
            p = probabilities(branch, x[n])
            e = ranked(p)[0]
            if taken[e] == limit:
                dropped += 1
                continue
            taken[e] += 1
            routed += 1
            y[n] = p[e] * expert(branch, e, x[n]).detach()
    return y, routed, dropped


NAIVE = {MixtureOfExperts: naive_top_2, Switch: naive_top_1}


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("seg", [None, SEG], ids=["full", "padded"])
def test_evaluation_by_formula(spec: Any, seg: Tensor | None, site: MakeSite) -> None:
    branch, x = branch_of(spec, site()), torch.randn(3, 7, 12)
    real = [True] * 21 if seg is None else (seg != 0).flatten().tolist()
    expected, _, dropped = NAIVE[type(spec)](branch, x.flatten(0, 1), real, 21, 21)
    assert dropped == 0
    torch.testing.assert_close(branch(x, context(seg, 7)).flatten(0, 1), expected, rtol=0, atol=1e-12)


def deterministic(spec: Any) -> Any:
    """Return a spec without randomness in training: the second expert is always used, and there is no jitter."""
    return replace(spec, threshold=0.0) if isinstance(spec, MixtureOfExperts) else replace(spec, jitter=0.0)


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("seg", [None, SEG], ids=["full", "padded"])
# Groups of 21, of 7, 7 and 7, and of 11 and 10 tokens; an expert processes at least 4 tokens of a group.
@pytest.mark.parametrize(("group", "size", "capacity", "limit"), [(21, 21, 1.0, 4), (9, 7, 1.0, 4), (20, 11, 2.4, 5)])
def test_training_by_formula(
    spec: Any, seg: Tensor | None, group: int, size: int, capacity: float, limit: int, site: MakeSite
) -> None:
    branch = branch_of(replace(deterministic(spec), group=group, capacity=capacity), site(), training=True)
    branch.router.data[0] += 0.5  # too many tokens choose expert 0
    x = (torch.randn(3, 7, 12) + 0.3).requires_grad_()
    real = [True] * 21 if seg is None else (seg != 0).flatten().tolist()
    expected, routed, dropped = NAIVE[type(spec)](branch, x.detach().flatten(0, 1), real, limit, size)
    y = branch(x, context(seg, 7))
    torch.testing.assert_close(y.flatten(0, 1), expected, rtol=0, atol=1e-12)
    counts = {name: int(count) for name, count in branch.report().items()}
    assert counts == {"dropped_tokens": dropped, "routed_tokens": routed}
    assert group < 21 or dropped > 0
    y.sum().backward()
    for parameter in branch.parameters():
        assert parameter.grad is not None
        assert bool(torch.isfinite(parameter.grad).all())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.kind)
def test_gradients(spec: Any, training: bool, site: MakeSite) -> None:
    branch = branch_of(replace(deterministic(spec), experts=3, d_hidden=2, capacity=0.1), site(d_model=3), training)
    x = torch.randn(1, 14, 3, requires_grad=True)
    seg = torch.tensor([[1] * 12 + [0] * 2])

    def run(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights = {"router": router, "up": up, "down": down}
        return torch.func.functional_call(branch, weights, (x, context(seg, 14)))

    weights = [p.detach().clone().requires_grad_() for p in (branch.router, branch.up, branch.down)]
    assert torch.autograd.gradcheck(run, (x, *weights), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.kind)
def test_evaluation_drops_no_token_if_all_choose_one_expert(spec: Any, site: MakeSite) -> None:
    """All tokens have the same two best experts."""
    branch = branch_of(spec, site())
    x = torch.randn(3, 7, 12).abs()
    branch.router.data.fill_(-1.0)
    branch.router.data[3] = 1.0
    branch.router.data[1] = 0.5
    expected, _, dropped = NAIVE[type(spec)](branch, x.flatten(0, 1), [True] * 21, 21, 21)
    assert dropped == 0
    torch.testing.assert_close(branch(x, context(None, 7)).flatten(0, 1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.kind)
def test_evaluation_of_a_token_is_independent_of_others(spec: Any, site: MakeSite) -> None:
    branch, x = branch_of(spec, site()), torch.randn(3, 7, 12)
    together = branch(x, context(SEG, 7))
    assert bool((together[SEG == 0] == 0).all())
    for b, t in (SEG != 0).nonzero().tolist():
        single = branch(x[b : b + 1, t : t + 1], context(None, 1))
        torch.testing.assert_close(single[0, 0], together[b, t], rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.kind)
def test_padding_uses_no_capacity_and_does_not_change_the_balance_loss(spec: Any, site: MakeSite) -> None:
    """Training on padded rows equals training on the real tokens alone, in one group."""
    branch = branch_of(replace(deterministic(spec), capacity=0.1), site(), training=True)
    x = torch.randn(3, 7, 12)
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    padded = branch(x, context(SEG, 7, losses[0]))
    # The real tokens alone are a smaller group, but the minimum of 4 tokens per expert applies to both groups.
    unpadded = branch(x[SEG != 0][None], context(None, 15, losses[1]))
    torch.testing.assert_close(padded[SEG != 0], unpadded[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(losses[0][0], losses[1][0], rtol=0, atol=1e-12)
    assert int(branch.report()["dropped_tokens"]) > 0


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.kind)
def test_balance_loss_by_formula(spec: Any, site: MakeSite) -> None:
    """0.01 E sum_e f_e P_e: f the share of first choices before anything is dropped, P the mean probability."""
    branch = branch_of(replace(deterministic(spec), group=7), site(), training=True)
    seg = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    x, losses = torch.randn(3, 7, 12), []
    branch(x, context(seg, 7, losses))
    terms = []
    for b in range(2):  # the third group has no token
        p = [probabilities(branch, x[b, t]) for t in range(7) if seg[b, t]]
        f = [sum(ranked(each)[0] == e for each in p) / len(p) for e in range(5)]
        P = [sum(each[e] for each in p) / len(p) for e in range(5)]
        terms.append(0.01 * 5 * sum(a * b for a, b in zip(f, P, strict=True)))
    assert len(losses) == 1
    assert losses[0].item() == pytest.approx(sum(terms) / 2, rel=1e-12)
    branch.eval()(x, context(seg, 7))  # no list, no loss


def test_zero_tokens(site: MakeSite) -> None:
    branch, losses = branch_of(Switch(5, 6), site(), training=True), []
    y = branch(torch.randn(1, 3, 12), context(torch.zeros(1, 3, dtype=torch.int64), 3, losses))
    assert bool((y == 0).all())
    assert losses[0].item() == 0.0


def test_second_expert_is_sampled_below_the_threshold(site: MakeSite) -> None:
    """In training with probability min(1, g_2 / threshold), and always in evaluation."""
    branch = branch_of(MixtureOfExperts(2, 6, threshold=0.8), site(), training=True)
    N = 20_000
    x = torch.randn(12)
    branch.router.data = torch.stack((torch.zeros(12), -x / (x @ x)))  # p = 1 / (1 + e^-1) and the rest
    second = 1 - 1 / (1 + math.exp(-1))
    branch.capacity = 10.0
    y = branch(x.expand(1, N, 12), context(None, N))[0]
    first_only = (1 - second) * expert(branch, 0, x)
    both = first_only + second * expert(branch, 1, x)
    used = (y - both).abs().amax(1) < 1e-6
    assert bool((used | ((y - first_only).abs().amax(1) < 1e-6)).all())
    expected = second / 0.8
    assert float(used.double().mean()) == pytest.approx(expected, abs=4 * math.sqrt(expected / N))
    counts = branch.report()
    assert int(counts["routed_tokens"]) == N + int(used.sum())  # an unused second expert takes no capacity
    branch.eval()
    torch.testing.assert_close(branch(x.expand(1, 3, 12), context(None, 3))[0], both.expand(3, 12))


def test_jitter_applies_to_the_router_input_only(site: MakeSite) -> None:
    """Fedus et al. 2022: the router reads x times U(1 - 0.01, 1 + 0.01) in training."""
    branch = branch_of(Switch(2, 6), site(), training=True)
    x = torch.randn(12)
    branch.router.data = torch.stack((torch.zeros(12), 3 * x / (x @ x)))
    y = branch(x.expand(1, 1000, 12), context(None, 1000))[0][:8]
    gates = (y / expert(branch, 1, x)).mean(1)
    assert len(set(gates.tolist())) == 8
    low, high = (1 / (1 + math.exp(-(3 - s * 0.03 * float(x.square().sum() / (x @ x))))) for s in (1, -1))
    assert bool(((gates > low) & (gates < high)).all())
    branch.eval()
    torch.testing.assert_close(
        branch(x.expand(1, 3, 12), context(None, 3))[0, 0], branch(x[None, None], context(None, 1))[0, 0]
    )


def test_single_expert_equals_a_feedforward(site: MakeSite) -> None:
    """A single expert has probability 1."""
    branch, x = branch_of(Switch(1, 6), site()), torch.randn(2, 4, 12)
    feedforward: Any = FeedForward(6, bias=False).build(site())
    feedforward.up.weight.data, feedforward.down.weight.data = branch.up.data[0], branch.down.data[0]
    torch.testing.assert_close(branch(x, context(None, 4)), feedforward(x, context(None, 4)))


def test_two_of_two_experts_are_a_soft_mixture(site: MakeSite) -> None:
    branch, x = branch_of(MixtureOfExperts(2, 6), site()), torch.randn(2, 4, 12)
    p = (x @ branch.router.T).softmax(-1)
    expected = sum(p[..., e, None] * expert(branch, e, x) for e in range(2))
    torch.testing.assert_close(branch(x, context(None, 4)), expected, rtol=2e-9, atol=0)  # g / (g_1 + g_2 + 1e-9)


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.kind)
def test_router_is_computed_in_float32(spec: Any, site: MakeSite) -> None:
    torch.set_default_dtype(torch.float32)
    branch, x = branch_of(spec, site()), torch.randn(2, 4, 12)
    expected = branch.probabilities(x.flatten(0, 1))
    with torch.autocast("cpu", torch.float16):
        autocast = branch.probabilities(x.flatten(0, 1))
    assert autocast.dtype is torch.float32
    assert torch.equal(autocast, expected)
    assert branch.bfloat16().probabilities(x.flatten(0, 1).bfloat16()).dtype is torch.float32


def test_each_expert_is_initialised_as_a_separate_matrix(site: MakeSite) -> None:
    """With the fan-in and fan-out of one expert: T5's std is d_in^-1/2, Glorot's bound sqrt(6 / (d_in + d_out))."""
    branch: Any = Switch(8, 300).build(site(d_model=100, init_=T5Init()))
    assert branch.up.std().item() == pytest.approx(100**-0.5, rel=0.02)
    assert branch.down.std().item() == pytest.approx(300**-0.5, rel=0.02)
    branch = Switch(8, 300).build(site(d_model=100))
    assert branch.up.abs().max().item() == pytest.approx(math.sqrt(6 / 400), rel=0.01)
    assert branch.down.abs().max().item() == pytest.approx(math.sqrt(6 / 400), rel=0.01)


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.kind)
def test_counts_are_reported_once_and_are_not_saved(spec: Any, site: MakeSite) -> None:
    branch, x = branch_of(spec, site(), training=True), torch.randn(2, 40, 12)
    assert [isinstance(module, Reporting) for module in (branch, nn.Linear(1, 1))] == [True, False]
    assert set(branch.state_dict()) == {"router", "up", "down"}
    branch(x, context(None, 40))
    branch(x, context(None, 40))
    first, second = branch.report(), branch.report()
    if isinstance(spec, Switch):
        assert int(first["dropped_tokens"] + first["routed_tokens"]) == 160
    assert int(first["routed_tokens"]) > 0
    assert [int(count) for count in second.values()] == [0, 0]
    branch.eval()(x, context(None, 40))
    assert [int(count) for count in branch.report().values()] == [0, 0]


def test_default_hidden_widths(site: MakeSite) -> None:
    assert MixtureOfExperts(3).build(site()).up.shape == (3, 24, 12)
    assert Switch(3).build(site()).up.shape == (3, 48, 12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixtureOfExperts(1), "experts: must be at least 2, not 1"),
        (lambda: Switch(0), "experts: must be at least 1, not 0"),
        (lambda: Switch(d_hidden=0), "d_hidden: must be at least 1, not 0"),
        (lambda: Switch(group=0), "group: must be at least 1, not 0"),
        (lambda: Switch(capacity=0.0), "capacity: must be above 0, not 0.0"),
        (lambda: Switch(balance=-1.0), "balance: must be at least 0, not -1.0"),
        (lambda: Switch(jitter=1.0), r"jitter: must lie in \[0, 1\), not 1.0"),
        (lambda: MixtureOfExperts(threshold=-0.1), "threshold: must be at least 0, not -0.1"),
    ],
)
def test_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        make()


# -- the variants


def layers(stack: Plain) -> list[Any]:
    """The last branch of every layer."""
    return [stack.block_of(layer).branches[-1] for layer in range(stack.depth)]


def test_every_fourth_feedforward_is_replaced() -> None:
    mixed: Any = apply("mixture_of_experts", preset("narang_base"))
    switched: Any = apply("switch", preset("narang_base"))
    for side, capacities in (("encoder", (2.0, 1.2)), ("decoder", (1.25, 1.25))):
        for model, kind, d_hidden, capacity in (
            (mixed, MixtureOfExperts, 1536, capacities[0]),
            (switched, Switch, 3072, capacities[1]),
        ):
            for layer, branch in enumerate(layers(getattr(model, side)), 1):
                if layer % 4:
                    assert branch == FeedForward(3072, bias=True)
                else:
                    assert branch == kind(32, d_hidden, capacity=capacity)


@pytest.mark.parametrize(("depth", "expected"), [(1, [0]), (3, [2]), (4, [3]), (6, [3]), (9, [3, 7])])
def test_replaced_layers_for_other_depths(depth: int, expected: list[int]) -> None:
    base = preset("transformer_small", **{"encoder.depth": depth})
    model: Any = apply("switch", base)
    assert [n for n, branch in enumerate(layers(model.encoder)) if isinstance(branch, Switch)] == expected
    assert [n for n, branch in enumerate(layers(model.decoder)) if isinstance(branch, Switch)] == [2]


@pytest.mark.parametrize("name", ["mixture_of_experts", "switch"])
def test_the_pattern_of_the_base_is_kept(name: str) -> None:
    base: Any = preset("transformer_small", **{"encoder.depth": 12})
    block = base.encoder.pattern[0]
    base = replace(base, encoder=replace(base.encoder, pattern=(block, replace(block, residual=PreNorm()), block)))
    model: Any = apply(name, base)
    for layer in range(12):
        assert model.encoder.block_of(layer).residual == base.encoder.block_of(layer).residual
        assert isinstance(model.encoder.block_of(layer).branches[-1], FeedForward) is ((layer + 1) % 4 != 0)


@pytest.mark.parametrize("name", ["mixture_of_experts", "switch", "product_key_memory"])
@pytest.mark.parametrize("base", ["narang_base", "transformer_tiny", "gpt2_small", "bert_base", "sahai"])
def test_applying_a_variant_twice_is_refused(name: str, base: str) -> None:
    changed = apply(name, preset(base))
    build(changed, device="meta")
    with pytest.raises(SpecError, match=rf"^variants: '{name}' changes nothing here"):
        apply(name, changed)


@pytest.mark.parametrize("name", ["mixture_of_experts", "switch", "product_key_memory"])
def test_shared_blocks_are_refused_where_they_would_be_silently_wrong(name: str) -> None:
    with pytest.raises(SpecError, match=r"^pattern: has (4|12) blocks, of which only the first 1 would be used"):
        apply(name, apply("block_sharing", preset("narang_base")))


def test_four_shared_blocks_can_be_every_fourth() -> None:
    base = swap(preset("narang_base"), Plain, lambda stack: replace(stack, unique=4))
    model: Any = apply("switch", base)
    assert [n for n, branch in enumerate(layers(model.decoder)) if isinstance(branch, Switch)] == [3, 7, 11]


@pytest.mark.parametrize("name", ["mixture_of_experts", "product_key_memory"])
def test_a_layer_without_feedforward_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"^(en|de)coder\.pattern\[\d+\]: layer \d+ has no feed-forward to replace"):
        apply(
            name,
            swap(apply("switch", preset("transformer_tiny", **{"decoder.depth": 5})), FeedForward, lambda _: Switch()),
        )
