from collections.abc import Callable

import pytest
import torch
from torch import nn

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.init import T5Init
from regard.nn.vocab.tables import Embeddings, Factorised


def test_embedding_and_logits_use_one_row_per_id(site: Callable[..., Site]) -> None:
    table = Embeddings().build(7, 5, site())
    E = table.weight
    assert isinstance(E, nn.Parameter)
    assert E.shape == (7, 5)
    ids, h = torch.tensor([[3, 1], [6, 3]]), torch.randn(2, 3, 5)
    assert torch.equal(table(ids), torch.stack([E[[3, 1]], E[[6, 3]]]))
    scores = table.logits(h)
    assert scores.shape == (2, 3, 7)
    for v in range(7):
        torch.testing.assert_close(scores[..., v], (h * E[v]).sum(-1))
    r, matrix = table.readout(h)
    torch.testing.assert_close(r @ matrix.T, scores)


def test_rows_are_initialised_as_embeddings(site: Callable[..., Site]) -> None:
    table = Embeddings().build(400, 100, site())
    assert abs(table(torch.arange(400)).std().item() - 0.1) < 0.005


def test_factorised_embedding_and_logits_use_the_product(site: Callable[..., Site]) -> None:
    table = Factorised(3).build(7, 5, site())
    A, B = table.weight, table.projection
    assert isinstance(A, nn.Parameter)
    assert isinstance(B, nn.Parameter)
    assert (A.shape, B.shape) == ((7, 3), (5, 3))
    E = [[sum((A[v, k] * B[j, k]).item() for k in range(3)) for j in range(5)] for v in range(7)]
    ids, h = torch.tensor([[3, 1], [6, 3]]), torch.randn(2, 3, 5)
    torch.testing.assert_close(table(ids), torch.tensor([[E[3], E[1]], [E[6], E[3]]]))
    torch.testing.assert_close(table.logits(h), h @ torch.tensor(E).T)
    r, matrix = table.readout(h)
    assert r.shape == (2, 3, 3)
    torch.testing.assert_close(r @ matrix.T, table.logits(h))


def test_initial_factors_have_equal_scale_and_unit_rows(site: Callable[..., Site]) -> None:
    """As in Narang et al. 2021: both are N(0, width^-1/2) with the init of T5, whose tables have variance 1."""
    table = Factorised(16).build(800, 300, site(init_=T5Init()))
    assert abs(table.weight.std().item() / 16**-0.25 - 1) < 0.03  # type: ignore[reportCallIssue]
    assert abs(table.projection.std().item() / 16**-0.25 - 1) < 0.03  # type: ignore[reportCallIssue]
    assert abs(table(torch.arange(800)).std().item() - 1) < 0.03


@pytest.mark.parametrize("width", [0, -1])
def test_a_factorised_table_needs_a_width(width: int) -> None:
    with pytest.raises(SpecError) as raised:
        Factorised(width)
    assert raised.value.path == "width"
