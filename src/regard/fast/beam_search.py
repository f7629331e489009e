"""Beam search that stays on the device: what `beam.search` finds, with no word to the host between two steps.

A search that asks the host at every step leaves a GPU waiting for most of the time. Here beams, scores, stopping and
what was found are tensors; a step of model and search has fixed shapes and is captured as one CUDA graph; and the host
only looks now and then which sources are done, to give their place to others that wait (continuous batching).

What is found is the same as on the host, to the last bit of the scores for the same log-probabilities: candidates are
compared in the same steps of 1e-5 with the same rule for ties. Where a decision hangs on what is not known any more
(there were more finished texts of one score than are kept), the source is `unsure` and left to the search on the host.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.batch import Batch, pad
from regard.decoding.candidates import Candidates
from regard.decoding.ensemble import Decodings, Ensemble
from regard.decoding.hypothesis import Hypothesis, SpecialTokens
from regard.decoding.job import Job, row_lengths
from regard.decoding.rank import NEVER
from regard.decoding.stopping import (
    STOPPING,
    CTranslate2,
    First,
    HuggingFace,
    HuggingFaceEarly,
    HuggingFaceNever,
    Optimal,
    Scoring,
    Stopping,
)
from regard.errors import DataError, SpecError
from regard.fast import graphs
from regard.fast.refill import refill, refillable
from regard.nn import attention

if TYPE_CHECKING:
    from regard.decoding.beam import Beam

POLL = 4  # steps between two looks at who is done
SHARE = 8  # one in so many places must be free before sources that wait are let in
WINDOW = 32  # the past is looked at in multiples of this: a graph for each, and little that is looked at in vain
KEPT = 4  # machines of a model that stay for the next batch of their shape
WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # of sources: those of like width share a machine
HOST = "the beams are searched by the host, step by step: "
FIELDS = 5  # of a text that is over
ENDED = 2.0**52  # more than any score in steps: what came to its end is before what did not


_log = logging.getLogger("regard.decoding")
_told: set[str] = set()


def tell(sentence: str) -> None:
    """Say once, to whoever listens to the log, why a search is slower than it could be."""
    if sentence not in _told:
        _told.add(sentence)
        _log.info(sentence)


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """What holds for every source of a search."""

    beams: int
    n_best: int
    scoring: Scoring
    stopping: type[Stopping]
    ends: SpecialTokens
    never: tuple[int, ...]  # what no row ever says
    patient: bool = False  # whether a source must not end at once

    @property
    def highest(self) -> int:
        """The highest id that it names."""
        return max(self.ends.bos, self.ends.eos, self.ends.pad, *self.never)


@dataclass(frozen=True, slots=True)
class Request:
    """One source that waits for its translation."""

    ids: tuple[int, ...]
    least: int
    most: int


def refusal(job: Job, spec: "Beam") -> str | None:
    """Why a job cannot be searched here; None if it can."""
    if spec.groups > 1:
        return "groups of beams are searched in turn"
    if spec.coverage:
        return "coverage is made from attention, step by step"
    if job.batch.source is None or any(model.source_first for model in job.models.models):
        return "prompts are read on the host"
    if not all(rules.vectorized for rules in job.rules):
        return "a constraint depends on the output so far"
    if len({rules.banned for rules in job.rules}) > 1:
        return "every row has bans of its own"
    return None


class BeamState:
    """The state of a search in `slots` places: `beams` texts that go on in each, and the best that are over.

    A step is some dozen calls on tensors of one number for each beam, and each call costs a GPU as much as if they
    were large; so what can be known before is, what moves together lies together, and results go where they are kept.
    """

    def __init__(self, book: SearchConfig, slots: int, room: int, device: torch.device) -> None:
        """`room` is how many tokens a text may have, at most."""
        self.book, self.slots, self.room = book, slots, room
        k, kept = book.beams, book.beams + 1

        def filled(*shape: int, value: float | int | bool = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.totals = filled(slots, k, value=NEVER, dtype=torch.float64)  # NEVER in places that are over
        self.ids = filled(slots * k, 1, value=book.ends.pad)
        self.said = filled(slots, k)  # the same for all beams; 0 in places that are over
        # When a text has all the tokens it may have; and length^alpha of the longest, or of the longest but eos.
        self.least, self.final = filled(slots, 1), filled(slots, 1)
        self.furthest = filled(slots, 1, value=1.0, dtype=torch.float64)
        self.over = filled(slots, 1, value=True, dtype=torch.bool)
        self.unsure, self.topped = (filled(slots, 1, value=False, dtype=torch.bool) for _ in range(2))
        self.kept = filled(slots, kept, FIELDS, value=NEVER, dtype=torch.float64)  # what is over, best first
        # What every beam said at every step and whom it continued; the last row is for those who are over.
        self.place = filled(slots, room + 2, k)  # parent * V + token
        self.value: Tensor | None = None  # log p of the token
        self.row = filled(slots, 1, value=room + 1)  # into which the next step is written
        self.candidates: Candidates | None = None  # known with the vocabulary, in the first step
        # length^alpha as the host computes it (another library may round a power differently), now and one and two on.
        sizes = torch.tensor([book.scoring.size(n) ** book.scoring.alpha for n in range(room + 5)], dtype=torch.float64)
        self.sizes = sizes.unfold(0, 3, 1).contiguous().to(device)
        self.own = torch.arange(k, device=device)
        self.alone = torch.arange(slots * k, device=device).view(slots, k)  # every beam continues itself
        self.parents = self.alone.flatten().clone()
        self.first = self.alone[:, :1].contiguous()
        self.nothing = filled(value=NEVER, dtype=torch.float64)
        self.zero, self.pad, self.aside = filled(), filled(value=book.ends.pad), filled(value=room + 1)
        # As many as there are beams, better than what cannot be said at all.
        self.lowest = filled(slots, k, value=torch.finfo(torch.float64).min, dtype=torch.float64)
        self.codes = self.own.double()

    def begin(self, at: Int[Tensor, " n"], asked: Sequence[Request]) -> None:
        """These places start to search for these sources."""
        device, k, book = at.device, self.book.beams, self.book
        first = torch.full((k,), NEVER, dtype=torch.float64)
        first[0] = 0.0  # only one beam has the empty text, or all would be alike
        numbers = torch.tensor([[one.least, one.most] for one in asked], dtype=torch.int64).to(device)
        least, most = numbers[:, :1].contiguous(), numbers[:, 1:]
        self.totals.index_copy_(0, at, first.to(device).expand(len(asked), k))
        self.ids.index_fill_(0, (at[:, None] * k + self.own).flatten(), book.ends.bos)
        self.least.index_copy_(0, at, least)
        self.final.index_copy_(0, at, most if book.stopping.eos_at_limit else most - 1)
        self.furthest.index_copy_(0, at, self.sizes[most[:, 0], 1 if book.stopping is Optimal else 0][:, None])
        for tensor in (self.said, self.row):
            tensor.index_fill_(0, at, 0)
        self.kept.index_fill_(0, at, NEVER)
        for tensor in (self.over, self.unsure, self.topped):
            tensor.index_fill_(0, at, False)

    def clear(self) -> None:
        """All places are over, whatever they were at."""
        self.over.fill_(True)
        self.totals.fill_(NEVER)
        self.said.fill_(0)
        self.row.fill_(self.room + 1)

    def step(self, log_probs: Float[Tensor, "B V"]) -> None:
        """What every source takes of log p of the next token: `Source.take` for all of them at once, in place."""
        book, k, V = self.book, self.book.beams, log_probs.shape[1]
        made = self._candidates(log_probs)
        rows = log_probs.view(self.slots, k, V)
        last = made.ends(rows)
        if book.patient:
            last.masked_fill_(self.said < self.least, NEVER)
        place, value, total, rank = made.onward(rows, self.totals)

        # A text ends if its end is among the `beams` best of all. Every beam has one end, so ends are known by beam.
        ending = self.totals + last
        ends = made.ranks(ending, made.eos_ties)
        better = (torch.cat((rank, ends, self.lowest), 1)[:, None] > ends[:, :, None]).sum(-1)
        ended = better < k
        gone = total == NEVER
        final, nowhere = self.said[:, :1] == self.final, gone[:, :1]
        stops = final | nowhere
        here, after, later = self.sizes.index_select(0, self.said[:, 0]).split(1, 1)  # (s, 1) each

        # What is over now: texts that end; those that go on, where nothing can; those that are full.
        cut = stops if book.stopping.eos_at_limit else nowhere & ~final
        over = [
            self._fields(
                torch.where(ended, ending, torch.where(cut, self.totals, self.nothing)),
                torch.where(ended, after, here),
                last,
                ended,
                torch.add(torch.add(self.codes, self.said, alpha=2 * k), ended, alpha=k),
            )
        ]
        if not book.stopping.eos_at_limit:
            within = (ends[:, None] > rank[:, :, None]).sum(-1) + self.own < k
            full = torch.where(final & within, total, self.nothing)
            over.append(self._fields(full, after, last, None, torch.add(self.codes + 2 * k, self.said, alpha=2 * k)))
        self._keep(over)
        if book.stopping is CTranslate2 and not book.scoring.alpha:
            self.topped |= (better == 0).any(1, keepdim=True)

        # What goes on.
        self._record(place, value)
        self.unsure |= total[:, :1].isnan()
        self.over |= stops | self._done(total.amax(1, keepdim=True), after, later)
        out, said = self.over | gone, self.said + 1
        torch.where(self.over, self.zero, said, out=self.said)
        torch.where(self.over, self.aside, said[:, :1], out=self.row)
        torch.where(out, self.nothing, total, out=self.totals)
        torch.where(out, self.pad, place % V, out=self.ids.view(self.slots, k))
        torch.where(out, self.alone, place // V + self.first, out=self.parents.view(self.slots, k))

    def _candidates(self, log_probs: Float[Tensor, "B V"]) -> Candidates:
        book, V = self.book, log_probs.shape[1]
        if self.candidates is None:
            if book.highest >= V:
                raise DataError(
                    f"rules: id {book.highest}, of a rule or of the ends, is not in the vocabulary of {V} tokens"
                )
            self.candidates = Candidates(book.beams, V, book.never, book.ends.eos, log_probs.device)
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
        """Texts as they are kept: order, score, log-probability, that of their end, and where to find them.

        The order is that of `Stopping.ranked` up to the ids, higher is better; the code is (2 steps + ended) k + beam.
        """
        assert self.candidates is not None
        score = order = total / size
        if self.book.stopping.strict:
            order = (score / self.candidates.unit).round_()
            order = order if ended is None else torch.add(order, ended, alpha=ENDED)
        return torch.stack((order, score, total, last, code), -1)

    def _keep(self, over: Sequence[Float[Tensor, "s k f"]]) -> None:
        """Keep the best of what is over. One more than beams: the next one tells whether the last is tied."""
        joined = torch.cat((self.kept, *over), 1)
        order = joined[:, :, 0].sort(dim=1, descending=True).indices[:, : self.kept.shape[1], None]
        torch.gather(joined, 1, order.expand(-1, -1, FIELDS), out=self.kept)

    def _record(self, place: Int[Tensor, "s k"], value: Float[Tensor, "s k"]) -> None:
        assert self.value is not None
        at = self.row[:, :, None].expand(-1, 1, self.book.beams)
        self.place.scatter_(1, at, place[:, None])
        self.value.scatter_(1, at, value[:, None])

    def _done(
        self, live: Float[Tensor, "s 1"], after: Float[Tensor, "s 1"], later: Float[Tensor, "s 1"]
    ) -> Bool[Tensor, "s 1"]:
        """`Stopping.done` of every source; sizes are those of what goes on, and of that with one token more."""
        book, kind = self.book, self.book.stopping
        if kind is First or book.beams == 1:  # greedy search: the likeliest token until eos
            return self._there(book.n_best)
        if kind is HuggingFaceEarly or (kind is CTranslate2 and book.scoring.alpha):
            return self._there(book.beams)
        if kind is CTranslate2:
            return self.topped & self._there(book.n_best)
        if kind is Optimal:
            assert self.candidates is not None
            reach = torch.maximum(live / later, live / self.furthest)
            # All that is over has ended while something goes on.
            return (reach / self.candidates.unit).round_() < self.kept[:, book.n_best - 1, :1] - ENDED
        assert issubclass(kind, HuggingFace)
        judged = self.furthest if kind is HuggingFaceNever and book.scoring.alpha > 0.0 else after
        return live / judged <= self.kept[:, book.beams - 1, 1:2]

    def _there(self, n: int) -> Bool[Tensor, "s 1"]:
        """Whether n texts are over."""
        return self.kept[:, n - 1, 1:2] > NEVER

    def found(self, at: Sequence[int]) -> list[list[Hypothesis] | None]:
        """What was found in these places, which are over; None where the host has to look."""
        assert self.candidates is not None
        assert self.value is not None
        index = torch.tensor(at, dtype=torch.int64, device=self.over.device)
        book, k, V = self.book, self.book.beams, self.candidates.vocab

        def fetched(tensor: Tensor) -> np.ndarray:
            return tensor.index_select(0, index).cpu().numpy()

        kept, unsure = fetched(self.kept), fetched(self.unsure)[:, 0]
        order = kept[:, :, 0]
        # Texts of one order rank by their ids. Those that were not kept may be of the order of the last.
        there, tied = order > NEVER, order >= order[:, book.n_best - 1 : book.n_best]
        unsure |= (tied & there)[:, -1] | np.isnan(order).any(1)
        wanted = np.where(there & tied & ~unsure[:, None], kept[:, :, -1], 0).astype(np.int64)
        steps, ended, beam = wanted // (2 * k), wanted // k % 2, wanted % k
        most = int(steps.max(initial=0))
        place, value = fetched(self.place[:, :most]), fetched(self.value[:, :most])
        ids, log_probs = paths(place % V, place // V, value, steps, beam)
        results: list[list[Hypothesis] | None] = []
        for source, doubt in enumerate(unsure):
            ranking = book.stopping(book.scoring, k, book.n_best, 0)
            for i in np.flatnonzero(there[source] & tied[source]):
                one, many = kept[source, i].tolist(), int(steps[source, i])
                said = log_probs[source, i, :many].tolist()
                ranking.add(text(ids[source, i, :many].tolist(), said, bool(ended[source, i]), *one[1:4]))
            results.append(None if doubt else ranking.ranked()[: book.n_best])
        return results


def paths(
    token: np.ndarray, parent: np.ndarray, value: np.ndarray, steps: np.ndarray, beam: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of texts that end at `steps` in `beam`, followed back through their parents.

    Records are (sources, steps, beams); texts (sources, n); what comes back (sources, n, steps).
    """
    sources, most = token.shape[:2]
    ids = np.zeros((*steps.shape, most), np.int64)
    values = np.zeros((*steps.shape, most), np.float64)
    source, at = np.arange(sources)[:, None], beam
    for step in range(most - 1, -1, -1):
        live = step < steps
        here = np.where(live, at, 0)
        ids[:, :, step] = token[source, step, here]
        values[:, :, step] = value[source, step, here]
        at = np.where(live, parent[source, step, here], at)
    return ids, values


