"""Candidates ranked in tensors are those of the exact ranking, in the same order, even with many equal scores."""

import pytest
import torch
from torch import Tensor

from regard.decoding import rank
from regard.decoding.candidates import Candidates
from regard.decoding.rank import NEVER, all_ranked

EOS, PAD = 2, 0


def compare(log_probs: Tensor, totals: Tensor) -> None:
    """Compare with a sort of all candidates."""
    sources, beams, V = log_probs.shape
    candidates = Candidates(beams, V, (PAD,), EOS, torch.device("cpu"))
    allowed = log_probs.clone()
    allowed[:, :, PAD] = NEVER
    last = candidates.ends(log_probs)
    place, value, total, order = candidates.onward(log_probs, totals)
    ends = candidates.ranks(totals + last, candidates.eos_ties)
    assert bool((order[:, :-1] >= order[:, 1:]).all())
    for source in range(sources):
        expected = all_ranked(allowed[source], totals[source].tolist(), beams * V)
        onward = [candidate for candidate in expected if candidate.token != EOS][:beams]
        here = zip(*(x[source].tolist() for x in (place, value, total)), strict=True)
        actual = [(at // V, at % V, own, sum_) for at, own, sum_ in here if sum_ > NEVER]
        assert actual == [tuple(candidate) for candidate in onward]
        # Candidates with eos are ranked in the same order.
        both = torch.cat((order[source], ends[source])).sort(descending=True)
        names = [(int(at) // V, int(at) % V) for at in place[source]] + [(beam, EOS) for beam in range(beams)]
        joint = [names[i] for i, number in zip(both.indices, both.values, strict=True) if number > NEVER]
        assert joint[:beams] == [(candidate.beam, candidate.token) for candidate in expected][:beams]


@pytest.mark.parametrize("width", [3, 4, 64])
@pytest.mark.parametrize(("beams", "V"), [(1, 7), (2, 12), (5, 23), (5, 130), (4, 4)])
@pytest.mark.parametrize("levels", [1, 2, 4, 1000])
def test_the_best_of_many_equal_scores(
    beams: int, V: int, levels: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few levels of score: whole blocks are equal, in one beam and in several."""
    monkeypatch.setattr(rank, "WIDTHS", (width,))
    generator = torch.Generator().manual_seed(levels)
    for dtype in (torch.float32, torch.float64):
        scores = torch.randint(levels, (6, beams, V), generator=generator).to(dtype) / -8
        totals = torch.randint(levels, (6, beams), generator=generator).double() / -8 - 3.0
        totals[0, 1:] = NEVER  # as in the first step
        totals[1] = NEVER  # a finished source
        scores[2, :, 3:] = NEVER  # almost all tokens are banned
        compare(scores, totals)


def test_scores_within_a_step_are_equal() -> None:
    """Scores that only float32 sums would confuse are not equal."""
    scores = torch.full((1, 2, 200), -9.0, dtype=torch.float64)
    scores[0, 0, 150], scores[0, 1, 40], scores[0, 1, 41] = -1.0, -1.0 - 3e-6, -1.0 - 1.2e-5
    compare(scores, torch.tensor([[-300.0, -300.0]], dtype=torch.float64))


def test_banned_eos_has_log_prob_minus_infinity() -> None:
    candidates = Candidates(2, 9, (PAD, EOS), EOS, torch.device("cpu"))
    assert bool((candidates.ends(torch.zeros(3, 2, 9)) == NEVER).all())


@pytest.mark.parametrize("V", [9, 300])
def test_nan_ranks_first(V: int) -> None:
    candidates = Candidates(3, V, (PAD,), EOS, torch.device("cpu"))
    scores = torch.randn(2, 3, V)
    scores[1, 2, V - 1] = torch.nan
    total = candidates.onward(scores, torch.tensor([[0.0, -1.0, NEVER]] * 2, dtype=torch.float64)).total
    assert total[:, 0].isnan().tolist() == [False, True]
