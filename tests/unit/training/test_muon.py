"""Muon in full precision: against its formula and torch's Muon, and the singular values after Newton-Schulz."""

import pytest
import torch
from torch import Tensor, nn

from regard.training import muon
from regard.training.muon import BatchedMuon, orthogonalised

SHAPES = ((6, 6), (12, 6), (6, 12), (6, 6), (12, 6), (5, 9))  # square, tall and wide, some alike


def matrices(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    rng = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=rng, dtype=torch.float64).to(parameter.dtype)


def newton_schulz(x: Tensor) -> Tensor:
    """Newton-Schulz iteration of one matrix, as in the paper."""
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def test_learning_rate_in_a_tensor_gives_the_same_steps() -> None:
    actual, expected = matrices(torch.float32), matrices(torch.float32)
    a = BatchedMuon(actual, lr=0.1, weight_decay=0.3, momentum=0.9)
    b = BatchedMuon(expected, lr=0.1, weight_decay=0.3, momentum=0.9)
    tensor_rate = b.param_groups[0]["lr"] = torch.tensor(0.0)
    for step, rate in enumerate((0.1, 0.05)):
        a.param_groups[0]["lr"] = rate
        tensor_rate.fill_(rate)
        for parameters, optimizer in ((actual, a), (expected, b)):
            set_gradients(parameters, step)
            optimizer.step()
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("batched", [1, 100, 2**17])  # elements: each matrix alone, some together, all together
def test_muon_matches_its_formula(batched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "BATCHED", batched)
    parameters = matrices()
    optimizer = BatchedMuon(parameters, lr=0.1, weight_decay=0.3, momentum=0.9)
    expected = [p.detach().clone() for p in parameters]
    buffers = [torch.zeros_like(p) for p in expected]
    for step, rate in enumerate((0.1, 0.05, 0.02)):
        optimizer.param_groups[0]["lr"] = rate
        set_gradients(parameters, step)
        for n, parameter in enumerate(parameters):
            assert parameter.grad is not None
            buffers[n] = 0.9 * buffers[n] + 0.1 * parameter.grad
            update = newton_schulz(0.1 * parameter.grad + 0.9 * buffers[n])
            expected[n] = expected[n] - rate * 0.3 * expected[n] - rate * 0.2 * max(parameter.shape) ** 0.5 * update
        optimizer.step()
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-9, atol=1e-10)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_equals_torch_muon_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", lambda x: x.clone())  # products in bfloat16 crash some CPUs
    actual, expected = matrices(), matrices()
    a = BatchedMuon(actual, lr=0.1, weight_decay=0.3, momentum=0.9)
    b = torch.optim.Muon(expected, lr=0.1, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for parameters, optimizer in ((actual, a), (expected, b)):
            set_gradients(parameters, step)
            optimizer.step()
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    states = [optimizer.state_dict()["state"] for optimizer in (a, b)]
    torch.testing.assert_close(*states)  # so that checkpoints move between devices


def test_stack_of_matrices_is_updated_like_single_matrices() -> None:
    single = [nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(n))) for n in range(3)]
    stack = nn.Parameter(torch.stack([p.detach() for p in single]))
    set_gradients(single, 0)
    stack.grad = torch.stack([p.grad for p in single if p.grad is not None])
    for parameters in (single, [stack]):
        BatchedMuon(parameters, lr=0.1, weight_decay=0.3, momentum=0.9).step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_schulz_brings_singular_values_near_one(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, 24, generator=rng, dtype=dtype)
    update = orthogonalised(x)
    assert update.dtype == dtype
    values = torch.linalg.svdvals(update)
    assert float(values.min()) > 0.65
    assert float(values.max()) < 1.25
    # The singular vectors stay: U' update V is diagonal.
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    turned = u.mT @ update @ v.mT
    torch.testing.assert_close(turned, torch.diag_embed(turned.diagonal(dim1=1, dim2=2)), rtol=0, atol=1e-4)


def test_muon_skips_matrices_without_gradients_and_survives_zero_gradients() -> None:
    parameters = matrices(torch.float32)
    set_gradients(parameters, 0)
    parameters[0].grad = None
    parameters[3].grad = torch.zeros_like(parameters[3])
    before = [p.detach().clone() for p in parameters]
    BatchedMuon(parameters, lr=0.1, weight_decay=0.0, momentum=0.9).step()
    unchanged = [bool(torch.equal(p, old)) for p, old in zip(parameters, before, strict=True)]
    assert unchanged == [True, False, False, True, False, False]
