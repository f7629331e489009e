from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.cache import KVCache, Rows
from regard.nn.core import Branch, Site
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.no_residual import NoResidual
from regard.nn.norm import NoNorm
from regard.nn.pattern import Window
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.shaw import Shaw
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.stacks.base import Stack
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
CALLS: list[tuple[str, int, str, Any, Any]] = []


@dataclass(frozen=True, slots=True)
class Spy(BranchSpec):
    """Adds 10^layer to x and records the call."""

    kind = "spy"
    name: str = "a"

    def build(self, site: Site) -> Branch:
        return _Spy(self.name, site)


class _Spy(Branch):
    def __init__(self, name: str, site: Site) -> None:
        super().__init__()
        self.name_, self.site = name, site
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, ctx: Context, state: Any = None) -> Tensor:
        memory = None if ctx.memory is None else ctx.memory.x[0][0, 0, 0].item()
        CALLS.append((self.name_, self.site.layer, self.site.path, state, memory))
        return x + 10.0**self.site.layer

    def start(self, rows: Rows, ctx: Context) -> KVCache:
        return KVCache(rows)


def spies(*names: str) -> tuple[Block, ...]:
    return tuple(Block((Spy(name),), NoResidual()) for name in names)


def run(stack: Stack, mask: Mask | None = None, state: list[Any] | None = None, **more: Any) -> Any:
    CALLS.clear()
    view = View(mask or Mask(causal=True), 3, 3, CPU)
    return stack(torch.zeros(1, 3, 12), Context(view, view, **more), state, keep=True)


@pytest.mark.parametrize(
    ("spec", "names", "layers"),
    [
        (Plain(spies("a"), 3), "aaa", [0, 1, 2]),
        (Plain(spies("a", "b"), 5), "ababa", [0, 1, 2, 3, 4]),
        (Plain(spies("a"), 4, unique=1), "aaaa", [0, 0, 0, 0]),
        (Plain(spies("a", "b"), 5, unique=2), "ababa", [0, 1, 0, 1, 0]),
        (Plain(spies("a", "b"), 5, unique=3), "abaab", [0, 1, 2, 0, 1]),
    ],
)
def test_order_of_blocks(spec: Plain, names: str, layers: list[int], site: MakeSite) -> None:
    stack = spec.build(site(path="decoder"))
    out = run(stack)
    assert "".join(call[0] for call in CALLS) == names
    assert [call[1] for call in CALLS] == layers
    pattern = len(spec.pattern)
    assert [call[2] for call in CALLS] == [f"decoder.pattern[{layer % pattern}].branches[0]" for layer in layers]
    assert out.x[0, 0, 0].item() == sum(10.0**layer for layer in layers)
    assert sum(p.numel() for p in stack.parameters()) == len(set(layers))
    assert [spec.block_of(call).branches[0].name for call in range(spec.depth)] == list(names)  # type: ignore[reportAttributeAccessIssue]


def test_keep_returns_the_hidden_states_between_blocks(site: MakeSite) -> None:
    out = run(Plain(spies("a"), 3).build(site()))
    assert [layer[0, 0, 0].item() for layer in out.layers] == [0, 1, 11, 111]
    stack = Plain(spies("a"), 3).build(site())
    view = View(Mask(), 3, 3, CPU)
    assert stack(torch.zeros(1, 3, 12), Context(view)).layers == ()


def test_shared_blocks_have_a_state_per_call(site: MakeSite) -> None:
    stack = Plain(spies("a"), 4, unique=1).build(site())
    rows = Rows(torch.zeros(1, dtype=torch.int64), 4)
    states = stack.start(rows, Context(View(Mask(), 3, 3, CPU)))
    assert len({id(state[0]) for state in states}) == 4
    run(stack, state=states)
    assert [call[3] for call in CALLS] == [state[0] for state in states]


def test_each_call_may_have_a_memory_of_its_own(site: MakeSite) -> None:
    memories = tuple(torch.full((1, 2, 12), float(n)) for n in range(3))
    run(Plain(spies("a"), 3, unique=1).build(site()), memory=Memory(memories))
    assert [call[4] for call in CALLS] == [0, 1, 2]


def test_segments_pass_through(site: MakeSite) -> None:
    seg = torch.tensor([[1, 1, 0]])
    assert run(Plain(spies("a"), 1).build(site()), Mask(q_seg=seg, k_seg=seg)).seg is seg


