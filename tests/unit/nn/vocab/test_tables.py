from collections.abc import Callable

import torch
from torch import nn

from regard.nn.core import Site
from regard.nn.vocab.tables import Embeddings


def test_one_row_per_id_both_ways(site: Callable[..., Site]) -> None:
    table = Embeddings().build(7, 5, site())
    E = table.weight
    assert isinstance(E, nn.Parameter)
    assert E.shape == (7, 5)
    ids, h = torch.tensor([[3, 1], [6, 3]]), torch.randn(2, 3, 5)
    assert torch.equal(table.embed(ids), torch.stack([E[[3, 1]], E[[6, 3]]]))
    scores = table.logits(h)
    assert scores.shape == (2, 3, 7)
    for v in range(7):
        torch.testing.assert_close(scores[..., v], (h * E[v]).sum(-1))
    r, matrix = table.readout(h)
    torch.testing.assert_close(r @ matrix.T, scores)


def test_rows_are_drawn_as_embeddings(site: Callable[..., Site]) -> None:
    table = Embeddings().build(400, 100, site())
    assert abs(table.embed(torch.arange(400)).std().item() - 0.1) < 0.005
