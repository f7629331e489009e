"""Weight normalisation against torch's, and its cache in inference."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from regard.errors import SpecError
from regard.fast.install import install
from regard.models.baselines.weight_norm import NormedEmbeddings, WeightNorm
from regard.nn.core import Site
from regard.nn.fixup import FixupInit
from regard.nn.init import ConvS2SInit, Uninitialized

MakeSite = Callable[..., Site]


def test_matches_torch_weight_norm(site: MakeSite) -> None:
    ours: Any = WeightNorm().build(5, {"up": 3, "gate": 4}, None, site()).double()
    theirs: Any = parametrizations.weight_norm(nn.Linear(5, 7).double(), dim=0)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        theirs.bias.copy_(ours.bias)
        theirs.parametrizations.weight.original0.copy_(ours.rows.length[:, None])
        theirs.parametrizations.weight.original1.copy_(ours.rows.direction)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)
    weight = theirs.parametrizations.weight
    torch.testing.assert_close(ours.rows.length.grad, weight.original0.grad[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.rows.direction.grad, weight.original1.grad, rtol=0, atol=1e-12)


def test_initial_weight_equals_its_direction(site: MakeSite) -> None:
    module: Any
    for module in (WeightNorm().build(6, {"up": 4}, False, site()), NormedEmbeddings().build(4, 6, site())):
        torch.testing.assert_close(module.rows(), module.rows.direction, rtol=0, atol=1e-7)
    assert WeightNorm(bias=False).build(6, {"up": 4}, None, site()).bias is None
    table: Any = NormedEmbeddings().build(9, 6, site())
    ids, h = torch.tensor([[3, 8]]), torch.randn(2, 6)
    assert torch.equal(table(ids), table.rows()[ids])
    torch.testing.assert_close(table.logits(h), h @ table.rows().T)


def test_matrix_is_cached_in_inference_until_weights_change(site: MakeSite) -> None:
    module: Any = WeightNorm().build(6, {"up": 4}, None, site()).eval()
    install(module, fixed=True)
    assert module.rows() is not module.rows()
    with torch.inference_mode():
        first = module.rows()
        assert module.rows() is first
    with torch.no_grad():
        module.rows.length.mul_(2)
    with torch.inference_mode():
        torch.testing.assert_close(module.rows(), 2 * first)
        again = module.rows()
    module.train().eval()
    with torch.inference_mode():
        assert module.rows() is not again
        assert copy.deepcopy(module).rows.cached.weight is None
    assert set(module.state_dict()) == {"bias", "rows.direction", "rows.length"}


def test_zero_rows_are_refused(site: MakeSite) -> None:
    with pytest.raises(SpecError, match="no direction"):
        WeightNorm().build(6, {"down": 4}, None, site(init_=FixupInit()))
    WeightNorm().build(6, {"down": 4}, None, site(init_=Uninitialized()))


@pytest.mark.parametrize(("role", "gain"), [("up", 4.0), ("gate", 4.0), ("query", 1.0), ("other", 1.0), ("head", 1.0)])
def test_init_preserves_the_variance(site: MakeSite, role: Any, gain: float) -> None:
    weight = torch.empty(500, 300)
    ConvS2SInit().draw(weight, role, site(dropout=0.2))
    assert abs(weight.std().item() / (gain * 0.8 / 300) ** 0.5 - 1) < 0.02
    ConvS2SInit().draw(weight, "embedding", site(dropout=0.2))
    assert abs(weight.std().item() / 0.1 - 1) < 0.02
