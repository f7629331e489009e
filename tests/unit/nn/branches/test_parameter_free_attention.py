"""softmax(X X') X, compared with the formula, and what lectures claim of it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import SpecError
from regard.nn.branches.parameter_free_attention import ParameterFreeAttention
from regard.nn.cache import KVCache, Rows
from regard.nn.core import Branch, Site
from regard.nn.mask import Context, Mask, View
from regard.nn.pattern import Window
from regard.nn.position.additive import Injected
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.ring_cache import RingCache
from regard.nn.trace import Trace

MakeSite = Callable[..., Site]
Naive = Callable[..., Tensor]
CPU = torch.device("cpu")
T, D = 5, 12
SEG = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
MASKS = [Mask(), Mask(causal=True), Mask(causal=True, strict=True), Mask(q_seg=SEG, k_seg=SEG)]


def weights_of(branch: Branch, x: Tensor, mask: Mask | None = None) -> Tensor:
    trace = Trace()
    branch(x, Context(View(mask or Mask(), x.shape[1], x.shape[1], CPU), trace=trace))
    return trace.weights["decoder.self"][0]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize(("heads", "scale"), [(1, "none"), (1, "sqrt"), (3, "none"), (4, 0.3)])
def test_by_formula(heads: int, scale: Any, mask: Mask, site: MakeSite, naive: Naive) -> None:
    x = torch.randn(2, T, D)
    branch = ParameterFreeAttention(heads, scale).build(site())
    factor = {"none": 1.0, "sqrt": math.sqrt(heads / D)}.get(scale, scale)
    parts = torch.stack(x.split(D // heads, -1), 1)
    expected = torch.cat(naive(parts, parts, parts, mask, factor).unbind(1), -1)
    torch.testing.assert_close(branch(x, Context(View(mask, T, T, CPU))), expected, rtol=0, atol=1e-12)


def test_no_parameters(site: MakeSite) -> None:
    """C4."""
    assert list(ParameterFreeAttention().build(site()).parameters()) == []


def test_a_rotation_of_the_features_changes_no_weight(site: MakeSite) -> None:
    """C5: each feature has an equal role."""
    branch, x = ParameterFreeAttention().build(site()), torch.randn(2, T, D)
    rotation = torch.linalg.qr(torch.randn(D, D)).Q
    torch.testing.assert_close(weights_of(branch, x @ rotation), weights_of(branch, x), rtol=0, atol=1e-12)


def test_tokens_of_equal_norm_attend_most_to_themselves(site: MakeSite) -> None:
    """C6: without separate queries and keys, the largest score of every token is its own."""
    x = torch.nn.functional.layer_norm(torch.randn(1, 1000, D), (D,))
    weights = weights_of(ParameterFreeAttention().build(site()), x)[0, 0]
    assert torch.equal(weights.argmax(-1), torch.arange(1000))


def test_outputs_lie_in_the_span_of_the_tokens(site: MakeSite) -> None:
    """C12, C29: a weighted mean leaves the span of the inputs as it is."""
    x = torch.randn(1, 9, 3) @ torch.randn(3, D)
    y = ParameterFreeAttention().build(site())(x, Context(View(Mask(), 9, 9, CPU)))
    assert torch.linalg.matrix_rank(torch.cat((x, y), 1)[0]) == 3


def test_positions_act_on_queries_keys_and_values(site: MakeSite, naive: Naive) -> None:
    """Rotary rotates queries and keys alone; ALiBi adds a bias; injected vectors are added to all three."""
    x, view = torch.randn(2, T, D), View(Mask(causal=True), T, T, CPU)
    one_head = site(heads=1, d_head=D, d_value=D)
    rotation, offset = Rotary().build(one_head)(view).rotation, Injected().build(one_head)(view).offset
    assert rotation is not None
    assert offset is not None
    turned, moved, plain = rotation(x[:, None]), (x + offset)[:, None], x[:, None]
    distance = (torch.arange(T) - torch.arange(T)[:, None]).abs()
    expected = {
        Rotary(): naive(turned, turned, plain, view.mask, 1.0),
        Injected(): naive(moved, moved, moved, view.mask, 1.0),
        ALiBi(): naive(plain, plain, plain, view.mask, 1.0, -(2.0**-8) * distance[None, None]),
    }
    for position, y in expected.items():
        branch = ParameterFreeAttention(position=position).build(site())
        torch.testing.assert_close(branch(x, Context(view)), y[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "cache"),
    [
        ({}, KVCache),
        ({"position": Rotary()}, KVCache),
        ({"position": ALiBi(), "attention_pattern": Window(2)}, RingCache),
        ({"position": Injected(), "scale": "sqrt"}, KVCache),
    ],
    ids=["plain", "rotary", "ALiBi in a window", "injected"],
)
def test_decoding_in_steps_equals_one_pass(fields: dict[str, Any], cache: type, site: MakeSite) -> None:
    branch, x = ParameterFreeAttention(2, **fields).build(site()), torch.randn(2, T, D)
    whole = branch(x, Context(View(Mask(causal=True), T, T, CPU)))
    rows = Rows.start(2, 1, CPU, T, static=False)
    state = branch.start(rows, Context(rows.view(1)))
    assert isinstance(state, cache)
    for start, stop in ((0, 2), (2, 3), (3, 5)):
        part = branch(x[:, start:stop], Context(rows.view(stop - start)), state)
        rows.advance(stop - start, None)
        torch.testing.assert_close(part, whole[:, start:stop], rtol=0, atol=1e-12)


def test_the_pattern_of_the_layer_replaces_that_of_the_stack(site: MakeSite) -> None:
    branch, x = ParameterFreeAttention(attention_pattern=Window(1)).build(site()), torch.randn(2, T, D)
    output = branch(x, Context(View(Mask(attention_pattern=Window(3)), T, T, CPU)))
    torch.testing.assert_close(output, x)  # every token attends to itself alone


def test_sizes_that_do_not_fit_are_refused(site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^decoder\.heads: 5 heads do not divide d_model 12"):
        ParameterFreeAttention(5).build(site(path="decoder"))
    with pytest.raises(SpecError, match=r"^decoder\.heads: is 1, but the stack's 't5_bias' position is for 3"):
        ParameterFreeAttention().build(site(path="decoder", position=T5Bias()))
    with pytest.raises(SpecError, match="at least 1, not 0"):
        ParameterFreeAttention(0)
