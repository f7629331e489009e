"""What only a GPU can show: the CUDA kernels agree, empty rows are zero there too, a decode step is a CUDA graph."""

from dataclasses import replace

import pytest
import torch

import regard
from regard import fast
from regard.errors import KernelError
from regard.fast import attention as kernels
from regard.fast.attention import attend
from regard.fast.fused import FastLayerNorm
from regard.nn.mask import Mask, View
from regard.nn.pattern import Window
from regard.nn.terms import Terms
from regard.testing import tiny

pytestmark = pytest.mark.gpu

SEG = torch.tensor([[1] * 5 + [2] * 7 + [3] * 3 + [0], [1] * 9 + [2] * 6 + [0]])
POS = torch.tensor([[*range(5), *range(7), *range(3), 0], [*range(9), *range(6), 0]])


def packed(**more: object) -> Mask:
    seg, pos = SEG.cuda(), POS.cuda()
    return Mask(q_pos=pos, k_pos=pos, q_seg=seg, k_seg=seg, packed=True, segments=4, longest=9, **more)  # type: ignore[reportArgumentType]


def tensors(dtype: torch.dtype, heads: int = 4, groups: int = 4, T: int = 16, K: int = 16) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    made = [torch.randn(2, h, T, K, generator=rng) for h in (heads, groups, groups)]
    return [x.cuda().to(dtype).requires_grad_() for x in made]


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
    a = gradients("varlen", view, torch.bfloat16, groups=groups)
    b = gradients("reference", view, torch.bfloat16, groups=groups)
    for mine, theirs in zip(a, b, strict=True):
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize("mask", ["encoder", "causal"])
@pytest.mark.parametrize("groups", [4, 2])
def test_segments_equals_reference(mask: str, groups: int) -> None:
    view = View(packed(**MASKS[mask]), 16, 16, torch.device("cuda"))
    a = gradients("segments", view, torch.bfloat16, groups=groups)
    b = gradients("reference", view, torch.bfloat16, groups=groups)
    for mine, theirs in zip(a, b, strict=True):
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


def long_rows(T: int, seed: int) -> torch.Tensor:
    """Rows of up to six segments, and padding."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.zeros(3, T, dtype=torch.int64)
    for row in rows:
        for n, end in enumerate(torch.randint(10, 40, (6,), generator=rng).cumsum(0).tolist(), 1):
            row[rows.shape[1] - (row == 0).sum() : end] = n
    return rows.cuda()


@pytest.mark.parametrize(("T", "S", "causal"), [(200, 200, True), (200, 200, False), (130, 250, False)])
def test_segments_over_several_blocks(T: int, S: int, causal: bool) -> None:
    """Rows longer than a block of the kernel, with padding at the end; queries and keys of two texts."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, 4, 32, generator=rng).cuda().bfloat16().transpose(1, 2) for n in (T, S, S))
    q_seg = long_rows(T, 1)
    k_seg = q_seg if T == S else long_rows(S, 2)
    found = {}
    for name in ("segments", "reference"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        mask = Mask(q_seg=q_seg, k_seg=k_seg, packed=True, causal=causal, segments=6, longest=40)
        with kernels.use(name):
            y = attend(inputs[0], inputs[1], inputs[2], View(mask, T, S, torch.device("cuda")), scale=0.2)
        (y.float() * torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape)).sum().backward()
        found[name] = [y.float(), *(x.grad.float() for x in inputs if x.grad is not None)]
    assert not found["segments"][0].transpose(1, 2)[q_seg == 0].any()
    for mine, theirs in zip(found["segments"], found["reference"], strict=True):
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_segments_dropout_has_its_probability_and_the_same_mask_backwards() -> None:
    """With values of 1 a context is the sum of the weights that are kept: its mean stays, its gradient is that sum."""
    view = View(packed(), 16, 16, torch.device("cuda"))
    q, k, _ = tensors(torch.bfloat16, K=16)
    v = torch.ones(2, 4, 16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kept = []
    for seed in range(200):
        torch.manual_seed(seed)
        with kernels.use("segments"):
            y = attend(q, k, v, view.with_terms(None), scale=0.25, dropout=0.3)
        v.grad = None
        y.sum().backward()
        assert v.grad is not None
        torch.testing.assert_close(v.grad.float().sum(), y.detach().float().sum(), rtol=1e-2, atol=0.1)
        kept.append(y.detach().float()[:, :, :15].mean())
    assert abs(torch.stack(kept).mean() - 1.0) < 0.02


@pytest.mark.parametrize("mask", MASKS)
def test_flex_with_bias_equals_reference(mask: str) -> None:
    bias = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1)).cuda()
    view = View(packed(**MASKS[mask]), 16, 16, torch.device("cuda"), Terms(bias=bias))
    for mine, theirs in zip(
        gradients("flex", view, torch.float32), gradients("reference", view, torch.float32), strict=True
    ):
        assert (mine - theirs).abs().max() < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["sdpa", "flex", "reference"])
