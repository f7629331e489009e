"""The gated delta rule in chunks equals the loop over tokens."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from regard.fast.gated_delta import (
    CHUNK,
    ChunkedGatedDelta,
    chunk_states,
    chunk_states_backward,
    chunked_gated_delta_rule,
)
from regard.nn.branches.gated_delta import gated_delta_rule, unit

B, H, K, V = 2, 3, 6, 4


def inputs(T: int) -> list[Tensor]:
    """Return (q, k, v, log_decay, strength, state)."""
    q, k, v = unit(torch.randn(B, H, T, K)), unit(torch.randn(B, H, T, K)), torch.randn(B, H, T, V)
    return [q, k, v, -2 * torch.rand(B, H, T), torch.rand(B, H, T), torch.randn(B, H, K, V)]


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 200])
def test_outputs_states_and_gradients_of_any_length(T: int) -> None:
    """Some tokens clear the state, and some leave it unchanged, as padding does."""
    leaves = [x.requires_grad_() for x in inputs(T)]
    clears = torch.rand(B, H, T) < 0.05
    clears[:, :, CHUNK - 2 : CHUNK + 1] = True
    padding = torch.rand(B, H, T) < 0.2
    clears[..., 0] = False

    def run(rule: object) -> list[Tensor]:
        q, k, v, log_decay, strength, state = leaves
        log_decay = log_decay.masked_fill(padding, 0.0).masked_fill(clears, -torch.inf)
        y, last = rule(q, k, v, log_decay, strength.masked_fill(padding, 0.0), state)  # type: ignore[reportCallIssue]
        return [y, last, *torch.autograd.grad((y**2).sum() + (last**3).sum(), leaves)]

    for rule in (chunked_gated_delta_rule, ChunkedGatedDelta.rule):
        for mine, plain in zip(run(rule), run(gated_delta_rule), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-11)


def test_any_cut_gives_the_same_state() -> None:
    *whole, start = inputs(150)
    y, last = chunked_gated_delta_rule(*whole, start)  # type: ignore[reportCallIssue]
    for cut in (1, 63, 64, 100, 149):
        first, second = ([x[:, :, part] for x in whole] for part in (slice(cut), slice(cut, None)))
        head, state = chunked_gated_delta_rule(*first, start)  # type: ignore[reportCallIssue]
        tail, state = chunked_gated_delta_rule(*second, state)  # type: ignore[reportCallIssue]
        torch.testing.assert_close(torch.cat((head, tail), 2), y, rtol=0, atol=1e-12)
        torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


@pytest.mark.parametrize("log_decay", [0.0, -1e-4, -50.0, -1e5])
def test_float32_is_precise_for_weak_and_strong_decays(log_decay: float) -> None:
    """Equal keys with strength 1 are the hardest case for the triangular system."""
    q, k, v, _, _, state = inputs(300)
    k = k[:, :, :1].expand_as(k)
    gates = torch.full((B, H, 300), log_decay), torch.ones(B, H, 300)
    exact = gated_delta_rule(q, k, v, *gates, state)
    single = [x.float().requires_grad_() for x in (q, k, v, *gates, state)]
    rounded = chunked_gated_delta_rule(*single)  # type: ignore[reportCallIssue]
    for mine, plain in zip(rounded, exact, strict=True):
        torch.testing.assert_close(mine.double(), plain, rtol=0, atol=1e-4)
    for gradient in torch.autograd.grad(rounded[0].sum() + rounded[1].sum(), single):
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("strong", [-50.0, -1e3, -1e6])
def test_float32_is_precise_for_weak_decays_after_a_strong_one(strong: float) -> None:
    """The digits of a weak decay are lost in a sum that begins with a strong one."""
    single = [x.float() for x in inputs(300)]
    single[3] = single[3] / 200
    single[3][:, :, 5::50] = strong
    exact = gated_delta_rule(*(x.double().requires_grad_() for x in single))
    rounded = chunked_gated_delta_rule(*(x.requires_grad_() for x in single))  # type: ignore[reportCallIssue]
    for mine, plain in zip(rounded, exact, strict=True):
        torch.testing.assert_close(mine.double(), plain, rtol=0, atol=1e-5)


class Work(TorchDispatchMode):
    """Counts the elements that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result._is_view():
            self.elements += result.numel()
        return result


def test_time_of_forward_and_backward_pass_is_linear() -> None:
    """The gradient of each slice of a tensor would be as large as the tensor."""
    elements = []
    for chunks in (8, 32):
        leaves = [x.requires_grad_() for x in inputs(chunks * CHUNK)]
        with Work() as work:
            y, last = chunked_gated_delta_rule(*leaves)  # type: ignore[reportCallIssue]
            torch.autograd.grad(y.sum() + last.sum(), leaves)
        elements.append(work.elements)
    assert elements[1] < 4.1 * elements[0]


def test_the_loop_over_chunks_is_one_operation_for_the_compiler() -> None:
    """Otherwise, torch.compile would unroll 1,024 chunks of a text of 65,536 tokens."""
    maps, added, state = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 5), torch.randn(2, 4, 5)
    arguments = (maps, added, state)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(chunk_states, tuple(x.requires_grad_() for x in arguments), test_utils=checks)
    torch.library.opcheck(chunk_states_backward, (maps.detach(), torch.randn(4, 2, 4, 5)), test_utils=checks)
    assert torch.autograd.gradcheck(chunk_states, arguments)

    sizes = []
    for chunks in (2, 6):
        trace: Any = make_fx(partial(chunked_gated_delta_rule, chunk=CHUNK))(*inputs(chunks * CHUNK))
        sizes.append(len(trace.graph.nodes))
    assert sizes[0] == sizes[1]
