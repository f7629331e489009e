"""Shazeer's experts: the gate token by token, all experts weighted by their gates, load by sampling, CV^2 by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.batch import Batch
from regard.errors import SpecError
from regard.models.build import build
from regard.models.cost import cost
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.noisy_experts import NoisyTopKExperts, squared_variation
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.testing import tiny
from regard.tree import swap

MakeSite = Callable[..., Site]
SEG = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]])
E = 5
EVERY_K = pytest.mark.parametrize("k", [1, 2, 4, E])


def context(seg: Tensor | None, T: int, losses: list[Tensor] | None = None) -> Context:
    return Context(View(Mask(q_seg=seg, k_seg=seg), T, T, torch.device("cpu")), losses=losses)


def branch_of(spec: NoisyTopKExperts, site: Site, training: bool = False) -> Any:
    """Return a branch with large random weights, so that no two experts have similar scores."""
    branch = spec.build(site).train(training)
    for parameter in branch.parameters():
        nn.init.normal_(parameter)
    return branch


def noisy_scores(branch: Any, x: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x W_g, standard deviation of the noise, H) for tokens x, with the noise that this seed gives."""
    router, noise_weight = branch.router.detach(), branch.noise.detach()
    torch.manual_seed(seed)
    noise = torch.randn(len(x), E)
    clean, deviation = x @ router.T, (1 + (x @ noise_weight.T).exp()).log() + 0.01
    return clean, deviation, clean + noise * deviation


def naive_gates(scores: list[float], k: int) -> list[float]:
    """Return the gates of all experts for one token: the softmax over the k highest scores, 0 elsewhere."""
    kept = sorted(range(E), key=lambda e: -scores[e])[:k]
    weight = sum(math.exp(scores[e]) for e in kept)
    return [math.exp(scores[e]) / weight if e in kept else 0.0 for e in range(E)]


def every_expert(branch: Any, x: Tensor, gates: Tensor) -> Tensor:
    """Run all experts on all tokens and weight their outputs by the gates."""
    return sum(gates[:, e, None] * (torch.relu(x @ branch.up[e].T) @ branch.down[e].T) for e in range(E))  # type: ignore[reportReturnType]


@EVERY_K
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("seg", [None, SEG], ids=["full", "padded"])
def test_output_equals_all_experts_weighted_by_naive_gates(
    k: int, training: bool, seg: Tensor | None, site: MakeSite
) -> None:
    branch, x = branch_of(NoisyTopKExperts(E, k, 6), site(), training), torch.randn(3, 7, 12)
    clean, _, noisy = noisy_scores(branch, x.flatten(0, 1), seed=3)
    gates = torch.tensor([naive_gates(scores, k) for scores in (noisy if training else clean).tolist()])
    expected = every_expert(branch, x.flatten(0, 1), gates).view_as(x)
    if seg is not None:
        expected = expected.masked_fill((seg == 0)[:, :, None], 0.0)
    torch.manual_seed(3)
    torch.testing.assert_close(branch(x, context(seg, 7)), expected, rtol=0, atol=1e-12)


@EVERY_K
def test_probability_of_an_expert_equals_its_frequency_if_its_noise_is_drawn_again(k: int, site: MakeSite) -> None:
    """The noise of one expert is drawn 100,000 times; that of the others stays the same."""
    branch, x = branch_of(NoisyTopKExperts(E, k, 6), site(), training=True), 0.3 * torch.randn(2, 12)
    clean, deviation, noisy = noisy_scores(branch, x, seed=3)
    torch.manual_seed(3)
    load = branch.choose(x).load.detach()
    draws = torch.randn(100_000, generator=torch.Generator().manual_seed(4))
    for n in range(2):
        for e in range(E):
            scores = noisy[n].expand(len(draws), E).clone()
            scores[:, e] = clean[n, e] + draws * deviation[n, e]
            above = (scores > scores[:, e, None]).sum(1)
            assert float(load[n, e]) == pytest.approx(float((above < k).double().mean()), abs=0.01)


