import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.errors import SpecError
from regard.models.build import build
from regard.nn.core import Site
from regard.nn.vocab.adaptive import AdaptiveSoftmax, AdaptiveTable
from regard.nn.vocab.base import Head
from regard.nn.vocab.tables import Embeddings, Factorised, Table
from regard.testing import tiny

MakeSite = Callable[..., Site]
V, D, N = 14, 12, 9
TABLE = AdaptiveTable((4, 3, 5, 2), (1, 3, 12, 1))  # widths 12, 4, 1, 12
CUTS = (0, 4, 7, 12, 14)
HEAD = AdaptiveSoftmax(tails=3)


def head_and_table(site: Site, spec: AdaptiveSoftmax = HEAD, table: AdaptiveTable = TABLE) -> tuple[Head, Table]:
    head, vectors = spec.build(V, site), table.build(V, D, site)
    for parameter in (*head.parameters(), *vectors.parameters()):
        nn.init.normal_(parameter, std=0.7)
    return head, vectors


def vector(table: Table, v: int) -> Tensor:
    """Return the vector of id v by definition: its row in the table of its cluster, times the projection."""
    c = next(c for c in range(4) if CUTS[c] <= v < CUTS[c + 1])
    row = table.get_parameter(f"clusters.{c}.weight")[v - CUTS[c]]
    return row if c in (0, 3) else table.get_parameter(f"clusters.{c}.projection") @ row


def softmaxes(head: Head, table: Table, h: Tensor) -> list[list[Tensor]]:
    """Return the logits of the first softmax (ids, then tails) and of the softmax of each tail."""
    tails = head.get_parameter("tails")
    first = [h @ vector(table, v) for v in range(CUTS[1])] + [h @ tails[c] for c in range(3)]
    return [first, *([h @ vector(table, v) for v in range(CUTS[c], CUTS[c + 1])] for c in (1, 2, 3))]


def place(v: int) -> list[tuple[int, int]]:
    """Return the (softmax, index) pairs whose probabilities multiply to that of id v."""
    if v < CUTS[1]:
        return [(0, v)]
    c = next(c for c in (1, 2, 3) if v < CUTS[c + 1])
    return [(0, CUTS[1] + c - 1), (c, v - CUTS[c])]


def log_sum(logits: list[Tensor]) -> Tensor:
    return torch.stack([logit.exp() for logit in logits]).sum().log()


def naive_log_probs(head: Head, table: Table, h: Tensor) -> Tensor:
    all_logits = softmaxes(head, table, h)
    sums = [log_sum(logits) for logits in all_logits]
    return torch.stack([sum((all_logits[s][row] - sums[s] for s, row in place(v)), torch.zeros(())) for v in range(V)])


def naive_loss(head: Head, table: Table, h: Tensor, label: int, label_smoothing: float, z: float) -> Tensor:
    all_logits, total = softmaxes(head, table, h), torch.zeros(())
    for s, row in place(label):
        log_z = log_sum(all_logits[s])
        uniform = torch.stack([log_z - logit for logit in all_logits[s]]).mean()
        total = total + (1 - label_smoothing) * (log_z - all_logits[s][row]) + label_smoothing * uniform + z * log_z**2
    return total


def data(all_tails: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.tensor([3, 4, 11, 0, 13, 7, 6, 12, 2]) if all_tails else torch.tensor([3, 4, 0, 0, 5, 1, 6, 2, 2])
    return torch.randn(N, D), labels, torch.rand(N)


def test_clusters_have_the_sizes_of_parts() -> None:
    assert AdaptiveTable().cuts(32128) == [0, 2500, 8500, 32128]
    assert AdaptiveTable((2500, 6000, 23500, 128), (1, 1, 1, 1)).cuts(32128) == [0, 2500, 8500, 32000, 32128]
    assert AdaptiveTable((2500, 6000, 23500, 128), (1, 1, 1, 1)).cuts(29) == [0, 2, 8, 28, 29]
    assert AdaptiveTable((1, 1000), (1, 1)).cuts(2) == [0, 1, 2]


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=6), st.integers(0, 10**6))
def test_every_cluster_has_at_least_one_id(parts: list[int], more: int) -> None:
    vocab = len(parts) + more
    cuts = AdaptiveTable(tuple(parts), (1,) * len(parts)).cuts(vocab)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, vocab, len(parts) + 1)
    assert all(a < b for a, b in pairwise(cuts))


def test_vectors_by_formula(site: MakeSite) -> None:
    _, table = head_and_table(site())
    assert sum(p.numel() for p in table.parameters()) == 4 * 12 + (3 * 4 + 4 * 12) + (5 * 1 + 1 * 12) + 2 * 12
    ids, h = torch.randint(0, V, (2, 3, 5)), torch.randn(2, 3, D)
    expected = torch.stack([vector(table, int(v)) for v in ids.flatten()]).view(2, 3, 5, D)
    torch.testing.assert_close(table(ids), expected)
    vectors = torch.stack([vector(table, v) for v in range(V)])
    torch.testing.assert_close(table.logits(h), h @ vectors.T)
    r, matrix = table.readout(h)
    torch.testing.assert_close(r @ matrix.T, h @ vectors.T)


def test_gradients_of_vectors_by_formula(site: MakeSite) -> None:
    _, table = head_and_table(site())
    ids, direction = torch.tensor([0, 5, 5, 8, 13, 11]), torch.randn(6, D)
    expected = torch.autograd.grad(
        (torch.stack([vector(table, int(v)) for v in ids]) * direction).sum(), list(table.parameters())
    )
    gradients = torch.autograd.grad((table(ids) * direction).sum(), list(table.parameters()))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wrong", [-1, V])
