"""Autoregressive decoding loop for greedy search, sampling and streaming: each step adds one token to every output."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.decoding.hypothesis import Hypothesis, Piece
from regard.decoding.job import BatchDecoding, Job
from regard.decoding.rank import NEVER, best
from regard.errors import SpecError

# (log-probabilities, one path per row, index of the step) -> (token, log p) per path, None if every token is banned
Pick = Callable[[Float[Tensor, "B V"], "Sequence[Path]", int], list[tuple[int, float] | None]]


@dataclass(eq=False, slots=True)
class Path:
    """An output that is being generated for a batch row: its tokens so far and their log-probabilities."""

    row: int  # index in the batch
    number: int  # index of the row in the whole input, for the random numbers of sampling
    sample: int  # index among the outputs of the row
    tokens: list[int] = field(default_factory=list)  # a list, because tuples would be copied at every step
    log_probs: list[float] = field(default_factory=list)
    total: float = 0.0
    over: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens generated so far, as a tuple."""
        return tuple(self.tokens)


class PathStep(NamedTuple):
    """The result of one decoding step for one output: a new token, or the finished hypothesis, or both."""

    path: Path
    token: int | None  # None: the path ended without a new token
    hypothesis: Hypothesis | None  # None: the path has not ended


@dataclass(frozen=True, slots=True)
class AutoregressiveLoop:
    """A decoding loop that generates `paths` outputs for each batch row."""

    paths: int
    pick: Pick  # chooses the tokens
    score: Callable[[float, int], float]  # (log-probability, length) -> score of an output
    eos_at_limit: bool = True  # a path of the maximum length may still end with eos

    def steps(self, job: Job) -> Iterator[list[PathStep]]:
        """Decode a batch. After each step, yield one `PathStep` for every output that was not finished earlier."""
        if any(rules.required for rules in job.rules):
            raise SpecError("rules.required", "required words need a beam search; set beam_size to 2 or more")
        paths = [[Path(row, number, sample) for sample in range(self.paths)] for row, number in enumerate(job.rows)]
        run = BatchDecoding(job, self.paths, max(job.most) + self.eos_at_limit)
        while run.slots:
            with torch.inference_mode():
                steps = self.step(run, [path for slot in run.slots for path in paths[slot]])
            if steps is None:
                yield from self.without_room(run, paths)
                return
            yield steps

    def step(self, run: BatchDecoding, paths: Sequence[Path]) -> list[PathStep] | None:
        """Generate one token for every output in `paths` and return the results, or None if no positions are left."""
        slots = [paths[i : i + self.paths] for i in range(0, len(paths), self.paths)]
        constrained = any(run.bans.follows)  # otherwise the outputs so far are not read
        log_probs = run.read([[path.ids if constrained else () for path in slot] for slot in slots])
        if log_probs is None:
            return None
        picked = self.pick(log_probs, paths, run.step)
        picked = [None if run.job.cancelled(path.row) else pick for path, pick in zip(paths, picked, strict=True)]
        steps = [self.take(path, pick, run) for path, pick in zip(paths, picked, strict=True) if not path.over]
        tokens = [[run.job.ends.pad if path.over else path.tokens[-1] for path in slot] for slot in slots]
        done = [all(path.over for path in slot) for slot in slots]
        run.follow(tokens, [range(self.paths)] * len(slots), done)
        return steps

    def take(self, path: Path, pick: tuple[int, float] | None, run: BatchDecoding) -> PathStep:
        """Append a token to an output, or end the output. `pick` is (token, log p), or None to end the output here."""
        most = run.job.most[path.row]
        if pick is None or (len(path.tokens) == most and pick[0] != run.job.ends.eos):
            return PathStep(path, None, self.finish(path, False))
        token, log_prob = pick
        path.log_probs.append(log_prob)
        path.total += log_prob
        if token == run.job.ends.eos:
            return PathStep(path, None, self.finish(path, True))
        path.tokens.append(token)
        full = len(path.tokens) == most and not self.eos_at_limit
        return PathStep(path, token, self.finish(path, False) if full else None)

    def finish(self, path: Path, ended: bool) -> Hypothesis:
        """Mark an output as finished and return the hypothesis. `ended` is true if the model generated eos."""
        path.over = True
        score = self.score(path.total, len(path.log_probs))
        return Hypothesis(path.ids, score, path.total, tuple(path.log_probs), ended)

    def without_room(self, run: BatchDecoding, paths: Sequence[Sequence[Path]]) -> Iterator[list[PathStep]]:
        """Yield the remaining decoding steps after the longest prompts have run out of positions.

        Rows with shorter prompts are decoded again in a separate batch, in which more positions are left. The outputs
        of all other rows end.
        """
        again = run.short()
        yield [
            PathStep(path, None, self.finish(path, False))
            for slot in run.slots
            if slot not in again
            for path in paths[slot]
            if not path.over
        ]
        if not again:
            return
        for n, step in enumerate(self.steps(run.job.part(again))):
            before = [paths[again[each.path.row]][each.path.sample] for each in step]
            yield [
                each._replace(path=path)
                for path, each in zip(before, step, strict=True)
                if not path.over and (n >= run.step or each.hypothesis is not None)  # earlier steps were yielded before
            ]

    def find(self, job: Job) -> list[list[Hypothesis]]:
        """Decode a batch. Return one list of hypotheses per batch row, in the order of the sample indices."""
        finished = dict(chain.from_iterable(self.find_by_row(job)))
        return [finished[row] for row in range(len(job.most))]

    def find_by_row(self, job: Job) -> Iterator[list[tuple[int, list[Hypothesis]]]]:
        """Decode a batch. After each step, yield the index and the hypotheses of every row that is finished."""
        hypotheses: list[list[Hypothesis | None]] = [[None] * self.paths for _ in job.most]
        missing = [self.paths] * len(job.most)
        for step in self.steps(job):
            rows = []
            for path, _, hypothesis in step:
                if hypothesis is not None:
                    hypotheses[path.row][path.sample] = hypothesis
                    missing[path.row] -= 1
                    rows += [path.row] if not missing[path.row] else []
            yield [(row, [each for each in hypotheses[row] if each is not None]) for row in rows]

    def stream(self, job: Job) -> Iterator[list[Piece]]:
        """Decode a batch. After each step, yield one `Piece` (the new token) for every unfinished output."""
        for step in self.steps(job):
            if step:
                yield [Piece(path.row, () if token is None else (token,), whole) for path, token, whole in step]


def likeliest(
    log_probs: Float[Tensor, "B V"],
    paths: Sequence[Path],
    step: int,  # noqa: ARG001
) -> list[tuple[int, float] | None]:
    """Greedy search: return (token, log p) for the likeliest token of every path. In a tie, choose the lowest id."""
    totals = [[NEVER if path.over else path.total] for path in paths]
    return [(ranked[0].token, ranked[0].log_prob) if ranked else None for ranked in best(log_probs, totals, 1)]
