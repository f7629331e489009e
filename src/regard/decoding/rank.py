"""Rank candidates in an order that does not depend on batch size, machine or order of summation.

Scores are compared in steps of 1e-5, that is by
round(score / 1e-5); where that is equal the lower token id goes first, then the lower beam.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import DataError

TIE = 1e-5
SPARE = 4  # candidates beyond the requested ones, so that ties at the cut are detected
NEVER = float("-inf")
SMALL = 2**15  # up to this many candidates, topk over all of them takes fewer calls than over blocks
WIDTHS = (64, 96, 100, 128)  # of blocks of tokens: one that divides the vocabulary leaves no odd block


class Candidate(NamedTuple):
    """A beam with one more token."""

    beam: int
    token: int
    log_prob: float  # of the token, the model's own
    total: float  # of the hypothesis with it


def bucket(score: float) -> int:
    """Return a finite score in steps of 1e-5."""
    return round(score / TIE)


def order(score: float, ids: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Sort key of finished hypotheses: the better score first, then the lower ids."""
    return (-bucket(score), ids)


def best(log_probs: Float[Tensor, "B V"], totals: Sequence[Sequence[float]], count: int) -> list[list[Candidate]]:
    """Return the `count` best continuations of every source, best first; fewer where the rest has probability 0.

    `totals` has the log-probability of every beam of every source, and log_probs one row for each of them.
    """
    sources, beams, V = len(totals), len(totals[0]), log_probs.shape[1]
    requested = min(count + SPARE, beams * V)
    # Relative to the best beam of their source, sums keep their precision in float32 at any length.
    tops = [top if top > NEVER else 0.0 for top in map(max, totals)]
    ahead = [[total - top for total in row] for row, top in zip(totals, tops, strict=True)]
    shift = torch.tensor(ahead, dtype=log_probs.dtype, device=log_probs.device)
    own, places = highest(log_probs.reshape(sources, beams, V), shift, requested)
    fetched = torch.stack((own.double(), places.double())).tolist()  # one transfer; a double holds every place
    ranked = []
    for source, (values, at, row) in enumerate(zip(*fetched, totals, strict=True)):
        best_first = []
        for value, place in zip(values, at, strict=True):
            beam, token = divmod(int(place), V)
            best_first.append(Candidate(beam, token, value, row[beam] + value))
        if not apart(best_first, count):
            here = log_probs[source * beams : (source + 1) * beams]
            best_first = settled(best_first, here, row, count)
        ranked.append(best_first[:count])
    return ranked


def apart(best_first: Sequence[Candidate], count: int) -> bool:
    """Return whether the first `count` and the next differ by so much that rounding cannot change their order."""
    if len(best_first) <= count:
        return False
    return all(best_first[i].total - best_first[i + 1].total > 2 * TIE for i in range(count))


def settled(
    candidates: Sequence[Candidate], log_probs: Float[Tensor, "k V"], totals: Sequence[float], count: int
) -> list[Candidate]:
    """Return the candidates of one source in their exact order, without those of probability 0."""
    if any(math.isnan(one.total) for one in candidates):
        raise DataError("models: a log-probability is not a number; the weights are not usable")
    real = [one for one in candidates if one.total > NEVER]
    ranked = sorted(real, key=exactly)
    everything = len(real) < len(candidates) or len(candidates) == log_probs.numel()
    # A candidate that was not fetched may tie with the last requested one; one step of margin for float32 sums.
    if everything or bucket(real[-1].total) < bucket(ranked[count - 1].total) - 1:
        return ranked
    return all_ranked(log_probs, totals, count)


def exactly(one: Candidate) -> tuple[int, int, int]:
    """Sort key of candidates: the score in steps, then the token, then the beam."""
    return (-bucket(one.total), one.token, one.beam)


def highest(
    log_probs: Float[Tensor, "s k V"], shift: Float[Tensor, "s k"], count: int
) -> tuple[Float[Tensor, "s n"], Int[Tensor, "s n"]]:
    """Return the highest of log_probs + shift in every source: log_probs there, and their places (beam * V + token).

    The maxima of blocks of tokens come first: the `count` highest lie in the blocks with the `count` highest maxima,
    so the vocabulary is read once and never copied.
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
    """Return the number of tokens in a block of the vocabulary."""
    return min(V, next((width for width in WIDTHS if V % width == 0), WIDTHS[0]))


def all_ranked(log_probs: Float[Tensor, "k V"], totals: Sequence[float], count: int) -> list[Candidate]:
    """Return the `count` best candidates of one source from all of them, ties included."""
    wide = log_probs.double()
    steps = (wide + torch.tensor(totals, dtype=torch.float64, device=wide.device)[:, None]).div_(TIE).round_()
    enough = steps.flatten().topk(min(count, steps.numel())).values[-1]
    at = ((steps >= enough) & (steps > NEVER)).nonzero()
    values = wide[at[:, 0], at[:, 1]].tolist()
    candidates = [
        Candidate(beam, token, value, totals[beam] + value)
        for (beam, token), value in zip(at.tolist(), values, strict=True)
    ]
    return sorted(candidates, key=exactly)
