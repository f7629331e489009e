"""The autoregressive loop of greedy search, sampling and streaming: one token for every path at each step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.decoding.hypothesis import Hypothesis, Piece
from regard.decoding.job import BatchDecoding, Job
from regard.decoding.rank import best
from regard.errors import SpecError

# (log-probs, the paths of their rows, the step) -> (token, log p) of each path; None where every token is banned
Pick = Callable[[Float[Tensor, "B V"], "Sequence[Path]", int], list[tuple[int, float] | None]]


class Path:
    """The tokens that one sample of a row has generated so far."""

    __slots__ = ("ids", "log_probs", "number", "over", "row", "sample", "total")

    def __init__(self, row: int, number: int, sample: int) -> None:
        """`row` is its index in the batch, `number` the caller's number of the row."""
        self.row, self.number, self.sample = row, number, sample
        self.ids: tuple[int, ...] = ()
        self.log_probs: tuple[float, ...] = ()
        self.total, self.over = 0.0, False


class PathStep(NamedTuple):
    """One step of one path."""

    path: Path
    token: int | None  # None: the path only ended
    hypothesis: Hypothesis | None  # once the path has ended


@dataclass(frozen=True, slots=True)
class AutoregressiveLoop:
    """Decode `paths` outputs of each row with the tokens that `pick` chooses; `score` ranks them.

    `eos_at_limit`: a path of the greatest length may still end with eos.
    """

    paths: int
    pick: Pick
    score: Callable[[float, int], float]
    eos_at_limit: bool = True

    def steps(self, job: Job) -> Iterator[list[PathStep]]:
        """Yield one step of every path at a time."""
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
        """Extend all paths by one token; None if the model has no position left for it."""
        slots = [paths[i : i + self.paths] for i in range(0, len(paths), self.paths)]
        log_probs = run.read([[path.ids for path in slot] for slot in slots])
        if log_probs is None:
            return None
        picked = self.pick(log_probs, paths, run.step)
        steps = [self.take(path, pick, run) for path, pick in zip(paths, picked, strict=True) if not path.over]
        tokens = [[run.job.ends.pad if path.over else path.ids[-1] for path in slot] for slot in slots]
        done = [all(path.over for path in slot) for slot in slots]
        run.follow(tokens, [range(self.paths)] * len(slots), done)
        return steps

    def take(self, path: Path, pick: tuple[int, float] | None, run: BatchDecoding) -> PathStep:
        """Extend a path by the token that was picked, or end it."""
        most = run.job.most[path.row]
        if pick is None or (len(path.ids) == most and pick[0] != run.job.ends.eos):
            return PathStep(path, None, self.over(path, False))
        token, log_prob = pick
        path.log_probs, path.total = (*path.log_probs, log_prob), path.total + log_prob
        if token == run.job.ends.eos:
            return PathStep(path, None, self.over(path, True))
        path.ids = (*path.ids, token)
        full = len(path.ids) == most and not self.eos_at_limit
        return PathStep(path, token, self.over(path, False) if full else None)

    def over(self, path: Path, ended: bool) -> Hypothesis:
        """End a path and return its hypothesis."""
        path.over = True
        score = self.score(path.total, len(path.log_probs))
        return Hypothesis(path.ids, score, path.total, path.log_probs, ended)

    def without_room(self, run: BatchDecoding, paths: Sequence[Sequence[Path]]) -> Iterator[list[PathStep]]:
        """End the paths without a position left; decode again those whose prompts share a batch with longer ones."""
        again = run.short()
        yield [
            PathStep(path, None, self.over(path, False))
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
        """Return the hypotheses of every row, in the order of its paths."""
        hypotheses: list[list[Hypothesis | None]] = [[None] * self.paths for _ in job.most]
        for step in self.steps(job):
            for path, _, hypothesis in step:
                if hypothesis is not None:
                    hypotheses[path.row][path.sample] = hypothesis
        return [[each for each in row if each is not None] for row in hypotheses]

    def stream(self, job: Job) -> Iterator[list[Piece]]:
        """Yield the tokens of the first path of every row as they are generated."""
        for step in self.steps(job):
            pieces = [
                Piece(path.row, () if token is None else (token,), hypothesis) for path, token, hypothesis in step
            ]
            if pieces:
                yield pieces


def likeliest(
    log_probs: Float[Tensor, "B V"],
    paths: Sequence[Path],
    step: int,  # noqa: ARG001
) -> list[tuple[int, float] | None]:
    """Greedy search: return the likeliest token of every path, the lowest id among equals."""
    totals = [[float("-inf") if path.over else path.total] for path in paths]
    return [(one[0].token, one[0].log_prob) if one else None for one in best(log_probs, totals, 1)]
