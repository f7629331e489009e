"""Cross-entropy in chunks equals that of the plain heads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard import fast
from regard.fast import cross_entropy
from regard.nn.core import Site
from regard.nn.vocab.adaptive import AdaptiveSoftmax, AdaptiveTable
from regard.nn.vocab.base import Head, HeadSpec
from regard.nn.vocab.mixture import MixtureOfSoftmaxes
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Table, TableSpec

MakeSite = Callable[..., Site]
V, D, N = 14, 12, 9
CLUSTERS = AdaptiveTable((4, 3, 5, 2), (1, 3, 12, 1))  # widths 12, 4, 1, 12
HEADS: dict[str, tuple[HeadSpec, TableSpec]] = {
    "softmax": (Softmax(), Embeddings()),
    "softmax with bias": (Softmax(True, True, 0.2, 0.3), Embeddings()),
    "softmax, smoothed": (Softmax(label_smoothing=0.1), Embeddings()),
    "softmax with z-loss": (Softmax(z_loss=0.3), Embeddings()),
    "adaptive": (AdaptiveSoftmax(3, True, 0.2, 0.3), CLUSTERS),
    "mixture": (MixtureOfSoftmaxes(3), Embeddings()),
    "mixture, smoothed": (MixtureOfSoftmaxes(3, label_smoothing=0.2), CLUSTERS),
}


def built(name: str, site: Site) -> tuple[Head, Table]:
    head, table = HEADS[name][0].build(V, site), HEADS[name][1].build(V, D, site)
    for parameter in (*head.parameters(), *table.parameters()):
        nn.init.normal_(parameter, std=0.7)
    return head, table


def data(tokens: int = N) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, D), torch.arange(tokens) % V, torch.rand(tokens)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("name", HEADS)
def test_chunks_of_any_size_have_the_loss_and_gradients_of_the_plain_head(
    name: str, rows: int, training: bool, compiling: bool, site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, table = built(name, site())
    head.train(training)
    h, labels, weights = data()
    h.requires_grad_()
    inputs = [h, *head.parameters(), *table.parameters()]
    expected = head.score(h, labels, weights, table)
    log_probs = head.log_probs(h, table)
    expected_gradients = torch.autograd.grad(2.5 * expected.objective, inputs, materialize_grads=True)
    fast.install(head)
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda *_: rows)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    output = head.score(h, labels, weights, table)
    torch.testing.assert_close(output.objective, expected.objective)
    torch.testing.assert_close(output.nll, expected.nll)
    assert not output.nll.requires_grad
    torch.testing.assert_close(head.log_probs(h, table), log_probs)
    gradients = torch.autograd.grad(2.5 * output.objective, inputs, materialize_grads=True)
    for a, b in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", HEADS)
def test_loss_of_no_tokens_is_zero(name: str, site: MakeSite) -> None:
    head, table = built(name, site())
    fast.install(head)
    h, labels, weights = data(0)
    scored = head.score(h.requires_grad_(), labels, weights, table)
    scored.objective.backward()
    assert (scored.objective.item(), scored.nll.item()) == (0.0, 0.0)


def test_without_gradient_one_product_is_computed_instead_of_three(site: MakeSite) -> None:
    head, table = built("softmax with bias", site())
    fast.install(head)
    h, labels, weights = data()
    with FlopCounterMode(display=False) as counted:
        trained = head.score(h, labels, weights, table)
    assert counted.get_total_flops() == 3 * 2 * N * D * V
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        evaluated = head.score(h, labels, weights, table)
    assert counted.get_total_flops() == 2 * N * D * V
    assert torch.equal(evaluated.objective, trained.objective)
    assert not evaluated.objective.requires_grad


def test_a_token_costs_only_the_tail_of_its_label(site: MakeSite) -> None:
    head, table = built("adaptive", site())
    fast.install(head)
    h, weights = torch.randn(N, D), torch.rand(N)
    labels = torch.tensor([0, 4, 13, 7, 5, 2, 8, 12, 3])  # two of each tail
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        head.score(h, labels, weights, table)
    tails = 2 * (2 * 4 * (12 + 3)) + 2 * (2 * 1 * (12 + 5)) + 2 * (2 * 12 * 2)
    assert counted.get_total_flops() == 2 * N * D * (4 + 3) + tails


def test_half_precision_is_summed_in_float32(site: MakeSite) -> None:
    head, table = built("softmax with bias", site())
    fast.install(head)
    h, labels, weights = data()
    exact = head.score(h, labels, weights, table)
    half = head.bfloat16().score(h.bfloat16(), labels, weights, table.bfloat16())
    assert half.objective.dtype == torch.float32
    assert half.objective.item() == pytest.approx(exact.objective.item(), rel=0.05)
    half.objective.backward()


@pytest.mark.parametrize(("rows", "vocab"), [(1, 10), (1000, 50_000), (7, 2**25), (4096, 4096), (0, 5)])
def test_chunks_fit_their_budget_and_cover_the_rows(rows: int, vocab: int) -> None:
    step = cross_entropy.chunk_rows(rows, vocab, torch.device("cpu"))
    assert step * vocab <= 2**23 or step <= 1
    chunks = -(-rows // max(step, 1))
    assert chunks * step >= rows
    assert chunks <= max(1, -(-rows * vocab // 2**23))
