import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.rms_norm import PartialRMSNorm, RMSNorm
from regard.nn.scale_norm import ScaleNorm

MakeSite = Callable[..., Site]
EXAMPLE = [100.0, 200.0, 100.0, 0.0]  # from USC 467


def moments(x: list[float]) -> tuple[float, float]:
    mean = sum(x) / len(x)
    return mean, sum((value - mean) ** 2 for value in x) / len(x)


def naive(norm: Norm, x: list[float], g: list[float], b: list[float]) -> list[float]:
    """Return the norm of one vector by its formula; g and b are as long as x."""
    mean, variance = moments(x)
    if isinstance(norm, LayerNorm):
        root = math.sqrt(variance) + norm.eps if norm.root == "outside" else math.sqrt(variance + norm.eps)
        return [gi * (xi - mean) / root + bi for xi, gi, bi in zip(x, g, b, strict=True)]
    if isinstance(norm, ScaleNorm):
        length = max(math.sqrt(sum(xi * xi for xi in x)), norm.eps)
        return [gi * xi / length for xi, gi in zip(x, g, strict=True)]
    assert isinstance(norm, RMSNorm | PartialRMSNorm)
    channels = x if isinstance(norm, RMSNorm) else x[: math.ceil(norm.fraction * len(x))]
    root = math.sqrt(sum(xi * xi for xi in channels) / len(channels) + norm.eps)
    return [gi * xi / root for xi, gi in zip(x, g, strict=True)]


