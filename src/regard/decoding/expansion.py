"""Expand the beams of a source by one token."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.decoding.constraints import Ids, index
from regard.decoding.rank import Candidate, best, bucket
from regard.decoding.required import Progress, Required, allocate


class Partial(NamedTuple):
    """A live hypothesis."""

    ids: Ids
    log_probs: tuple[float, ...]
    total: float
    progress: Progress | None = None  # towards the required sequences, if there are any


EMPTY = Partial((), (), float("-inf"))  # a beam that is not in use


class Choice(NamedTuple):
    """The candidates of one step of one source."""

    first: list[Candidate]  # the best of all, as many as beams; those with eos end
    onward: list[Candidate | None]  # the best without eos, one for each beam; None where there are too few


def plain(log_probs: Float[Tensor, "B V"], totals: Sequence[Sequence[float]], eos: int) -> list[Choice]:
    """Return the best continuations. Each beam has one with eos, so twice as many as beams suffice."""
    beams = len(totals[0])
    return [split(ranked, beams, eos) for ranked in best(log_probs, totals, 2 * beams)]


def split(ranked: Sequence[Candidate], beams: int, eos: int) -> Choice:
    """Split ranked candidates into the first of all and the first without eos."""
    return Choice([*ranked[:beams]], filled([one for one in ranked if one.token != eos][:beams], beams))


def filled(onward: Sequence[Candidate], beams: int) -> list[Candidate | None]:
    """Pad candidates with None to one for each beam."""
    return [*onward, *(None,) * (beams - len(onward))]


def diverse(
    log_probs: Float[Tensor, "B V"], totals: Sequence[Sequence[float]], eos: int, groups: int, diversity: float
) -> list[Choice]:
    """Expand group after group, with a penalty on the tokens that earlier groups chose (Vijayakumar et al. 2016)."""
    sources, width = len(totals), len(totals[0]) // groups
    choices = [Choice([], []) for _ in totals]
    chosen = log_probs.new_zeros(sources, log_probs.shape[1])
    for at in range(0, groups * width, width):
        own = log_probs.reshape(sources, -1, log_probs.shape[1])[:, at : at + width]
        penalised = (own - diversity * chosen[:, None]).flatten(0, 1)
        ranking = best(penalised, [row[at : at + width] for row in totals], 2 * width)
        pairs = [(slot * groups * width + at + one.beam, one.token) for slot, row in enumerate(ranking) for one in row]
        new: list[tuple[int, int]] = []
        values = iter(log_probs[index(pairs, log_probs)].tolist() if pairs else [])
        for slot, ranked in enumerate(ranking):
            real = []
            for one in ranked:
                beam, value = at + one.beam, next(values)
                real.append(Candidate(beam, one.token, value, totals[slot][beam] + value))
            first, onward = split(real, width, eos)
            choices[slot].first.extend(first)
            choices[slot].onward.extend(onward)
            new += [(slot, one.token) for one in onward if one is not None]
        if new:
            chosen.index_put_(index(new, chosen), chosen.new_ones(()), accumulate=True)
    return choices


def constrained(
    log_probs: Float[Tensor, "k V"], live: Sequence[Partial], goal: Required, room: int, eos: int
) -> Choice:
    """Dynamic beam allocation (Post & Vilar 2018) with `room` tokens left after this step.

    Candidates are the best of all, the best of each beam, and tokens that bring a beam nearer to a required sequence.
    Only a hypothesis with all of them may end; one that has no room for them is dropped while there are others.
    """
    beams, totals = len(live), [one.total for one in live]
    (candidates,) = best(log_probs, [totals], 2 * beams)
    for beam, ranked in enumerate(best(log_probs, [[total] for total in totals], 2)):
        candidates += [one._replace(beam=beam) for one in ranked]
    pairs = [
        (beam, token)
        for beam, one in enumerate(live)
        if one.progress is not None
        for token in goal.useful(one.progress)
    ]
    values = log_probs[index(pairs, log_probs)].tolist() if pairs else []
    for (beam, token), value in zip(pairs, values, strict=True):
        candidates.append(Candidate(beam, token, value, totals[beam] + value))

    def missing(one: Candidate) -> int:
        progress = live[one.beam].progress
        assert progress is not None
        return goal.distance(progress if one.token == eos else goal.step(progress, one.token))

    ranked = sorted(
        {(one.beam, one.token): one for one in candidates if one.total > float("-inf")}.values(),
        key=lambda one: (-bucket(one.total), one.token, one.beam),
    )
    ranked = [one for one in ranked if one.token != eos or not missing(one)]
    ranked = [one for one in ranked if missing(one) <= room] or ranked
    onward = allocate([one for one in ranked if one.token != eos], beams, missing)
    return Choice(allocate(ranked, beams, missing), filled(onward, beams))
