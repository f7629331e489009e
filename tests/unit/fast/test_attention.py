import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import fast
from regard.batch import Batch, translation
from regard.errors import KernelError
from regard.fast import attention as kernels
from regard.fast import flex
from regard.fast.install import install
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn import attention
from regard.nn.attention_heads import Scale, factor
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.core import Site
from regard.nn.mask import Mask, View
from regard.nn.pattern import AttentionPattern, Blocks, Window
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.shaw import Shaw
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.plain import Plain
from regard.nn.terms import Terms
from regard.nn.trace import Trace

CPU = torch.device("cpu")
Naive = Callable[..., Tensor]
Case = tuple[Mask, int, int]


def view_of(mask: Mask, T: int, S: int, **terms: Any) -> View:
    return View(mask, T, S, CPU, Terms(**terms) if terms else None)


def heads(T: int, S: int, groups: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 heads with d_k 6, keys and values of `groups` heads with d_v 3, for two rows."""
    return torch.randn(2, 4, T, 6), torch.randn(2, groups, S, 6), torch.randn(2, groups, S, 3)


def biases(T: int, S: int) -> dict[str, Tensor | None]:
    return {"none": None, "shared": torch.randn(1, 4, T, S), "per row": torch.randn(2, 4, T, S)}


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("which", ["none", "shared", "per row"])
def test_every_kernel_computes_the_formula(case: Case, which: str, groups: int, naive: Naive) -> None:
    mask, T, S = case
    q, k, v = heads(T, S, groups)
    bias = biases(T, S)[which]
    expected = naive(q, k, v, mask, 0.3, bias)
    for name in ("sdpa", "reference", "flex"):
        view = view_of(mask, T, S) if bias is None else view_of(mask, T, S, bias=bias)
        with kernels.use(name):
            torch.testing.assert_close(kernels.attend(q, k, v, view, scale=0.3), expected, rtol=0, atol=1e-12)


def test_cpu_uses_sdpa_by_default(case: Case, naive: Naive) -> None:
    mask, T, S = case
    q, k, v = heads(T, S)
    assert kernels.choose(kernels.Call(q, k, v, view_of(mask, T, S), 0.3, 0.0)) == "sdpa"
    y = kernels.attend(q, k, v, view_of(mask, T, S), scale=0.3)
    torch.testing.assert_close(y, naive(q, k, v, mask, 0.3), rtol=0, atol=1e-12)


def test_content_and_context_terms_are_added_to_scores_and_values(naive: Naive) -> None:
    """softmax(scale (q k' + c(q)) + bias) v + d(weights), on the reference kernel and, without d, on sdpa."""
    mask, T, S = Mask(causal=True), 5, 5
    (q, k, v), bias, per_distance = heads(T, S), torch.randn(1, 4, T, S), torch.randn(5, 3)

    def content(q: Tensor) -> Tensor:
        return q.sum(-1, keepdim=True) * torch.arange(5.0)

    def context(weights: Tensor) -> Tensor:
        return weights @ per_distance

    combined = bias + 0.3 * content(q)
    expected = naive(q, k, v, mask, 0.3, combined)
    for name in ("sdpa", "reference"):
        with kernels.use(name):
            y = kernels.attend(q, k, v, view_of(mask, T, S, content=content, bias=bias), scale=0.3)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    view = view_of(mask, T, S, content=content, bias=bias, context=context)
    extra = naive(q, k, per_distance.expand(2, 4, 5, 3), mask, 0.3, combined)
    torch.testing.assert_close(kernels.attend(q, k, v, view, scale=0.3), expected + extra, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["sdpa", "reference", "flex"])
@pytest.mark.parametrize("biased", [False, True])
def test_query_without_visible_keys_gives_exactly_zero(name: str, biased: bool) -> None:
    packed = torch.tensor([[1, 1, 2, 0, 0], [1, 0, 0, 0, 0]])
    for mask in (
        Mask(causal=True, strict=True),
        Mask(causal=True, q_seg=packed, k_seg=packed, packed=True, segments=2),
        Mask(k_seg=torch.zeros(2, 5, dtype=torch.int64)),
    ):
        q, k, v = heads(5, 5)
        view = view_of(mask, 5, 5, bias=torch.randn(1, 4, 5, 5)) if biased else view_of(mask, 5, 5)
        dense = mask.dense(5, 5, CPU)
        assert dense is not None
        empty = ~dense.any(-1)[:, 0].expand(2, 5)
        assert empty.any()
        with kernels.use(name):
            y = kernels.attend(q, k, v, view, scale=0.3)
        assert bool((y.transpose(1, 2)[empty] == 0).all())
        assert bool(y.isfinite().all())


@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_query_without_visible_keys_has_finite_gradients(name: str, biased: bool, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in heads(5, 5))
    bias = torch.randn(1, 4, 5, 5, dtype=dtype, requires_grad=True)
    view = view_of(Mask(causal=True, strict=True), 5, 5, **({"bias": bias} if biased else {}))
    with kernels.use(name):
        kernels.attend(q, k, v, view, scale=0.3).square().sum().backward()
    for tensor in (q, k, v, bias) if biased else (q, k, v):
        assert tensor.grad is not None
        assert bool(tensor.grad.isfinite().all())
        assert bool(tensor.grad.any())
    assert q.grad is not None
    assert bool((q.grad[:, :, 0] == 0).all())


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_gradients_agree_with_the_formula(name: str) -> None:
    """The same formula in a few tensor operations, differentiated by autograd, has the same gradients."""
    mask = Mask(causal=True, attention_pattern=Window(3))
    tensors = [x.requires_grad_() for x in heads(5, 5, 2)]
    bias = torch.randn(1, 4, 5, 5, requires_grad=True)
    inputs = [*tensors, bias]
    q, k, v = tensors
    wide_k, wide_v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    visible = torch.tensor([[0 <= i - j < 3 for j in range(5)] for i in range(5)])
    by_hand = (0.3 * q @ wide_k.mT + bias).masked_fill(~visible, -math.inf).softmax(-1) @ wide_v
    with kernels.use(name):
        y = kernels.attend(q, k, v, view_of(mask, 5, 5, bias=bias), scale=0.3)
    weight = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad((y * weight).sum(), inputs),
        torch.autograd.grad((by_hand * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_weights_are_a_distribution_over_visible_keys(case: Case, is_visible: Callable[..., bool]) -> None:
    """C2: weights are >= 0, exactly 0 at hidden keys, and their sum over keys is 1 (0 without visible keys)."""
    mask, T, S = case
    q, k, _ = heads(T, S)
    weights = kernels.attention_weights(q, k, view_of(mask, T, S), 0.3)
    assert weights.shape == (2, 4, T, S)
    for b in range(2):
        for i in range(T):
            keys = [j for j in range(S) if is_visible(mask, b, i, j)]
            hidden = [j for j in range(S) if j not in keys]
            assert bool((weights[b, :, i, hidden] == 0).all())
            assert bool((weights[b, :, i, keys] > 0).all())
            assert weights[b, :, i].sum(-1).tolist() == pytest.approx([1.0 if keys else 0.0] * 4, abs=1e-12)


def test_weights_are_those_that_attend_uses() -> None:
    q, k, v = heads(5, 5, 2)
    view = view_of(Mask(causal=True), 5, 5, bias=torch.randn(1, 4, 5, 5), content=lambda q: q[..., :5])
    weights = kernels.attention_weights(q, k, view, 0.3)
    y = kernels.attend(q, k, v, view, scale=0.3)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), y, rtol=0, atol=1e-12)


def test_worked_example_of_the_lecture() -> None:
    """C3: weights 0.6, 0.1, 0.2, 0.1 give c = 0.6 v1 + 0.1 v2 + 0.2 v3 + 0.1 v4."""
    weights, v = [0.6, 0.1, 0.2, 0.1], torch.randn(1, 1, 4, 3)
    scores = torch.tensor(weights).log()[None, None, None]
    context = kernels.mix(scores, v, view_of(Mask(), 1, 4))
    expected = sum(w * v[0, 0, j] for j, w in enumerate(weights))
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(context[0, 0, 0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reference_normalises_half_precision_in_float32(dtype: torch.dtype) -> None:
    """Scores above 100 overflow exp in float16; the reference softmax must not overflow."""
    q, k, v = (x.to(dtype) * 20 for x in heads(5, 5))
    with kernels.use("reference"):
        y = kernels.attend(q, k, v, view_of(Mask(causal=True), 5, 5), scale=0.5)
    assert y.dtype == dtype
    assert bool(y.isfinite().all())
    with kernels.use("reference"):
        exact = kernels.attend(q.double(), k.double(), v.double(), view_of(Mask(causal=True), 5, 5), scale=0.5)
    # The scores themselves are in half precision, so only the median error is bounded.
    assert (y.double() - exact).abs().median() < 0.2


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_dropout_keeps_the_mean_and_drops_whole_weights(name: str) -> None:
    q, k, v = torch.zeros(1, 1, 4000, 2), torch.zeros(1, 1, 4, 2), torch.eye(4)[None, None]
    with kernels.use(name):
        weights = kernels.attend(q, k, v, view_of(Mask(), 4000, 4), scale=1.0, dropout=0.25)[0, 0]
    kept = torch.tensor(0.25 / 0.75)
    assert bool(((weights == 0) | ((weights - kept).abs() < 1e-12)).all())
    assert weights.sum(-1).mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("scale", "value"), [("sqrt", 0.25), ("none", 1.0), (0.7, 0.7), (2.0, 2.0)])
def test_factor_of_the_scores(scale: Scale, value: float) -> None:
    assert factor(scale, 16) == value


def test_repeat_heads_repeats_each_key_head_for_its_queries() -> None:
    k = torch.randn(2, 2, 3, 4)
    assert torch.equal(attention.repeat_heads(k, 6), torch.stack([k[:, h // 3] for h in range(6)], 1))
    assert attention.repeat_heads(k, 2) is k


class TestChoice:
    def test_use_nests_and_ends_with_its_with_block(self) -> None:
        call = kernels.Call(*heads(5, 5), view_of(Mask(), 5, 5), 1.0, 0.0)
        with kernels.use("reference"):
            with kernels.use("flex"), torch.no_grad():
                assert kernels.choose(call) == "flex"
            assert kernels.choose(call) == "reference"
        with pytest.raises(ZeroDivisionError), kernels.use("reference"):
            raise ZeroDivisionError
        assert kernels.choose(call) == "sdpa"

    def test_unknown_kernel_name_has_a_suggestion(self) -> None:
        with pytest.raises(KernelError, match="unknown kernel 'sdpaa'; did you mean 'sdpa'"), kernels.use("sdpaa"):
            pass
        with (
            pytest.raises(
                KernelError, match="known names: 'chunked', 'flex', 'reference', 'sdpa', 'segments', 'varlen'"
            ),
            kernels.use("nonsense"),
        ):
            pass

    def test_forced_kernel_raises_if_it_cannot_compute_the_call(self) -> None:
        q, k, v = heads(5, 5)
        with kernels.use("varlen"), pytest.raises(KernelError, match=r"^kernel 'varlen' refused: varlen needs CUDA"):
            kernels.attend(q, k, v, view_of(Mask(), 5, 5), scale=1.0)
        with (
            kernels.use("flex"),
            pytest.raises(KernelError, match=r"^kernel 'flex' refused: flex has no attention drop"),
        ):
            kernels.attend(q, k, v, view_of(Mask(), 5, 5), scale=1.0, dropout=0.1)

    @pytest.mark.parametrize("name", ["sdpa", "flex", "varlen"])
    def test_terms_on_the_values_need_the_reference(self, name: str) -> None:
        view = view_of(Mask(), 5, 5, context=lambda weights: weights)
        call = kernels.Call(*heads(5, 5), view, 1.0, 0.0)
        assert "use 'reference'" in (kernels.refusal(name, call) or "")
        assert kernels.refusal("reference", call) is None
        assert kernels.choose(call) == "reference"

    def test_flex_refuses_inputs_with_gradients_on_the_cpu(self) -> None:
        q, k, v = heads(5, 5)
        call = kernels.Call(q.requires_grad_(), k, v, view_of(Mask(), 5, 5), 1.0, 0.0)
        assert "no backward pass on the CPU" in (kernels.refusal("flex", call) or "")
        with torch.no_grad():
            assert kernels.refusal("flex", call) is None

    def test_flex_refuses_content_terms(self) -> None:
        call = kernels.Call(*heads(5, 5), view_of(Mask(), 5, 5, content=lambda q: q), 1.0, 0.0)
        assert "flex does not support position terms that depend on the query" in (kernels.refusal("flex", call) or "")
        assert kernels.refusal("sdpa", call) is None


class _Odd(AttentionPattern):
    __slots__ = ()
    kind = "odd"

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        return (q - k) % 2 == 0


def on_cuda(
    mask: Mask,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 2,
    d_key: int = 16,
    d_value: int = 16,
    T: int = kernels.SHORT + 1,
    S: int | None = None,
    dropout: float = 0.0,
    terms: Terms | None = None,
) -> kernels.Call:
    """Return the arguments of `attend` with fake tensors on a GPU; choosing a kernel does not read them."""
    S = S or T
    with FakeTensorMode():
        q = torch.empty(rows, 4, T, d_key, dtype=dtype, device="cuda")
        k = torch.empty(rows, 4, S, d_key, dtype=dtype, device="cuda")
        v = torch.empty(rows, 4, S, d_value, dtype=dtype, device="cuda")
    return kernels.Call(q, k, v, View(mask, T, S, q.device, terms), 1.0, dropout)


PACKED = Mask(causal=True, packed=True)
BIAS = Terms(bias=torch.zeros(1, 4, 8, 8))
CONTENT = Terms(content=lambda q: q)


@pytest.mark.parametrize(
    ("call", "chosen", "reason"),
    [
        (on_cuda(PACKED), "varlen", None),
        (on_cuda(replace(PACKED, attention_pattern=Window(3))), "varlen", None),
        (on_cuda(Mask(causal=True)), "sdpa", None),  # not packed: torch's causal mask is enough
        (on_cuda(PACKED, T=kernels.SHORT), "sdpa", None),  # too short for varlen
        (on_cuda(PACKED, dtype=torch.float32), "flex", "half precision, not cuda and torch.float32"),
        (on_cuda(PACKED, terms=BIAS), "flex", "varlen does not support a bias"),
        (on_cuda(PACKED, terms=CONTENT), "sdpa", "varlen does not support a bias"),
        (on_cuda(PACKED, d_value=8), "flex", "needs d_k = d_v, a multiple of 8 up to 256, not 16 and 8"),
        (on_cuda(PACKED, d_key=12, d_value=12), "flex", "not 12 and 12"),
        (on_cuda(PACKED, d_key=264, d_value=264), "flex", "not 264 and 264"),
        (on_cuda(replace(PACKED, strict=True)), "flex", "does not support strict, prefix or beam masks"),
        (
            on_cuda(replace(PACKED, prefix=torch.ones(2, 8, dtype=torch.bool))),
            "flex",
            "does not support strict, prefix or beam masks",
        ),
        (on_cuda(replace(PACKED, start=3)), "flex", "not over a cache"),
        (on_cuda(PACKED, S=9), "flex", "not over a cache"),
        (on_cuda(replace(PACKED, attention_pattern=_Odd())), "flex", "varlen supports only windows, not odd"),
        (on_cuda(PACKED, dropout=0.1), "sdpa", "varlen has no attention dropout"),
    ],
)
def test_choice_of_kernel_on_cuda(call: kernels.Call, chosen: str, reason: str | None) -> None:
    assert kernels.choose(call) == chosen
    refusal = kernels.refusal("varlen", call)
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("pattern", "eager", "compiled"),
    [(Window(64), "varlen", "varlen"), (Window(2048), "sdpa", "sdpa"), (Blocks(64), "flex", "sdpa")],
)
def test_compiled_models_have_a_sparse_kernel_for_windows(
    pattern: AttentionPattern, eager: str, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = on_cuda(Mask(causal=True, attention_pattern=pattern), T=4096)
    assert kernels.choose(call) == eager
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert kernels.choose(call) == compiled


class DenseMasks:
    """Records the shape of every mask that is converted to a dense tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, int]] = []
        dense = Mask.dense

        def counted(mask: Mask, T: int, S: int, device: torch.device) -> Tensor | None:
            self.shapes.append((T, S))
            return dense(mask, T, S, device)

        monkeypatch.setattr(Mask, "dense", counted)


def encoder_decoder(own: Position | None = None, stack: Position | None = None) -> EncoderDecoder:
    attention = SelfAttention(position=own)
    return EncoderDecoder(
        vocab=11,
        d_model=8,
        heads=2,
        dropout=0.0,
        encoder=Plain((Block((attention, FeedForward(8))),), 3, position=stack),
        decoder=Plain((Block((attention, CrossAttention(), FeedForward(8))),), 4, position=stack),
    )


PAIRS = [([3, 4, 5], [6, 7]), ([3, 4], [6, 7, 8, 9])]
S, T = 3, 5  # of the padded batch
Sp, Tp = 5, 8  # of the packed one


@pytest.mark.parametrize(
    ("spec", "packed", "shapes"),
    [
        (encoder_decoder(), False, [(S, S), (T, S)]),  # the decoder's self-attention uses torch's causal mask
        (encoder_decoder(), True, [(Sp, Sp), (Tp, Tp), (Tp, Sp)]),
        (encoder_decoder(stack=T5Bias()), False, [(S, S), (T, T), (T, S)]),
        (encoder_decoder(own=T5Bias()), False, [(S, S), (T, T), (T, S)]),
        (encoder_decoder(own=ALiBi()), True, [(Sp, Sp), (Tp, Tp), (Tp, Sp)]),
        (encoder_decoder(own=Shaw(4)), True, [(Sp, Sp), (Tp, Tp), (Tp, Sp)]),
    ],
    ids=["padded", "packed", "shared bias", "bias per layer", "packed, bias per layer", "packed, Shaw per layer"],
)
def test_a_mask_is_converted_once_per_stack(
    spec: EncoderDecoder, packed: bool, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, dense_masks = build(spec), translation(PAIRS, packed=packed, source_end=()), DenseMasks(monkeypatch)
    install(model)
    model.loss(batch).total.backward()
    assert dense_masks.shapes == shapes


def test_a_mask_is_converted_once_per_stack_with_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dense_masks = build(encoder_decoder()), DenseMasks(monkeypatch)
    install(model)
    model.log_probs(translation(PAIRS, source_end=()), trace=Trace())  # type: ignore[reportCallIssue]
    assert dense_masks.shapes == [(S, S), (T, T), (T, S)]


def test_language_model_with_right_padding_converts_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Plain((Block((SelfAttention(), FeedForward(8))),), 2)
    model, dense_masks = build(DecoderOnly(vocab=11, d_model=8, heads=2, decoder=stack)), DenseMasks(monkeypatch)
    install(model)
    ids = torch.tensor([[3, 4, 5], [3, 0, 0]])
    model.loss(Batch(ids, ids, (ids != 0).long()))
    assert dense_masks.shapes == []


def test_flex_is_compiled_for_more_lengths_than_torch_keeps_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    kernel = torch.compile(flex.flexible.flex_attention, dynamic=False, backend=backend)
    monkeypatch.setattr(flex, "_compiled_flex", lambda: kernel)
    lengths = range(128, 128 * 12, 128)
    for _ in range(2):
        for T in lengths:
            q, view = torch.randn(1, 1, T, 8), View(Mask(causal=True, attention_pattern=Blocks(33)), T, T, CPU)
            with torch.no_grad():
                y = flex.compiled(q, q, q, block_mask=flex.block_mask_of(view, 1), scale=0.3)
                with kernels.use("reference"):
                    torch.testing.assert_close(y, kernels.attend(q, q, q, view, scale=0.3))
    assert len(graphs) == len(lengths)


def test_flex_builds_its_blocks_once_per_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[int] = []
    create = flex.block_mask_of
    monkeypatch.setattr(flex, "block_mask_of", lambda view, rows: shapes.append(view.T) or create(view, rows))
    model = build(encoder_decoder(own=T5Bias()))
    fast.install(model)
    with torch.no_grad(), kernels.use("flex"):
        model.loss(translation(PAIRS, source_end=()))
    assert shapes == [S, T, T]  # encoder, decoder, cross-attention


SEG = torch.ones(2, 8, dtype=torch.int64)
ROWS = replace(PACKED, q_seg=SEG, k_seg=SEG)


@pytest.mark.parametrize(
    ("call", "chosen", "reason"),
    [
        (on_cuda(ROWS, T=200), "segments", None),
        (on_cuda(ROWS, T=200, dropout=0.1), "segments", None),
        (on_cuda(replace(ROWS, causal=False), T=200, S=300), "segments", None),
        (on_cuda(replace(ROWS, longest=100), T=1024), "segments", None),
        (on_cuda(ROWS, T=1024), "varlen", None),
        (on_cuda(ROWS, T=1024, dropout=0.1), "segments", None),
        (on_cuda(PACKED, T=200), "sdpa", "segments is for packed rows"),
        (on_cuda(ROWS, T=200, dtype=torch.float32), "sdpa", "bfloat16, not cuda and torch.float32"),
        (on_cuda(ROWS, T=200, dtype=torch.float16), "sdpa", "bfloat16, not cuda and torch.float16"),
        (on_cuda(ROWS, T=128, rows=16_384), "sdpa", "at most 65,535 rows times heads, not 16384 * 4"),
        (on_cuda(ROWS, T=128, rows=16_383), "segments", None),
        (on_cuda(ROWS, T=200, terms=BIAS), "sdpa", "segments does not support a bias"),
        (on_cuda(ROWS, T=200, d_value=32), "sdpa", "needs d_k = d_v of 16, 32, 64 or 128, not 16 and 32"),
        (on_cuda(ROWS, T=200, d_key=24, d_value=24), "sdpa", "not 24 and 24"),
        (on_cuda(replace(ROWS, strict=True), T=200), "sdpa", "does not support strict, prefix, sparse or beam masks"),
        (
            on_cuda(replace(ROWS, attention_pattern=Window(3)), T=200),
            "sdpa",
            "does not support strict, prefix, sparse or beam masks",
        ),
        (on_cuda(ROWS, T=200, S=300), "sdpa", "not over a cache"),
    ],
)
def test_choice_of_kernel_with_triton(
    call: kernels.Call, chosen: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Triton is not installed" in (kernels.refusal("segments", call) or "") or kernels.TRITON
    monkeypatch.setattr(kernels, "TRITON", True)
    assert kernels.choose(call) == chosen
    refusal = kernels.refusal("segments", call)
    if reason is None:
        assert refusal is None
    else:
        assert reason in (refusal or "")


@pytest.mark.parametrize(
    ("spec", "fused"),
    [
        (SelfAttention(), True),
        (SelfAttention(tied="query_key"), False),  # two parts, although of equal widths
        (SelfAttention(tied="key_value"), False),
        (SelfAttention(kv_heads=1), False),
        (SelfAttention(d_value=5), False),
        (SelfAttention(query_key_norm=RMSNorm()), False),
    ],
    ids=repr,
)
def test_a_kernel_reads_the_fused_projection_only_if_it_has_three_equal_parts(
    spec: SelfAttention, fused: bool, site: Callable[..., Site]
) -> None:
    branch = spec.build(site())
    install(branch, CPU)
    assert isinstance(branch, kernels.FastSelfAttention)
    assert branch.is_fused(View(Mask(), 5, 5, CPU)) == fused
