"""The state of a beam search as tensors: live beams, finished outputs and stopping, for many sources at a time.

The results equal those of `regard.decoding.beam.search`. Both searches compare scores rounded to multiples of 1e-5 and
break ties by the same rule. Given equal log-probabilities, they therefore return the same outputs with bitwise equal
scores. If too many finished outputs of a source have the same score, some are dropped. The source is marked `unsure` if
a decision depends on the dropped outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.candidates import Candidates
from regard.decoding.hypothesis import Hypothesis, SpecialTokens
from regard.decoding.rank import NEVER
from regard.decoding.stopping import (
    CTranslate2,
    First,
    HuggingFace,
    HuggingFaceEarly,
    HuggingFaceNever,
    Optimal,
    Scoring,
    Stopping,
)
from regard.errors import DataError

FIELDS = 5  # number of values stored for a finished output
ENDED = 2.0**52  # larger than any order; added to the order of outputs that ended with eos, which rank before cut ones


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """Beam search settings that all sources of a search share."""

    beams: int
    n_best: int
    scoring: Scoring
    stopping: type[Stopping]
    ends: SpecialTokens
    never: tuple[int, ...]  # tokens that must not occur in an output
    has_min_len: bool = False  # whether some source has a minimum length

    @property
    def highest(self) -> int:
        """The highest token id among the special tokens and the excluded tokens."""
        return max(self.ends.bos, self.ends.eos, self.ends.pad, *self.never)


@dataclass(frozen=True, slots=True)
class Request:
    """A source to decode, with the minimum and maximum length of its output."""

    ids: tuple[int, ...]
    min_len: int
    max_len: int


class BeamState:
    """State of a beam search in `slots` slots. A slot holds the live beams and best finished outputs of one source.

    A step consists of dozens of operations on tensors with one number per beam. On a GPU, such a small operation takes
    as long as a larger one. To save operations, constants are computed beforehand, values that are moved together are
    stored together, and results are written in place.
    """

    def __init__(self, config: SearchConfig, slots: int, room: int, device: torch.device) -> None:
        """Allocate the state. `room` is the largest number of tokens in an output."""
        self.config, self.slots, self.room = config, slots, room
        k, kept = config.beams, config.beams + 1

        def filled(*shape: int, value: float | int | bool = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.totals = filled(slots, k, value=NEVER, dtype=torch.float64)  # NEVER in slots that are done
        self.ids = filled(slots * k, 1, value=config.ends.pad)
        self.lengths = filled(slots, k)  # tokens so far, equal for all beams of a source; 0 in slots that are done
        # `final` is the length at which an output is full. `furthest` is length^alpha for the maximum length. This
        # length includes eos only with `Optimal`.
        self.min_len, self.final = filled(slots, 1), filled(slots, 1)
        self.furthest = filled(slots, 1, value=1.0, dtype=torch.float64)
        self.done = filled(slots, 1, value=True, dtype=torch.bool)
        self.unsure, self.topped = (filled(slots, 1, value=False, dtype=torch.bool) for _ in range(2))
        self.finished = filled(slots, kept, FIELDS, value=NEVER, dtype=torch.float64)  # best first
        # The token and the parent of every beam at every step. Slots that are done write to the last row.
        self.place = filled(slots, room + 2, k)  # parent * V + token
        self.value: Tensor | None = None  # log p of the token
        self.row = filled(slots, 1, value=room + 1)  # the row that the next step writes
        self.candidates: Candidates | None = None  # created in the first step, when the vocabulary size is known
        # Row n has length^alpha for the lengths n, n + 1 and n + 2. The host computes the powers, because other
        # libraries may round them differently.
        sizes = torch.tensor(
            [config.scoring.size(n) ** config.scoring.alpha for n in range(room + 5)], dtype=torch.float64
        )
        self.sizes = sizes.unfold(0, 3, 1).contiguous().to(device)
        self.own = torch.arange(k, device=device)
        self.alone = torch.arange(slots * k, device=device).view(slots, k)  # the parents if every beam continues itself
        self.parents = self.alone.flatten().clone()
        self.first = self.alone[:, :1].contiguous()
        self.nothing = filled(value=NEVER, dtype=torch.float64)
        self.zero, self.pad, self.aside = filled(), filled(value=config.ends.pad), filled(value=room + 1)
        # One value per beam, just above the score of an impossible token.
        self.lowest = filled(slots, k, value=torch.finfo(torch.float64).min, dtype=torch.float64)
        self.codes = self.own.double()

    def begin(self, at: Int[Tensor, " n"], requests: Sequence[Request]) -> None:
        """Start the searches for `requests`, in the slots with the indices `at`."""
        device, k, config = at.device, self.config.beams, self.config
        first = torch.full((k,), NEVER, dtype=torch.float64)
        first[0] = 0.0  # only one beam starts; otherwise all beams would be equal
        limits = torch.tensor([[each.min_len, each.max_len] for each in requests], dtype=torch.int64).to(device)
        min_len, max_len = limits[:, :1].contiguous(), limits[:, 1:]
        self.totals.index_copy_(0, at, first.to(device).expand(len(requests), k))
        self.ids.index_fill_(0, (at[:, None] * k + self.own).flatten(), config.ends.bos)
        self.min_len.index_copy_(0, at, min_len)
        self.final.index_copy_(0, at, max_len if config.stopping.eos_at_limit else max_len - 1)
        self.furthest.index_copy_(0, at, self.sizes[max_len[:, 0], 1 if config.stopping is Optimal else 0][:, None])
        for tensor in (self.lengths, self.row):
            tensor.index_fill_(0, at, 0)
        self.finished.index_fill_(0, at, NEVER)
        for tensor in (self.done, self.unsure, self.topped):
            tensor.index_fill_(0, at, False)

    def clear(self) -> None:
        """Mark the searches in all slots as done, even unfinished searches."""
        self.done.fill_(True)
        self.totals.fill_(NEVER)
        self.lengths.fill_(0)
        self.row.fill_(self.room + 1)

    def step(self, log_probs: Float[Tensor, "B V"]) -> None:
        """Extend every beam by one token, in place, as `Source.take` does in the search on the host."""
        config, k, V = self.config, self.config.beams, log_probs.shape[1]
        candidates = self._candidates(log_probs)
        rows = log_probs.view(self.slots, k, V)
        last = candidates.ends(rows)
        if config.has_min_len:
            last.masked_fill_(self.lengths < self.min_len, NEVER)
        place, value, total, rank = candidates.onward(rows, self.totals)

        # An output ends if its extension by eos is among the `beams` best candidates. Each beam has one such extension.
        ending = self.totals + last
        ends = candidates.ranks(ending, candidates.eos_ties)
        better = (torch.cat((rank, ends, self.lowest), 1)[:, None] > ends[:, :, None]).sum(-1)
        ended = better < k
        impossible = total == NEVER
        final, stuck = self.lengths[:, :1] == self.final, impossible[:, :1]
        stops = final | stuck
        here, after, later = self.sizes.index_select(0, self.lengths[:, 0]).split(1, 1)  # (s, 1) each

        # Outputs finish in this step if they end with eos, have no possible continuation, or are full.
        cut = stops if config.stopping.eos_at_limit else stuck & ~final
        finished = [
            self._fields(
                torch.where(ended, ending, torch.where(cut, self.totals, self.nothing)),
                torch.where(ended, after, here),
                last,
                ended,
                torch.add(torch.add(self.codes, self.lengths, alpha=2 * k), ended, alpha=k),
            )
        ]
        if not config.stopping.eos_at_limit:
            within = (ends[:, None] > rank[:, :, None]).sum(-1) + self.own < k
            full = torch.where(final & within, total, self.nothing)
            code = torch.add(self.codes + 2 * k, self.lengths, alpha=2 * k)
            finished.append(self._fields(full, after, last, None, code))
        self._keep(finished)
        if config.stopping is CTranslate2 and not config.scoring.alpha:
            self.topped |= (better == 0).any(1, keepdim=True)

        # The beams of the next step.
        self._record(place, value)
        self.unsure |= total[:, :1].isnan()
        self.done |= stops | self._is_done(total.amax(1, keepdim=True), after, later)
        out, lengths = self.done | impossible, self.lengths + 1
        torch.where(self.done, self.zero, lengths, out=self.lengths)
        torch.where(self.done, self.aside, lengths[:, :1], out=self.row)
        torch.where(out, self.nothing, total, out=self.totals)
        torch.where(out, self.pad, place % V, out=self.ids.view(self.slots, k))
        torch.where(out, self.alone, place // V + self.first, out=self.parents.view(self.slots, k))

    def _candidates(self, log_probs: Float[Tensor, "B V"]) -> Candidates:
        config, V = self.config, log_probs.shape[1]
        if self.candidates is None:
            if config.highest >= V:
                raise DataError(
                    f"rules: id {config.highest}, of a constraint or a special token, is not in the vocabulary of "
                    f"{V} tokens"
                )
            self.candidates = Candidates(config.beams, V, config.never, config.ends.eos, log_probs.device)
            self.value = torch.zeros_like(self.place, dtype=log_probs.dtype)
        return self.candidates

    def _fields(
        self,
        total: Float[Tensor, "s k"],
        size: Float[Tensor, "s #k"],
        last: Float[Tensor, "s k"],
        ended: Bool[Tensor, "s k"] | None,
        code: Float[Tensor, "s k"],
    ) -> Float[Tensor, "s k f"]:
        """Return five values for each finished output: order, score, log-probability, log-probability of eos, and code.

        Outputs are ranked by their order (higher is better), then by token ids, as in `Stopping.ranked`. With k beams,
        the code is (2 * steps + ended) * k + beam. The tokens of the output can be found from the code.
        """
        assert self.candidates is not None
        score = order = total / size
        if self.config.stopping.strict:
            order = (score / self.candidates.unit).round_()
            order = order if ended is None else torch.add(order, ended, alpha=ENDED)
        return torch.stack((order, score, total, last, code), -1)

    def _keep(self, finished: Sequence[Float[Tensor, "s k f"]]) -> None:
        """Store the `beams` + 1 best finished outputs. The additional output is needed to detect a tie at the end."""
        joined = torch.cat((self.finished, *finished), 1)
        order = joined[:, :, 0].sort(dim=1, descending=True).indices[:, : self.finished.shape[1], None]
        torch.gather(joined, 1, order.expand(-1, -1, FIELDS), out=self.finished)

    def _record(self, place: Int[Tensor, "s k"], value: Float[Tensor, "s k"]) -> None:
        assert self.value is not None
        at = self.row[:, :, None].expand(-1, 1, self.config.beams)
        self.place.scatter_(1, at, place[:, None])
        self.value.scatter_(1, at, value[:, None])

    def _is_done(
        self, live: Float[Tensor, "s 1"], after: Float[Tensor, "s 1"], later: Float[Tensor, "s 1"]
    ) -> Bool[Tensor, "s 1"]:
        """Return whether the search for each source is done, by the same rule as `Stopping.done`.

        `live` is the log-probability of the best live beam, `after` is length^alpha (the length penalty) of the live
        beams, and `later` is length^alpha with one token more.
        """
        config, kind = self.config, self.config.stopping
        if kind is First or config.beams == 1:  # greedy search: the likeliest token until eos
            return self._has_finished(config.n_best)
        if kind is HuggingFaceEarly or (kind is CTranslate2 and config.scoring.alpha):
            return self._has_finished(config.beams)
        if kind is CTranslate2:
            return self.topped & self._has_finished(config.n_best)
        if kind is Optimal:
            assert self.candidates is not None
            reach = torch.maximum(live / later, live / self.furthest)
            # While there are live beams, every finished output has ended with eos.
            return (reach / self.candidates.unit).round_() < self.finished[:, config.n_best - 1, :1] - ENDED
        assert issubclass(kind, HuggingFace)
        judged = self.furthest if kind is HuggingFaceNever and config.scoring.alpha > 0.0 else after
        return live / judged <= self.finished[:, config.beams - 1, 1:2]

    def _has_finished(self, n: int) -> Bool[Tensor, "s 1"]:
        return self.finished[:, n - 1, 1:2] > NEVER

    def results(self, at: Sequence[int]) -> list[list[Hypothesis] | None]:
        """Return the n best outputs of each slot in `at`. The searches in these slots must be done.

        The result for a slot is None if it is `unsure`. Then the host must repeat the search.
        """
        assert self.candidates is not None
        assert self.value is not None
        index = torch.tensor(at, dtype=torch.int64, device=self.done.device)
        config, k, V = self.config, self.config.beams, self.candidates.vocab

        def fetched(tensor: Tensor) -> np.ndarray:
            return tensor.index_select(0, index).cpu().numpy()

        finished, unsure = fetched(self.finished), fetched(self.unsure)[:, 0]
        order = finished[:, :, 0]
        # Outputs of equal order rank by their ids. A dropped output may have the same order as the last stored output.
        exists, in_reach = order > NEVER, order >= order[:, config.n_best - 1 : config.n_best]
        unsure |= (in_reach & exists)[:, -1] | np.isnan(order).any(1)
        codes = np.where(exists & in_reach & ~unsure[:, None], finished[:, :, -1], 0).astype(np.int64)
        steps, ended, beam = codes // (2 * k), codes // k % 2, codes % k
        longest = int(steps.max(initial=0))
        place, value = fetched(self.place[:, :longest]), fetched(self.value[:, :longest])
        ids, log_probs = paths(place % V, place // V, value, steps, beam)
        results: list[list[Hypothesis] | None] = []
        for source, doubt in enumerate(unsure):
            ranking = config.stopping(config.scoring, k, config.n_best, 0)
            for i in np.flatnonzero(exists[source] & in_reach[source]):
                n, (_, score, total, last, _) = int(steps[source, i]), finished[source, i].tolist()
                tokens, values = tuple(ids[source, i, :n].tolist()), log_probs[source, i, :n].tolist()
                eos = bool(ended[source, i])
                ranking.add(Hypothesis(tokens, score, total, (*values, last) if eos else tuple(values), eos))
            results.append(None if doubt else ranking.ranked()[: config.n_best])
        return results


def paths(
    token: np.ndarray, parent: np.ndarray, value: np.ndarray, steps: np.ndarray, beam: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids and log-probabilities of the outputs that end after `steps` steps in beam `beam`.

    Each output is traced back through its parent beams. `token`, `parent` and `value` have the shape (sources, steps,
    beams); `steps` and `beam` have the shape (sources, n); the results have the shape (sources, n, steps).
    """
    sources, longest = token.shape[:2]
    ids = np.zeros((*steps.shape, longest), np.int64)
    values = np.zeros((*steps.shape, longest), np.float64)
    source, at = np.arange(sources)[:, None], beam
    for step in range(longest - 1, -1, -1):
        live = step < steps
        here = np.where(live, at, 0)
        ids[:, :, step] = token[source, step, here]
        values[:, :, step] = value[source, step, here]
        at = np.where(live, parent[source, step, here], at)
    return ids, values
