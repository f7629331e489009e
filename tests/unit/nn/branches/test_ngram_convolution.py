from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import SpecError
from regard.nn.branches.ngram_convolution import NGramConvolution
from regard.nn.cache import ActivationCache, Rows
from regard.nn.core import Site
from regard.nn.linear import Dense
from regard.nn.mask import Context, Mask, View
from tests.unit.nn.branches.random_branch import branch_of

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
D, T = 12, 7
SEG = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]])
PACKED = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 3, 0, 0]])
MASKS = {
    "no padding": Mask(),
    "padded": Mask(q_seg=SEG, k_seg=SEG),
    "packed": Mask(q_seg=PACKED, k_seg=PACKED, packed=True, segments=3),
}
SPECS = {
    "default": NGramConvolution(),
    "unequal shares of d_model": NGramConvolution((2, 3, 1, 4, 6), output=False),
    "filters given, tanh": NGramConvolution((5, 2), filters=7, activation="tanh"),
    "wider than the row": NGramConvolution((9, 18), filters=3),
    "no bias": NGramConvolution((3, 4), bias=False),
}


def context(mask: Mask, length: int = T) -> Context:
    return Context(View(mask, length, length, CPU))


def by_conv1d(branch: Any, spec: NGramConvolution, text: Tensor, causal: bool) -> Tensor:
    """One text (T, D) through torch's convolution, with the weights of the branch."""
    filtered = []
    for width, ngram in zip(spec.widths, branch.ngrams, strict=True):
        weight = ngram.weight.unflatten(1, (width, D)).transpose(1, 2)
        around = (width - 1, 0) if causal else ((width - 1) // 2, width // 2)
        filtered.append(F.conv1d(F.pad(text.T[None], around), weight, ngram.bias)[0].T)
    hidden = torch.cat(filtered, -1)
    hidden = hidden.tanh() if spec.activation == "tanh" else hidden.relu()
    return (
        hidden @ branch.output.weight.T + (0.0 if spec.bias is False else branch.output.bias) if spec.output else hidden
    )


def texts(x: Tensor, segments: Tensor | None) -> list[tuple[int, Tensor]]:
    """Return (row, positions) of every text."""
    if segments is None:
        return [(row, torch.arange(T)) for row in range(x.shape[0])]
    return [(row, (line == n).nonzero()[:, 0]) for row, line in enumerate(segments) for n in line.unique() if n]


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_equals_conv1d_on_each_text_alone(spec: NGramConvolution, mask: Mask, causal: bool, site: MakeSite) -> None:
    branch = branch_of(spec, site(causal=causal, side="decoder" if causal else "encoder"))
    x = torch.randn(2, T, D, requires_grad=True)
    output = branch(x, context(mask))
    pairs = [(output[row, at], by_conv1d(branch, spec, x[row, at], causal)) for row, at in texts(x, mask.k_seg)]
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    inputs = [x, *branch.parameters()]
    gradients = [
        torch.autograd.grad(torch.cat([text.square().sum()[None] for text in side]).sum(), inputs)
        for side in zip(*pairs, strict=True)
    ]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_ragged_decoding_steps_equal_the_full_pass(spec: NGramConvolution, static: bool, site: MakeSite) -> None:
    branch, x = branch_of(spec, site()), torch.randn(2, T, D)
    full = branch(x, context(Mask(causal=True)))
    rows = Rows(torch.zeros(2, dtype=torch.int64), 12, uniform=not static, static=static)
    state = branch.start(rows, context(Mask()))
    assert isinstance(state, ActivationCache)
    done = [0, 0]
    for counts in ([3, 1], [1, 1], [1, 3], [2, 2]):
        length = max(counts)
        step = torch.full((2, length, D), 99.0)  # padding
        for row, count in enumerate(counts):
            step[row, :count] = x[row, done[row] : done[row] + count]
        y = branch(step, Context(View(rows.mask(length), length, rows.reach(length), CPU)), state)
        for row, count in enumerate(counts):
            expected = full[row, done[row] : done[row] + count]
            torch.testing.assert_close(y[row, :count], expected, rtol=0, atol=1e-12)
            done[row] += count
        rows.advance(length, None if min(counts) == length else torch.tensor(counts))


def test_parameters(site: MakeSite) -> None:
    """Kim 2014: 100 filters of each width over vectors of 300 channels."""
    with torch.device("meta"):
        kim = NGramConvolution(filters=100, output=False).build(site(d_model=300, heads=1))
        projected = NGramConvolution(filters=100).build(site(d_model=300, heads=1))
        bare = NGramConvolution((2,), filters=5).build(site(linear_=Dense(bias=False)))
    assert sum(p.numel() for p in kim.parameters()) == 100 * (3 + 4 + 5) * 300 + 300
    assert sum(p.numel() for p in projected.parameters()) == 100 * (3 + 4 + 5) * 300 + 300 + 300 * 301
    assert sum(p.numel() for p in bare.parameters()) == 5 * 2 * D + 5 * D


def test_filters_are_dropped_in_training_only(site: MakeSite) -> None:
    branch, x = branch_of(NGramConvolution(output=False), site(activation_dropout=0.5)), torch.randn(8, T, D)
    trained = branch(x, context(Mask()))
    branch.eval()
    kept = trained != 0
    assert 0.3 < kept.double().mean() / (branch(x, context(Mask())) != 0).double().mean() < 0.7
    torch.testing.assert_close(trained[kept], 2 * branch(x, context(Mask()))[kept])


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"widths": ()}, "widths: needs at least one width"),
        ({"widths": (3, 0)}, r"widths\[1\]: must be at least 1, not 0"),
        ({"filters": 0}, "filters: must be at least 1, not 0"),
    ],
)
def test_impossible_sizes_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(SpecError, match=f"^{error}"):
        NGramConvolution(**fields)


def test_filters_must_fit_d_model(site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^here\.output: .* d_model 12, not 3 x 5"):
        NGramConvolution(filters=5, output=False).build(site(path="here"))
    with pytest.raises(SpecError, match=r"^here\.filters: 13 widths cannot share d_model 12"):
        NGramConvolution(tuple(range(1, 14))).build(site(path="here"))
