"""Step-by-step decoding of one batch, which all search methods share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import Batch
from regard.decoding.constraints import Bans, Ids, TokenConstraints
from regard.decoding.ensemble import Decodings, Ensemble
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.required import automaton
from regard.errors import DataError, SpecError
from regard.models.base import Generator


def never(row: int) -> bool:  # noqa: ARG001
    """Return False: the outputs of all rows are wanted."""
    return False


@dataclass(frozen=True, slots=True)
class Job:
    """A batch to decode: the models, the sources or prompts, and the constraints and limits of each row."""

    models: Ensemble
    batch: Batch
    ends: SpecialTokens
    rules: tuple[TokenConstraints, ...]
    least: tuple[int, ...]  # minimum number of tokens for each row
    most: tuple[int, ...]  # maximum number of tokens for each row
    rows: tuple[int, ...]  # index of each row in the whole input, for the random numbers of sampling
    lengths: tuple[int, ...]  # number of tokens that each row reads before its first output: the prompt, source or bos
    prefill_chunk: int | None = None  # maximum number of input tokens that are processed at a time
    # Called at each step with the index of a row; True ends the search for this row early.
    cancelled: Callable[[int], bool] = never

    def part(self, rows: Sequence[int]) -> "Job":
        """Return a job with only the batch rows whose indices are in `rows`."""
        target, source, at = self.batch.target, self.batch.source, torch.tensor(rows, device=self.batch.target.device)
        ids, seg = (target, self.batch.target_seg) if source is None else (source, self.batch.source_seg)
        lengths = row_lengths(ids, seg)
        width = max(lengths[row] for row in rows)
        ids, seg = ids[at, :width], None if seg is None else seg[at, :width]
        # If there is a source, the target is not read.
        batch = Batch(ids, target_seg=seg) if source is None else Batch(target[at, :1], source=ids, source_seg=seg)
        names = ("rules", "least", "most", "rows", "lengths")
        picked = {name: tuple(getattr(self, name)[row] for row in rows) for name in names}
        return replace(self, batch=batch, cancelled=lambda row: self.cancelled(rows[row]), **picked)


def prepare(
    models: Generator | Sequence[Generator],
    batch: Batch,
    ends: SpecialTokens,
    limits: Limits | Sequence[Limits],
    rules: TokenConstraints | Sequence[TokenConstraints],
    rows: Sequence[int] | None,
    prefill_chunk: int | None = None,
) -> Job:
    """Return the `Job` for a batch: check the constraints, and compute the length limits of every row."""
    B = batch.target.shape[0]
    every = (rules,) * B if isinstance(rules, TokenConstraints) else tuple(rules)
    bounds = (limits,) * B if isinstance(limits, Limits) else tuple(limits)
    numbers = tuple(range(B)) if rows is None else tuple(rows)
    for name, given in (("rules", every), ("limits", bounds), ("rows", numbers)):
        if len(given) != B:
            raise DataError(
                f"{name}: {len(given)} values for a batch of {B} rows; give one for each row, or one for all"
            )
    if min(numbers) < 0:
        raise DataError(f"rows: a row number must be at least 0, not {min(numbers)}")
    if batch.packed:
        raise DataError("packed: a search has one source or prompt per row; give it a padded batch")
    for each in dict.fromkeys(every):
        each.check(ends)
    sources = row_lengths(batch.source, batch.source_seg) if batch.source is not None else None
    most = []
    for row, (each, bound) in enumerate(zip(every, bounds, strict=True)):
        goal = automaton(each.required)
        needed = len(each.prefix) + goal.distance(goal.follow(goal.start, each.prefix))
        most.append(bound.most(None if sources is None else sources[row], needed))
        if needed > most[row]:
            what = f"{needed} tokens for its prefix and its required sequences"
            raise DataError(f"rules: row {row} needs {what}, but max_len is {most[row]}; raise it")
    ensemble = Ensemble(models)
    if prefill_chunk is not None:
        ensemble.check_prefill()
    read_first = any(model.source_first for model in ensemble.models)
    lengths = row_lengths(batch.target, batch.target_seg) if sources is None else sources if read_first else (1,) * B
    least = tuple(bound.min_len for bound in bounds)
    return Job(ensemble, batch, ends, every, least, tuple(most), numbers, lengths, prefill_chunk)


def row_lengths(ids: Int[Tensor, "B T"], seg: Int[Tensor, "B T"] | None) -> tuple[int, ...]:
    """Return the number of tokens in each row, without padding."""
    return (ids.shape[1],) * ids.shape[0] if seg is None else tuple((seg != 0).sum(1).tolist())


class BatchDecoding:
    """The state of decoding one batch, step by step.

    The batch has a group of `beams` rows for every source (or prompt), and the i-th group belongs to the source with
    index `slots[i]`. Finished sources are dropped.
    """

    def __init__(self, job: Job, beams: int, steps: int, watch: bool = False) -> None:
        """`steps` is the maximum number of steps. If `watch` is true, attention weights are recorded."""
        self.job, self.beams, self.step = job, beams, 0
        self.device = job.batch.target.device
        self.slots = list(range(len(job.most)))
        self.running = self.slots  # the unfinished sources
        self.bans = Bans(job.rules, job.least, job.ends, beams, self.device)
        self.ids, self.seg = first_read(job, beams)
        with torch.inference_mode():
            room = self.ids.shape[1] + steps - 1
            self.decodings: Decodings = job.models.start(job.batch, room, beams, prefill_chunk=job.prefill_chunk)
        if watch:
            self.decodings.watch()
        self.droppable = self.decodings.droppable()

    def read(self, outputs: Sequence[Sequence[Ids]]) -> Float[Tensor, "B V"] | None:
        """Feed the last tokens to the models and return log p of the next token, or None if no positions are left.

        Banned tokens have log p = -inf. `outputs` are the ids that the beams of each source have generated so far.
        Constraints may depend on these ids.
        """
        try:
            log_probs = self.job.models.advance(self.ids, self.decodings, self.seg)
        except SpecError as error:
            # A model with learned positions cannot read more tokens than its position table has rows.
            if self.step == 0 or not error.path.endswith("max_len"):
                raise
            return None
        self.bans.apply(log_probs, self.step, self.slots, outputs)
        return log_probs

    def follow(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], done: Sequence[bool]
    ) -> list[int]:
        """Continue the beams with new tokens. Return, for each new row, the index of the old row that it continues.

        Beam k in group i continues beam `parents[i][k]` of the group with the token `tokens[i][k]`. `done[i]` is true
        if the source of group i is finished. Finished groups stay in the batch until they make up an eighth of all
        groups. Then they are dropped together, because dropping costs about as much as reordering.
        """
        left = [slot for slot, over in enumerate(done) if not over]
        self.running = [self.slots[slot] for slot in left]
        self.seg, self.step = None, self.step + 1
        if not left:
            self.slots = []
            return []
        if self.droppable and (len(done) - len(left)) * 8 >= len(done) > len(left):
            self.decodings.keep(torch.tensor(left, device=self.device))
            self.slots = self.running
        else:
            left = list(range(len(done)))
        moved = [at * self.beams + parent for at, slot in enumerate(left) for parent in parents[slot]]
        if moved != list(range(len(moved))):
            self.decodings.reorder(torch.tensor(moved, device=self.device))
        self.ids = torch.tensor([token for slot in left for token in tokens[slot]], device=self.device)[:, None]
        return [slot * self.beams + parent for slot in left for parent in parents[slot]]

    def short(self) -> list[int]:
        """Return the indices of unfinished prompts (or sources) that are shorter than the longest one of the job.

        In a separate batch, they have more positions left for their outputs.
        """
        longest = max(self.job.lengths)
        return [source for source in self.running if self.job.lengths[source] < longest]


def first_read(job: Job, beams: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"] | None]:
    """Return the ids and the segments of the decoder's first input: bos if there are sources, else the prompts.

    Segment 0 is padding. Padding shared by all prompts is removed. If no padding is left, the segments are None.
    """
    batch, width = job.batch, max(job.lengths)
    if batch.source is not None:
        rows = batch.source.shape[0] * beams
        return torch.full((rows, 1), job.ends.bos, dtype=torch.int64, device=batch.source.device), None
    seg = None if batch.target_seg is None or min(job.lengths) == width else batch.target_seg[:, :width]
    ids = batch.target[:, :width].repeat_interleave(beams, 0)
    return ids, None if seg is None else seg.repeat_interleave(beams, 0)
