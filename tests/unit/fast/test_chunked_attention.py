"""The kernels "chunked" and "flex" equal the reference under every pattern."""

import inspect
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.fast import attention as kernels
from regard.fast import chunked_attention, flex
from regard.fast.chunked_attention import groups_of
from regard.nn.big_bird import CausalBigBird
from regard.nn.mask import Mask, View
from regard.nn.pattern import AnyOf, GlobalTokens, Window
from regard.nn.position.bias import alibi_slopes
from regard.nn.terms import Terms

from .sparse_masks import T, masks

CPU = torch.device("cpu")
MASKS = dict(masks())
SLOPES = torch.tensor(alibi_slopes(4), dtype=torch.float64)
ALIBI = Terms(by_distance=lambda distance: -SLOPES.view(-1, *[1] * distance.dim()) * distance.abs())


def inputs(kv_heads: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, T, 8, dtype=torch.float64, requires_grad=True) for heads in (4, kv_heads, kv_heads)]


def output_and_gradients(kernel: str, mask: Mask, terms: Terms | None, kv_heads: int = 4) -> list[Tensor]:
    """Return the output of `kernel`, and the gradients of q, k and v if it has them on a CPU."""
    qkv = inputs(kv_heads)
    gradients = kernel != "flex"
    with kernels.use(kernel):
        q, k, v = (x if gradients else x.detach() for x in qkv)
        y = kernels.attend(q, k, v, View(mask, T, T, CPU, terms), scale=0.3)
    if not gradients:
        return [y]
    torch.manual_seed(1)
    return [y, *torch.autograd.grad((y * torch.randn_like(y)).sum(), qkv)]


@pytest.mark.parametrize("name", MASKS)
def test_sparse_kernels_equal_the_reference(name: str) -> None:
    expected = output_and_gradients("reference", MASKS[name], None)
    for kernel in ("chunked", "flex") if "packed" in name or "prefix" in name else ("chunked",):  # both share a mask
        for output, reference in zip(output_and_gradients(kernel, MASKS[name], None), expected, strict=False):
            torch.testing.assert_close(output, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["window, plain, causal", "big bird, padded", "sinks, packed, causal"])
@pytest.mark.parametrize(("terms", "kv_heads"), [(ALIBI, 4), (None, 2), (ALIBI, 1)])
def test_sparse_kernels_have_biases_and_grouped_queries(name: str, terms: Terms | None, kv_heads: int) -> None:
    expected = output_and_gradients("reference", MASKS[name], terms, kv_heads)
    for kernel in ("chunked", "flex"):
        for output, reference in zip(
            output_and_gradients(kernel, MASKS[name], terms, kv_heads), expected, strict=False
        ):
            torch.testing.assert_close(output, reference, rtol=0, atol=1e-12)


def test_single_precision_is_within_a_millionth() -> None:
    q, k, v = (x.detach().float() for x in inputs())
    view = View(MASKS["window, plain, causal"], T, T, CPU)
    with kernels.use("reference"):
        expected = kernels.attend(q, k, v, view, scale=0.3)
    for kernel in ("sdpa", "chunked", "flex"):
        with kernels.use(kernel):
            assert (kernels.attend(q, k, v, view, scale=0.3) - expected).abs().max() < 1e-6


def test_dropout_of_attention_weights_keeps_the_mean() -> None:
    """With values of 1, an output is the sum of the weights that are kept, divided by 0.7: 1 on average."""
    q, k, v = (x.detach() for x in inputs())
    view = View(MASKS["window, plain, causal"], T, T, CPU)
    with kernels.use("chunked"):
        y = kernels.attend(q, k, torch.ones_like(v), view, scale=0.3, dropout=0.3)[..., 0]
    assert set(y[:, :, 0].flatten().tolist()) <= {0.0, 1 / 0.7}  # the first query attends to itself alone
    assert y.std() > 0.05
    assert abs(y.mean() - 1.0) < 6 * y.std() / math.sqrt(y.numel())