@EVERY_K
def test_loss_by_hand(k: int, site: MakeSite) -> None:
    """0.05 (CV^2(importance) + CV^2(load)) over the real tokens of a batch; CV is standard deviation / mean."""
    branch, x = branch_of(NoisyTopKExperts(E, k, 6, balance=0.05), site(), training=True), torch.randn(3, 7, 12)
    tokens = x.flatten(0, 1)
    clean, deviation, noisy = noisy_scores(branch, tokens, seed=3)
    importance, load = [0.0] * E, [0.0] * E
    for n in (SEG.flatten() != 0).nonzero().flatten().tolist():
        gates = naive_gates(noisy[n].tolist(), k)
        for e in range(E):
            others = sorted((float(noisy[n, i]) for i in range(E) if i != e), reverse=True)
            margin = math.inf if k == E else (float(clean[n, e]) - others[k - 1]) / float(deviation[n, e])
            importance[e] += gates[e]
            load[e] += 0.5 * (1 + math.erf(margin / math.sqrt(2)))

    def variation(values: list[float]) -> float:
        mean = sum(values) / E
        return sum((value - mean) ** 2 for value in values) / E / mean**2

    losses: list[Tensor] = []
    torch.manual_seed(3)
    branch(x, context(SEG, 7, losses))
    assert len(losses) == 1
    assert losses[0].item() == pytest.approx(0.05 * (variation(importance) + variation(load)), rel=1e-9)
    if k == E:
        assert variation(load) == pytest.approx(0.0, abs=1e-12)


def test_squared_variation_by_hand() -> None:
    """The mean of 1, 2, 3 and 6 is 3, and their variance (4 + 1 + 0 + 9) / 4."""
    assert squared_variation(torch.tensor([1.0, 2.0, 3.0, 6.0])).item() == pytest.approx(3.5 / 9)
    assert squared_variation(torch.zeros(4)).item() == 0.0


def test_evaluation_adds_neither_noise_nor_loss(site: MakeSite) -> None:
    branch, x, losses = branch_of(NoisyTopKExperts(E, 2, 6), site()), torch.randn(3, 7, 12), []
    assert torch.equal(branch(x, context(SEG, 7, losses)), branch(x, context(SEG, 7, losses)))
    assert losses == []


def test_gate_starts_at_zero_with_equal_gates(site: MakeSite) -> None:
    branch: Any = NoisyTopKExperts(E, 3, 6).build(site()).eval()
    assert bool((branch.router == 0).all())
    assert bool((branch.noise == 0).all())
    expert, gate, _ = branch.choose(torch.randn(4, 12))
    assert torch.equal(gate, torch.full((4, 3), 1 / 3))
    assert expert.tolist() == [[0, 1, 2]] * 4  # of equal scores, the one with the lower index
    branch.train()
    used = branch.choose(torch.randn(5000, 12)).expert.flatten().bincount(minlength=E) / 15_000
    torch.testing.assert_close(used, torch.full((E,), 1 / E), rtol=0, atol=0.02)


def test_one_of_one_expert_is_a_feedforward(site: MakeSite) -> None:
    branch, x, losses = branch_of(NoisyTopKExperts(1, 1, 6), site(), training=True), torch.randn(2, 4, 12), []
    feedforward: Any = FeedForward(6, bias=False).build(site())
    feedforward.up.weight.data, feedforward.down.weight.data = branch.up.data[0], branch.down.data[0]
    torch.testing.assert_close(branch(x, context(None, 4, losses)), feedforward(x, context(None, 4)))
    assert losses[0].item() == 0.0


