"""CUDA kernels agree with the reference, and a decoding step runs as a CUDA graph."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard import fast
from regard.errors import KernelError
from regard.fast import attention as kernels
from regard.fast import graphs
from regard.fast.attention import attend
from regard.fast.fused import FastLayerNorm
from regard.nn.big_bird import BigBird, CausalBigBird, random_block
from regard.nn.mask import Mask, View
from regard.nn.pattern import AttentionPattern, Sinks, Window
from regard.nn.terms import Terms
from regard.testing import tiny

pytestmark = pytest.mark.gpu

SEG = torch.tensor([[1] * 5 + [2] * 7 + [3] * 3 + [0], [1] * 9 + [2] * 6 + [0]])
POS = torch.tensor([[*range(5), *range(7), *range(3), 0], [*range(9), *range(6), 0]])


def packed(**options: object) -> Mask:
    seg, pos = SEG.cuda(), POS.cuda()
    return Mask(q_pos=pos, k_pos=pos, q_seg=seg, k_seg=seg, packed=True, segments=4, longest=9, **options)  # type: ignore[reportArgumentType]


def tensors(dtype: torch.dtype, heads: int = 4, groups: int = 4, T: int = 16, K: int = 16) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, h, T, K, generator=rng) for h in (heads, groups, groups)]
    return [x.cuda().to(dtype).requires_grad_() for x in drawn]


def gradients(name: str, view: View, dtype: torch.dtype, **sizes: int) -> list[torch.Tensor]:
    q, k, v = tensors(dtype, **sizes)
    view = view.with_terms(view.terms)
    with kernels.use(name):
        y = attend(q, k, v, view, scale=0.25)
    assert not y.isnan().any()
    real = (SEG != 0).cuda()[:, None, :, None]
    (y * real).square().sum().backward()
    return [(y * real).detach().float(), *(x.grad.float() for x in (q, k, v) if x.grad is not None)]


MASKS = {"encoder": {}, "causal": {"causal": True}, "window": {"causal": True, "attention_pattern": Window(3)}}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [4, 2])
def test_varlen_equals_reference(mask: str, groups: int) -> None:
    view = View(packed(**MASKS[mask]), 16, 16, torch.device("cuda"))
    actual = gradients("varlen", view, torch.bfloat16, groups=groups)
    expected = gradients("reference", view, torch.bfloat16, groups=groups)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize("mask", ["encoder", "causal"])
@pytest.mark.parametrize("groups", [4, 2])
def test_segments_equals_reference(mask: str, groups: int) -> None:
    view = View(packed(**MASKS[mask]), 16, 16, torch.device("cuda"))
    actual = gradients("segments", view, torch.bfloat16, groups=groups)
    expected = gradients("reference", view, torch.bfloat16, groups=groups)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_random_blocks_are_the_same_if_compiled() -> None:
    """Inductor computes an expression of positions with 32 bits."""

    def drawn(device: str) -> torch.Tensor:
        return random_block(torch.arange(4000, device=device) // 4, 1, 3, torch.arange(1, 4001, device=device), 7)

    assert torch.equal(torch.compile(drawn)("cuda").cpu(), drawn("cpu"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", ["whole", "padded", "packed"])
@pytest.mark.parametrize("pattern", [Window(64), Sinks(64), BigBird(), CausalBigBird()], ids=repr)
def test_a_sparse_kernel_neither_waits_for_the_host_nor_computes_all_pairs(
    pattern: AttentionPattern, rows: str, compiled: bool
) -> None:
    """So that a training step under an attention pattern can be captured as a CUDA graph, also if it is compiled.

    Padded rows have many shapes and are not captured. Their kernel, "chunked", reads the mask on the host.
    """
    T = 4000
    seg = torch.ones(2, T, dtype=torch.int64)
    if rows != "whole":
        seg[0, 1500:], seg[1, 3000:] = (2, 3) if rows == "packed" else (0, 0)
        seg[1, 1700:3000] = 2 if rows == "packed" else 1
    pos = torch.stack(
        [torch.cat([torch.arange(n) for n in row.unique_consecutive(return_counts=True)[1]]) for row in seg]
    )
    seg, pos = seg.cuda(), pos.cuda()
    places = {"packed": True, "segments": 3, "q_pos": pos, "k_pos": pos} if rows == "packed" else {}
    segs = {} if rows == "whole" else {"q_seg": seg, "k_seg": seg}
    mask = Mask(causal=pattern.causal is not False, attention_pattern=pattern, **segs, **places)
    q, k, v = (x.float().detach() for x in tensors(torch.float32, T=T))

    def step(attend_: Any) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        y = attend_(*inputs, View(mask, T, T, q.device), scale=0.25).masked_fill((seg == 0)[:, None, :, None], 0.0)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), inputs)]

    # Without checks of shapes, which torch.compile cannot trace.
    function = torch.compile(inspect.unwrap(attend), dynamic=False) if compiled else attend
    step(function)  # compiles FlexAttention
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    actual, waits = graphs.watched(lambda: step(function))
    assert waits is None or rows == "padded"
    assert torch.cuda.max_memory_allocated() - before < 8 * T * T  # all pairs of 2 rows and 4 heads: 32 * T * T bytes
    with kernels.use("reference"):
        expected = step(attend)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-3 * theirs.abs().max()


def long_rows(T: int, seed: int) -> torch.Tensor:
    """Return segment numbers of rows with up to six segments and padding."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.zeros(3, T, dtype=torch.int64)
    for row in rows:
        for n, end in enumerate(torch.randint(10, 40, (6,), generator=rng).cumsum(0).tolist(), 1):
            row[rows.shape[1] - (row == 0).sum() : end] = n
    return rows.cuda()


