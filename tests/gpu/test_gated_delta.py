"""The gated delta rule in chunks on a GPU equals the loop over tokens in float64, also as a CUDA graph."""

import pytest
import torch
from torch import Tensor

from regard.fast.gated_delta import chunked_gated_delta_rule
from regard.nn.branches.gated_delta import gated_delta_rule, unit

pytestmark = pytest.mark.gpu
B, H, K, V = 2, 3, 16, 8


def inputs(T: int) -> list[Tensor]:
    """Return (q, k, v, log_decay, strength, state) in float32. Some decays are strong, and some clear the state."""
    torch.manual_seed(0)
    q, k, v = unit(torch.randn(B, H, T, K)), unit(torch.randn(B, H, T, K)), torch.randn(B, H, T, V)
    log_decay = -0.01 * torch.rand(B, H, T)
    log_decay[:, :, 5::40], log_decay[:, :, 70::90] = -1e4, -torch.inf
    return [x.float() for x in (q, k, v, log_decay, torch.rand(B, H, T), torch.randn(B, H, K, V))]


def outputs_and_gradients(rule: object, leaves: list[Tensor]) -> list[Tensor]:
    y, last = rule(*leaves)  # type: ignore[reportCallIssue]
    gradients = torch.autograd.grad(y.square().sum() + last.sum(), leaves)
    return [y.detach(), last.detach(), *gradients]  # a graph of autograd would tie a later capture to this stream


def leaves_of(values: list[Tensor], **options: object) -> list[Tensor]:
    return [x.detach().to(**options).requires_grad_() for x in values]  # type: ignore[reportCallIssue]


def test_outputs_and_gradients() -> None:
    for T in (1, 63, 200, 1000):
        values = inputs(T)
        exact = outputs_and_gradients(gated_delta_rule, leaves_of(values, dtype=torch.float64))
        rounded = outputs_and_gradients(chunked_gated_delta_rule, leaves_of(values, device="cuda"))
        for mine, plain in zip(rounded, exact, strict=True):
            assert (mine.cpu().double() - plain).norm() <= 1e-4 * plain.norm()


def test_a_cuda_graph_computes_the_same() -> None:
    """As in training, where a step is one graph: no operation waits for the GPU."""
    leaves = leaves_of(inputs(200), device="cuda")
    expected = outputs_and_gradients(chunked_gated_delta_rule, leaves)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # a graph is captured after a few steps beside the default stream
        for _ in range(3):
            outputs_and_gradients(chunked_gated_delta_rule, leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs_and_gradients(chunked_gated_delta_rule, leaves)
    graph.replay()
    torch.cuda.synchronize()
    for mine, plain in zip(captured, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


def test_memory_is_linear_in_the_length() -> None:
    peaks = []
    for T in (4096, 16384):
        leaves = leaves_of(inputs(T), device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs_and_gradients(chunked_gated_delta_rule, leaves)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 4.5 * peaks[0]
