"""Beam search that stays on the device: what `beam.search` finds, with no word to the host between two steps.

A search that asks the host at every step leaves a GPU waiting for most of the time. Here beams, scores, stopping and
what was found are tensors; a step of model and search has fixed shapes and is captured as one CUDA graph; and the host
only looks now and then which sources are done, to give their place to others that wait (continuous batching).

What is found is the same as on the host, to the last bit of the scores for the same log-probabilities: candidates are
compared in the same steps of 1e-5 with the same rule for ties. Where a decision hangs on what was not looked at (more
ties than were fetched, two finished texts of one score), the source is `unsure` and left to the search on the host.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.batch import Batch, pad
from regard.decoding.ensemble import Decodings, Ensemble
from regard.decoding.hypothesis import Ends, Hypothesis
from regard.decoding.rank import NEVER, TIE, highest
from regard.decoding.run import Job, row_lengths
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
from regard.nn import graphs

if TYPE_CHECKING:
    from regard.decoding.beam import Beam

SPARE = 32  # candidates beyond those asked for: half precision has many ties, and each is a walk to the host
POLL = 4  # steps between two looks at who is done
SHARE = 8  # one in so many places must be free before sources that wait are let in
WINDOW = 32  # the past is looked at in multiples of this: a graph for each, and little that is looked at in vain
KEPT = 4  # machines of a model that stay for the next batch of their shape
WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # of sources: those of like width share a machine
FAR = 2**62


@dataclass(frozen=True, slots=True)
class Rulebook:
    """What holds for every source of a search."""

    beams: int
    n_best: int
    scoring: Scoring
    stopping: type[Stopping]
    ends: Ends
    never: tuple[int, ...]  # what no row ever says

    @property
    def highest(self) -> int:
        """The highest id that it names."""
        return max(self.ends.bos, self.ends.eos, self.ends.pad, *self.never)


@dataclass(frozen=True, slots=True)
class Asked:
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
    if any(rules.prefix or rules.required or rules.follows() for rules in job.rules):
        return "a rule wants to know what was said"
    if len({rules.banned for rules in job.rules}) > 1:
        return "every row has bans of its own"
    return None


class Ranked(NamedTuple):
    """The best continuations of every source, best first, and whether their order is in doubt."""

    beam: Int[Tensor, "s n"]
    token: Int[Tensor, "s n"]
    value: Float[Tensor, "s n"]  # log p of the token
    total: Float[Tensor, "s n"]  # of the text with it
    doubt: Bool[Tensor, " s"]


class Board:
    """The state of a search in `slots` places: `beams` texts that go on in each, and the best that are over."""

    def __init__(self, book: Rulebook, slots: int, room: int, device: torch.device) -> None:
        """`room` is how many tokens a text may have, at most."""
        self.book, self.slots, self.room = book, slots, room
        k, kept = book.beams, book.beams + 1

        def filled(*shape: int, value: float | int | bool = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.totals = filled(slots, k, value=NEVER, dtype=torch.float64)
        self.ids = filled(slots * k, 1, value=book.ends.pad)
        self.parents = torch.arange(slots * k, device=device)
        self.said, self.limit, self.least = filled(slots), filled(slots, value=1), filled(slots)
        self.over = filled(slots, value=True, dtype=torch.bool)
        self.unsure, self.topped = (filled(slots, value=False, dtype=torch.bool) for _ in range(2))
        self.count = filled(slots)
        # What is over, best first: score, log-probability, that of its end, where its text ends, and whether by eos.
        self.score, self.total, self.last = (filled(slots, kept, value=NEVER, dtype=torch.float64) for _ in range(3))
        self.steps, self.beam = (filled(slots, kept) for _ in range(2))
        self.ended = filled(slots, kept, value=False, dtype=torch.bool)
        # What every beam said at every step and whom it continued; the last place is for those who are over.
        self.token, self.parent = (filled(slots, room + 2, k) for _ in range(2))
        self.value = filled(slots, room + 2, k, dtype=torch.float64)
        # length^alpha as the host computes it: another library may round a power differently.
        sizes = [book.scoring.size(length) ** book.scoring.alpha for length in range(room + 3)]
        self.sizes = torch.tensor(sizes, dtype=torch.float64, device=device)
        self.never = torch.tensor(book.never, dtype=torch.int64, device=device)
        self.own = torch.arange(k, device=device)
        self.row = torch.arange(slots, device=device)[:, None] * k

    def begin(self, at: Int[Tensor, " n"], asked: Sequence[Asked]) -> None:
        """These places start to search for these sources."""
        device, k = at.device, self.book.beams
        first = torch.full((k,), NEVER, dtype=torch.float64)
        first[0] = 0.0  # only one beam has the empty text, or all would be alike
        numbers = torch.tensor([[one.least, one.most] for one in asked], dtype=torch.int64).to(device)
        self.totals.index_copy_(0, at, first.to(device).expand(len(asked), k))
        self.ids.index_fill_(0, (at[:, None] * k + self.own).flatten(), self.book.ends.bos)
        self.least.index_copy_(0, at, numbers[:, 0].contiguous())
        self.limit.index_copy_(0, at, numbers[:, 1].contiguous())
        for tensor in (self.said, self.count, self.steps, self.beam):
            tensor.index_fill_(0, at, 0)
        for tensor in (self.score, self.total, self.last):
            tensor.index_fill_(0, at, NEVER)
        for tensor in (self.over, self.unsure, self.topped, self.ended):
            tensor.index_fill_(0, at, False)

    def normalised(self, log_prob: Float[Tensor, "..."], length: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The score of a text: `Scoring.score`, looked up."""
        return log_prob / self.sizes[length]

    def step(self, log_probs: Float[Tensor, "B V"]) -> None:
        """What every source takes of log p of the next token: `Source.take` for all of them at once, in place."""
        book, k, V = self.book, self.book.beams, log_probs.shape[1]
        if book.highest >= V:
            raise DataError(
                f"rules: id {book.highest}, of a rule or of the ends, is not in the vocabulary of {V} tokens"
            )
        active, t = ~self.over, self.said
        log_probs.index_fill_(1, self.never, NEVER)
        rows = log_probs.view(self.slots, k, V)
        rows[:, :, book.ends.eos].masked_fill_((t < self.least)[:, None], NEVER)
        beam, token, value, total, doubt = self._ranked(rows)
        real = total > NEVER
        ends = (token == book.ends.eos) & real
        self.topped |= active & ends[:, 0]

        onward, goes = self._onward(~ends & real)
        full = (t + 1 == self.limit) & active if not book.stopping.asks_again else torch.zeros_like(active)
        nowhere = ~goes.any(1)
        cut = active & ~full & ((t == self.limit) | nowhere if book.stopping.asks_again else nowhere)

        # What is over now: texts that end; those that are full; those that go on, where nothing can.
        ended = ends[:, :k] & active[:, None]
        filled = real[:, :k] & ~ends[:, :k] & full[:, None]
        place = (~ends[:, :k]).long().cumsum(1) - 1  # the n-th that does not end becomes beam n
        known = (ended[:, :, None] & (beam[:, :k, None] == self.own)).any(1)
        stuck = cut[:, None] & (self.totals > NEVER) & ~known
        said = t[:, None].expand(-1, k)
        self._remember(
            torch.cat((ended | filled, stuck), 1),
            torch.cat((total[:, :k], self.totals), 1),
            torch.cat((value[:, :k], torch.zeros_like(self.totals)), 1),
            torch.cat((said + 1, said), 1),
            torch.cat((torch.where(ends[:, :k], said, said + 1), said), 1),
            torch.cat((torch.where(ends[:, :k], beam[:, :k], place), self.own.expand_as(said)), 1),
            torch.cat((ended, torch.zeros_like(stuck)), 1),
        )

        # What goes on.
        tokens = torch.where(goes, token.gather(1, onward), book.ends.pad)
        parents = torch.where(goes, beam.gather(1, onward), self.own)
        totals = torch.where(goes, total.gather(1, onward), NEVER)
        self._record(active, tokens, parents, value.gather(1, onward))
        done = self._done(totals.amax(1), t + 1)
        over = self.over | full | cut | (active & done)
        self.unsure |= doubt & active
        self.over.copy_(over)
        self.said.copy_(torch.where(over, t, t + 1))
        self.totals.copy_(torch.where(over[:, None], NEVER, totals))
        self.ids.copy_(torch.where(over[:, None], book.ends.pad, tokens).view(-1, 1))
        self.parents.copy_((self.row + torch.where(over[:, None], self.own, parents)).flatten())

    def _ranked(self, log_probs: Float[Tensor, "s k V"]) -> Ranked:
        """`rank.best` of twice as many as there are beams."""
        k, V = log_probs.shape[1:]
        wanted, fetched = min(2 * k, k * V), min(2 * k + SPARE, k * V)
        tops = self.totals.amax(1, keepdim=True)
        shift = self.totals - tops.masked_fill(tops == NEVER, 0.0)
        own, places = highest(log_probs, shift.to(log_probs.dtype), fetched)
        beam, token, value = places // V, places % V, own.double()
        total = self.totals.gather(1, beam) + value
        real = total > NEVER
        steps = torch.where(real, (total / TIE).round(), 0.0).long()
        # The score in steps, then the token, then the beam, as one number.
        rank = torch.where(real, -steps * (V * k) + token * k + beam, FAR)
        order = rank.sort(1).indices[:, :wanted]
        everything = ~real.all(1) if fetched < k * V else torch.ones_like(self.over)
        settled = everything | (steps[:, -1] < steps.gather(1, order[:, -1:])[:, 0] - 1)
        doubt = ~settled | total.isnan().any(1)
        return Ranked(
            beam.gather(1, order), token.gather(1, order), value.gather(1, order), total.gather(1, order), doubt
        )

    def _onward(self, goes: Bool[Tensor, "s n"]) -> tuple[Int[Tensor, "s k"], Bool[Tensor, "s k"]]:
        """Which candidates go on, one for each beam, and whether there is one."""
        k = self.book.beams
        number = goes.long().cumsum(1) - 1
        at = torch.where(goes & (number < k), number, k)  # those of no use share the last place
        index = torch.arange(goes.shape[1], device=goes.device).expand_as(at)
        chosen = torch.zeros(goes.shape[0], k + 1, dtype=torch.int64, device=goes.device).scatter_(1, at, index)
        return chosen[:, :k], number[:, -1:] >= self.own

    def _remember(
        self,
        valid: Bool[Tensor, "s n"],
        total: Float[Tensor, "s n"],
        last: Float[Tensor, "s n"],
        length: Int[Tensor, "s n"],
        steps: Int[Tensor, "s n"],
        beam: Int[Tensor, "s n"],
        ended: Bool[Tensor, "s n"],
    ) -> None:
        """Keep the best of what is over. One more than beams: the next one tells whether the last is tied."""
        score = torch.where(valid, self.normalised(total, length), NEVER)
        mine = (self.score, self.total, self.last, self.steps, self.beam, self.ended)
        joined = [torch.cat(pair, 1) for pair in zip(mine, (score, total, last, steps, beam, ended), strict=True)]
        order = self._order(joined[0], joined[-1]).sort(dim=1, stable=True).indices[:, : self.score.shape[1]]
        for tensor, new in zip(mine, joined, strict=True):
            tensor.copy_(new.gather(1, order))
        self.count += valid.sum(1)

    def _order(self, score: Float[Tensor, "s n"], ended: Bool[Tensor, "s n"]) -> Tensor:
        """Sorts what is over, best first, as `Stopping.ranked` does up to the ids."""
        if not self.book.stopping.strict:
            return -score
        steps = torch.where(score > NEVER, (score / TIE).round(), 0.0).long()
        return torch.where(score > NEVER, torch.where(ended, 0, 2**52) - steps, FAR)

    def _record(
        self, active: Bool[Tensor, " s"], tokens: Tensor, parents: Tensor, values: Float[Tensor, "s k"]
    ) -> None:
        at = torch.where(active, self.said, self.room + 1)[:, None, None].expand(-1, 1, self.book.beams)
        self.token.scatter_(1, at, tokens[:, None])
        self.parent.scatter_(1, at, parents[:, None])
        self.value.scatter_(1, at, values[:, None])

    def _done(self, live: Float[Tensor, " s"], said: Int[Tensor, " s"]) -> Bool[Tensor, " s"]:
        """`Stopping.done` of every source."""
        book, kind = self.book, self.book.stopping
        if kind is First or book.beams == 1:  # greedy search: the likeliest token until eos
            return self.count >= book.n_best
        if kind is HuggingFaceEarly or (kind is CTranslate2 and book.scoring.alpha):
            return self.count >= book.beams
        if kind is CTranslate2:
            return self.topped & (self.count >= book.n_best)
        if kind is Optimal:
            reach = torch.maximum(self.normalised(live, said + 1), self.normalised(live, self.limit + 1))
            nth = self.score[:, book.n_best - 1]
            return (self.count >= book.n_best) & ((reach / TIE).round() < (nth / TIE).round())
        assert issubclass(kind, HuggingFace)
        judged = self.limit if kind is HuggingFaceNever and book.scoring.alpha > 0.0 else said
        return (self.count >= book.beams) & ~(self.normalised(live, judged) > self.score[:, book.beams - 1])

    def found(self, at: Sequence[int]) -> list[list[Hypothesis] | None]:
        """What was found in these places, which are over; None where the host has to look."""
        index = torch.tensor(at, dtype=torch.int64, device=self.over.device)
        n = self.book.n_best
        order = self._order(self.score, self.ended).index_select(0, index)
        tied = (order[:, :n] == order[:, 1 : n + 1]) & (self.score.index_select(0, index)[:, 1 : n + 1] > NEVER)
        doubt = (self.unsure.index_select(0, index) | tied.any(1)).tolist()

        def fetched(tensor: Tensor) -> np.ndarray:
            return tensor.index_select(0, index).cpu().numpy()

        score, total, last = (fetched(tensor)[:, :n] for tensor in (self.score, self.total, self.last))
        steps, beam, ended = (fetched(tensor)[:, :n] for tensor in (self.steps, self.beam, self.ended))
        most = int(steps.max(initial=0))
        records = [fetched(tensor[:, :most]) for tensor in (self.token, self.parent, self.value)]
        ids, log_probs = paths(records[0], records[1], records[2], steps, beam)
        results: list[list[Hypothesis] | None] = []
        for source, unsure in enumerate(doubt):
            results.append(
                None
                if unsure
                else [
                    text(ids[source, i], log_probs[source, i], int(steps[source, i]), bool(ended[source, i]),
                         float(score[source, i]), float(total[source, i]), float(last[source, i]))
                    for i in range(n)
                    if score[source, i] > NEVER
                ]
            )  # fmt: skip
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
    ids: np.ndarray, values: np.ndarray, steps: int, ended: bool, score: float, total: float, last: float
) -> Hypothesis:
    """One thing that was found."""
    said = values[:steps].tolist()
    return Hypothesis(tuple(ids[:steps].tolist()), score, total, (*said, last) if ended else tuple(said), ended)


