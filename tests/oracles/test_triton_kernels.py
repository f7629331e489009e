"""Our Triton kernels without a GPU: Triton's interpreter runs them on a CPU, in float32, against torch's operations."""

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
    """A module of kernels, imported so that they are interpreted.

    Not by the usual way: what checks shapes in tests would wrap them, and the interpreter reads their source.
    """
    found: dict[str, ModuleType] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in ("dropout_rng", "packed_attention", "layer_norm", "linear_relu"):
            place = Path(regard.__file__).parent / "fast" / f"{name}.py"
            spec = spec_from_file_location(f"regard.fast.{name}", place)
            assert spec is not None
            assert spec.loader is not None
            found[name] = module_from_spec(spec)
            patch.setitem(sys.modules, spec.name, found[name])
            spec.loader.exec_module(found[name])
        yield found.__getitem__


@pytest.fixture(autouse=True)
def single() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def gradients(y: Tensor, weights: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), inputs)]


def close(mine: Sequence[Tensor], its: Sequence[Tensor]) -> None:
    for a, b in zip(mine, its, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def visible(causal: bool) -> Tensor:
    seen = (SEG[:, None, :, None] == SEG[:, None, None, :]) & (SEG > 0)[:, None, None, :]
    return seen & torch.ones(100, 100).tril().bool() if causal else seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_within_segments(kernels: Any, causal: bool, fused: bool) -> None:
    qkv, weights = draw(2, 100, 3, 4, 16), torch.randn(2, 4, 100, 16)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    layout = kernels("packed_attention").lay_out(SEG, SEG, causal)
    mine = kernels("packed_attention").attend(q, k, v, layout, 0.25, 0.0, qkv if fused else None)
    scores = (0.25 * q @ k.mT).masked_fill(~visible(causal), -torch.inf)
    its = scores.softmax(-1).nan_to_num(0.0) @ v
    close(gradients(mine, weights, [qkv]), gradients(its, weights, [qkv]))


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_attention_keeps_the_same_weights_on_the_way_back(kernels: Any, causal: bool) -> None:
    """With the identity as values, the context is the dropped weights, which explain all gradients."""
    q, k, weights = draw(2, 4, 100, 128), draw(2, 4, 100, 128), torch.randn(2, 4, 100, 128)
    v = torch.eye(100, 128).expand(2, 4, -1, -1).clone().requires_grad_()
    layout = kernels("packed_attention").lay_out(SEG, SEG, causal)
    mine = kernels("packed_attention").attend(q, k, v, layout, 0.25, SHARE)
    seen = visible(causal)
    kept = (mine.detach()[..., :100] > 0) | ~seen
    share = float(kept[seen.expand_as(kept)].float().mean())
    assert share == pytest.approx(1 - SHARE, abs=0.02)
    soft = (0.25 * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    its = (soft * kept / (1 - SHARE)) @ v
    close(gradients(mine, weights, [q, k, v]), gradients(its, weights, [q, k, v]))


@pytest.mark.parametrize("D", [16, 100, 512])
@pytest.mark.parametrize("joins", [False, True])
def test_layer_norm(kernels: Any, D: int, joins: bool) -> None:
    x, added, gain, bias, weights = draw(5, 37, D), draw(5, 37, D), draw(D), draw(D), torch.randn(5, 37, D)
    inputs = [x, gain, bias, *([added] if joins else [])]
    mine = kernels("layer_norm").layer_norm(x, gain, bias, 1e-5, added if joins else None)
    its = F.layer_norm(x + added if joins else x, (D,), gain, bias, 1e-5)
    close(gradients(mine, weights, inputs), gradients(its, weights, inputs))


def test_a_layer_norm_without_eps_knows_nothing_of_rows_that_are_not_there(kernels: Any) -> None:
    """The last tile is not full: what is not there has a variance of 0."""
    x, gain, bias, weights = draw(5, 512), draw(512), draw(512), torch.randn(5, 512)
    mine = kernels("layer_norm").layer_norm(x, gain, bias, 0.0)
    close(
        gradients(mine, weights, [x, gain, bias]),
        gradients(F.layer_norm(x, (512,), gain, bias, 0.0), weights, [x, gain, bias]),
    )


def test_dropout_inside_a_layer_norm(kernels: Any) -> None:
    D = 64
    x, added, gain, bias, weights = draw(50, 37, D), draw(50, 37, D), draw(D), draw(D), torch.randn(50, 37, D)
    inputs = [x, added, gain, bias]
    mine = gradients(kernels("layer_norm").layer_norm(x, gain, bias, 1e-5, added, SHARE), weights, inputs)
    kept = (mine[2] != 0).float()
    assert float(kept.mean()) == pytest.approx(1 - SHARE, abs=0.01)
    its = F.layer_norm(x + added * kept / (1 - SHARE), (D,), gain, bias, 1e-5)
    close(mine, gradients(its, weights, inputs))
    again = gradients(kernels("layer_norm").layer_norm(x, gain, bias, 1e-5, added, SHARE), weights, inputs)
    same = float(((again[2] != 0) == (mine[2] != 0)).float().mean())
    assert same == pytest.approx(SHARE**2 + (1 - SHARE) ** 2, abs=0.01)  # another seed, another mask


@pytest.mark.parametrize(("tokens", "D", "F_"), [(240, 64, 256), (101, 48, 200), (7, 32, 300)])
def test_relu_inside_a_product(kernels: Any, tokens: int, D: int, F_: int) -> None:
    x, weight, bias, weights = draw(2, tokens, D), draw(F_, D), draw(F_), torch.randn(2, tokens, F_)
    mine = kernels("linear_relu").linear_relu(x, weight, bias)
    its = F.relu(F.linear(x, weight, bias))
    inputs = [x, weight, bias]
    close(gradients(mine, weights, inputs), gradients(its, weights, inputs))


def test_a_compiler_takes_all_of_them(kernels: Any) -> None:
    """Shapes that are told to it are those that come, and gradients are the same."""
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
