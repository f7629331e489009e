import math

import pytest
import torch

from regard.decoding import rank
from regard.decoding.rank import Candidate, best


def by_definition(log_probs: torch.Tensor, totals: list[list[float]], count: int) -> list[list[Candidate]]:
    """Return the best of all candidates, sorted by round(score / 1e-5), token and beam."""
    beams = len(totals[0])
    ranked = []
    for source, row in enumerate(totals):
        every = [
            Candidate(beam, token, value, row[beam] + value)
            for beam in range(beams)
            for token, value in enumerate(log_probs[source * beams + beam].double().tolist())
            if row[beam] + value > -math.inf
        ]
        ranked.append(
            sorted(every, key=lambda candidate: (-round(candidate.total / 1e-5), candidate.token, candidate.beam))[
                :count
            ]
        )
    return ranked


@pytest.mark.parametrize("vocab", [7, 64, 1024, 1025, 2500, 2549, 4224])
@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("small", [2**12, 2**17])
def test_the_best_candidates_are_those_of_the_definition(
    vocab: int, beams: int, dtype: torch.dtype, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without blocks of tokens."""
    monkeypatch.setattr(rank, "SMALL", small)
    log_probs = (2 * torch.randn(3 * beams, vocab, dtype=dtype)).log_softmax(-1)
    log_probs[:, [0, 5]] = -torch.inf
    totals = (-30 * torch.rand(3, beams, dtype=torch.float64)).tolist()
    totals[1] = [totals[1][0]] + [-math.inf] * (beams - 1)  # only one beam in use
    totals[2] = [-math.inf] * beams  # a source that is done
    for count in (1, beams, 2 * beams):
        assert best(log_probs, totals, count) == by_definition(log_probs, totals, count)
    assert best(log_probs, totals, 2)[2] == []


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("steps", [0.2, 1.0, 3.0])
def test_ties_at_the_cut_are_ranked_in_full(vocab: int, steps: float) -> None:
    """Scores within a few steps of 1e-5, so that for every `count` the last candidate is tied with others."""
    noise = torch.rand(4, vocab) * steps * 1e-5
    log_probs = (-3.0 + noise).double()
    totals = [[-1.0, -1.0 - 1e-5], [-2.0, -2.0 + 1e-6]]
    for count in (1, 2, 4, 10):
        assert best(log_probs, totals, count) == by_definition(log_probs, totals, count)


def test_long_sums_lose_no_precision() -> None:
    """In float32 a sum of -5000 is only exact to 5e-4; the ranking is still exact."""
    log_probs = torch.full((2, 2500), -9.0, dtype=torch.float32)
    log_probs[0, 7], log_probs[1, 9] = -1.0, -1.0
    totals = [[-5000.0, -5000.0 + 1e-4]]
    ((first, second),) = best(log_probs, totals, 2)
    assert (first.beam, first.token, second.beam, second.token) == (1, 9, 0, 7)
    assert first.total == totals[0][1] - 1.0


def test_close_candidates_of_long_sums_are_ranked_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates ten steps apart, which are equal in float32, are ranked without ranking all tokens."""
    monkeypatch.setattr(rank, "all_ranked", None)
    generator = torch.Generator().manual_seed(0)
    log_probs = -1.0 - 1e-4 * torch.stack([torch.randperm(2500, generator=generator) for _ in range(2)]).float()
    totals = [[-5000.0, -5000.0 - 5e-5]]
    for count in (1, 4, 10):
        assert best(log_probs, totals, count) == by_definition(log_probs, totals, count)


@pytest.mark.parametrize("vocab", [1025, 1087, 2500])
def test_the_last_token_of_a_vocabulary_is_ranked_once(vocab: int) -> None:
    """The last block of tokens is not full; the padding of this block must not count."""
    log_probs = torch.randn(5, vocab).log_softmax(-1)
    log_probs[:, -1] = -0.01
    totals = [[-1.0, -1.5, -2.0, -2.5, -3.0]]
    assert best(log_probs, totals, 10) == by_definition(log_probs, totals, 10)


def test_without_ties_not_all_tokens_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ties, `all_ranked` is not called."""
    monkeypatch.setattr(rank, "all_ranked", None)
    log_probs = torch.randn(10, 5000).log_softmax(-1)
    assert len(best(log_probs, [[-1.0] * 5, [-2.0] * 5], 10)[1]) == 10
