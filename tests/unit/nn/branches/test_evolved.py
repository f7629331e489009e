from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import SpecError
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.evolved import EvolvedDecoderConv, EvolvedEncoderConv, GatedLinear
from regard.nn.cache import ActivationCache, Rows
from regard.nn.core import Site
from regard.nn.linear import Dense
from regard.nn.mask import Context, Mask, View
from regard.nn.norm import LayerNorm, NoNorm
from tests.unit.nn.branches.random_branch import branch_of

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
D, T = 12, 14  # longer than eleven taps
SEG = torch.tensor([[1] * T, [1] * 9 + [0] * 5])
PACKED = torch.tensor([[1] * 5 + [2] * 9, [1] * 2 + [2] * 3 + [3] * 6 + [0] * 3])
MASKS = {
    "nothing hidden": Mask(),
    "padded": Mask(q_seg=SEG, k_seg=SEG),
    "packed": Mask(q_seg=PACKED, k_seg=PACKED, packed=True, segments=3),
}
SPECS = {
    "encoder": EvolvedEncoderConv(LayerNorm(eps=1e-6)),
    "encoder with biases": EvolvedEncoderConv(bias=True),
    "encoder without norm": EvolvedEncoderConv(NoNorm()),
    "decoder": EvolvedDecoderConv(LayerNorm(eps=1e-6)),
}


def context(mask: Mask) -> Context:
    return Context(View(mask, T, T, CPU))


def by_hand(branch: Any, spec: BranchSpec, x: Tensor, seg: Tensor | None, causal: bool) -> Tensor:
    """Position by position and tap by tap, from modifications.md 3.12."""
    P = dict(branch.named_parameters())

    def window(row: list[Tensor], b: int, t: int, width: int) -> list[Tensor]:
        """Return what the filter taps read: zeros outside the text, in padding and in other segments."""
        first = t - width + 1 if causal else t - width // 2
        read = []
        for s in range(first, first + width):
            readable = 0 <= s < T and (seg is None or (int(seg[b, s]) != 0 and int(seg[b, s]) == int(seg[b, t])))
            read.append(row[s] if readable else torch.zeros(len(row[0])))
        return read

    def dense(name: str, v: Tensor) -> Tensor:
        y = P[f"{name}.weight"] @ v
        return y + P[f"{name}.bias"] if f"{name}.bias" in P else y

    def separable(name: str, read: list[Tensor]) -> Tensor:
        depthwise = P[f"{name}.bias"]
        for i, v in enumerate(read):
            depthwise = depthwise + P[f"{name}.filters"][:, i] * v
        return dense(f"{name}.pointwise", depthwise)

    def filled(v: Tensor, width: int) -> Tensor:
        return torch.cat((v, torch.zeros(width - len(v))))

    def norm(v: Tensor) -> Tensor:
        if isinstance(spec.norm, NoNorm):  # type: ignore[reportAttributeAccessIssue]
            return v
        mean = sum(v) / len(v)
        variance = sum((c - mean) ** 2 for c in v) / len(v)
        eps = spec.norm.eps  # type: ignore[reportAttributeAccessIssue]
        return (v - mean) / (variance + eps) ** 0.5 * P["norm.weight"] + P["norm.bias"]

    out = []
    for b in range(len(x)):
        row = list(x[b])
        hidden: list[Tensor] = []
        for t in range(T):
            if isinstance(spec, EvolvedEncoderConv):
                left = dense("left", row[t]).clamp(min=0)
                right = dense("right", torch.cat(window(row, b, t, 3))).clamp(min=0)
                hidden.append(norm(left + filled(right, 4 * D)))
            else:
                left = separable("left", window(row, b, t, 11)).clamp(min=0)
                right = separable("right", window(row, b, t, 7))
                hidden.append(norm(left + filled(right, 2 * D)))
        width = 9 if isinstance(spec, EvolvedEncoderConv) else 7
        out.append(torch.stack([filled(separable("output", window(hidden, b, t, width)), D) for t in range(T)]))
    return torch.stack(out)