def test_the_last_residual_rule_ends_the_stack(site: MakeSite) -> None:
    feedforward = FeedForward(8)
    pre = Plain((Block((feedforward,), PreNorm()),), 2).build(site())
    assert isinstance(pre.end, nn.LayerNorm)
    nn.init.normal_(pre.end.weight)
    x, ctx = torch.randn(1, 3, 12), Context(View(Mask(), 3, 3, CPU))
    out = pre(x, ctx, keep=True)
    blocks: Any = pre.blocks
    expected = pre.end(blocks[1](blocks[0](x, ctx), ctx))
    torch.testing.assert_close(out.x, expected)
    assert torch.equal(out.layers[-1], out.x)
    post = Plain((Block((feedforward,), PostNorm()),), 2).build(site())
    assert isinstance(post.end, nn.Identity)
    mixed = Plain(
        (Block((feedforward,), PreNorm()), Block((feedforward, feedforward), (PreNorm(), PostNorm()))), 2
    ).build(site())
    assert isinstance(mixed.end, nn.Identity)


def test_residual_branches_count_every_call() -> None:
    short, long = Block((FeedForward(8),)), Block((SelfAttention(), FeedForward(8)))
    assert Plain((short, long), 5).residual_branches() == 3 * 1 + 2 * 2
    assert Plain((long,), 6, unique=2).residual_branches() == 12
    assert Plain((long,), 6, unique=2).blocks() == 6


def attention_stack(**more: Any) -> Plain:
    return Plain((Block((SelfAttention(),), PostNorm(NoNorm())),), 2, **more)


def weights_of(spec: Plain, site: Site) -> list[Tensor]:
    trace = Trace()
    spec.build(site)(torch.randn(1, 3, 12), Context(View(Mask(causal=site.causal), 3, 3, CPU), trace=trace))
    return trace.weights["decoder.self"]


def test_attention_pattern_and_strict_apply_to_every_layer(site: MakeSite) -> None:
    for spec, visible in (
        (attention_stack(), [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        (attention_stack(strict=True), [[0, 0, 0], [1, 0, 0], [1, 1, 0]]),
        (attention_stack(attention_pattern=Window(2)), [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
        (attention_stack(attention_pattern=Window(2), strict=True), [[0, 0, 0], [1, 0, 0], [0, 1, 0]]),
    ):
        for weights in weights_of(spec, site()):
            assert (weights[0] > 0).long().tolist() == [visible] * 3


def test_one_position_serves_all_layers(site: MakeSite) -> None:
    shared = attention_stack(position=T5Bias(8, 9)).build(site())
    names = [name for name, _ in shared.named_parameters() if "position" in name]
    assert names == ["position.weight"]
    with_bias, without = weights_of(attention_stack(position=ALiBi()), site()), weights_of(attention_stack(), site())
    assert all(not torch.equal(a, b) for a, b in zip(with_bias, without, strict=True))


def test_a_shared_position_refuses_layers_of_other_sizes(site: MakeSite) -> None:
    spec = replace(attention_stack(position=Shaw()), pattern=(Block((FeedForward(), SelfAttention(d_head=6))),))
    with pytest.raises(
        SpecError,
        match=r"^decoder\.pattern\[0\]\.branches\[1\]\.d_head: is 6, but the stack's 'shaw' position is for 4",
    ):
        spec.build(site(path="decoder"))


def test_only_a_causal_stack_can_be_strict(site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^encoder\.strict: only a causal stack"):
        attention_stack(strict=True).build(site(path="encoder", causal=False))


@pytest.mark.parametrize(
    ("fields", "path"),
    [({"depth": 0}, "depth"), ({"pattern": ()}, "pattern"), ({"unique": 0}, "unique"), ({"unique": 4}, "unique")],
)
def test_refusals(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        Plain(**{"pattern": spies("a"), "depth": 3, **fields})
    assert raised.value.path == path


def test_unused_blocks_are_refused() -> None:
    with pytest.raises(SpecError, match="pattern: has 3 blocks, of which only the first 2 would be used"):
        Plain(spies("a", "b", "c"), 2)
    with pytest.raises(SpecError, match="pattern: has 2 blocks, of which only the first 1 would be used"):
        Plain(spies("a", "b"), 4, unique=1)
