from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from regard import Batch, build, replace_at, swap
from regard.errors import SpecError
from regard.nn.big_bird import BigBird, CausalBigBird
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Tokens
from regard.nn.mask import Mask
from regard.nn.pattern import (
    AnyOf,
    AttentionPattern,
    Blocks,
    DilatedWindow,
    GlobalTokens,
    KeepPrefix,
    Sinks,
    Window,
)
from regard.nn.position.base import AtHeads
from regard.nn.position.bias import T5Bias
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace
from regard.testing import tiny


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_window_reaches_size_minus_one_each_way(size: int) -> None:
    positions = torch.arange(6)
    visible = Window(size).visible(positions[None, :, None], positions[None, None, :])[0]
    assert visible.tolist() == [[abs(i - j) < size for j in range(6)] for i in range(6)]


def test_a_window_holds_at_least_one_position() -> None:
    with pytest.raises(SpecError, match=r"^size: a window must hold at least one position, not 0"):
        Window(0)


def shown(pattern: AttentionPattern, n: int = 12) -> list[list[bool]]:
    positions = torch.arange(n)
    return pattern.visible(positions[:, None], positions[None]).tolist()


@pytest.mark.parametrize(
    ("pattern", "visible"),
    [
        (DilatedWindow(3, 2), lambda i, j: abs(i - j) in (0, 2, 4)),
        (Blocks(4), lambda i, j: i // 4 == j // 4),
        (Blocks(3, 1), lambda i, j: abs(i // 3 - j // 3) <= 1),
        (GlobalTokens(2), lambda i, j: i < 2 or j < 2),
        (Sinks(3, 2), lambda i, j: abs(i - j) < 3 or j < 2),
        (AnyOf((Window(2), GlobalTokens(1))), lambda i, j: abs(i - j) < 2 or 0 in (i, j)),
    ],
)
def test_visible_keys_of_each_pattern(pattern: AttentionPattern, visible: Callable[[int, int], bool]) -> None:
    assert shown(pattern) == [[visible(i, j) for j in range(12)] for i in range(12)]
    # Reach and first are upper bounds that a ring cache relies on.
    assert pattern.reach is not None
    for i in range(12):
        for j in range(i):
            assert not shown(pattern)[i][j] or i - j <= pattern.reach or j < pattern.first


def test_prefix_is_visible_at_any_distance() -> None:
    prefix = torch.tensor([[True, True, False, False, False, False]])
    mask = Mask(causal=True, prefix=prefix, attention_pattern=KeepPrefix(Window(2)))
    dense = mask.dense(6, 6, torch.device("cpu"))
    assert dense is not None
    for i in range(6):
        assert dense[0, 0, i].tolist() == [j < 2 or (j <= i and i - j < 2) for j in range(6)]


def test_a_prefix_pattern_is_refused_without_a_prefix() -> None:
    spec = tiny.decoder_only()
    with pytest.raises(SpecError, match="'keep_prefix' has no effect without a prefix; use it in a prefix language"):
        build(replace_at(spec, "decoder.attention_pattern", KeepPrefix(Window(2))))
    build(replace_at(tiny.prefix_lm(), "decoder.attention_pattern", KeepPrefix(Window(2))))


def test_layers_of_one_stack_may_have_different_patterns() -> None:
    """Local, local, global: each layer equals the dense mask of its own pattern."""
    local, everywhere = SelfAttention(attention_pattern=Window(3)), SelfAttention()
    blocks = tuple(Block((branch, FeedForward(24)), PreNorm()) for branch in (local, local, everywhere))
    model = build(replace_at(tiny.decoder_only(depth=3), "decoder.pattern", blocks)).eval()
    trace = Trace()
    with torch.no_grad():
        model(Batch(torch.randint(3, 20, (1, 9))), trace=trace)
    for weights, size in zip(trace.weights["decoder.self"], (3, 3, 9), strict=True):
        attended = (weights[0] > 0).all(0).tolist()
        assert attended == [[0 <= i - j < size for j in range(9)] for i in range(9)]


def test_a_union_needs_two_patterns() -> None:
    with pytest.raises(SpecError, match=r"^patterns: a union needs at least two patterns"):
        AnyOf((Window(2),))


def test_a_pattern_of_a_layer_keeps_the_position_scheme_for_its_number_of_heads() -> None:
    """The pattern as a field of the layers gives the same output as the pattern of the stack."""
    spec = swap(tiny.decoder_only(), Tokens, lambda tokens: replace(tokens, position=None))
    positions = (AtHeads(2, T5Bias(8, 16)),)
    of_layers = SelfAttention(heads=2, attention_pattern=Window(3))
    of_stack = replace(of_layers, attention_pattern=None)
    wiring = Plain((Block((of_layers, FeedForward(24)), PreNorm()),), 2, positions=positions)
    other = replace(wiring, pattern=(Block((of_stack, FeedForward(24)), PreNorm()),), attention_pattern=Window(3))
    layers, stack = (build(replace_at(spec, "decoder", decoder)) for decoder in (wiring, other))
    stack.load_state_dict(layers.state_dict())
    batch = Batch(torch.randint(3, 20, (2, 9)))
    torch.testing.assert_close(layers.eval()(batch), stack.eval()(batch))
    layers(batch).square().sum().backward()
    assert layers.get_parameter("decoder.positions.2.weight").grad.abs().sum() > 0  # type: ignore[reportOptionalMemberAccess]


def test_a_pattern_of_a_stack_that_no_layer_uses_is_refused() -> None:
    block = Block((SelfAttention(attention_pattern=Window(3)), FeedForward(24)))
    with pytest.raises(
        SpecError, match=r"^attention_pattern: every attention layer of this stack has a pattern of its"
    ):
        Plain((block,), 2, attention_pattern=Window(4))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Window, "size", 10**30),
        (BigBird, "seed", 10**14),
        (CausalBigBird, "seed", -1),
        (DilatedWindow, "dilation", 2**31),
    ],
)
def test_numbers_that_no_tensor_can_hold_are_refused(kind: type[AttentionPattern], name: str, value: int) -> None:
    with pytest.raises(SpecError, match=f"^{name}: must be at"):
        kind(**{name: value})
