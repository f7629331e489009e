import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.parallel import Parallel
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.synthesizer import RandomScores, Synthesizer
from regard.nn.branches.weighted import Weighted
from regard.nn.checks import MOST_BLOCKS
from regard.nn.core import Branch, Site
from regard.nn.mask import Context, Mask, View
from regard.nn.pattern import Window
from regard.nn.position.base import AtHeads, position_bias
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.stacks.base import StackSpec, shared_modules
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.nn.stacks.universal import Universal, UniversalACT

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Scale:
    """Describes a shared module: multiplication by a learned number."""

    value: float = 2.0

    def build(self, site: Site) -> nn.Module:
        return ScaleModule(self.value)


class ScaleModule(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@dataclass(frozen=True, slots=True)
class Scaled(BranchSpec):
    """A branch that applies the module which all layers of its stack share."""

    kind = "scaled"
    attends = True  # so that a funnel accepts it
    by: float | None = 2.0

    def shared(self) -> Scale | None:
        return None if self.by is None else Scale(self.by)

    def build(self, site: Site) -> Branch:
        return ScaledModule()


class ScaledModule(Branch):
    def forward(self, x: Tensor, ctx: Context, state: Any = None) -> Tensor:
        assert ctx.shared is not None
        return ctx.shared["scaled"](x)


@pytest.mark.parametrize("kind", [Plain, Universal, UniversalACT, Funnel])
def test_layers_share_a_module_of_the_stack(kind: type[StackSpec], site: Callable[..., Site]) -> None:
    place = site(causal=kind is not Funnel)
    parallel = Parallel((Scaled(), Scaled()))  # also inside another branch
    built: Any = stack(kind, Scaled(), parallel).build(place)
    assert [name for name in built.state_dict() if "shared" in name] == ["shared.scaled.weight"]
    x = torch.randn(2, 4, 12)
    out = built(x, Context(View(Mask(causal=place.causal), 4, 4, CPU))).x
    out.sum().backward()
    assert built.shared["scaled"].weight.grad.abs() > 0
    again = copy.deepcopy(built)
    with torch.no_grad():
        again.shared["scaled"].weight.add_(1.0)
    assert not torch.equal(again(x, Context(View(Mask(causal=place.causal), 4, 4, CPU))).x, out)
    assert torch.equal(built(x, Context(View(Mask(causal=place.causal), 4, 4, CPU))).x, out)


def test_a_shared_module_is_there_only_if_a_layer_describes_one(site: Callable[..., Site]) -> None:
    assert not list(shared_modules(stack(Plain, Scaled(None)), site()))
    with pytest.raises(SpecError, match=r"^decoder: the 'scaled' layers of this stack share one module, but one has"):
        stack(Plain, Scaled(2.0), Scaled(3.0)).build(site(path="decoder"))


def test_view_is_unchanged_without_pattern_or_position() -> None:
    view = View(Mask(causal=True), 3, 3, CPU)
    assert view.with_mask(attention_pattern=None, strict=False).with_positions(None) is view


def test_pattern_and_strict_change_the_mask_and_clear_its_cache() -> None:
    view = View(Mask(causal=True), 3, 3, CPU)
    view.lowered["x"] = view.shared["x"] = 1
    prepared = view.with_mask(attention_pattern=Window(2), strict=True)
    assert prepared.mask == Mask(causal=True, strict=True, attention_pattern=Window(2))
    assert (prepared.lowered, prepared.shared) == ({}, {})
    assert view.mask == Mask(causal=True)


def test_with_positions_adds_position_terms(site: Callable[..., Site]) -> None:
    module = ALiBi().build(site())
    prepared = View(Mask(causal=True, start=2), 1, 3, CPU).with_positions(module)
    assert prepared.terms is not None
    bias = position_bias(prepared)
    assert bias is not None
    assert bias.shape == (1, 3, 1, 3)


def stack(kind: type[StackSpec], *branches: BranchSpec, **more: Any) -> StackSpec:
    block = Block(branches)
    if kind is Plain:
        return Plain((block,), 2, **more)
    return Funnel((block,), (1, 1), **more) if kind is Funnel else kind(block, 0, 2, 0, **more)  # type: ignore[reportCallIssue]


# The site has 3 heads.
WEIGHTED = Weighted(SelfAttention(6, d_head=4, output=False), FeedForward(8))
PARALLEL = Parallel((SelfAttention(6, d_head=4), FeedForward(8)))
SYNTHESIZER = Synthesizer(RandomScores(), heads=6, d_head=4)


@pytest.mark.parametrize("kind", [Plain, Funnel, Universal, UniversalACT])
@pytest.mark.parametrize("attention", [SelfAttention(6, d_head=4), WEIGHTED, PARALLEL, SYNTHESIZER])
def test_a_position_for_heads_that_no_attention_has_is_refused(
    kind: type[StackSpec], attention: BranchSpec, site: Callable[..., Site]
) -> None:
    encoder = site(causal=False, side="encoder", path="encoder")
    six, five = AtHeads(6, T5Bias()), AtHeads(5, T5Bias())
    built = stack(kind, attention, positions=(six,)).build(encoder)
    assert [name for name, _ in built.named_parameters() if "positions." in name] == ["positions.6.weight"]
    with pytest.raises(SpecError, match=r"^encoder.positions\[1\].heads: .* 5 heads \(heads: 6\), .*; leave it out"):
        stack(kind, attention, positions=(six, five)).build(encoder)
    with pytest.raises(SpecError, match=r"^encoder.position: .*`positions` has one for all of them"):
        stack(kind, attention, position=T5Bias(), positions=(six,)).build(encoder)
    with_both = stack(kind, attention, SelfAttention(), position=T5Bias(), positions=(six,)).build(encoder)
    assert len([name for name, _ in with_both.named_parameters() if name.startswith("position")]) == 2


@pytest.mark.parametrize("kind", [Plain, Funnel, Universal, UniversalACT])
@pytest.mark.parametrize("attention", [SelfAttention(position=ALiBi()), Synthesizer(position=ALiBi())])
@pytest.mark.parametrize("position", [T5Bias(), Rotary()])
def test_a_stack_position_that_no_attention_uses_is_refused(
    kind: type[StackSpec], attention: BranchSpec, position: Any, site: Callable[..., Site]
) -> None:
    encoder = site(causal=False, side="encoder", path="encoder")
    assert stack(kind, attention).build(encoder)
    with pytest.raises(SpecError, match=r"^encoder.position: .*each has a position of its own"):
        stack(kind, attention, position=position).build(encoder)
    with pytest.raises(SpecError, match=r"^encoder.positions\[0\].heads: .*none without a position of its own"):
        stack(kind, attention, positions=(AtHeads(3, ALiBi()),)).build(encoder)


def test_position_with_cross_attention_only_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^position: no branch of this stack attends"):
        stack(Plain, CrossAttention(), FeedForward(8), position=Rotary())


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Plain((Block((FeedForward(8),)),), 10**9), "depth"),
        (lambda: Universal(Block((FeedForward(8),)), steps=10**9), "steps"),
        (lambda: Funnel((Block((SelfAttention(),)),), (1, 10**9)), "layers"),
    ],
)
def test_too_deep_stacks_are_refused(make: Callable[[], StackSpec], path: str) -> None:
    with pytest.raises(SpecError, match=rf"^{path}: must be at most {MOST_BLOCKS:,}, not 1,000,000,00"):
        make()