def test_invalid_ids_raise_an_error(wrong: int, site: MakeSite) -> None:
    head, table = head_and_table(site())
    with pytest.raises((IndexError, RuntimeError)):
        table(torch.tensor([1, wrong]))
    with pytest.raises((IndexError, RuntimeError)):
        head.score(torch.randn(2, D), torch.tensor([1, wrong]), torch.ones(2), table)


def test_narrow_clusters_have_at_least_one_channel(site: MakeSite) -> None:
    table = TABLE.build(V, 2, site())
    assert [tuple(p.shape) for p in table.parameters()] == [(4, 2), (3, 1), (2, 1), (5, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize("scaled", [False, True])
def test_log_probs_by_formula(scaled: bool, site: MakeSite) -> None:
    head, table = head_and_table(site(), replace(HEAD, scaled=scaled))
    h = torch.randn(2, 3, D)
    log_probs = head.log_probs(h, table)
    rows = (h / math.sqrt(D) if scaled else h).view(-1, D)
    expected = torch.stack([naive_log_probs(head, table, row) for row in rows]).view(2, 3, V)
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3))


@pytest.mark.parametrize("all_tails", [False, True])
@pytest.mark.parametrize(("label_smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.3)])
def test_loss_and_gradients_by_formula(label_smoothing: float, z: float, all_tails: bool, site: MakeSite) -> None:
    """With `all_tails`, each tail has labels; otherwise, some tail has none."""
    head, table = head_and_table(site(), replace(HEAD, label_smoothing=label_smoothing, z_loss=z))
    h, labels, weights = data(all_tails)
    h.requires_grad_()
    inputs = [h, *head.parameters(), *table.parameters()]
    losses = [naive_loss(head, table, x, int(y), label_smoothing, z) for x, y in zip(h, labels, strict=True)]
    expected = (weights * torch.stack(losses)).sum()
    scored = head.score(h, labels, weights, table)
    torch.testing.assert_close(scored.objective, expected)
    nll = -head.log_probs(h, table)[torch.arange(N), labels]
    torch.testing.assert_close(scored.nll, (weights * nll).sum())
    assert not scored.nll.requires_grad
    gradients = torch.autograd.grad(2.5 * scored.objective, inputs)
    for a, b in zip(gradients, torch.autograd.grad(2.5 * expected, inputs, materialize_grads=True), strict=True):
        torch.testing.assert_close(a, b)


def test_evaluation_has_no_label_smoothing_and_no_z_loss(site: MakeSite) -> None:
    head, table = head_and_table(site(), AdaptiveSoftmax(3, True, 0.2, 0.3))
    h, labels, weights = data()
    with torch.no_grad():
        scored = head.eval().score(h, labels, weights, table)
    assert torch.equal(scored.objective, scored.nll)
    nll = -head.log_probs(h, table)[torch.arange(N), labels]
    torch.testing.assert_close(scored.nll, (weights * nll).sum())


def test_loss_of_zero_tokens_is_zero(site: MakeSite) -> None:
    head, table = head_and_table(site())
    scored = head.score(torch.randn(0, D, requires_grad=True), torch.zeros(0, dtype=torch.int64), torch.rand(0), table)
    scored.objective.backward()
    assert (scored.objective.item(), scored.nll.item()) == (0.0, 0.0)
    assert all(p.grad is not None for p in (*head.parameters(), *table.parameters()))


def test_half_precision_is_summed_in_float32(site: MakeSite) -> None:
    head, table = head_and_table(site(), replace(HEAD, scaled=True))
    h = torch.randn(N, D)
    exact = head.log_probs(h, table)
    half = head.half().log_probs(h.half(), table.half())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact.float(), rtol=0.02, atol=0.02)


def test_initial_logits_have_one_scale(site: MakeSite) -> None:
    table = AdaptiveTable((300, 300, 300), (1, 3, 12)).build(900, 120, site())
    stds = [table(torch.arange(c * 300, c * 300 + 300)).std().item() * 120**0.5 for c in range(3)]
    assert all(0.9 < std < 1.6 for std in stds)


@pytest.mark.parametrize(
    ("parts", "divisors", "path"),
    [
        ((4,), (1,), "parts"),
        ((4, 0), (1, 1), "parts"),
        ((4, 4), (1, 0), "divisors"),
        ((4, 4, 4), (1, 2), "divisors"),
        ((), (), "parts"),
    ],
)
def test_invalid_tables_are_refused(parts: tuple[int, ...], divisors: tuple[int, ...], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        AdaptiveTable(parts, divisors)
    assert raised.value.path == path


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"tails": 0}, "tails"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"z_loss": -1.0}, "z_loss"),
    ],
)
def test_invalid_heads_are_refused(changes: dict[str, float], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        replace(AdaptiveSoftmax(), **changes)
    assert raised.value.path == path


def test_head_and_table_that_do_not_fit_are_refused() -> None:
    model = tiny.encoder_decoder()
    fitting = replace(model, table=TABLE, head=HEAD)
    build(fitting, device="meta")
    build(replace(fitting, vocab=40, target_vocab=29, sharing=replace(fitting.sharing, source_target=False)), "meta")
    for wrong, path in [
        (replace(model, head=HEAD), "head"),
        (replace(fitting, table=Factorised(3)), "head"),
        (replace(fitting, output_table=Embeddings(), sharing=replace(fitting.sharing, input_output=False)), "head"),
        (replace(fitting, head=replace(HEAD, tails=2)), "head.tails"),
        (replace(fitting, vocab=3), "table.parts"),
        (replace(tiny.encoder_only(), task=replace(tiny.encoder_only().task, head=HEAD)), "task.head"),  # type: ignore[reportArgumentType]
    ]:
        with pytest.raises(SpecError) as raised:
            build(wrong, device="meta")
        assert raised.value.path == path
