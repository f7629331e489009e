import math
from collections.abc import Callable

import pytest
import torch

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.mask import Mask, View
from regard.nn.position.rotary import Rotary

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")


def rotated(x: torch.Tensor, spec: Rotary, mask: Mask, site: Site) -> torch.Tensor:
    T = x.shape[2]
    rotation = spec.build(site)(View(mask, T, T, CPU)).rotation
    assert rotation is not None
    return rotation(x)


def test_rotates_pairs_by_their_angles(site: MakeSite) -> None:
    d, base = 6, 50.0
    x = torch.randn(2, 3, 4, d)
    y = rotated(x, Rotary(base), Mask(start=5), site(d_head=d))
    for t in range(4):
        for k in range(d // 2):
            angle = (5 + t) * base ** (-2 * k / d)
            a, b = x[:, :, t, k], x[:, :, t, k + d // 2]
            torch.testing.assert_close(y[:, :, t, k], math.cos(angle) * a - math.sin(angle) * b)
            torch.testing.assert_close(y[:, :, t, k + d // 2], math.sin(angle) * a + math.cos(angle) * b)


def test_scores_depend_on_distance_only(site: MakeSite) -> None:
    """With the same query and key at every position, scores are Toeplitz and change with distance."""
    q, k = torch.randn(1, 1, 1, 8).expand(1, 1, 30, 8), torch.randn(1, 1, 1, 8).expand(1, 1, 30, 8)
    scores = (
        rotated(q, Rotary(), Mask(), site(d_head=8)) @ rotated(k, Rotary(), Mask(), site(d_head=8)).transpose(-1, -2)
    )[0, 0]
    for distance in range(-29, 30):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert (scores[0] - scores[0, 0]).abs().max() > 1e-2
    torch.testing.assert_close(scores[0, 0], (q[0, 0, 0] * k[0, 0, 0]).sum())


def test_rotation_keeps_the_norm_of_vectors(site: MakeSite) -> None:
    x = torch.randn(2, 3, 4, 8)
    torch.testing.assert_close(rotated(x, Rotary(), Mask(), site(d_head=8)).norm(dim=-1), x.norm(dim=-1))


def test_rows_with_different_positions(site: MakeSite) -> None:
    x, spec = torch.randn(2, 3, 2, 8), Rotary()
    y = rotated(x, spec, Mask(q_pos=torch.tensor([[4, 5], [0, 1]])), site(d_head=8))
    torch.testing.assert_close(y[:1], rotated(x[:1], spec, Mask(start=4), site(d_head=8)))
    torch.testing.assert_close(y[1:], rotated(x[1:], spec, Mask(), site(d_head=8)))


def test_rotation_keeps_the_dtype(site: MakeSite) -> None:
    x = torch.randn(1, 1, 2, 8, dtype=torch.bfloat16)
    assert rotated(x, Rotary(), Mask(), site(d_head=8)).dtype == torch.bfloat16


def test_angles_stay_exact_in_a_half_precision_model(site: MakeSite) -> None:
    torch.set_default_dtype(torch.float32)
    module, view = Rotary().build(site(d_head=8)), View(Mask(start=3000), 4, 3004, CPU)
    exact = module(view).rotation
    rounded = module.to(torch.bfloat16)(view).rotation
    assert exact is not None
    assert rounded is not None
    x = torch.eye(8)[:4].expand(1, 4, 4, 8).transpose(1, 2)  # head k of every token is the k-th unit vector
    assert torch.equal(exact(x), rounded(x))
    for k in range(4):
        angle = 3002 * 10000 ** (-2 * k / 8)
        assert exact(x)[0, k, 2, k].item() == pytest.approx(math.cos(angle), abs=1e-3)


def test_refusals(site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^decoder\.position\.kind: .* even d_head, not 5"):
        Rotary().build(site(d_head=5, path="decoder.position"))
    with pytest.raises(SpecError, match=r"^base: must be above 1"):
        Rotary(1.0)