@pytest.mark.parametrize("causal", [False, True], ids=["centred", "causal"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_by_formula(spec: BranchSpec, mask: Mask, causal: bool, site: MakeSite) -> None:
    """Filters are centred on a token; in a causal stack, they end at the token."""
    branch = branch_of(spec, site(causal=causal))
    x = torch.randn(2, T, D)
    real = torch.ones(2, T, dtype=torch.bool) if mask.k_seg is None else mask.k_seg != 0
    expected = by_hand(branch, spec, x, mask.k_seg, causal)
    torch.testing.assert_close(branch(x, context(mask))[real], expected[real], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("spec", "causal"),
    [(EvolvedEncoderConv(bias=True), False), (EvolvedDecoderConv(), True)],
    ids=["encoder", "decoder"],
)
def test_gradients_by_formula(spec: BranchSpec, causal: bool, site: MakeSite) -> None:
    branch, x = branch_of(spec, site(causal=causal)), torch.randn(2, T, D, requires_grad=True)
    upstream = torch.randn(2, T, D) * (PACKED != 0)[:, :, None]
    inputs = [x, *branch.parameters()]
    gradients = torch.autograd.grad((branch(x, context(MASKS["packed"])) * upstream).sum(), inputs)
    expected = torch.autograd.grad((by_hand(branch, spec, x, PACKED, causal) * upstream).sum(), inputs)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_ragged_decoding_steps_equal_the_full_pass(spec: BranchSpec, static: bool, site: MakeSite) -> None:
    """Rows read different numbers of tokens in the middle of decoding, which no law covers."""
    counts = [[12, 2], [1, 1], [1, 9]]
    branch, x = branch_of(spec, site()), torch.randn(2, T, D)
    full = branch(x, context(Mask(causal=True)))
    rows = Rows(torch.zeros(2, dtype=torch.int64), 24, uniform=not static, static=static)
    state = branch.start(rows, context(Mask()))
    assert [type(cache) for cache in state] == [
        ActivationCache,
        ActivationCache,
    ]  # inputs of the first and of the second convolution
    read = [0, 0]
    for step in counts:
        width = max(step)
        new = torch.full((2, width, D), 99.0)
        for b, n in enumerate(step):
            new[b, :n] = x[b, read[b] : read[b] + n]
        outputs = branch(new, Context(View(rows.mask(width), width, rows.reach(width), CPU)), state)
        for b, n in enumerate(step):
            torch.testing.assert_close(outputs[b, :n], full[b, read[b] : read[b] + n], rtol=0, atol=1e-11)
            read[b] += n
        rows.advance(width, None if min(step) == width else torch.tensor(step))


def test_gated_linear_by_formula(site: MakeSite) -> None:
    branch, x = branch_of(GatedLinear(), site()), torch.randn(2, T, D)
    W, b = branch.gated.weight, branch.gated.bias
    expected = (x @ W[:D].T + b[:D]) / (1 + (-(x @ W[D:].T + b[D:])).exp())
    torch.testing.assert_close(branch(x, context(Mask())), expected)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (GatedLinear(bias=True), 2 * 590_592),
        (GatedLinear(), 2 * 589_824),
        (EvolvedEncoderConv(), 4_460_928),
        (EvolvedEncoderConv(bias=True), 4_460_928 + 3072 + 384),
        (EvolvedDecoderConv(), 2_687_616),
    ],
)
def test_parameters(spec: BranchSpec, count: int, site: MakeSite) -> None:
    """Those of Narang et al. 2021: with attention and feed-forward, 12,723,840 and 19,206,528 in a block."""
    with torch.device("meta"):
        branch = spec.build(site(d_model=768, heads=12, linear_=Dense(bias=False)))
    assert sum(p.numel() for p in branch.parameters()) == count


@pytest.mark.parametrize("spec", [EvolvedEncoderConv(), EvolvedDecoderConv()], ids=repr)
def test_dropout_in_training_only(spec: BranchSpec, site: MakeSite) -> None:
    branch, x = branch_of(spec, site(activation_dropout=0.5)), torch.randn(2, T, D)
    assert not torch.equal(branch(x, context(Mask())), branch(x, context(Mask())))
    branch.eval()
    assert torch.equal(branch(x, context(Mask())), branch(x, context(Mask())))


@pytest.mark.parametrize("spec", [EvolvedEncoderConv(), EvolvedDecoderConv()], ids=repr)
def test_d_model_below_two_is_refused(spec: BranchSpec, site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^kind: one convolution has d_model / 2 channels"):
        spec.build(site(d_model=1))
