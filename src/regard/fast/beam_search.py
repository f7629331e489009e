"""Beam search on the GPU with continuous batching. Most steps copy no data to the host.

If the search waited for the host at every step, the GPU would be idle most of the time. Here, beams, scores, stopping
and outputs are tensors (`BeamState`). A decoding step, including the search, has fixed shapes and is captured as one
CUDA graph. Every few steps, the host checks which sources are done and replaces them by new sources (continuous
batching).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from regard.batch import Batch, pad
from regard.decoding.ensemble import Decodings, Ensemble
from regard.decoding.hypothesis import Hypothesis
from regard.decoding.job import Job, never, row_lengths
from regard.decoding.stopping import STOPPING
from regard.errors import SpecError
from regard.fast import graphs
from regard.fast.attention import forced
from regard.fast.beam_state import BeamState, Request, SearchConfig
from regard.fast.refill import refill, refillable
from regard.nn.precision import widen

if TYPE_CHECKING:
    from regard.decoding.beam import Beam

POLL = 4  # number of steps between two checks for sources that are done
REFILL_SHARE = 8  # further sources are encoded when at least one in this many slots is free
WINDOW = 32  # the cache is read up to a multiple of `WINDOW`; there is one graph per multiple
LONGEST_QUEUE = 4096  # a search takes no further requests after so many
KEPT_DECODERS = 4  # number of decoders cached per model, for later batches of equal shape
WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # source lengths of decoders; sources are padded to one of these
LAUNCH_BOUND = 32_768  # number of tokens up to which an encoder takes longer to launch its kernels than to run them
HOST = "beam search runs on the host, step by step: "

More = Callable[[int, Callable[[Request], bool]], Sequence[Request]]

Found = list[tuple[int, list[Hypothesis] | None]]  # numbers and outputs; None: the host must search


def _no_more(number: int, takes: Callable[[Request], bool]) -> Sequence[Request]:  # noqa: ARG001
    return ()


_log = logging.getLogger("regard.decoding")
_logged: set[str] = set()


def log_once(sentence: str) -> None:
    """Log a message about a slower search, unless it has been logged before."""
    if sentence not in _logged:
        _logged.add(sentence)
        _log.info(sentence)


def _log_refusal(why: str) -> None:
    log_once(f"a part of the search cannot be captured as a CUDA graph and is launched kernel by kernel: {why}")


def refusal(job: Job, spec: "Beam") -> str | None:
    """Return the reason why the beam search for a job cannot run on the GPU, or None if it can."""
    if spec.groups > 1:
        return "groups of beams are searched one after another"
    if spec.coverage:
        return "coverage is computed from the attention of every step"
    if job.batch.source is None or any(model.source_first for model in job.models.models):
        return "prompts are read on the host"
    if not all(rules.vectorized for rules in job.rules):
        return "a constraint depends on the output so far"
    if len({rules.banned for rules in job.rules}) > 1:
        return "rows have different banned tokens"
    return None


class CapturedDecoder:
    """Decoding session of fixed shape, its search state, and CUDA graphs of encoding and of decoding steps.

    Each of its slots decodes one source at a time. There is one graph per window (number of cached positions that a
    step reads). The decoder has no reference to a model, so that it can be cached for the next batch without keeping
    the model alive.
    """

    def __init__(self, config: SearchConfig, decodings: Decodings, slots: int, room: int) -> None:
        self.config, self.decodings, self.room = config, decodings, room
        self.device = decodings.members[0].rows.lengths.device
        self.state = BeamState(config, slots, room, self.device)
        for member in decodings.members:
            member.rows.follow(self.state.lengths)
        self.first_step = [0] * slots  # the step in which the source in each slot started
        self.last_step = [0] * slots  # the step after which the source in each slot is certainly done
        self.busy: dict[int, int] = {}  # occupied slot -> number of its source
        self.in_use = False  # True while a search runs, whose slots must not be cleared
        self.steps = 0
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if on_gpu else None
        self.pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self.windows: dict[int, graphs.Graphed[None]] = {}
        self.sources: Batch | None = None  # the input of the encoder's graph
        # The encoder's graph has its own memory pool, because later steps still read the encoder's output.
        self.encoder: graphs.Graphed[Decodings] = graphs.Graphed(self.stream, None, _log_refusal, first=True)

    @property
    def free(self) -> int:
        """The number of free slots, each of which can decode one source."""
        return len(self.first_step) - len(self.busy)

    def start(self, models: Ensemble, sources: Batch) -> Decodings:
        """Return a new decoding session for `sources`. The next call of `start` may overwrite this session."""
        if self.sources is None:
            self.sources = sources.copy_to(self.device)
        if sources.target.numel() > LAUNCH_BOUND or not self.sources.alike(sources):
            return models.start(sources, self.room, self.config.beams, static=True)
        self.sources.fill(sources)
        same = self.sources
        return self.encoder(lambda: models.start(same, self.room, self.config.beams, static=True))

    def put(self, fresh: Decodings, of: Sequence[int], requests: Sequence[Request], numbers: Sequence[int]) -> None:
        """Move sources from the new decoding session `fresh` to free slots, where they are decoded.

        `of` are the indices of the sources in `fresh`. `collect` returns their outputs together with their `numbers`.
        """
        free = [slot for slot in range(len(self.first_step)) if slot not in self.busy][: len(numbers)]
        at = torch.tensor(free, device=self.device)
        sources = torch.tensor(of, device=self.device)
        for mine, its in zip(self.decodings.members, fresh.members, strict=True):
            refill(mine, its, sources, at)
        self.state.begin(at, requests)
        for slot, number, request in zip(free, numbers, requests, strict=True):
            self.busy[slot], self.first_step[slot] = number, self.steps
            self.last_step[slot] = self.steps + request.max_len + self.config.stopping.eos_at_limit

    @property
    def left(self) -> int:
        """Upper bound of the number of steps until all sources in the slots are done."""
        return max(self.last_step[slot] for slot in self.busy) - self.steps

    def run(self, models: Ensemble) -> None:
        """Run one decoding step, which extends the beams of all sources in the slots by one token."""
        read = 1 + self.steps - min(self.first_step[slot] for slot in self.busy)
        window = min(-(-read // WINDOW) * WINDOW, self.room)
        for member in self.decodings.members:
            member.rows.window = window
        self.steps += 1
        if window not in self.windows:
            self.windows[window] = graphs.Graphed(self.stream, self.pool, _log_refusal, first=self.steps == 1)
        self.windows[window](lambda: self._step(models))

    def _step(self, models: Ensemble) -> None:
        """Process the last token of every beam, choose the next tokens and reorder the beams."""
        self.state.step(widen(models.advance(self.state.ids, self.decodings)))
        if self.config.beams > 1:
            self.decodings.reorder(self.state.parents)

    def collect(self) -> list[tuple[int, list[Hypothesis] | None]]:
        """Remove the sources that are done. Return the number and the outputs of each.

        The outputs of a source are None if it must be searched again on the host.
        """
        is_done = self.state.done.flatten().tolist()  # waits for the device
        done = [slot for slot in self.busy if is_done[slot]]
        results = self.state.results(done) if done else []
        return [(self.busy.pop(slot), result) for slot, result in zip(done, results, strict=True)]

    def drop(self, cancelled: Callable[[int], bool]) -> None:
        """Free the slots of the sources whose number is cancelled."""
        self.busy = {slot: number for slot, number in self.busy.items() if not cancelled(number)}

    def clear(self) -> None:
        """Remove all sources from the slots."""
        self.busy.clear()
        self.state.clear()


@dataclass
class RequestQueue:
    """Queue of sources to decode, which are encoded in batches of `batch` sources."""

    models: Ensemble
    config: SearchConfig
    requests: Sequence[Request]
    batch: int
    device: torch.device
    width: int = 0
    room: int = 0
    next: int = 0  # the number of the next source
    first: int = 0  # the number of the first source in `fresh`
    encoded: int = 0  # the number of the first source after those in `fresh`
    fresh: Decodings | None = None

    def __post_init__(self) -> None:
        """Set `width` from the longest source, and `room` from the maximum length of the outputs."""
        self.width = width_for(max(len(request.ids) for request in self.requests))
        self.config = replace(self.config, has_min_len=any(request.min_len for request in self.requests))
        room = max(request.max_len for request in self.requests) + self.config.stopping.eos_at_limit
        self.room = -(-room // WINDOW) * WINDOW

    @property
    def left(self) -> int:
        """The number of sources in the queue whose decoding has not started."""
        return len(self.requests) - self.next

    def takes(self, request: Request) -> bool:
        """Return whether a source that arrives later fits into the decoder."""
        room = request.max_len + self.config.stopping.eos_at_limit
        return len(request.ids) <= self.width and room <= self.room and (self.config.has_min_len or not request.min_len)

    def sources(self, first: int) -> Batch:
        """Return a batch of sources from the queue, beginning with source number `first`."""
        rows = [request.ids for request in self.requests[first : first + self.batch]]
        rows += rows[-1:] * (self.batch - len(rows))  # a decoder has one shape, also if some of its slots stay free
        ids, seg = pad(rows, self.width)
        return Batch(ids, source=ids, source_seg=seg).to(self.device)

    def enter(self, decoder: CapturedDecoder) -> None:
        """Start decoding the next sources in the free slots of the decoder, up to the end of an encoded batch."""
        if self.fresh is None or self.next >= self.encoded:
            self.first, self.fresh = self.next, decoder.start(self.models, self.sources(self.next))
            self.encoded = min(len(self.requests), self.first + self.batch)
        end = min(self.encoded, self.next + decoder.free)
        numbers = range(self.next, end)
        decoder.put(self.fresh, [n - self.first for n in numbers], self.requests[self.next : end], numbers)
        self.next = end


_decoders: "WeakKeyDictionary[Any, OrderedDict[Any, CapturedDecoder]]" = WeakKeyDictionary()  # keyed by first model


def release() -> None:
    """Release the memory of all cached decoders."""
    _decoders.clear()


def is_captured(model: object) -> bool:
    """Return whether a cached decoder for `model` runs decoding steps as a CUDA graph."""
    windows = (step for decoder in _decoders.get(model, {}).values() for step in decoder.windows.values())
    return any(step.graph is not None for step in windows)


def decoder_for(queue: RequestQueue) -> CapturedDecoder:
    """Return a decoder for a queue: a cached decoder of the required shape, or a new decoder."""
    models = queue.models.models
    kept = _decoders.setdefault(models[0], OrderedDict())
    # A captured step always reads weights from the same addresses, and calls the same kernels, as during the capture.
    weights = tuple((id(model), *(p.data_ptr() for p in model.parameters())) for model in models)
    key = (weights, queue.config, queue.batch, queue.width, queue.room, queue.device, forced())
    decoder = kept.pop(key, None)
    if decoder is None or decoder.in_use:
        decodings = queue.models.start(queue.sources(0), queue.room, queue.config.beams, static=True)
        if not refillable(decodings.members):
            raise NotOnDeviceError("a cached state cannot be refilled with another source")
        decoder = CapturedDecoder(queue.config, decodings, queue.batch, queue.room)
    kept[key] = decoder
    while len(kept) > KEPT_DECODERS:
        kept.popitem(last=False)
    decoder.clear()
    return decoder


class NotOnDeviceError(Exception):
    """Raised if a beam search cannot run on the GPU and has to run on the host."""


@torch.inference_mode()
def search_requests(
    models: Ensemble, config: SearchConfig, requests: Sequence[Request], slots: int, device: torch.device
) -> list[list[Hypothesis] | None]:
    """Search on the GPU and return the outputs for every request, or None for a request that the host must search.

    At most `slots` sources are decoded at a time.
    """
    results: list[list[Hypothesis] | None] = [None] * len(requests)
    queue = RequestQueue(models, config, requests, min(slots, len(requests)), device)
    for finished in _rounds(queue):
        for number, result in finished:
            results[number] = result
    return results


def search_continuously(
    models: Ensemble,
    config: SearchConfig,
    requests: Sequence[Request],
    slots: int,
    device: torch.device,
    more: More = _no_more,
    cancelled: Callable[[int], bool] = never,
) -> Iterator[Found]:
    """Search on the GPU. Every few steps, yield the numbers and the outputs of the requests that are finished.

    `more(n, takes)` returns up to n further requests, for slots that are free; `takes` is true for the requests that
    fit. The numbers of requests count from 0 in the order in which they arrive. The slot of a request whose number is
    `cancelled` is freed, and the request has no outputs.
    """
    rounds = _rounds(RequestQueue(models, config, requests, slots, device), more, cancelled)
    try:
        while True:
            with torch.inference_mode():  # not around `yield`, which would leave the mode set for the caller
                finished = next(rounds, None)
            if finished is None:
                return
            yield finished
    finally:
        with torch.inference_mode():
            rounds.close()


def _rounds(
    queue: RequestQueue, more: More = _no_more, cancelled: Callable[[int], bool] = never
) -> Generator[Found, None, None]:
    """Decode the requests of a queue, and of `more`; yield the requests that finished after every `POLL` steps."""
    decoder = decoder_for(queue)
    decoder.in_use = True
    try:
        while queue.left or decoder.busy:
            if queue.left and decoder.free * REFILL_SHARE >= queue.batch:
                queue.enter(decoder)
                continue
            for _ in range(min(POLL, decoder.left)):
                decoder.run(queue.models)
            yield decoder.collect()
            decoder.drop(cancelled)
            if decoder.free > queue.left and len(queue.requests) < LONGEST_QUEUE:
                added = more(decoder.free - queue.left, queue.takes)
                queue.requests = [*queue.requests, *added] if added else queue.requests
    finally:
        decoder.clear()
        decoder.in_use = False


def find_each(jobs: Sequence[Job], spec: "Beam") -> Iterator[list[list[Hypothesis] | None]]:
    """Yield, for every job, the outputs of its batch rows. Jobs with similar source lengths share a decoder."""
    for _, same in groupby(jobs, key=lambda job: (width_for(_width(job)), job.models.models, job.ends, job.rules[0])):
        group = list(same)
        results = iter(_search_together(group, spec))
        yield from ([next(results) for _ in job.most] for job in group)


def _search_together(group: Sequence[Job], spec: "Beam") -> list[list[Hypothesis] | None]:
    lead, requests = group[0], [request for job in group for request in requests_of(job)]
    slots = max(len(job.most) for job in group)
    try:
        return search_requests(lead.models, search_config(lead, spec), requests, slots, lead.batch.target.device)
    except NotOnDeviceError as error:
        why = str(error)
    except SpecError as error:
        # A learned position table may be shorter than `room`. The search on the host handles that.
        if not error.path.endswith("max_len"):
            raise
        why = "the model may have too few learned positions for the longest text"
    log_once(HOST + why)
    return [None] * len(requests)


def width_for(longest: int) -> int:
    """Return the length to which a decoder pads sources of at most `longest` tokens."""
    return next((width for width in WIDTHS if width >= longest), longest)


def _width(job: Job) -> int:
    assert job.batch.source is not None
    return job.batch.source.shape[1]


def requests_of(job: Job) -> list[Request]:
    """Return a `Request` (source and length limits) for every batch row of a job."""
    assert job.batch.source is not None
    lengths = row_lengths(job.batch.source, job.batch.source_seg)
    return [
        Request(tuple(row[:length]), least, most)
        for row, length, least, most in zip(job.batch.source.tolist(), lengths, job.least, job.most, strict=True)
    ]


def search_config(job: Job, spec: "Beam") -> SearchConfig:
    """Return the search settings that all batch rows of a job share."""
    never = {*job.ends.never, *(sequence[0] for sequence in job.rules[0].banned)}
    stopping = STOPPING[spec.stopping]
    return SearchConfig(spec.beam_size, spec.n_best, spec.scoring, stopping, job.ends, tuple(sorted(never)))


class DeviceSearch:
    """Beam search on a GPU, with the interface that `regard.decoding.beam` calls."""

    find_each = staticmethod(find_each)

    @staticmethod
    def find_by_row(job: Job, spec: "Beam", slots: int, more: More) -> Iterator[Found]:
        """Search for the rows of a job and for the requests that `more` returns; see `search_continuously`."""
        config, device = search_config(job, spec), job.batch.target.device
        return search_continuously(job.models, config, requests_of(job), slots, device, more, job.cancelled)

    @staticmethod
    def accepts(job: Job, spec: "Beam") -> bool:
        """Return whether the beam search for a job runs on the GPU. If it does not, the reason is logged once."""
        if not job.batch.target.is_cuda:
            return False
        why = refusal(job, spec)
        if why is not None:
            log_once(HOST + why)
        return why is None
