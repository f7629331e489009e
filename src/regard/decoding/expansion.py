"""Choose the candidates by which beam search extends its hypotheses in one step."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.decoding.constraints import Ids, index
from regard.decoding.rank import NEVER, Candidate, best, sort_key
from regard.decoding.required import Progress, Required, allocate


class Partial(NamedTuple):
    """A live (unfinished) hypothesis."""

    ids: Ids
    log_probs: tuple[float, ...]
    total: float
    progress: Progress | None = None  # progress towards the required sequences; None: no sequence is required


EMPTY = Partial((), (), NEVER)  # an unused beam


class Choice(NamedTuple):
    """The candidates chosen for one source in one step."""

    first: list[Candidate]  # the k best candidates for k beams, or fewer; those with eos end a hypothesis
    onward: list[Candidate | None]  # the k best candidates except those with eos, padded with None to k entries


def plain(log_probs: Float[Tensor, "B V"], totals: Sequence[Sequence[float]], eos: int) -> list[Choice]:
    """Return the chosen candidates for every source in plain beam search.

    With k beams, only the 2k best candidates are ranked. At most k of them end with eos, so at least k do not.
    """
    beams = len(totals[0])
    return [split(ranked, beams, eos) for ranked in best(log_probs, totals, 2 * beams)]


def split(ranked: Sequence[Candidate], beams: int, eos: int) -> Choice:
    """Return the `Choice` from the ranked candidates of one source."""
    return Choice([*ranked[:beams]], filled([each for each in ranked if each.token != eos][:beams], beams))


def filled(onward: Sequence[Candidate], beams: int) -> list[Candidate | None]:
    """Return the candidates, padded with None to length `beams`."""
    return [*onward, *(None,) * (beams - len(onward))]


def diverse(
    log_probs: Float[Tensor, "B V"], totals: Sequence[Sequence[float]], eos: int, groups: int, diversity: float
) -> list[Choice]:
    """Return the chosen candidates for every source in diverse beam search (Vijayakumar et al. 2016).

    The groups of beams choose their tokens one after another. A token gets a penalty of `diversity` for each beam of an
    earlier group that has chosen the same token.
    """
    sources, width = len(totals), len(totals[0]) // groups
    choices = [Choice([], []) for _ in totals]
    chosen = log_probs.new_zeros(sources, log_probs.shape[1])
    for at in range(0, groups * width, width):
        own = log_probs.reshape(sources, -1, log_probs.shape[1])[:, at : at + width]
        penalised = (own - diversity * chosen[:, None]).flatten(0, 1)
        ranking = best(penalised, [row[at : at + width] for row in totals], 2 * width)
        pairs = [
            (slot * groups * width + at + each.beam, each.token) for slot, row in enumerate(ranking) for each in row
        ]
        new: list[tuple[int, int]] = []
        values = iter(log_probs[index(pairs, log_probs)].tolist() if pairs else [])
        for slot, ranked in enumerate(ranking):
            real = []
            for each in ranked:
                beam, value = at + each.beam, next(values)
                real.append(Candidate(beam, each.token, value, totals[slot][beam] + value))
            first, onward = split(real, width, eos)
            choices[slot].first.extend(first)
            choices[slot].onward.extend(onward)
            new += [(slot, each.token) for each in onward if each is not None]
        if new:
            chosen.index_put_(index(new, chosen), chosen.new_ones(()), accumulate=True)
    return choices


def constrained(
    log_probs: Float[Tensor, "k V"], live: Sequence[Partial], goal: Required, room: int, eos: int
) -> Choice:
    """Choose the candidates for one source with required sequences by dynamic beam allocation (Post & Vilar 2018).

    The candidates are the best of all beams together, the best two of each beam, and all tokens that continue a
    required sequence. A hypothesis may end only if it contains all required sequences. `room` is the number of tokens
    that may follow this step. Candidates that still need more than `room` tokens are dropped. If all need more, all are
    kept.
    """
    beams, totals = len(live), [each.total for each in live]
    (candidates,) = best(log_probs, [totals], 2 * beams)
    for beam, ranked in enumerate(best(log_probs, [[total] for total in totals], 2)):
        candidates += [each._replace(beam=beam) for each in ranked]
    progress_of = [(beam, each.progress) for beam, each in enumerate(live) if each.progress is not None]
    pairs = [(beam, token) for beam, progress in progress_of for token in goal.useful(progress)]
    values = log_probs[index(pairs, log_probs)].tolist() if pairs else []
    for (beam, token), value in zip(pairs, values, strict=True):
        candidates.append(Candidate(beam, token, value, totals[beam] + value))

    def missing(each: Candidate) -> int:
        progress = live[each.beam].progress
        assert progress is not None
        return goal.distance(progress if each.token == eos else goal.step(progress, each.token))

    possible = {(each.beam, each.token): each for each in candidates if each.total > NEVER}
    ranked = [each for each in sorted(possible.values(), key=sort_key) if each.token != eos or not missing(each)]
    ranked = [each for each in ranked if missing(each) <= room] or ranked
    onward = allocate([each for each in ranked if each.token != eos], beams, missing)
    return Choice(allocate(ranked, beams, missing), filled(onward, beams))