@EVERY_K
def test_gradients(k: int, site: MakeSite) -> None:
    """Of the output and of the loss, through gates, noise, thresholds and experts."""
    branch = branch_of(NoisyTopKExperts(E, k, 2), site(d_model=2), training=True)
    x, seg = torch.randn(1, 4, 2, requires_grad=True), torch.tensor([[1, 1, 1, 0]])
    names = [name for name, _ in branch.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        losses: list[Tensor] = []
        y = torch.func.functional_call(branch, dict(zip(names, weights, strict=True)), (x, context(seg, 4, losses)))
        return y, losses[0]

    weights = [p.detach().clone().requires_grad_() for p in branch.parameters()]
    assert torch.autograd.gradcheck(run, (x, *weights), eps=1e-7, atol=1e-4)


def test_padding_counts_neither_in_importance_nor_in_load(site: MakeSite) -> None:
    branch, x = branch_of(NoisyTopKExperts(E, 2, 6), site(), training=True), torch.randn(1, 9, 12)
    seg = torch.tensor([[1] * 5 + [0] * 4])
    results = []
    for padding in (1.0, 100.0):
        losses: list[Tensor] = []
        torch.manual_seed(0)
        y = branch(torch.cat((x[:, :5], padding * x[:, 5:]), 1), context(seg, 9, losses))
        results.append((y, losses[0]))
    assert bool((results[0][0][:, 5:] == 0).all())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_all_tokens_may_choose_one_expert(site: MakeSite) -> None:
    """No capacity limit: no token is dropped in training."""
    branch, x = branch_of(NoisyTopKExperts(E, 1, 6), site(), training=True), torch.randn(3, 7, 12).abs()
    branch.router.data.fill_(-50.0)
    branch.router.data[3] = 50.0
    gates = torch.zeros(21, E)
    gates[:, 3] = 1.0
    expected = every_expert(branch, x.flatten(0, 1), gates).view_as(x)
    torch.testing.assert_close(branch(x, context(None, 7)), expected, rtol=0, atol=1e-12)


def test_gate_is_computed_in_float32(site: MakeSite) -> None:
    torch.set_default_dtype(torch.float32)
    branch, x = branch_of(NoisyTopKExperts(E, 2, 6), site(), training=True), torch.randn(8, 12)
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(branch.choose(x))
    assert results[1].gate.dtype is torch.float32
    assert all(map(torch.equal, *results))


def model_of(spec: NoisyTopKExperts) -> Any:
    return build(swap(tiny.decoder_only(), FeedForward, lambda _: spec), seed=1)


def test_loss_reaches_the_training_loss_and_not_validation() -> None:
    rows = tiny.examples(tiny.decoder_only(), 3)
    batch: Batch = tiny.collate(tiny.decoder_only(), rows)
    aux = {}
    for balance in (0.01, 0.02):
        model = model_of(NoisyTopKExperts(E, 2, 6, balance=balance)).train()
        torch.manual_seed(7)
        aux[balance] = model.loss(batch).aux.item()
        assert model.eval().loss(batch).aux.item() == 0.0
    assert aux[0.01] > 0
    assert aux[0.02] == pytest.approx(2 * aux[0.01])


def test_untrained_model_decodes_step_by_step_as_in_one_pass() -> None:
    """All scores of an untrained gate are equal, so that a tie decides which experts are used."""
    model, ids = model_of(NoisyTopKExperts(40, 2, 6)).eval(), torch.randint(3, tiny.VOCAB, (2, 9))
    whole = model.log_probs(Batch(ids))
    decoding = model.start(Batch(ids), 9)
    for t in range(9):
        step = model.advance(ids[:, t : t + 1], decoding)
        torch.testing.assert_close(step, whole[:, t], rtol=0, atol=1e-12)
    assert [state[1] for state in decoding.states] == [None, None]


def test_flops_count_the_experts_that_a_token_uses() -> None:
    D, F, length = 16, 24, 7
    spec = swap(tiny.decoder_only(), FeedForward, lambda _: NoisyTopKExperts(8, 3, F))
    parts = {part.part: part.flops_per_token for part in cost(spec, length).parts}
    assert parts["decoder.noisy_top_k_experts"] == 2 * (2 * D * 8 + 3 * 4 * D * F)


def test_default_hidden_width_costs_as_much_as_one_feedforward(site: MakeSite) -> None:
    assert [NoisyTopKExperts(5, k).build(site()).up.shape for k in (1, 2, 4)] == [(5, n, 12) for n in (48, 24, 12)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoisyTopKExperts(0), "experts: must be at least 1, not 0"),
        (lambda: NoisyTopKExperts(k=0), "k: must be at least 1, not 0"),
        (lambda: NoisyTopKExperts(4, 5), "k: 5 exceeds the number of experts; choose at most 4"),
        (lambda: NoisyTopKExperts(d_hidden=0), "d_hidden: must be at least 1, not 0"),
        (lambda: replace(NoisyTopKExperts(), balance=-1.0), "balance: must be at least 0, not -1.0"),
    ],
)
def test_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        make()
