"""One decoding of a batch, step by step: what every search shares."""

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be found: the models, the sources or prompts, and what holds for each row of them."""

    models: Ensemble
    batch: Batch
    ends: SpecialTokens
    rules: tuple[TokenConstraints, ...]
    least: tuple[int, ...]  # tokens before a row may end
    most: tuple[int, ...]  # tokens a row may have
    rows: tuple[int, ...]  # the caller's numbers of the rows
    lengths: tuple[int, ...]  # of what each row reads before it says anything: its prompt, or its source, or bos

    def part(self, rows: Sequence[int]) -> "Job":
        """The same for some rows of a batch of prompts or sources."""
        at = torch.tensor(rows, device=self.batch.target.device)
        whole = self.batch
        read = (whole.target, whole.target_seg) if whole.source is None else (whole.source, whole.source_seg)
        width = max(row_lengths(*read)[row] for row in rows)
        if whole.source is None:
            seg = None if whole.target_seg is None else whole.target_seg[at, :width]
            batch = Batch(whole.target[at, :width], target_seg=seg)
        else:  # the target is not read
            seg = None if whole.source_seg is None else whole.source_seg[at, :width]
            batch = Batch(whole.target[at, :1], source=whole.source[at, :width], source_seg=seg)
        picked = {
            name: tuple(getattr(self, name)[row] for row in rows)
            for name in ("rules", "least", "most", "rows", "lengths")
        }
        return replace(self, batch=batch, **picked)


def prepare(
    models: Generator | Sequence[Generator],
    batch: Batch,
    ends: SpecialTokens,
    limits: Limits | Sequence[Limits],
    rules: TokenConstraints | Sequence[TokenConstraints],
    rows: Sequence[int] | None,
) -> Job:
    """Check what was asked for and work out the limits of every row."""
    B = batch.target.shape[0]
    every = (rules,) * B if isinstance(rules, TokenConstraints) else tuple(rules)
    bounds = (limits,) * B if isinstance(limits, Limits) else tuple(limits)
    numbers = tuple(range(B)) if rows is None else tuple(rows)
    for name, given in (("rules", every), ("limits", bounds), ("rows", numbers)):
        if len(given) != B:
            raise DataError(f"{name}: {len(given)} for a batch of {B} rows; give one for each, or one for all")
    if min(numbers) < 0:
        raise DataError(f"rows: a row has no negative number, as {min(numbers)}")
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
            raise DataError(
                f"rules: row {row} needs {needed} tokens for its prefix and what is required of it, and max_len is "
                f"{most[row]}; raise it"
            )
    ensemble = Ensemble(models)
    read_first = any(model.source_first for model in ensemble.models)
    lengths = row_lengths(batch.target, batch.target_seg) if sources is None else sources if read_first else (1,) * B
    least = tuple(bound.min_len for bound in bounds)
    return Job(ensemble, batch, ends, every, least, tuple(most), numbers, lengths)


def row_lengths(ids: Int[Tensor, "B T"], seg: Int[Tensor, "B T"] | None) -> tuple[int, ...]:
    """How many real tokens each row has."""
    return (ids.shape[1],) * ids.shape[0] if seg is None else tuple((seg != 0).sum(1).tolist())


class BatchDecoding:
    """A decoding under way. Slot i runs source `slots[i]` in `beams` rows; sources that are done leave their slots."""

    def __init__(self, job: Job, beams: int, steps: int, watch: bool = False) -> None:
        """`steps` is how often it will be asked at most; `watch` records what is looked at in the source."""
        self.job, self.beams, self.step = job, beams, 0
        self.device = job.batch.target.device
        self.slots = list(range(len(job.most)))
        self.running = self.slots  # the sources that are not done
        self.bans = Bans(job.rules, job.least, job.ends, beams, self.device)
        self.ids, self.seg = first_read(job, beams)
        with torch.inference_mode():
            self.decodings: Decodings = job.models.start(job.batch, self.ids.shape[1] + steps - 1, beams)
        if watch:
            self.decodings.watch()
        self.droppable = self.decodings.droppable()

    def read(self, said: Sequence[Sequence[Ids]]) -> Float[Tensor, "B V"] | None:
        """Read the next tokens: log p of what follows, -inf where a rule forbids it; None if there is no more room.

        `said` is what the beams of every slot have said, as far as rules may want to know it.
        """
        try:
            log_probs = self.job.models.advance(self.ids, self.decodings, self.seg)
        except SpecError as error:
            # A model with a table of learned positions refuses to read beyond its end.
            if self.step == 0 or not error.path.endswith("max_len"):
                raise
            return None
        self.bans.apply(log_probs, self.step, self.slots, said)
        return log_probs

    def follow(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], done: Sequence[bool]
    ) -> list[int]:
        """Beam k of slot i goes on with tokens[i][k] after its beam parents[i][k]; returns which row each row was.

        Slots that are done are dropped once they are an eighth of all, as dropping costs about as much as reordering;
        until then they are carried along.
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
        """The sources under way whose prompts are shorter than others: alone, they would have more room."""
        longest = max(self.job.lengths)
        return [source for source in self.running if self.job.lengths[source] < longest]


def first_read(job: Job, beams: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"] | None]:
    """What the decoder begins with: bos where there is a source, else the prompts, without superfluous padding."""
    batch, width = job.batch, max(job.lengths)
    if batch.source is not None:
        rows = batch.source.shape[0] * beams
        return torch.full((rows, 1), job.ends.bos, dtype=torch.int64, device=batch.source.device), None
    seg = None if batch.target_seg is None or min(job.lengths) == width else batch.target_seg[:, :width]
    ids = batch.target[:, :width].repeat_interleave(beams, 0)
    return ids, None if seg is None else seg.repeat_interleave(beams, 0)