def text(
    ids: Sequence[int], values: Sequence[float], ended: bool, score: float, total: float, last: float
) -> Hypothesis:
    """One thing that was found."""
    return Hypothesis(tuple(ids), score, total, (*values, last) if ended else tuple(values), ended)


class CapturedDecoder:
    """A static decoding with its board, and the graphs of their step: one for each window of the past.

    It holds no model, so that it can be kept for the next batch without keeping a model alive.
    """

    def __init__(self, book: SearchConfig, decodings: Decodings, slots: int, room: int) -> None:
        self.book, self.decodings, self.room = book, decodings, room
        self.device = decodings.members[0].rows.lengths.device
        self.board = BeamState(book, slots, room, self.device)
        for member in decodings.members:
            member.rows.follow(self.board.said)
        self.begun = [0] * slots  # the step at which each place was taken
        self.ends = [0] * slots  # the step after which it is over, whatever is said
        self.busy: dict[int, int] = {}  # the number of the source in every place that is taken
        self.steps = 0
        self.warmed: set[int] = set()  # windows in which a step has run
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None

    @property
    def free(self) -> int:
        """How many places wait for a source."""
        return len(self.begun) - len(self.busy)

    def put(self, fresh: Decodings, of: Sequence[int], asked: Sequence[Request], numbers: Sequence[int]) -> None:
        """Let in sources, known to the caller by `numbers`, which are `of` in `fresh`."""
        free = [slot for slot in range(len(self.begun)) if slot not in self.busy][: len(numbers)]
        at = torch.tensor(free, device=self.device)
        sources = torch.tensor(of, device=self.device)
        for mine, its in zip(self.decodings.members, fresh.members, strict=True):
            refill(mine, its, sources, at)
        self.board.begin(at, asked)
        for slot, number, one in zip(free, numbers, asked, strict=True):
            self.busy[slot], self.begun[slot] = number, self.steps
            self.ends[slot] = self.steps + one.most + self.book.stopping.eos_at_limit

    @property
    def left(self) -> int:
        """How many steps there can still be to take."""
        return max(self.ends[slot] for slot in self.busy) - self.steps

    def run(self, models: Ensemble) -> None:
        """A step of all places."""
        read = 1 + self.steps - min(self.begun[slot] for slot in self.busy)
        window = min(-(-read // WINDOW) * WINDOW, self.room)
        for member in self.decodings.members:
            member.rows.window = window
        self.steps += 1
        if self.stream is None or self.steps == 1:  # constants are made on first use, which waits
            self._step(models)
        elif window in self.graphs:
            self.graphs[window].replay()
        elif window not in self.warmed:
            self._warm_up(models, window)
        else:
            self._capture(models, window)

    def _warm_up(self, models: Ensemble, window: int) -> None:
        """The first step in a window is not captured, but watched: a part that asks the host cannot be."""
        assert self.stream is not None
        self.warmed.add(window)
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            _, waits = graphs.watched(lambda: self._step(models))
        here.wait_stream(self.stream)
        if waits is not None:
            self._go_step_by_step(waits)

    def _capture(self, models: Ensemble, window: int) -> None:
        """Ask for a step once, and replay it."""
        assert self.stream is not None
        try:
            graph = graphs.capture(lambda: self._step(models), self.stream, self.pool)
        except RuntimeError as error:
            self._go_step_by_step(str(error))
            torch.cuda.synchronize(self.device)
            self._step(models)
            return
        self.pool = self.pool or graph.pool()
        self.graphs[window] = graph
        graph.replay()

    def _go_step_by_step(self, why: str) -> None:
        self.stream = None
        lines = why.splitlines() or ["no reason given"]
        tell(f"a step of the search cannot be captured, and every call of it is made anew: {lines[0][:200]}")

    def _step(self, models: Ensemble) -> None:
        """Read a token, choose the next, move the beams."""
        board = self.board
        log_probs = models.advance(board.ids, self.decodings)
        board.step(log_probs.float() if log_probs.dtype in (torch.float16, torch.bfloat16) else log_probs)
        if self.book.beams > 1:
            self.decodings.reorder(board.parents)

    def harvest(self) -> list[tuple[int, list[Hypothesis] | None]]:
        """What was found for the sources that are done, by their numbers; their places are free."""
        over = self.board.over.flatten().tolist()  # waits for the device
        done = [slot for slot in self.busy if over[slot]]
        found = self.board.found(done) if done else []
        return [(self.busy.pop(slot), one) for slot, one in zip(done, found, strict=True)]

    def clear(self) -> None:
        """Forget the sources under way."""
        self.busy.clear()
        self.board.clear()


@dataclass
class RequestQueue:
    """Sources in the order in which they are let in, encoded a batch at a time."""

    models: Ensemble
    book: SearchConfig
    asked: Sequence[Request]
    batch: int
    device: torch.device
    width: int = 0
    room: int = 0
    next: int = 0  # the number of the next source
    first: int = 0  # that of the first in `fresh`
    fresh: Decodings | None = None

    def __post_init__(self) -> None:
        """As wide as the longest source, with room for the longest text."""
        self.width = width_for(max(len(one.ids) for one in self.asked))
        self.book = replace(self.book, patient=any(one.least for one in self.asked))
        room = max(one.most for one in self.asked) + self.book.stopping.eos_at_limit
        self.room = -(-room // WINDOW) * WINDOW

    @property
    def left(self) -> int:
        """How many there are."""
        return len(self.asked) - self.next

    def start(self, first: int) -> Decodings:
        """A decoding of the batch that begins with this source."""
        some = self.asked[first : first + self.batch]
        ids, seg = pad([one.ids for one in some], self.width)
        batch = Batch(ids, source=ids, source_seg=seg).to(self.device)
        return self.models.start(batch, self.room, self.book.beams, static=True)

    def enter(self, machine: CapturedDecoder) -> None:
        """Let in as many as there are places for, from one batch."""
        if self.fresh is None or self.next >= self.first + self.batch:
            self.first, self.fresh = self.next, self.start(self.next)
        end = min(len(self.asked), self.first + self.batch, self.next + machine.free)
        numbers = range(self.next, end)
        machine.put(self.fresh, [n - self.first for n in numbers], [self.asked[n] for n in numbers], numbers)
        self.next = end


_kept: "WeakKeyDictionary[Any, OrderedDict[Any, CapturedDecoder]]" = WeakKeyDictionary()  # by the first model


def forget() -> None:
    """Give back the memory of all machines that are kept for the next batch of their shape."""
    _kept.clear()


def captured(model: object) -> bool:
    """Whether a machine that is kept for a model has a step that runs as a CUDA graph."""
    return any(machine.graphs for machine in _kept.get(model, {}).values())


def machine_for(waiting: RequestQueue) -> CapturedDecoder:
    """A machine of this shape: one that is kept, or a new one."""
    models = waiting.models.models
    held = _kept.setdefault(models[0], OrderedDict())
    # A captured step reads the weights where they were.
    weights = tuple((id(model), *(p.data_ptr() for p in model.parameters())) for model in models)
    shape = (waiting.book, waiting.batch, waiting.width, waiting.room, waiting.device)
    key = (weights, *shape, attention.forced())  # and calls the kernels that it called
    made = held.pop(key, None)
    if made is None:
        decodings = waiting.start(0)
        if not refillable(decodings.members):
            raise NotHereError("a state cannot take in another source")
        made = CapturedDecoder(waiting.book, decodings, waiting.batch, waiting.room)
    held[key] = made
    while len(held) > KEPT:
        held.popitem(last=False)
    made.clear()
    return made


class NotHereError(Exception):
    """A search that has to be made on the host."""


@torch.inference_mode()
def flow(
    models: Ensemble, book: SearchConfig, asked: Sequence[Request], slots: int, device: torch.device
) -> list[list[Hypothesis] | None]:
    """What is found for every source, with at most `slots` under way at a time; None where the host has to look."""
    slots = min(slots, len(asked))
    waiting = RequestQueue(models, book, asked, slots, device)
    machine = machine_for(waiting)
    found: list[list[Hypothesis] | None] = [None] * len(asked)
    try:
        while waiting.left or machine.busy:
            if waiting.left and machine.free * SHARE >= slots:
                waiting.enter(machine)
                continue
            for _ in range(min(POLL, machine.left)):
                machine.run(models)
            for number, one in machine.harvest():
                found[number] = one
    finally:
        machine.clear()
    return found


def find_each(jobs: Sequence[Job], spec: "Beam") -> Iterator[list[list[Hypothesis] | None]]:
    """What is found for the rows of every job, in order; jobs of like width flow through one machine."""
    for _, some in groupby(jobs, key=lambda job: (width_for(_width(job)), job.models.models, job.ends, job.rules[0])):
        group = list(some)
        found = iter(_flowing(group, spec))
        yield from ([next(found) for _ in job.most] for job in group)


def _flowing(group: Sequence[Job], spec: "Beam") -> list[list[Hypothesis] | None]:
    lead, asked = group[0], [one for job in group for one in sources(job)]
    slots = max(len(job.most) for job in group)
    try:
        return flow(lead.models, rulebook(lead, spec), asked, slots, lead.batch.target.device)
    except NotHereError as error:
        why = str(error)
    except SpecError as error:
        # A table of learned positions that ends before the room does: the search on the host knows what to do then.
        if not error.path.endswith("max_len"):
            raise
        why = "the positions learned may be too few for the longest text"
    tell(HOST + why)
    return [None] * len(asked)


def width_for(longest: int) -> int:
    """The width of the machine that takes sources of this length."""
    return next((width for width in WIDTHS if width >= longest), longest)


def _width(job: Job) -> int:
    assert job.batch.source is not None
    return job.batch.source.shape[1]


def sources(job: Job) -> list[Request]:
    """The rows of a job."""
    assert job.batch.source is not None
    lengths = row_lengths(job.batch.source, job.batch.source_seg)
    return [
        Request(tuple(row[:length]), least, most)
        for row, length, least, most in zip(job.batch.source.tolist(), lengths, job.least, job.most, strict=True)
    ]


def rulebook(job: Job, spec: "Beam") -> SearchConfig:
    """What holds for every row of a job."""
    never = {*job.ends.never, *(sequence[0] for sequence in job.rules[0].banned)}
    stopping = STOPPING[spec.stopping]
    return SearchConfig(spec.beam_size, spec.n_best, spec.scoring, stopping, job.ends, tuple(sorted(never)))


class DeviceSearch:
    """The beam search of a GPU, as `regard.decoding.beam` calls it."""

    find_each = staticmethod(find_each)

    @staticmethod
    def accepts(job: Job, spec: "Beam") -> bool:
        """Whether a job is searched on its device; the reason why not is logged once."""
        if not job.batch.target.is_cuda:
            return False
        why = refusal(job, spec)
        if why is not None:
            tell(HOST + why)
        return why is None
