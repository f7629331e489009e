"""Who is best: the order of candidates, the same for every batch size, machine and order of summation.

Two scores within rounding of each other are no difference. Scores are compared in steps of 1e-5, that is by
round(score / 1e-5); where that is equal the lower token id goes first, then the lower beam.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import DataError

TIE = 1e-5
SPARE = 4  # candidates beyond those asked for, so that ties at the cut are seen
SMALL = 4096  # candidates of which the best are found directly


class Candidate(NamedTuple):
    """One more token for one hypothesis."""

    beam: int
    token: int
    log_prob: float  # of the token, as the model says
    total: float  # of the hypothesis with it


def bucket(score: float) -> int:
    """A finite score in steps of 1e-5."""
    return round(score / TIE)


def order(score: float, ids: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Sorts finished hypotheses: the better score first, then the lower ids."""
    return (-bucket(score), ids)


def best(log_probs: Float[Tensor, "B V"], totals: Sequence[Sequence[float]], count: int) -> list[list[Candidate]]:
    """The `count` best continuations of every source, best first; fewer where the rest has probability 0.

    `totals` has the log-probability of every beam of every source, and log_probs one row for each of them.
    """
    sources, beams, V = len(totals), len(totals[0]), log_probs.shape[1]
    asked = min(count + SPARE, beams * V)
    past = np.array(totals)
    # Relative to the best beam of their source, sums keep their precision in float32 however long they have become.
    top = past.max(1, keepdims=True)
    shift = torch.from_numpy(past - np.where(top > -np.inf, top, 0.0)).to(log_probs)
    own, places = highest(log_probs.reshape(sources, beams, V), shift, asked)
    found = torch.stack((own.double(), places.double())).cpu().numpy()  # one transfer; a double holds every place
    beam, token = np.divmod(found[1].astype(np.int64), V)
    total = np.take_along_axis(past, beam, 1) + found[0]
    if np.isnan(total).any():
        raise DataError("models: a log-probability is not a number; the weights are not usable")
    step = np.rint(total / TIE)
    rank = np.lexsort((beam, token, -step))[:, :count]
    # What was not fetched may tie with the last one wanted; one step of margin for the sums in float32.
    last = np.take_along_axis(step, rank[:, -1:], 1)[:, 0]
    tied = (step[:, -1] >= last - 1) & (step[:, -1] > -np.inf) & (asked < beams * V)
    columns = [np.take_along_axis(x, rank, 1).tolist() for x in (beam, token, found[0], total)]
    ranked = [[one for one in map(Candidate, *row) if one.total > -np.inf] for row in zip(*columns, strict=True)]
    for source in tied.nonzero()[0].tolist():
        here = log_probs[source * beams : (source + 1) * beams]
        ranked[source] = all_ranked(here, totals[source], count)
    return ranked


def highest(
    log_probs: Float[Tensor, "s k V"], shift: Float[Tensor, "s k"], count: int
) -> tuple[Float[Tensor, "s n"], Int[Tensor, "s n"]]:
    """The highest of log_probs + shift in every source: log_probs there, and where (beam * V + token).

    The maxima of blocks of tokens come first: the `count` highest lie in the blocks with the `count` highest maxima,
    so the vocabulary is read once and never copied.
    """
    k, V = log_probs.shape[1:]
    if k * V <= SMALL:
        places = (log_probs + shift[:, :, None]).flatten(1).topk(count).indices
        return log_probs.flatten(1).gather(1, places), places
    width = 64
    blocks, whole = -(-V // width), V // width
    maxima = log_probs[:, :, : whole * width].unflatten(2, (whole, width)).amax(-1)
    if whole < blocks:
        maxima = torch.cat((maxima, log_probs[:, :, whole * width :].amax(-1, keepdim=True)), -1)
    block = (maxima + shift[:, :, None]).flatten(1).topk(min(count, k * blocks)).indices
    beam, block = block // blocks, block % blocks
    token = block[:, :, None] * width + torch.arange(width, device=block.device)
    places = (beam * V)[:, :, None] + (token if whole == blocks else token.clamp(max=V - 1))
    own = log_probs.flatten(1).gather(1, places.flatten(1))
    if whole < blocks:  # the last block is not full
        own.masked_fill_((token >= V).flatten(1), -torch.inf)
    chosen = (own + shift.gather(1, beam).repeat_interleave(width, 1)).topk(count).indices
    return own.gather(1, chosen), places.flatten(1).gather(1, chosen)


def all_ranked(log_probs: Float[Tensor, "k V"], totals: Sequence[float], count: int) -> list[Candidate]:
    """The same for one source, by ranking everything."""
    wide = log_probs.double()
    steps = (wide + torch.tensor(totals, dtype=torch.float64, device=wide.device)[:, None]).div_(TIE).round_()
    enough = steps.flatten().topk(min(count, steps.numel())).values[-1]
    at = ((steps >= enough) & (steps > -torch.inf)).nonzero()
    values = wide[at[:, 0], at[:, 1]].tolist()
    found = [
        (-bucket(totals[beam] + value), token, beam, value, totals[beam] + value)
        for (beam, token), value in zip(at.tolist(), values, strict=True)
    ]
    return [Candidate(beam, token, value, total) for _, token, beam, value, total in sorted(found)[:count]]