@pytest.mark.parametrize(("T", "S", "causal"), [(200, 200, True), (200, 200, False), (130, 250, False)])
def test_segments_over_several_blocks(T: int, S: int, causal: bool) -> None:
    """Rows are longer than a block of the kernel and end with padding; queries and keys may differ in length."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, 4, 32, generator=rng).cuda().bfloat16().transpose(1, 2) for n in (T, S, S))
    q_seg = long_rows(T, 1)
    k_seg = q_seg if T == S else long_rows(S, 2)
    results = {}
    for name in ("segments", "reference"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        mask = Mask(q_seg=q_seg, k_seg=k_seg, packed=True, causal=causal, segments=6, longest=40)
        with kernels.use(name):
            y = attend(inputs[0], inputs[1], inputs[2], View(mask, T, S, torch.device("cuda")), scale=0.2)
        (y.float() * torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape)).sum().backward()
        results[name] = [y.float(), *(x.grad.float() for x in inputs if x.grad is not None)]
    assert not results["segments"][0].transpose(1, 2)[q_seg == 0].any()
    for ours, theirs in zip(results["segments"], results["reference"], strict=True):
        assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_segments_dropout_has_its_probability_and_the_same_mask_backwards() -> None:
    """With values of 1, the output is the sum of the kept weights: its mean is 1, and the gradient is the same sum."""
    view = View(packed(), 16, 16, torch.device("cuda"))
    q, k, _ = tensors(torch.bfloat16, K=16)
    v = torch.ones(2, 4, 16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    means = []
    for seed in range(200):
        torch.manual_seed(seed)
        with kernels.use("segments"):
            y = attend(q, k, v, view.with_terms(None), scale=0.25, dropout=0.3)
        v.grad = None
        y.sum().backward()
        assert v.grad is not None
        torch.testing.assert_close(v.grad.float().sum(), y.detach().float().sum(), rtol=1e-2, atol=0.1)
        means.append(y.detach().float()[:, :, :15].mean())
    assert abs(torch.stack(means).mean() - 1.0) < 0.02


@pytest.mark.parametrize("mask", MASKS)
def test_flex_with_bias_equals_reference(mask: str) -> None:
    bias = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1)).cuda()
    view = View(packed(**MASKS[mask]), 16, 16, torch.device("cuda"), Terms(bias=bias))
    for ours, theirs in zip(
        gradients("flex", view, torch.float32), gradients("reference", view, torch.float32), strict=True
    ):
        assert (ours - theirs).abs().max() < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["sdpa", "flex", "reference"])
def test_query_without_visible_keys_is_zero_and_has_finite_gradients(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype)
    view = View(Mask(causal=True, strict=True), 16, 16, torch.device("cuda"))
    with kernels.use(kernel):
        y = attend(q, k, v, view, scale=0.25)
    assert y[:, :, 0].abs().max() == 0
    y.float().square().sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_padded_queries_are_zero_with_varlen() -> None:
    q, k, v = tensors(torch.bfloat16)
    view = View(packed(causal=True), 16, 16, torch.device("cuda"))
    with kernels.use("varlen"):
        y = attend(q, k, v, view, scale=0.25)
    assert y.transpose(1, 2)[(SEG == 0).cuda()].abs().max() == 0


def test_varlen_writes_all_rows_with_long_padding() -> None:
    """With padding longer than any segment, in memory that contained NaN, output and gradient are finite."""
    seg = torch.tensor([[1] * 5 + [2] * 4 + [0] * 503]).cuda()
    pos = torch.tensor([[*range(5), *range(4), *[0] * 503]]).cuda()
    mask = Mask(causal=True, q_pos=pos, k_pos=pos, q_seg=seg, k_seg=seg, packed=True, segments=2, longest=9)
    q, k, v = (x[:1] for x in tensors(torch.bfloat16, T=512, K=64))
    poison = [torch.full((1, 4, 512, 64), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(16)]
    del poison
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with kernels.use("varlen"):
        y = attend(leaves[0], leaves[1], leaves[2], View(mask, 512, 512, torch.device("cuda")), scale=0.125)
    poison = [torch.full((1, 4, 512, 64), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(16)]
    del poison
    y.float().square().sum().backward()
    assert y.isfinite().all()
    assert y[:, :, 9:].abs().max() == 0
    for x in leaves:
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad[:, :, 9:].abs().max() == 0


def test_long_packed_rows_use_varlen_and_short_rows_or_dropout_use_segments() -> None:
    q, k, v = tensors(torch.bfloat16)
    view = View(packed(causal=True), 16, 16, torch.device("cuda"))
    long = replace(view, mask=replace(view.mask, longest=None), T=1024, S=1024)
    assert kernels.choose(kernels.Call(q, k, v, view, 1.0, 0.0)) == "segments"
    assert kernels.choose(kernels.Call(q, k, v, long, 1.0, 0.0)) == "varlen"
    assert kernels.choose(kernels.Call(q, k, v, long, 1.0, 0.1)) == "segments"
    with kernels.use("varlen"), pytest.raises(KernelError, match="dropout"):
        attend(q, k, v, view, scale=1.0, dropout=0.1)


def test_packed_model_equals_padded_model_in_half_precision() -> None:
    spec = regard.preset("transformer_tiny", vocab=tiny.VOCAB, dropout=0.0)
    model = regard.build(spec, device="cuda").eval()
    fast.install(model)
    rows = tiny.examples(spec, 4)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        apart = model.loss(tiny.collate(spec, rows, device="cuda")).total
        together = model.loss(tiny.collate(spec, rows, packed=True, extra=3, device="cuda")).total
    assert abs(apart - together) / apart < 5e-3


@torch.no_grad()
def test_a_captured_decoding_step_equals_the_eager_one() -> None:
    spec = tiny.encoder_decoder()
    model = regard.build(spec, device="cuda").eval()
    fast.install(model)
    assert isinstance(model, regard.Generator)
    batch = tiny.collate(spec, tiny.examples(spec, 3), device="cuda")
    ids = torch.full((6, 1), 3, device="cuda")
    eager, captured = (model.start(batch, 12, beams=2, static=True) for _ in range(2))
    model.advance(ids, captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.advance(ids, captured)
    captured.rows.restart(torch.arange(6, device="cuda"))
    for token in (3, 7, 5, 9):
        ids.fill_(token)
        graph.replay()
        assert torch.equal(out, model.advance(ids, eager))


def norm_and_gradients(D: int, dtype: torch.dtype, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return outputs and gradients of the norm of x or of x + added; the last tensor weights the outputs."""
    norm = FastLayerNorm(D).cuda()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.linspace(0.5, 1.5, D))
    norm.to(torch.float64 if dtype is torch.float64 else torch.float32)
    *inputs, weights = [x.detach().to(dtype, copy=True) for x in tensors]
    inputs = [x.requires_grad_() for x in inputs]
    fits = norm.fits(inputs[0])
    assert fits == (dtype is torch.bfloat16)
    added = inputs[1] if len(inputs) > 1 else None
    y = norm.fused(inputs[0], added) if fits else norm(sum(inputs[1:], inputs[0]))
    assert y.dtype is dtype
    (y * weights).sum().backward()
    results = [y.detach(), *(x.grad for x in (*inputs, *norm.parameters()))]
    return [x for x in results if x is not None]


