"""Our Triton kernels equal torch's operations, in float32 on a CPU with Triton's interpreter."""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard

pytestmark = pytest.mark.oracle
SHARE = 0.3  # of dropout
SEG = torch.tensor([[1] * 40 + [2] * 37 + [3] * 20 + [0] * 3, [1] * 90 + [2] * 10])


@pytest.fixture(scope="module")
def kernels() -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that returns a module of kernels, imported so that they are interpreted.

    A normal import would wrap the kernels with shape checks, but the interpreter reads their source.
    """
    modules: dict[str, ModuleType] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in ("dropout_rng", "packed_attention", "layer_norm", "linear_relu"):
            path = Path(regard.__file__).parent / "fast" / f"{name}.py"
            spec = spec_from_file_location(f"regard.fast.{name}", path)
            assert spec is not None
            assert spec.loader is not None
            modules[name] = module_from_spec(spec)
            patch.setitem(sys.modules, spec.name, modules[name])
            spec.loader.exec_module(modules[name])
        yield modules.__getitem__


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def gradients(y: Tensor, weights: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), inputs)]


def close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def visible(causal: bool) -> Tensor:
    mask = (SEG[:, None, :, None] == SEG[:, None, None, :]) & (SEG > 0)[:, None, None, :]
    return mask & torch.ones(100, 100).tril().bool() if causal else mask


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_within_segments(kernels: Any, causal: bool, fused: bool) -> None:
    qkv, weights = draw(2, 100, 3, 4, 16), torch.randn(2, 4, 100, 16)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    layout = kernels("packed_attention").lay_out(SEG, SEG, causal)
    actual = kernels("packed_attention").attend(q, k, v, layout, 0.25, 0.0, qkv if fused else None)
    scores = (0.25 * q @ k.mT).masked_fill(~visible(causal), -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0.0) @ v
    close(gradients(actual, weights, [qkv]), gradients(expected, weights, [qkv]))


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_attention_has_the_same_mask_in_the_backward_pass(kernels: Any, causal: bool) -> None:
    """With the identity as values, the output is the weights after dropout, which determine all gradients."""
    q, k, weights = draw(2, 4, 100, 128), draw(2, 4, 100, 128), torch.randn(2, 4, 100, 128)
    v = torch.eye(100, 128).expand(2, 4, -1, -1).clone().requires_grad_()
    layout = kernels("packed_attention").lay_out(SEG, SEG, causal)
    actual = kernels("packed_attention").attend(q, k, v, layout, 0.25, SHARE)
    mask = visible(causal)
    kept = (actual.detach()[..., :100] > 0) | ~mask
    share = float(kept[mask.expand_as(kept)].float().mean())
    assert share == pytest.approx(1 - SHARE, abs=0.02)
    soft = (0.25 * q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    expected = (soft * kept / (1 - SHARE)) @ v
    close(gradients(actual, weights, [q, k, v]), gradients(expected, weights, [q, k, v]))


@pytest.mark.parametrize("D", [16, 100, 512])
@pytest.mark.parametrize("joins", [False, True])
def test_layer_norm(kernels: Any, D: int, joins: bool) -> None:
    x, added, gain, bias, weights = draw(5, 37, D), draw(5, 37, D), draw(D), draw(D), torch.randn(5, 37, D)
    inputs = [x, gain, bias, *([added] if joins else [])]
    actual = kernels("layer_norm").layer_norm(x, gain, bias, 1e-5, added if joins else None)
    expected = F.layer_norm(x + added if joins else x, (D,), gain, bias, 1e-5)
    close(gradients(actual, weights, inputs), gradients(expected, weights, inputs))


def test_a_layer_norm_without_eps_ignores_rows_beyond_the_end(kernels: Any) -> None:
    """The last tile is not full, and its missing rows have a variance of 0."""
    x, gain, bias, weights = draw(5, 512), draw(512), draw(512), torch.randn(5, 512)
    actual = kernels("layer_norm").layer_norm(x, gain, bias, 0.0)
    close(
        gradients(actual, weights, [x, gain, bias]),
        gradients(F.layer_norm(x, (512,), gain, bias, 0.0), weights, [x, gain, bias]),
    )


def test_dropout_inside_a_layer_norm(kernels: Any) -> None:
    D = 64
    x, added, gain, bias, weights = draw(50, 37, D), draw(50, 37, D), draw(D), draw(D), torch.randn(50, 37, D)
    inputs = [x, added, gain, bias]
    actual = gradients(kernels("layer_norm").layer_norm(x, gain, bias, 1e-5, added, SHARE), weights, inputs)
    kept = (actual[2] != 0).float()
    assert float(kept.mean()) == pytest.approx(1 - SHARE, abs=0.01)
    expected = F.layer_norm(x + added * kept / (1 - SHARE), (D,), gain, bias, 1e-5)
    close(actual, gradients(expected, weights, inputs))
    again = gradients(kernels("layer_norm").layer_norm(x, gain, bias, 1e-5, added, SHARE), weights, inputs)
    same = float(((again[2] != 0) == (actual[2] != 0)).float().mean())
    assert same == pytest.approx(SHARE**2 + (1 - SHARE) ** 2, abs=0.01)  # another seed, another mask


@pytest.mark.parametrize(("tokens", "D", "F_"), [(240, 64, 256), (101, 48, 200), (7, 32, 300)])
def test_relu_inside_a_product(kernels: Any, tokens: int, D: int, F_: int) -> None:
    x, weight, bias, weights = draw(2, tokens, D), draw(F_, D), draw(F_), torch.randn(2, tokens, F_)
    actual = kernels("linear_relu").linear_relu(x, weight, bias)
    expected = F.relu(F.linear(x, weight, bias))
    inputs = [x, weight, bias]
    close(gradients(actual, weights, inputs), gradients(expected, weights, inputs))


def test_torch_compile_supports_all_kernels(kernels: Any) -> None:
    """The declared shapes are the real shapes, and gradients are equal."""
    layout = kernels("packed_attention").lay_out(SEG, SEG, True)
    x, up, bias, wide = draw(2, 100, 32), draw(64, 32), draw(64), draw(192, 64)

    def model(x: Tensor, up: Tensor, bias: Tensor, wide: Tensor) -> Tensor:
        y = kernels("linear_relu").linear_relu(x, up, bias)
        y = kernels("layer_norm").layer_norm(y, bias, bias, 1e-5, y * 2)
        qkv = F.linear(y, wide).unflatten(-1, (3, 4, 16))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        segments = kernels("packed_attention")
        return segments.attend(q, k, v, layout, 0.25, 0.0, qkv) + segments.attend(q, k, v, layout, 0.25, 0.0)

    weights, inputs = torch.randn(2, 4, 100, 16), [x, up, bias, wide]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(gradients(compiled(*inputs), weights, inputs), gradients(model(*inputs), weights, inputs))