def test_an_empty_row_is_zero_and_has_a_gradient(kernel: str, dtype: torch.dtype) -> None:
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


def test_varlen_writes_every_row_however_much_padding_there_is() -> None:
    """Padding longer than any segment, in memory that holds NaN: neither output nor gradient may take it up."""
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


def test_long_packed_rows_choose_varlen_short_ones_and_dropout_choose_segments() -> None:
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
    """Outputs and gradients of a norm of x, or of x and what is added to it; the last of the tensors weighs outputs."""
    norm = FastLayerNorm(D).cuda()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.linspace(0.5, 1.5, D))
    norm.to(torch.float64 if dtype is torch.float64 else torch.float32)
    *given, weights = [x.detach().to(dtype, copy=True) for x in tensors]
    given = [x.requires_grad_() for x in given]
    fits = norm.fits(given[0])
    assert fits == (dtype is torch.bfloat16)
    added = given[1] if len(given) > 1 else None
    y = norm.fused(given[0], added) if fits else norm(sum(given[1:], given[0]))
    assert y.dtype is dtype
    (y * weights).sum().backward()
    found = [y.detach(), *(x.grad for x in (*given, *norm.parameters()))]
    return [x for x in found if x is not None]


@pytest.mark.parametrize("D", [16, 100, 512, 3000])
@pytest.mark.parametrize("count", [1, 2])
def test_layer_norm_equals_torch(D: int, count: int) -> None:
    """Outputs and gradients in bfloat16, against torch's own in float64; of a sum, too."""
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(40, 60, D, generator=rng).bfloat16().cuda() for _ in range(count + 1)]
    found = [norm_and_gradients(D, dtype, tensors) for dtype in (torch.bfloat16, torch.float64)]
    assert len(found[0]) == count + 3
    for mine, theirs in zip(*found, strict=True):
        assert (mine.double() - theirs).abs().max() < 0.01 * theirs.abs().max()


def test_dropout_inside_a_layer_norm_is_dropout() -> None:
    """What it kept is seen by the gradient, and explains the output; another call keeps something else."""
    D, share = 512, 0.3
    x, added, weights = (torch.randn(40, 60, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    norm, kept = FastLayerNorm(D).cuda(), []
    for _ in range(2):
        given = [t.clone().requires_grad_() for t in (x, added)]
        y = norm.fused(given[0], given[1], share)
        dx, d_added = torch.autograd.grad((y * weights).sum(), given)
        kept.append(d_added != 0)
        torch.testing.assert_close(d_added.float(), dx.float() * kept[-1] / (1 - share), rtol=0.02, atol=0.01)
        explained = torch.nn.functional.layer_norm(x.float() + added.float() * kept[-1] / (1 - share), (D,))
        torch.testing.assert_close(y.float(), explained, rtol=0.03, atol=0.05)
        assert abs(float(kept[-1].float().mean()) - (1 - share)) < 0.005
    assert abs(float((kept[0] == kept[1]).float().mean()) - (share**2 + (1 - share) ** 2)) < 0.005


@pytest.mark.parametrize(("tokens", "D", "F"), [(2400, 64, 256), (1001, 48, 200), (7, 512, 2048)])
def test_linear_relu_equals_torch(tokens: int, D: int, F: int) -> None:
    """Outputs and gradients in bfloat16, against torch's own in float64."""
    from regard.fast.linear_relu import linear_relu  # needs Triton

    rng = torch.Generator().manual_seed(0)
    x, wide = (torch.randn(tokens, n, generator=rng).bfloat16().cuda() for n in (D, F))
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        projection = torch.nn.Linear(D, F).cuda()
        with torch.no_grad():
            projection.weight.copy_(torch.randn(F, D, generator=torch.Generator().manual_seed(2)).bfloat16())
            projection.bias.copy_(torch.linspace(-1, 1, F).bfloat16())
        projection.to(torch.float64 if dtype is torch.float64 else torch.float32)
        own = x.detach().to(dtype, copy=True).requires_grad_()
        y = linear_relu(own, projection.weight, projection.bias) if dtype is torch.bfloat16 else projection(own).relu()
        assert y.dtype is dtype
        (y * wide.to(dtype)).sum().backward()
        found.append([y.detach(), own.grad, *(parameter.grad for parameter in projection.parameters())])
    for mine, theirs in zip(*found, strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.shape == theirs.shape
        assert (mine.double() - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_qkv_equals_separate_projections(causal: bool, dropout: float) -> None:
    qkv = torch.randn(2, 16, 3, 4, 32, device="cuda", dtype=torch.bfloat16).requires_grad_()
    view = View(packed(causal=causal), 16, 16, qkv.device)
    found = []
    for fused in (None, qkv):
        torch.manual_seed(3)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        with kernels.use("segments"):
            y = attend(q, k, v, view, scale=0.25, dropout=dropout, qkv=fused)
        (gradient,) = torch.autograd.grad(y.square().sum(), qkv)
        found.append((y, gradient))
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its)
