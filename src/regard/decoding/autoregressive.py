"""AutoregressiveLoop: one path per row and no way back. Greedy search, sampling, and whatever is streamed."""

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

# (log-probs, the paths whose rows they are, the step) -> (token, log p) of each path; None where nothing can be said
Pick = Callable[[Float[Tensor, "B V"], "Sequence[Path]", int], list[tuple[int, float] | None]]


class Path:
    """What one row has said so far."""

    __slots__ = ("ids", "log_probs", "number", "over", "row", "sample", "total")

    def __init__(self, row: int, number: int, sample: int) -> None:
        """`row` is its place in the batch, `number` what the caller calls it."""
        self.row, self.number, self.sample = row, number, sample
        self.ids: tuple[int, ...] = ()
        self.log_probs: tuple[float, ...] = ()
        self.total, self.over = 0.0, False


class PathStep(NamedTuple):
    """One step of one path."""

    path: Path
    token: int | None  # None: it only came to its end
    hypothesis: Hypothesis | None  # at its end


@dataclass(frozen=True, slots=True)
class AutoregressiveLoop:
    """How paths are walked: how many from each row, who picks the token, what a score is, whether the end is asked for.

    `asks_again`: a path that has all the tokens it may have is still asked whether it ends there.
    """

    paths: int
    pick: Pick
    score: Callable[[float, int], float]
    asks_again: bool = True

    def steps(self, job: Job) -> Iterator[list[PathStep]]:
        """What every path says, step by step."""
        if any(rules.required for rules in job.rules):
            raise SpecError(
                "rules.required", "one path cannot make room for what is required; search with 2 beams or more"
            )
        paths = [[Path(row, number, sample) for sample in range(self.paths)] for row, number in enumerate(job.rows)]
        run = BatchDecoding(job, self.paths, max(job.most) + self.asks_again)
        while run.slots:
            with torch.inference_mode():
                said = self.step(run, [path for slot in run.slots for path in paths[slot]])
            if said is None:
                yield from self.without_room(run, paths)
                return
            yield said

    def step(self, run: BatchDecoding, paths: Sequence[Path]) -> list[PathStep] | None:
        """One step of all paths in the run, which then follows them; None if there is no room for it."""
        slots = [paths[i : i + self.paths] for i in range(0, len(paths), self.paths)]
        log_probs = run.read([[path.ids for path in slot] for slot in slots])
        if log_probs is None:
            return None
        picked = self.pick(log_probs, paths, run.step)
        said = [self.take(path, pick, run) for path, pick in zip(paths, picked, strict=True) if not path.over]
        tokens = [[run.job.ends.pad if path.over else path.ids[-1] for path in slot] for slot in slots]
        done = [all(path.over for path in slot) for slot in slots]
        run.follow(tokens, [range(self.paths)] * len(slots), done)
        return said

    def take(self, path: Path, pick: tuple[int, float] | None, run: BatchDecoding) -> PathStep:
        """Let a path say what was picked, or end."""
        most = run.job.most[path.row]
        if pick is None or (len(path.ids) == most and pick[0] != run.job.ends.eos):
            return PathStep(path, None, self.over(path, False))
        token, log_prob = pick
        path.log_probs, path.total = (*path.log_probs, log_prob), path.total + log_prob
        if token == run.job.ends.eos:
            return PathStep(path, None, self.over(path, True))
        path.ids = (*path.ids, token)
        full = len(path.ids) == most and not self.asks_again
        return PathStep(path, token, self.over(path, False) if full else None)

    def over(self, path: Path, ended: bool) -> Hypothesis:
        """The hypothesis of a path that goes no further."""
        path.over = True
        score = self.score(path.total, len(path.log_probs))
        return Hypothesis(path.ids, score, path.total, path.log_probs, ended)

    def without_room(self, run: BatchDecoding, paths: Sequence[Sequence[Path]]) -> Iterator[list[PathStep]]:
        """End the paths that cannot go on. Those that only shared their columns with longer prompts start anew."""
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
            before = [paths[again[said.path.row]][said.path.sample] for said in step]
            yield [
                said._replace(path=path)
                for path, said in zip(before, step, strict=True)
                if not path.over and (n >= run.step or said.hypothesis is not None)  # what came before is known
            ]

    def find(self, job: Job) -> list[list[Hypothesis]]:
        """Where every path of every row ends, in their order."""
        found: list[list[Hypothesis | None]] = [[None] * self.paths for _ in job.most]
        for step in self.steps(job):
            for path, _, hypothesis in step:
                if hypothesis is not None:
                    found[path.row][path.sample] = hypothesis
        return [[one for one in row if one is not None] for row in found]

    def stream(self, job: Job) -> Iterator[list[Piece]]:
        """The first path of every row, piece by piece."""
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
    """Greedy search: the likeliest token of every path, the lowest of those that tie."""
    totals = [[float("-inf") if path.over else path.total] for path in paths]
    return [(one[0].token, one[0].log_prob) if one else None for one in best(log_probs, totals, 1)]