@pytest.mark.parametrize("D", [16, 100, 512, 3000])
@pytest.mark.parametrize("count", [1, 2])
def test_layer_norm_equals_torch(D: int, count: int) -> None:
    """Outputs and gradients in bfloat16, also of a residual sum, are close to those of torch in float64."""
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(40, 60, D, generator=rng).bfloat16().cuda() for _ in range(count + 1)]
    results = [norm_and_gradients(D, dtype, tensors) for dtype in (torch.bfloat16, torch.float64)]
    assert len(results[0]) == count + 3
    for ours, theirs in zip(*results, strict=True):
        assert (ours.double() - theirs).abs().max() < 0.01 * theirs.abs().max()


def test_dropout_inside_a_layer_norm() -> None:
    """The gradient shows the dropout mask, which reproduces the output; another call has another mask."""
    D, share = 512, 0.3
    x, added, weights = (torch.randn(40, 60, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    norm, masks = FastLayerNorm(D).cuda(), []
    for _ in range(2):
        inputs = [t.clone().requires_grad_() for t in (x, added)]
        y = norm.fused(inputs[0], inputs[1], share)
        dx, d_added = torch.autograd.grad((y * weights).sum(), inputs)
        masks.append(d_added != 0)
        torch.testing.assert_close(d_added.float(), dx.float() * masks[-1] / (1 - share), rtol=0.02, atol=0.01)
        expected = torch.nn.functional.layer_norm(x.float() + added.float() * masks[-1] / (1 - share), (D,))
        torch.testing.assert_close(y.float(), expected, rtol=0.03, atol=0.05)
        assert abs(float(masks[-1].float().mean()) - (1 - share)) < 0.005
    assert abs(float((masks[0] == masks[1]).float().mean()) - (share**2 + (1 - share) ** 2)) < 0.005


@pytest.mark.parametrize(("tokens", "D", "F"), [(2400, 64, 256), (1001, 48, 200), (7, 512, 2048)])
def test_linear_relu_equals_torch(tokens: int, D: int, F: int) -> None:
    """Outputs and gradients in bfloat16 are close to those of torch in float64."""
    from regard.fast.linear_relu import linear_relu  # needs Triton

    rng = torch.Generator().manual_seed(0)
    x, wide = (torch.randn(tokens, n, generator=rng).bfloat16().cuda() for n in (D, F))
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        projection = torch.nn.Linear(D, F).cuda()
        with torch.no_grad():
            projection.weight.copy_(torch.randn(F, D, generator=torch.Generator().manual_seed(2)).bfloat16())
            projection.bias.copy_(torch.linspace(-1, 1, F).bfloat16())
        projection.to(torch.float64 if dtype is torch.float64 else torch.float32)
        leaf = x.detach().to(dtype, copy=True).requires_grad_()
        y = (
            linear_relu(leaf, projection.weight, projection.bias)
            if dtype is torch.bfloat16
            else projection(leaf).relu()
        )
        assert y.dtype is dtype
        (y * wide.to(dtype)).sum().backward()
        results.append([y.detach(), leaf.grad, *(parameter.grad for parameter in projection.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_qkv_equals_separate_projections(causal: bool, dropout: float) -> None:
    qkv = torch.randn(2, 16, 3, 4, 32, device="cuda", dtype=torch.bfloat16).requires_grad_()
    view = View(packed(causal=causal), 16, 16, qkv.device)
    results = []
    for fused in (None, qkv):
        torch.manual_seed(3)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        with kernels.use("segments"):
            y = attend(q, k, v, view, scale=0.25, dropout=dropout, qkv=fused)
        (gradient,) = torch.autograd.grad(y.square().sum(), qkv)
        results.append((y, gradient))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
