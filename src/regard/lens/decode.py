"""The input of a model for one request of the lens: the text, and the output, which is generated or given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from regard.batch import Batch, pad
from regard.decoding.beam import Beam, search
from regard.decoding.constraint import bind_all
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.job import prepare
from regard.errors import SpecError
from regard.inference.text import Warn
from regard.inspection.beam_tree import BeamTree
from regard.inspection.recording import UNKNOWN
from regard.runs.decode import ensemble
from regard.runs.inspect import batch_of

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel

NEW = 20  # default number of tokens of a continuation


@dataclass(frozen=True, slots=True)
class Read:
    """The batch of one row that a model reads, and how its output was chosen.

    The output begins after `before` tokens of the target: bos, or a prompt. `ids` are its tokens without eos.
    """

    batch: Batch
    before: int = 0
    ids: tuple[int, ...] = ()
    ended: bool = False
    search: Beam | None = None  # None: nothing is searched
    best: Hypothesis | None = None
    tree: BeamTree | None = None


def beam_search(run: "TrainedModel", beam: int | None) -> Beam:
    """Return the beam search of the run's recipe, with `beam` beams.

    If the recipe samples, the search is greedy search unless `beam` is given.
    """
    own = run.recipe.decode
    if not isinstance(own, Beam):
        return Beam(beam or 1)
    beams = beam or own.beam_size
    return replace(own, beam_size=beams, n_best=min(own.n_best, beams))


def decode(
    run: "TrainedModel", text: str, beam: int | None, forced: Sequence[int], max_len: int | None, warn: Warn
) -> Read:
    """Translate or continue a text by beam search.

    `forced` is a prefix of the output, as token ids. A translation equals that of `run.translate` with the same prefix.
    """
    check_ids(run, forced)
    texts, spec = ensemble([run], warn), beam_search(run, beam)
    first, limits = _input(run, text, max(max_len or NEW, len(forced) + 1), warn)
    rules = bind_all(spec.constraints, run.tokenizer)
    if forced:
        rules = replace(rules, prefix=tuple(forced))
    rows, seg = pad([first])
    translates = run.command == "translate"
    batch = Batch(rows, source=rows, source_seg=seg) if translates else Batch(rows, target_seg=seg)
    models: Any = [run.model]
    job = prepare(models, batch.to(run.device), texts.ends, limits, rules, None)
    tree = BeamTree(texts.ends.eos, job.most[0])
    (found,) = search(job, replace(spec, constraints=()), tree)
    if not found:
        raise SpecError("forced", "no output fits the constraints; release the forced tokens")
    best = found[0]
    read = _read(run, first, best.ids, best.ended)
    return replace(read, search=spec, best=best, tree=tree)


def written(run: "TrainedModel", text: str, ids: Sequence[int], warn: Warn) -> Read:
    """Return what the model reads if its whole output is `ids`, then eos."""
    check_ids(run, ids)
    first, _ = _input(run, text, len(ids) + 1, warn)
    return _read(run, first, ids, True)


def given(run: "TrainedModel", text: str, target: str, warn: Warn) -> Read:
    """Return what the model reads if its output is the text `target`, then eos."""
    return written(run, text, run.tokenizer.encode(target), warn)


def classified(run: "TrainedModel", text: str) -> Read:
    """Return what a classifier reads."""
    return Read(batch_of(run, text))


def check_ids(run: "TrainedModel", ids: Sequence[int]) -> None:
    """Raise SpecError for an id that cannot be part of an output."""
    control = {run.tokenizer.pad, run.tokenizer.bos, run.tokenizer.eos}
    for token in ids:
        if not 0 <= token < run.tokenizer.size:
            size = run.tokenizer.size
            raise SpecError("forced", f"{token} is not in the vocabulary of {size:,} tokens; leave it out")
        if token in control:
            raise SpecError("forced", f"{token} is the id of bos, eos or padding; only eos may be forced, as the last")


def _input(run: "TrainedModel", text: str, new: int, warn: Warn) -> tuple[list[int], Limits]:
    """Return the ids of the source or the prompt, and the limits of an output of up to `new` tokens."""
    texts = ensemble([run], warn)
    if run.command == "translate":
        return texts.sources([text])[0], Limits(derived=run.recipe.length_limit)
    (ids,) = texts.prompts([text if text or texts.begin else "\n"], limits=Limits(max_len=new))
    left = texts.positions.left(len(ids))
    return ids, Limits(max_len=new if left is None else max(1, min(new, left)))


def _read(run: "TrainedModel", first: Sequence[int], ids: Sequence[int], ended: bool) -> Read:
    """Return what the model reads if `ids` follow a source or a prompt `first`. Labels are the next tokens."""
    translates = run.command == "translate"
    begin = [run.tokenizer.bos] if translates else list(first)
    target = [*begin, *ids]
    labels = [*target[1:], run.tokenizer.eos if ended else UNKNOWN]
    source = torch.tensor([list(first)]) if translates else None
    batch = Batch(torch.tensor([target]), torch.tensor([labels]), source=source)
    return Read(batch.to(run.device), len(begin), tuple(ids), ended)
