import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.vocab.base import Head
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Table

MakeSite = Callable[..., Site]
V, D, N = 9, 12, 7


def head_and_table(spec: Softmax, site: Site) -> tuple[Head, Table]:
    head, table = spec.build(V, site), Embeddings().build(V, D, site)
    for parameter in (*head.parameters(), *table.parameters()):
        nn.init.normal_(parameter)
    return head, table


def data() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(N, D), torch.randint(0, V, (N,)), torch.rand(N)


def loss_of(scores: list[float], label: int, label_smoothing: float, z: float) -> tuple[float, float]:
    """Return (objective, negative log-likelihood) of one token, given its logits."""
    log_z = math.log(sum(math.exp(s) for s in scores))
    nll = log_z - scores[label]
    uniform = sum(log_z - s for s in scores) / len(scores)
    return (1 - label_smoothing) * nll + label_smoothing * uniform + z * log_z**2, nll


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_by_formula(scaled: bool, bias: bool, site: MakeSite) -> None:
    head, table = head_and_table(Softmax(scaled, bias), site())
    h = torch.randn(2, 3, D)
    scores = (h / math.sqrt(D) if scaled else h) @ table.readout(h)[1].T + (head.bias if bias else 0.0)  # type: ignore[reportOperatorIssue]
    log_probs = head.log_probs(h, table)
    torch.testing.assert_close(log_probs, scores - scores.exp().sum(-1, keepdim=True).log())
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("label_smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.3)])
def test_score_by_formula(
    label_smoothing: float, z: float, bias: bool, scaled: bool, training: bool, site: MakeSite
) -> None:
    head, table = head_and_table(Softmax(scaled, bias, label_smoothing, z), site())
    head.train(training)
    h, labels, weights = data()
    scored = head.score(h, labels, weights, table)
    x = h / math.sqrt(D) if scaled else h
    logits = (x @ table.readout(h)[1].T + (head.bias if bias else 0.0)).tolist()  # type: ignore[reportOperatorIssue]
    if not training:
        label_smoothing = z = 0.0
    tokens = [loss_of(row, label, label_smoothing, z) for row, label in zip(logits, labels.tolist(), strict=True)]
    objective = sum(w * token[0] for w, token in zip(weights.tolist(), tokens, strict=True))
    nll = sum(w * token[1] for w, token in zip(weights.tolist(), tokens, strict=True))
    assert scored.objective.item() == pytest.approx(objective, abs=1e-10)
    assert scored.nll.item() == pytest.approx(nll, abs=1e-10)
    assert not scored.nll.requires_grad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("label_smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.3)])
def test_gradients_by_formula(label_smoothing: float, z: float, bias: bool, site: MakeSite) -> None:
    head, table = head_and_table(Softmax(bias=bias, label_smoothing=label_smoothing, z_loss=z), site())
    h, labels, weights = data()
    h.requires_grad_()
    matrix = table.weight
    assert isinstance(matrix, nn.Parameter)
    inputs: list[Tensor] = [h, matrix, *head.parameters()]
    logits = h @ matrix.T + (head.bias if bias else 0.0)  # type: ignore[reportOperatorIssue]
    log_z = logits.logsumexp(-1)
    nll = log_z - logits[torch.arange(N), labels]
    loss = (1 - label_smoothing) * nll + label_smoothing * (log_z - logits.mean(-1)) + z * log_z**2
    expected = torch.autograd.grad(2.5 * (weights * loss).sum(), inputs)
    gradients = torch.autograd.grad(2.5 * head.score(h, labels, weights, table).objective, inputs)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_label_smoothing_matches_torch(site: MakeSite) -> None:
    head, table = head_and_table(Softmax(label_smoothing=0.1), site())
    h, labels, _ = data()
    expected = nn.functional.cross_entropy(table.logits(h), labels, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(head.score(h, labels, torch.ones(N), table).objective, expected)


def test_loss_of_zero_tokens_is_zero(site: MakeSite) -> None:
    head, table = head_and_table(Softmax(label_smoothing=0.1), site())
    scored = head.score(torch.randn(0, D, requires_grad=True), torch.zeros(0, dtype=torch.int64), torch.rand(0), table)
    scored.objective.backward()
    assert (scored.objective.item(), scored.nll.item()) == (0.0, 0.0)


def test_half_precision_is_summed_in_float32(site: MakeSite) -> None:
    head, table = head_and_table(Softmax(bias=True), site())
    h, labels, weights = data()
    exact = head.score(h, labels, weights, table)
    half = head.bfloat16().score(h.bfloat16(), labels, weights, table.bfloat16())
    assert half.objective.dtype == torch.float32
    assert half.objective.item() == pytest.approx(exact.objective.item(), rel=0.05)
    half.objective.backward()
    assert head.log_probs(h.bfloat16(), table).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"z_loss": -1.0}, "z_loss"),
    ],
)
def test_refusals(changes: dict[str, float], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        replace(Softmax(), **changes)
    assert raised.value.path == path
