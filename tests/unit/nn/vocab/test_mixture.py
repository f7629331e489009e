import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.vocab.adaptive import AdaptiveTable
from regard.nn.vocab.base import Head
from regard.nn.vocab.mixture import MixtureOfSoftmaxes
from regard.nn.vocab.tables import Embeddings, Factorised, Table, TableSpec

MakeSite = Callable[..., Site]
V, D, N, K = 9, 12, 7, 3
HEAD, TABLE = MixtureOfSoftmaxes(K), Embeddings()


def head_and_table(site: Site, spec: MixtureOfSoftmaxes = HEAD, table_spec: TableSpec = TABLE) -> tuple[Head, Table]:
    head, table = spec.build(V, site), table_spec.build(V, D, site)
    for parameter in (*head.parameters(), *table.parameters()):
        nn.init.normal_(parameter, std=0.6)
    return head, table


def data() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(N, D), torch.randint(0, V, (N,)), torch.rand(N)


def naive_probabilities(head: Head, E: Tensor, h: Tensor) -> Tensor:
    """Return sum_k pi_k softmax(E tanh(C_k h)) of one token, number by number."""
    P = head.get_parameter("prior.weight")
    mixed = [(h @ P[k]).exp() for k in range(len(P))]
    total: Any = 0
    for k in range(len(P)):
        context = torch.stack([(row @ h).tanh() for row in head.get_parameter(f"contexts.{k}.weight")])
        scores = [(context @ E[v]).exp() for v in range(len(E))]
        total = total + mixed[k] / sum(mixed) * torch.stack([score / sum(scores) for score in scores])
    return total


@pytest.mark.parametrize("scaled", [False, True])
def test_log_probs_by_formula(scaled: bool, site: MakeSite) -> None:
    head, table = head_and_table(site(), replace(HEAD, scaled=scaled))
    h = torch.randn(2, 3, D)
    log_probs = head.log_probs(h, table)
    E = table.get_parameter("weight")
    x = (h / math.sqrt(D) if scaled else h).view(-1, D)
    expected = torch.stack([naive_probabilities(head, E, row) for row in x]).view(2, 3, V)
    torch.testing.assert_close(log_probs, expected.log())
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3))
    torch.testing.assert_close(log_probs.log_softmax(-1), log_probs)  # normalised: log Z is 0


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("training", [True, False])
def test_loss_and_gradients_by_formula(training: bool, label_smoothing: float, site: MakeSite) -> None:
    head, table = head_and_table(site(), replace(HEAD, label_smoothing=label_smoothing))
    head.train(training)
    h, labels, weights = data()
    h.requires_grad_()
    inputs = [h, *head.parameters(), *table.parameters()]
    log_probs = torch.stack([naive_probabilities(head, table.get_parameter("weight"), row) for row in h]).log()
    nll = -log_probs[torch.arange(N), labels]
    s = label_smoothing if training else 0.0
    expected = (weights * ((1 - s) * nll - s * log_probs.mean(-1))).sum()
    scored = head.score(h, labels, weights, table)
    torch.testing.assert_close(scored.objective, expected)
    torch.testing.assert_close(scored.nll, (weights * nll).sum())
    assert not scored.nll.requires_grad
    gradients = torch.autograd.grad(2.5 * scored.objective, inputs)
    for a, b in zip(gradients, torch.autograd.grad(2.5 * expected, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("table_spec", [Factorised(3), AdaptiveTable((4, 5), (1, 3))], ids=lambda table: table.kind)
def test_accepts_any_table(table_spec: TableSpec, site: MakeSite) -> None:
    head, table = head_and_table(site(), replace(HEAD, label_smoothing=0.1), table_spec)
    h, labels, weights = data()
    E = table(torch.arange(V))
    expected = torch.stack([naive_probabilities(head, E, row) for row in h]).log()
    torch.testing.assert_close(head.log_probs(h, table), expected)
    scored = head.score(h, labels, weights, table)
    torch.testing.assert_close(scored.nll, -(weights * expected[torch.arange(N), labels]).sum())
    scored.objective.backward()
    assert all(p.grad is not None for p in (*head.parameters(), *table.parameters()))


def test_equal_components_equal_one_softmax(site: MakeSite) -> None:
    head, table = head_and_table(site())
    for k in range(1, K):
        head.get_parameter(f"contexts.{k}.weight").data = head.get_parameter("contexts.0.weight").data
    h = torch.randn(N, D)
    context = (h @ head.get_parameter("contexts.0.weight").T).tanh()
    torch.testing.assert_close(head.log_probs(h, table), table.logits(context).log_softmax(-1))


def test_a_mixture_has_a_higher_rank_than_the_model(site: MakeSite) -> None:
    """The log-probabilities of a single softmax over D channels have at most rank D + 1."""
    small = site(d_model=2)
    head, table = HEAD.build(V, small), Embeddings().build(V, 2, small)
    for parameter in (*head.parameters(), *table.parameters()):
        nn.init.normal_(parameter, std=2.0)
    h = torch.randn(50, 2)
    assert int(torch.linalg.matrix_rank(table.logits(h).log_softmax(-1), rtol=1e-9)) == 3
    assert int(torch.linalg.matrix_rank(head.log_probs(h, table), rtol=1e-9)) > 5


def test_tiny_probabilities_stay_finite(site: MakeSite) -> None:
    head, table = head_and_table(site(), replace(HEAD, label_smoothing=0.1))
    head, table = head.float(), table.float()
    with torch.no_grad():
        table.get_parameter("weight").mul_(500)
    h, labels, weights = data()
    log_probs = head.log_probs(h.float(), table)
    assert bool(torch.isfinite(log_probs).all())
    assert log_probs.min().item() < -200
    scored = head.score(h.float(), labels, weights.float(), table)
    scored.objective.backward()
    assert bool(torch.isfinite(scored.objective))
    assert all(bool(torch.isfinite(p.grad).all()) for p in head.parameters() if p.grad is not None)


def test_loss_without_grad_mode(site: MakeSite) -> None:
    head, table = head_and_table(site())
    h, labels, weights = data()
    with torch.no_grad():
        scored = head.score(h, labels, weights, table)
    assert not scored.objective.requires_grad
    torch.testing.assert_close(scored.objective, head.score(h, labels, weights, table).objective)


def test_loss_of_zero_tokens_is_zero(site: MakeSite) -> None:
    head, table = head_and_table(site(), replace(HEAD, label_smoothing=0.1))
    scored = head.score(torch.randn(0, D, requires_grad=True), torch.zeros(0, dtype=torch.int64), torch.rand(0), table)
    scored.objective.backward()
    assert (scored.objective.item(), scored.nll.item()) == (0.0, 0.0)
    assert head.log_probs(torch.randn(0, D), table).shape == (0, V)


def test_half_precision_is_summed_in_float32(site: MakeSite) -> None:
    head, table = head_and_table(site())
    h, labels, weights = data()
    exact = head.score(h, labels, weights, table)
    half = head.half().score(h.half(), labels, weights, table.half())
    assert half.objective.dtype == torch.float32
    assert half.objective.item() == pytest.approx(exact.objective.item(), rel=0.05)
    half.objective.backward()
    assert head.log_probs(h.half(), table).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "path"), [({"components": 0}, "components"), ({"label_smoothing": 1.0}, "label_smoothing")]
)
def test_refusals(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        replace(MixtureOfSoftmaxes(), **changes)
    assert raised.value.path == path