def spread(parameter: Tensor | None, otherwise: float, width: int) -> list[float]:
    if parameter is None:
        return [otherwise] * width
    return parameter.tolist() * (width // parameter.numel())


@pytest.mark.parametrize("root", ["inside", "outside"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gain", ["vector", "scalar", "none"])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_layer_norm_by_formula(gain: str, bias: bool, root: str, eps: float, site: MakeSite) -> None:
    check(LayerNorm(gain, bias, eps, root), site())  # type: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "norm",
    [
        RMSNorm(),
        RMSNorm(0.3),
        PartialRMSNorm(),
        PartialRMSNorm(0.5, 0.3),
        PartialRMSNorm(1.0),
        ScaleNorm(),
        ScaleNorm(9.0),
    ],
    ids=repr,
)
def test_other_norms_by_formula(norm: Norm, site: MakeSite) -> None:
    check(norm, site())


def check(norm: Norm, site: Site) -> None:
    module = norm.build(site)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = 3.0 * torch.randn(2, 5, site.d_model) + 1.0
    y = module(x)
    g = spread(getattr(module, "weight", None), 1.0, site.d_model)
    b = spread(getattr(module, "bias", None), 0.0, site.d_model)
    for row, actual in zip(x.flatten(0, 1).tolist(), y.flatten(0, 1).tolist(), strict=True):
        assert actual == pytest.approx(naive(norm, row, g, b), abs=1e-12)


@pytest.mark.parametrize(
    ("norm", "shapes"),
    [
        (LayerNorm(), [(12,), (12,)]),
        (LayerNorm(bias=False), [(12,)]),
        (LayerNorm("scalar"), [(1,), (1,)]),
        (LayerNorm("scalar", bias=False), [(1,)]),
        (LayerNorm("none"), []),
        (LayerNorm("none", root="outside"), []),
        (LayerNorm(root="outside"), [(12,), (12,)]),
        (RMSNorm(), [(12,)]),
        (PartialRMSNorm(), [(12,)]),
        (ScaleNorm(), [(1,)]),
        (NoNorm(), []),
    ],
    ids=repr,
)
def test_parameters(norm: Norm, shapes: list[tuple[int, ...]], site: MakeSite) -> None:
    assert [tuple(p.shape) for p in norm.build(site()).parameters()] == shapes


def test_worked_example_of_usc_467(site: MakeSite) -> None:
    """C42: the population variance of [100, 200, 100, 0] is 5000; a sample variance would give 1.2247."""
    assert moments(EXAMPLE) == (100.0, 5000.0)
    module = LayerNorm("scalar").build(site(), 4)
    x = torch.tensor(EXAMPLE)
    assert module(x).tolist() == pytest.approx([0.0, math.sqrt(2), 0.0, -math.sqrt(2)], abs=1e-4)
    nn.init.constant_(module.weight, 3.0)  # type: ignore[reportArgumentType]
    nn.init.constant_(module.bias, 7.0)  # type: ignore[reportArgumentType]
    assert module(x).tolist() == pytest.approx([7.0, 3 * math.sqrt(2) + 7, 7.0, 7 - 3 * math.sqrt(2)], abs=1e-4)


VERSIONS = {
    "USC 467: scalar gain, eps inside": LayerNorm("scalar"),
    "COMP7607: vector gain, no eps": LayerNorm(eps=0.0),
    "CS 224n: no gain, eps outside": LayerNorm("none", root="outside"),
    "CS 182: scaling only": RMSNorm(),
}


class TestLectureVersions:
    """C43: the four versions agree for ordinary input and differ for small input."""

    def test_agree_on_ordinary_input(self, site: MakeSite) -> None:
        x = torch.randn(20, 12)
        x = x - x.mean(-1, keepdim=True)  # the fourth version does not centre
        first, *others = (norm.build(site())(x) for norm in VERSIONS.values())
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=1e-3)
        torch.testing.assert_close(others[0], first, rtol=0, atol=1e-4)

    @pytest.mark.parametrize(
        ("name", "largest"),
        [
            ("USC 467: scalar gain, eps inside", 0.309),
            ("COMP7607: vector gain, no eps", 1.414),
            ("CS 224n: no gain, eps outside", 1.394),
        ],
    )
    def test_differ_for_small_inputs(self, name: str, largest: float, site: MakeSite) -> None:
        x = torch.tensor(EXAMPLE) * 1e-5
        assert VERSIONS[name].build(site(), 4)(x).max().item() == pytest.approx(largest, abs=1e-3)

    def test_rms_norm_does_not_centre(self, site: MakeSite) -> None:
        x = torch.tensor(EXAMPLE)
        root = math.sqrt((100**2 + 200**2 + 100**2) / 4)
        assert RMSNorm(0.0).build(site(), 4)(x).tolist() == pytest.approx([v / root for v in EXAMPLE], abs=1e-12)


@pytest.mark.parametrize(("width", "fraction", "used"), [(768, 0.0675, 52), (12, 0.25, 3), (12, 0.26, 4), (5, 1.0, 5)])
def test_partial_rms_norm_rounds_the_number_of_channels_up(
    width: int, fraction: float, used: int, site: MakeSite
) -> None:
    """Channels up to ceil(fraction * D) change the scale; those after it do not."""
    module, x = PartialRMSNorm(fraction).build(site(), width), torch.randn(width)
    unchanged = module(x)
    for channel, matters in ((used - 1, True), (used, False)):
        if channel == width:
            continue
        changed = x.clone()
        changed[channel] += 5.0
        other_channels = torch.arange(width) != channel
        assert torch.equal(module(changed)[other_channels], unchanged[other_channels]) is not matters


def test_partial_rms_norm_does_not_overflow_in_half_precision(site: MakeSite) -> None:
    x = torch.full((4,), 3e4, dtype=torch.float16)
    y = PartialRMSNorm(1.0).build(site(), 4).half()(x)
    assert y.dtype == torch.float16
    assert y.tolist() == pytest.approx([1.0] * 4, abs=1e-2)


def test_scale_norm_starts_at_length_sqrt_d(site: MakeSite) -> None:
    module = ScaleNorm().build(site())
    assert next(module.parameters()).tolist() == pytest.approx([math.sqrt(12)])
    assert module(torch.randn(5, 12)).norm(dim=-1).tolist() == pytest.approx([math.sqrt(12)] * 5)


def test_no_norm_changes_nothing(site: MakeSite) -> None:
    x = torch.randn(3, 12)
    assert torch.equal(NoNorm().build(site())(x), x)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm, PartialRMSNorm, ScaleNorm])
def test_a_negative_eps_is_refused(norm: Callable[..., Norm]) -> None:
    with pytest.raises(SpecError, match=r"^eps: must be at least 0, not -0\.1"):
        norm(eps=-0.1)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5])
def test_an_invalid_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(SpecError, match=r"^fraction: must be above 0 and at most 1"):
        PartialRMSNorm(fraction)