@pytest.mark.parametrize("name", ["big bird, packed", "sinks, padded, causal", "prefix kept, prefix, causal"])
def test_masks_do_not_depend_on_the_number_of_elements_computed_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(MASKS[name], T, T, CPU)
    whole = groups_of(view, 2)
    monkeypatch.setattr(chunked_attention, "ELEMENTS", 1)
    for group, parts in zip(whole, groups_of(view, 2), strict=True):
        assert torch.equal(group.mask, parts.mask)


def test_no_tensor_of_the_mask_has_length_squared_elements() -> None:
    length = 4096
    view = View(Mask(causal=True, attention_pattern=AnyOf((Window(64), GlobalTokens(1)))), length, length, CPU)
    assert sum(group.mask.numel() for group in groups_of(view, 1)) < length * 64 * 8


@pytest.mark.parametrize(
    ("pattern", "length", "chosen"),
    [(Window(64), 4096, "chunked"), (Window(64), 512, "sdpa"), (Window(4096), 4096, "sdpa"), (None, 4096, "sdpa")],
)
def test_long_sequences_with_small_windows_use_the_sparse_kernel(
    pattern: Window | None, length: int, chosen: str
) -> None:
    q = torch.empty(1, 1, length, 8)
    view = View(Mask(causal=True, attention_pattern=pattern), length, length, CPU)
    assert kernels.choose(kernels.Call(q, q, q, view, 1.0, 0.0)) == chosen
    with_table = View(view.mask, length, length, CPU, Terms(content=lambda q: q))
    assert kernels.choose(kernels.Call(q, q, q, with_table, 1.0, 0.0)) == "sdpa"


def test_big_bird_in_packed_rows_is_sparse() -> None:
    seg = torch.ones(1, 4096, dtype=torch.int64).cumsum(1) // 1500 + 1
    mask = Mask(causal=True, q_seg=seg, k_seg=seg, packed=True, segments=3, attention_pattern=CausalBigBird())
    q = torch.empty(1, 1, 4096, 8)
    assert kernels.choose(kernels.Call(q, q, q, View(mask, 4096, 4096, CPU), 1.0, 0.0)) == "chunked"
    beside = replace(mask, q_seg=seg.clone())  # the rows of queries and of keys may differ
    assert kernels.choose(kernels.Call(q, q, q, View(beside, 4096, 4096, CPU), 1.0, 0.0)) == "sdpa"


class Layer(torch.nn.Module):
    """One attention layer under a window."""

    def __init__(self) -> None:
        super().__init__()
        self.pattern, self.attend = Window(30), inspect.unwrap(kernels.attend)
        self.scale = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, q: Tensor) -> Tensor:
        mask = Mask(causal=True, attention_pattern=self.pattern)
        attend = self.attend  # without checks of shapes, which torch.compile cannot trace
        return attend(q * self.scale, q, q, View(mask, q.shape[2], q.shape[2], CPU), scale=0.3).sum(-1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # emitted by torch.compile
@pytest.mark.parametrize("dynamic", [False, None])
def test_torch_compile_keeps_the_sparse_kernel(dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    choose = kernels.choose
    monkeypatch.setattr(kernels, "choose", lambda call: (chosen.append(choose(call)), choose(call))[1])
    torch.compiler.reset()
    layer = Layer()
    compiled = torch.compile(layer, backend="eager", dynamic=dynamic)
    for length in (1100, 1200):
        q = torch.randn(1, 2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        expected = torch.autograd.grad(layer(q).square().sum(), layer.scale)
        chosen.clear()
        actual = torch.autograd.grad(compiled(q).square().sum(), layer.scale)
        assert chosen == ["chunked"]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_flex_attention_is_compiled_for_any_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above torch's limit of 8 shapes, FlexAttention would compute all pairs of tokens."""
    torch.compiler.reset()
    compiled = torch.compile(flex.flexible.flex_attention, backend="eager", dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "_compiled_flex", lambda: compiled)
    for length in range(1, 12):
        q = torch.randn(1, 1, length, 8)
        torch.testing.assert_close(flex.fused(q, q, q, scale=1.0), torch.softmax(q @ q.mT, -1) @ q)