class Machine:
    """A static decoding with its board, and the graphs of their step: one for each window of the past.

    It holds no model, so that it can be kept for the next batch without keeping a model alive.
    """

    def __init__(self, book: Rulebook, decodings: Decodings, slots: int, room: int) -> None:
        self.book, self.decodings, self.room = book, decodings, room
        self.device = decodings.members[0].rows.lengths.device
        self.board = Board(book, slots, room, self.device)
        self.begun = [0] * slots  # the step at which each place was taken
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

    def put(self, fresh: Decodings, of: Sequence[int], asked: Sequence[Asked], numbers: Sequence[int]) -> None:
        """Let in sources, known to the caller by `numbers`, which are `of` in `fresh`."""
        free = [slot for slot in range(len(self.begun)) if slot not in self.busy][: len(numbers)]
        at = torch.tensor(free, device=self.device)
        self.decodings.put(fresh, torch.tensor(of, device=self.device), at)
        self.board.begin(at, asked)
        for slot, number in zip(free, numbers, strict=True):
            self.busy[slot], self.begun[slot] = number, self.steps

    def run(self, models: Ensemble) -> None:
        """A step of all places."""
        read = 1 + self.steps - min(self.begun[slot] for slot in self.busy)
        window = min(-(-read // WINDOW) * WINDOW, self.room)
        for member in self.decodings.members:
            member.rows.window = window
        self.steps += 1
        if self.stream is None:
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
            self.stream = None  # step by step, then

    def _capture(self, models: Ensemble, window: int) -> None:
        """Ask for a step once, and replay it."""
        assert self.stream is not None
        try:
            graph = graphs.capture(lambda: self._step(models), self.stream, self.pool)
        except RuntimeError:
            self.stream = None
            torch.cuda.synchronize(self.device)
            self._step(models)
            return
        self.pool = self.pool or graph.pool()
        self.graphs[window] = graph
        graph.replay()

    def _step(self, models: Ensemble) -> None:
        """Read a token, choose the next, move the beams."""
        board = self.board
        said = torch.where(board.over, 0, board.said)
        for member in self.decodings.members:
            member.rows.rewind(said)
        log_probs = models.advance(board.ids, self.decodings)
        board.step(log_probs.float() if log_probs.dtype in (torch.float16, torch.bfloat16) else log_probs)
        if self.book.beams > 1:
            self.decodings.reorder(board.parents)

    def harvest(self) -> list[tuple[int, list[Hypothesis] | None]]:
        """What was found for the sources that are done, by their numbers; their places are free."""
        over = self.board.over.tolist()  # waits for the device
        done = [slot for slot in self.busy if over[slot]]
        found = self.board.found(done) if done else []
        return [(self.busy.pop(slot), one) for slot, one in zip(done, found, strict=True)]

    def clear(self) -> None:
        """Forget the sources under way."""
        self.busy.clear()
        self.board.over.fill_(True)


@dataclass
class Waiting:
    """Sources in the order in which they are let in, encoded a batch at a time."""

    models: Ensemble
    book: Rulebook
    asked: Sequence[Asked]
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
        room = max(one.most for one in self.asked) + self.book.stopping.asks_again
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

    def enter(self, machine: Machine) -> None:
        """Let in as many as there are places for, from one batch."""
        if self.fresh is None or self.next >= self.first + self.batch:
            self.first, self.fresh = self.next, self.start(self.next)
        end = min(len(self.asked), self.first + self.batch, self.next + machine.free)
        numbers = range(self.next, end)
        machine.put(self.fresh, [n - self.first for n in numbers], [self.asked[n] for n in numbers], numbers)
        self.next = end


_kept: "WeakKeyDictionary[Any, OrderedDict[Any, Machine]]" = WeakKeyDictionary()  # by the first model


def forget() -> None:
    """Give back the memory of all machines that are kept for the next batch of their shape."""
    _kept.clear()


def machine_for(waiting: Waiting) -> Machine:
    """A machine of this shape: one that is kept, or a new one."""
    models = waiting.models.models
    held = _kept.setdefault(models[0], OrderedDict())
    # A captured step reads the weights where they were.
    weights = tuple((id(model), *(p.data_ptr() for p in model.parameters())) for model in models)
    key = (weights, waiting.book, waiting.batch, waiting.width, waiting.room, waiting.device)
    made = held.pop(key, None)
    if made is None:
        decodings = waiting.start(0)
        if not decodings.refillable():
            raise NotHereError("a state cannot take in another source")
        made = Machine(waiting.book, decodings, waiting.batch, waiting.room)
    held[key] = made
    while len(held) > KEPT:
        held.popitem(last=False)
    made.clear()
    return made


class NotHereError(Exception):
    """A search that has to be made on the host."""


@torch.inference_mode()
def flow(
    models: Ensemble, book: Rulebook, asked: Sequence[Asked], slots: int, device: torch.device
) -> list[list[Hypothesis] | None]:
    """What is found for every source, with at most `slots` under way at a time; None where the host has to look."""
    slots = min(slots, len(asked))
    waiting = Waiting(models, book, asked, slots, device)
    machine = machine_for(waiting)
    found: list[list[Hypothesis] | None] = [None] * len(asked)
    try:
        while waiting.left or machine.busy:
            if waiting.left and machine.free * SHARE >= slots:
                waiting.enter(machine)
                continue
            for _ in range(POLL):
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
    except NotHereError:
        return [None] * len(asked)
    except SpecError as error:
        # A table of learned positions that ends before the room does: the search on the host knows what to do then.
        if not error.path.endswith("max_len"):
            raise
        return [None] * len(asked)


def width_for(longest: int) -> int:
    """The width of the machine that takes sources of this length."""
    return next((width for width in WIDTHS if width >= longest), longest)


def _width(job: Job) -> int:
    assert job.batch.source is not None
    return job.batch.source.shape[1]


def sources(job: Job) -> list[Asked]:
    """The rows of a job."""
    assert job.batch.source is not None
    lengths = row_lengths(job.batch.source, job.batch.source_seg)
    return [
        Asked(tuple(row[:length]), least, most)
        for row, length, least, most in zip(job.batch.source.tolist(), lengths, job.least, job.most, strict=True)
    ]


def rulebook(job: Job, spec: "Beam") -> Rulebook:
    """What holds for every row of a job."""
    never = {*job.ends.never, *(sequence[0] for sequence in job.rules[0].banned)}
    stopping = STOPPING[spec.stopping]
    return Rulebook(spec.beams, spec.n_best, spec.scoring, stopping, job.ends, tuple(sorted(never)))
