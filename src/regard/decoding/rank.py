"""Rank candidates in an order that does not depend on batch size, machine or order of summation.

Scores are compared in steps of 1e-5, that is, by round(score / 1e-5). Candidates with equal rounded scores are ordered
by token id and then by beam, the lower number first.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import DataError

TIE = 1e-5
SPARE = 4  # number of candidates fetched beyond the requested ones, to detect ties with the last requested one
NEVER = float("-inf")
SMALL = 2**15  # up to this number of candidates, topk over all of them takes fewer calls than topk over blocks
WIDTHS = (64, 96, 100, 128)  # block widths; with a divisor of the vocabulary size, no shorter last block is needed


class Candidate(NamedTuple):
    """A candidate in a step of beam search: a beam extended by one token."""

    beam: int
    token: int
    log_prob: float  # log p of the token under the model
    total: float  # log p of the hypothesis including the token


def bucket(score: float) -> int:
    """Return a finite score in units of 1e-5, rounded to an integer."""
    return round(score / TIE)


def order(score: float, ids: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the sort key of a finished hypothesis: a higher score comes first, then lower ids."""
    return (-bucket(score), ids)


def best(log_probs: Float[Tensor, "B V"], totals: Sequence[Sequence[float]], count: int) -> list[list[Candidate]]:
    """Return the `count` best candidates for every source, best first.

    Candidates of probability 0 are left out. `totals` has the log-probability of every beam, grouped by source, and
    `log_probs` has one row for each beam.
    """
    sources, beams, V = len(totals), len(totals[0]), log_probs.shape[1]
    requested = min(count + SPARE, beams * V)
    # Sums relative to the best beam of the same source keep their precision in float32 at any length.
    tops = [top if top > NEVER else 0.0 for top in map(max, totals)]
    ahead = [[total - top for total in row] for row, top in zip(totals, tops, strict=True)]
    shift = torch.tensor(ahead, dtype=log_probs.dtype, device=log_probs.device)
    own, places = highest(log_probs.reshape(sources, beams, V), shift, requested)
    fetched = torch.stack((own.double(), places.double())).tolist()  # one transfer; every index is exact in float64
    ranked = []
    for source, (values, at, row) in enumerate(zip(*fetched, totals, strict=True)):
        pairs = [(*divmod(int(place), V), value) for value, place in zip(values, at, strict=True)]
        best_first = [Candidate(beam, token, value, row[beam] + value) for beam, token, value in pairs]
        if not apart(best_first, count):
            here = log_probs[source * beams : (source + 1) * beams]
            best_first = ranked_exactly(best_first, here, row, count)
        ranked.append(best_first[:count])
    return ranked


def apart(best_first: Sequence[Candidate], count: int) -> bool:
    """Return whether the first `count` + 1 candidates differ so much in score that rounding cannot change their order.

    The result is False if there are at most `count` candidates.
    """
    if len(best_first) <= count:
        return False
    return all(best_first[i].total - best_first[i + 1].total > 2 * TIE for i in range(count))


def ranked_exactly(
    candidates: Sequence[Candidate], log_probs: Float[Tensor, "k V"], totals: Sequence[float], count: int
) -> list[Candidate]:
    """Sort the candidates for one source by `sort_key`, and leave out candidates of probability 0.

    If a token that is not in `candidates` could tie with one of the first `count` candidates, all tokens are ranked.
    """
    if any(math.isnan(each.total) for each in candidates):
        raise DataError("models: a log-probability is NaN; use weights without NaN or infinity")
    real = [each for each in candidates if each.total > NEVER]
    ranked = sorted(real, key=sort_key)
    everything = len(real) < len(candidates) or len(candidates) == log_probs.numel()
    # A candidate that was not fetched may tie with the last requested one. The margin for float32 sums is one step.
    if everything or bucket(real[-1].total) < bucket(ranked[count - 1].total) - 1:
        return ranked
    return all_ranked(log_probs, totals, count)


def sort_key(candidate: Candidate) -> tuple[int, int, int]:
    """Return the sort key of a candidate: a higher score comes first, then a lower token id, then a lower beam."""
    return (-bucket(candidate.total), candidate.token, candidate.beam)


def highest(
    log_probs: Float[Tensor, "s k V"], shift: Float[Tensor, "s k"], count: int
) -> tuple[Float[Tensor, "s n"], Int[Tensor, "s n"]]:
    """Return log-probabilities and indices of the `count` candidates per source with the highest log_probs + shift.

    An index is beam * V + token. The maxima of blocks of tokens are computed first. The `count` highest values are in
    the blocks with the `count` highest maxima, so `log_probs` is read once and never copied.
    """
    k, V = log_probs.shape[1:]
    flat = log_probs.flatten(1)
    if flat.numel() <= SMALL:
        places = (log_probs + shift[:, :, None]).flatten(1).topk(count).indices
        return flat.gather(1, places), places
    width = block_width(V)
    whole, rest = divmod(V, width)
    maxima = log_probs[:, :, : V - rest].unflatten(2, (whole, width)).amax(-1)
    if rest:
        maxima = torch.cat((maxima, log_probs[:, :, V - rest :].amax(-1, keepdim=True)), -1)
    blocks = maxima.shape[2]
    block = (maxima + shift[:, :, None]).flatten(1).topk(min(count, k * blocks)).indices
    beam, inside = block // blocks, torch.arange(width, device=block.device)
    places = (block * width - beam * (blocks * width - V))[:, :, None] + inside  # beam * V + first token + inside
    own = flat.gather(1, places.clamp(max=k * V - 1).flatten(1) if rest else places.flatten(1)).view(places.shape)
    if rest:  # the last block of a beam runs into the next beam
        own.masked_fill_((block % blocks == whole)[:, :, None] & (inside >= rest), -torch.inf)
    chosen = (own + shift.gather(1, beam)[:, :, None]).flatten(1).topk(count).indices
    return own.flatten(1).gather(1, chosen), places.flatten(1).gather(1, chosen)


def block_width(V: int) -> int:
    """Return the number of tokens per block when `highest` divides a vocabulary of V tokens into blocks."""
    return min(V, next((width for width in WIDTHS if V % width == 0), WIDTHS[0]))


def all_ranked(log_probs: Float[Tensor, "k V"], totals: Sequence[float], count: int) -> list[Candidate]:
    """Rank all tokens of all beams of a source. Return the `count` best, and all that tie with the last of these."""
    wide = log_probs.double()
    steps = (wide + torch.tensor(totals, dtype=torch.float64, device=wide.device)[:, None]).div_(TIE).round_()
    enough = steps.flatten().topk(min(count, steps.numel())).values[-1]
    at = ((steps >= enough) & (steps > NEVER)).nonzero()
    values = wide[at[:, 0], at[:, 1]].tolist()
    pairs = zip(at.tolist(), values, strict=True)
    return sorted((Candidate(b, token, value, totals[b] + value) for (b, token), value in pairs), key=sort_key)
