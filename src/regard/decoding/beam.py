"""Beam search."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, starmap
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.decoding.autoregressive import AutoregressiveLoop, likeliest
from regard.decoding.constraint import Constraint
from regard.decoding.constraints import Ids
from regard.decoding.coverage import Coverage
from regard.decoding.expansion import EMPTY, Choice, Partial, constrained, diverse, plain
from regard.decoding.hypothesis import Hypothesis, Piece
from regard.decoding.job import BatchDecoding, Job
from regard.decoding.rank import NEVER, Candidate
from regard.decoding.required import automaton
from regard.decoding.search import Finished, Search
from regard.decoding.stopping import STOPPING, Normalise, Scoring
from regard.errors import SpecError
from regard.nn.checks import check_count, check_not_negative, require

Observer = Callable[[int, Choice], None]  # receives a batch row and its `Choice`, in every step of a search


@dataclass(frozen=True, slots=True)
class Beam(Search):
    """Beam search: each step extends all hypotheses of a source by every token and keeps the `beam_size` likeliest.

    A hypothesis ends when its extension by eos is among the `beam_size` best candidates of a step. Finished hypotheses
    are ranked by

        score = log p / norm(length)^alpha + coverage * sum_j log(min(sum_t a_tj, 1)),

    where `normalise` chooses the norm: 1 ("none"), the length ("mean"), or (5 + length) / 6 ("gnmt", Wu et al. 2016).
    The length includes eos. a_tj is the attention weight of source token j for output token t, averaged over the heads
    of the last decoder layer. Source positions without any attention, such as padding, are left out of the sum.

    `stopping` is the rule that ends the search. With "optimal", the search ends when no live (unfinished) hypothesis
    can become one of the `n_best`. With "first", it ends when `n_best` hypotheses have ended. The other rules are
    copied from other libraries (see `regard.decoding.stopping`). With "optimal" and "first", hypotheses that were cut
    at the length limit rank behind those that ended with eos.

    With several `groups`, the beams are divided into groups that choose their tokens one after another. In every step,
    the score of a token is lowered by `diversity` for each beam of an earlier group that chose the same token
    (Vijayakumar et al. 2016). This penalty affects the choice of tokens but not the score of a hypothesis.

    With one beam this is greedy search, which takes the likeliest token until eos.
    """

    kind = "beam"
    beam_size: int = 5
    n_best: int = 1
    normalise: Normalise = "mean"
    alpha: float = 1.0
    coverage: float = 0.0
    groups: int = 1
    diversity: float = 0.0
    stopping: Literal["optimal", "first", "ctranslate2", "huggingface", "huggingface_early", "huggingface_never"] = (
        "optimal"
    )
    constraints: tuple[Constraint, ...] = ()
    prefill_chunk: int | None = None  # a decoder-only model processes its input in pieces of this many tokens

    def check(self) -> None:
        for name in ("beam_size", "n_best", "groups", "prefill_chunk"):
            check_count(name, getattr(self, name))
        if self.n_best > self.beam_size:
            message = f"{self.n_best} hypotheses need at least as many beams, not {self.beam_size}; raise beam_size"
            raise SpecError("n_best", message)
        if self.beam_size % self.groups:
            raise SpecError("groups", f"{self.groups} groups do not divide {self.beam_size} beams; choose a divisor")
        if self.groups > 1 and self.diversity <= 0.0:
            raise SpecError("diversity", f"must be above 0 with {self.groups} groups, not {self.diversity}")
        if self.groups == 1 and self.diversity:
            raise SpecError("diversity", "has no effect with one group of beams; increase groups or set diversity to 0")
        if self.normalise == "none" and self.alpha != 1.0:
            raise SpecError("alpha", "has no effect with normalise='none'; leave it out")
        check_not_negative("coverage", self.coverage)
        if self.stopping not in {"optimal", "first"}:  # a rule of another library, which lacks some settings
            ours, rule = "choose stopping='optimal' or 'first'", repr(self.stopping)
            require(self.groups == 1, "groups", f"{rule} does not support groups; {ours}")
            require(
                self.normalise != "gnmt",
                "normalise",
                f"{rule} divides only by a power of the length; choose 'mean' or 'none'",
            )
            require(not self.coverage, "coverage", f"{rule} does not support this penalty; {ours}")

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.normalise, 0.0 if self.normalise == "none" else self.alpha)

    def find(self, job: Job) -> list[list[Hypothesis]]:
        return next(self.find_each([job]))

    def find_each(self, jobs: Sequence[Job]) -> Iterator[list[list[Hypothesis]]]:
        for on_device, some in groupby(jobs, key=self._stays_on_the_device):
            group = list(some)
            if on_device:
                results = group[0].models.device_search.find_each(group, self)
                yield from starmap(self._completed, zip(group, results, strict=True))
            else:
                yield from map(self._on_the_host, group)

    def _stays_on_the_device(self, job: Job) -> bool:
        search_on_device = job.models.device_search
        return search_on_device is not None and search_on_device.accepts(job, self)

    def find_by_row(self, job: Job) -> Iterator[Finished]:
        self._check_required(job)
        greedy = self.beam_size == 1 and not self.coverage
        return self.greedy().find_by_row(job) if greedy else search_by_row(job, self)

    def _on_the_host(self, job: Job) -> list[list[Hypothesis]]:
        self._check_required(job)
        return self.greedy().find(job) if self.beam_size == 1 and not self.coverage else search(job, self)

    def _check_required(self, job: Job) -> None:
        """Raise SpecError if the job has required words and this search does not support them."""
        if any(rules.required for rules in job.rules):
            if self.beam_size < 2:
                raise SpecError("beam_size", "required words need at least 2 beams; set it to 2 or more")
            if self.groups > 1 or self.stopping not in {"optimal", "first"}:
                raise SpecError("beam_size", "required words need one group of beams and stopping='optimal' or 'first'")

    def _completed(self, job: Job, results: Sequence[list[Hypothesis] | None]) -> list[list[Hypothesis]]:
        """Return the `results` of the GPU search. Rows whose result is None are searched again, on the host."""
        again = [row for row, hypotheses in enumerate(results) if hypotheses is None]
        repeated = dict(zip(again, self._on_the_host(job.part(again)), strict=True)) if again else {}
        return [repeated[row] if hypotheses is None else hypotheses for row, hypotheses in enumerate(results)]

    def stream(self, job: Job) -> Iterator[list[Piece]]:
        if self.beam_size > 1:
            message = f"{self.beam_size} beams revise earlier tokens and cannot be streamed; set it to 1"
            raise SpecError("beam_size", message)
        if self.coverage:
            raise SpecError("coverage", "is computed at the end of an output and cannot be streamed; set it to 0")
        return self.greedy().stream(job)

    def greedy(self) -> AutoregressiveLoop:
        """Return the decoding loop for greedy search, which is used if there is only one beam."""
        return AutoregressiveLoop(1, likeliest, self.scoring.score, STOPPING[self.stopping].eos_at_limit)


class Source:
    """The state of the search for one source: the beams and the finished hypotheses."""

    def __init__(self, spec: Beam, job: Job, row: int) -> None:
        required = job.rules[row].required
        self.goal = automaton(required) if required else None
        self.eos, self.pad, self.limit = job.ends.eos, job.ends.pad, job.most[row]
        self.stopping = STOPPING[spec.stopping](spec.scoring, spec.beam_size, spec.n_best, self.limit)
        begin = Partial((), (), 0.0, None if self.goal is None else self.goal.start)
        # Each group begins with one empty hypothesis and unused beams. Several empty hypotheses would stay equal.
        per_group = spec.beam_size // spec.groups
        self.live = [EMPTY if beam % per_group else begin for beam in range(spec.beam_size)]
        self.tokens, self.parents = [self.pad] * spec.beam_size, list(range(spec.beam_size))
        self.topped = self.over = False

    def totals(self) -> list[float]:
        return [NEVER if self.over else text.total for text in self.live]

    def take(self, choice: Choice, step: int, before: Sequence[float], now: Sequence[float]) -> None:
        """Update the beams with the candidates that were chosen in a step.

        `before` and `now` are the coverage penalties of the beams before and after this step.
        """
        rule, onward = self.stopping, choice.onward
        full = step + 1 == self.limit and not rule.eos_at_limit
        self.topped = self.topped or (bool(choice.first) and choice.first[0].token == self.eos)
        for each in choice.first:
            if each.token == self.eos:
                text = self.live[each.beam]
                self.add(text.ids, (*text.log_probs, each.log_prob), each.total, True, now[each.beam])
            elif full:
                text = self.extended(each)
                self.add(text.ids, text.log_probs, text.total, False, now[each.beam])
        if full:
            self.end()
        elif step == self.limit or not any(onward):
            self.cut(before)
        else:
            self.live = [EMPTY if each is None else self.extended(each) for each in onward]
            self.tokens = [self.pad if each is None else each.token for each in onward]
            self.parents = [beam if each is None else each.beam for beam, each in enumerate(onward)]
            best_live = max(text.total for text in self.live)
            if rule.done(best_live, step + 1, self.topped) or (len(self.live) == 1 and rule.finished):
                self.end()

    def extended(self, candidate: Candidate) -> Partial:
        """Return the hypothesis of the candidate's beam, extended by the candidate's token."""
        _, token, log_prob, total = candidate
        text = self.live[candidate.beam]
        progress = None if self.goal is None or text.progress is None else self.goal.step(text.progress, token)
        return Partial((*text.ids, token), (*text.log_probs, log_prob), total, progress)

    def add(self, ids: Ids, log_probs: tuple[float, ...], total: float, ended: bool, penalty: float) -> None:
        """Store a finished hypothesis. `ended` is true if the model generated eos."""
        score = self.stopping.scoring.score(total, len(log_probs)) + penalty
        self.stopping.add(Hypothesis(ids, score, total, log_probs, ended))

    def cut(self, penalties: Sequence[float]) -> None:
        """End the search for this source and store the unfinished hypotheses as outputs without eos."""
        for text, penalty in zip(self.live, penalties, strict=True):
            if text is not EMPTY:
                self.add(text.ids, text.log_probs, text.total, False, penalty)
        self.end()

    def end(self) -> None:
        """End the search for this source. The beams then produce padding until the source is dropped from the batch."""
        self.over = True
        self.tokens, self.parents = [self.pad] * len(self.live), list(range(len(self.live)))


def search(job: Job, spec: Beam, observer: Observer | None = None) -> list[list[Hypothesis]]:
    """Beam search. Return the `n_best` hypotheses for every batch row of a job, best first.

    An `observer` is called with every choice of candidates. It does not influence the search.
    """
    finished = dict(chain.from_iterable(search_by_row(job, spec, observer)))
    return [finished[row] for row in range(len(job.most))]


def search_by_row(job: Job, spec: Beam, observer: Observer | None = None) -> Iterator[Finished]:
    """Beam search. After each step, yield the index and the hypotheses of every batch row that is finished."""
    sources = [Source(spec, job, row) for row in range(len(job.most))]
    steps = max(job.most) + STOPPING[spec.stopping].eos_at_limit
    run = BatchDecoding(job, spec.beam_size, steps, watch=spec.coverage > 0.0)
    coverage = Coverage(spec.coverage, len(sources) * spec.beam_size)
    unfinished = dict(enumerate(sources))
    has_room = True
    while run.slots and has_room:
        with torch.inference_mode():  # not around `yield`, which would leave the mode set for the caller
            has_room = extend(run, spec, sources, coverage, observer)
        again = [] if has_room else run.short()
        for row in again:
            unfinished.pop(row)
        over = [row for row, source in unfinished.items() if source.over]
        yield [(row, unfinished.pop(row).stopping.ranked()[: spec.n_best]) for row in over]
        if again:
            nested = None if observer is None else _renumbered(observer, again)
            for finished in search_by_row(job.part(again), spec, nested):
                yield [(again[row], hypotheses) for row, hypotheses in finished]


def _renumbered(observer: Observer, rows: Sequence[int]) -> Observer:
    """Return an observer for a part of a batch, whose row i is row `rows[i]` of the batch."""
    return lambda row, choice: observer(rows[row], choice)


def extend(
    run: BatchDecoding, spec: Beam, sources: Sequence[Source], coverage: Coverage, observer: Observer | None = None
) -> bool:
    """Extend all beams by one token. Return False if no positions are left; the beams are then cut where they are."""
    here = [sources[slot] for slot in run.slots]
    slices = [slice(slot * spec.beam_size, (slot + 1) * spec.beam_size) for slot in range(len(here))]
    log_probs = run.read([[text.ids for text in source.live] for source in here])
    if log_probs is None:
        before, _ = coverage.penalties()
        for source, beams in zip(here, slices, strict=True):
            if not source.over:
                source.cut(before[beams])
        return False
    coverage.record(run.decodings)
    before, now = coverage.penalties()
    choices = choose(spec, log_probs, here, run.step)
    for row, source, choice, beams in zip(run.slots, here, choices, slices, strict=True):
        if not source.over:
            if observer is not None:
                observer(row, choice)
            source.take(choice, run.step, before[beams], now[beams])
        if not source.over and run.job.cancelled(row):
            source.end()
    tokens, parents = [source.tokens for source in here], [source.parents for source in here]
    coverage.follow(run.follow(tokens, parents, [source.over for source in here]))
    return True


def choose(spec: Beam, log_probs: Float[Tensor, "B V"], sources: Sequence[Source], step: int) -> list[Choice]:
    """Return the `Choice` of candidates for every source in this step."""
    totals, eos = [source.totals() for source in sources], sources[0].eos
    if spec.groups > 1:
        return diverse(log_probs, totals, eos, spec.groups, spec.diversity)
    choices = plain(log_probs, totals, eos)
    for slot, source in enumerate(sources):
        if source.goal is not None and not source.over:
            rows = log_probs[slot * spec.beam_size : (slot + 1) * spec.beam_size]
            choices[slot] = constrained(rows, source.live, source.goal, source.limit - step - 1, eos)
    return choices
