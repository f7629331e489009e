import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.mask import Mask, View
from regard.nn.position.base import Position, position_bias
from regard.nn.position.bias import ALiBi, DistanceBias, T5Bias, alibi_slopes

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")


def bias_of(position: Position, view: View, site: Site) -> tuple[Tensor, nn.Module]:
    module = position.build(site)
    terms = module(view)
    assert (terms.rotation, terms.offset, terms.bias, terms.content, terms.context) == (None, None, None, None, None)
    bias = position_bias(view.with_terms(terms))
    assert bias is not None
    return bias, module


def full_view(T: int) -> View:
    return View(Mask(), T, T, CPU)


@pytest.mark.parametrize("position", [DistanceBias(3), T5Bias(8, 9), ALiBi()], ids=repr)
def test_bias_is_toeplitz_per_head(position: Position, site: MakeSite) -> None:
    """C62: b depends on i - j only, and differs from head to head."""
    bias, _ = bias_of(position, full_view(20), site())
    assert bias.shape == (1, 3, 20, 20)
    for h in range(3):
        for distance in range(-19, 20):
            diagonal = bias[0, h].diagonal(distance)
            assert torch.equal(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.equal(bias[0, 0], bias[0, 1])


@pytest.mark.parametrize("position", [DistanceBias(3), T5Bias(8, 9), ALiBi()], ids=repr)
def test_the_bias_of_a_decoding_step_is_a_row_of_the_full_bias(position: Position, site: MakeSite) -> None:
    module = position.build(site())
    views = (
        full_view(9),
        View(Mask(causal=True, start=7), 2, 9, CPU),
        View(Mask(causal=True, q_pos=torch.tensor([[7], [2]])), 1, 9, CPU),
    )
    bias, step, ragged = (position_bias(view.with_terms(module(view))) for view in views)
    assert bias is not None
    assert step is not None
    assert ragged is not None
    assert torch.equal(step, bias[:, :, 7:])
    assert torch.equal(ragged, torch.cat((bias[:, :, 7:8], bias[:, :, 2:3])))


def test_distance_bias_is_a_scalar_per_clipped_distance(site: MakeSite) -> None:
    bias, module = bias_of(DistanceBias(3), full_view(9), site())
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (3, 7)
    for h in range(3):
        for i in range(9):
            for j in range(9):
                assert bias[0, h, i, j] == weight[h, max(-3, min(3, j - i)) + 3]


def bucket(distance: int, buckets: int, max_distance: int, causal: bool) -> int:
    """Return the bucket of one distance j - i, as in the code of Raffel et al."""
    first = 0
    if causal:
        far = max(-distance, 0)
    else:
        buckets //= 2
        first, far = (buckets if distance > 0 else 0), abs(distance)
    exact = buckets // 2
    if far < exact:
        return first + far
    share = math.log(far / exact) / math.log(max_distance / exact)
    # A distance on the border of two buckets belongs to the upper one, whatever the rounding of the logarithm.
    return first + min(exact + int(share * (buckets - exact) + 1e-6), buckets - 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (4, 16), (64, 1000)])
def test_t5_buckets(buckets: int, max_distance: int, causal: bool) -> None:
    distances = torch.arange(-1500, 1501)
    actual = T5Bias(buckets, max_distance).bucket(distances, causal)
    assert actual.tolist() == [bucket(d, buckets, max_distance, causal) for d in distances.tolist()]


def test_t5_buckets_of_chosen_distances() -> None:
    """32 buckets up to 128: for earlier keys, 0 .. 7 exact and 8 wider ones; for later keys, the same from 16."""
    spec = T5Bias()
    left = {0: 0, 1: 1, 7: 7, 8: 8, 11: 8, 12: 9, 16: 10, 127: 15, 128: 15, 5000: 15}
    for distance, number in left.items():
        assert spec.bucket(torch.tensor(-distance), False).item() == number
        assert distance == 0 or spec.bucket(torch.tensor(distance), False).item() == number + 16
    for distance, number in {0: 0, 15: 15, 16: 16, 128: 31, 5000: 31}.items():
        assert spec.bucket(torch.tensor(-distance), True).item() == number
    assert spec.bucket(torch.tensor([1, 50]), True).tolist() == [0, 0]  # the future, which a mask hides


@pytest.mark.parametrize("causal", [True, False])
def test_t5_bias_is_a_scalar_per_bucket(causal: bool, site: MakeSite) -> None:
    bias, module = bias_of(T5Bias(8, 9), full_view(30), site(causal=causal))
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (3, 8)
    for h in range(3):
        for i in range(30):
            for j in range(30):
                assert bias[0, h, i, j] == weight[h, bucket(j - i, 8, 9, causal)]


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (8, [2**-n for n in range(1, 9)]),
        (12, [*[2**-n for n in range(1, 9)], 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (3, [2**-4, 2**-8, 2**-2]),
    ],
)
def test_alibi_slopes(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads) == pytest.approx(slopes)


def test_alibi_lowers_scores_with_distance(site: MakeSite) -> None:
    bias, module = bias_of(ALiBi(), full_view(6), site(heads=12))
    assert not list(module.parameters())
    assert not module.state_dict()
    for h, slope in enumerate(alibi_slopes(12)):
        for i in range(6):
            for j in range(6):
                assert bias[0, h, i, j].item() == pytest.approx(-slope * abs(i - j))


def test_alibi_has_the_given_slopes(site: MakeSite) -> None:
    bias, _ = bias_of(ALiBi((0.5, 0.125)), full_view(4), site(heads=2))
    for h, slope in enumerate((0.5, 0.125)):
        assert bias[0, h, 3, 1].item() == -2 * slope
    with pytest.raises(SpecError, match="slopes: there are 2 slopes for 3 heads"):
        ALiBi((0.5, 0.125)).build(site(heads=3))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: DistanceBias(0), "max_distance"),
        (lambda: T5Bias(6), "buckets"),
        (lambda: T5Bias(0), "buckets"),
        (lambda: T5Bias(32, 16), "max_distance"),
    ],
)
def test_refusals(make: Callable[[], Position], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        make()
    assert raised.value.path == path
