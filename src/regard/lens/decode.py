"""Decode one text with a beam search that records all hypotheses it considers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from regard.batch import Batch, pad
from regard.decoding.beam import Beam, search
from regard.decoding.constraint import bind_all
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.job import prepare
from regard.errors import SpecError
from regard.inference.text import Warn
from regard.inspection.beam_tree import BeamTree
from regard.runs.decode import ensemble

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel

NEW = 20  # default number of tokens of a continuation


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of a beam search for one text, best hypothesis first, and the tree of all hypotheses."""

    hypotheses: list[Hypothesis]
    tree: BeamTree
    search: Beam


def beam_search(run: "TrainedModel", beam: int | None) -> Beam:
    """Return the beam search of the run's recipe with `beam` beams, which are all returned, best first.

    If the recipe samples, the search is beam search with one beam unless `beam` is given.
    """
    own = run.recipe.decode
    if not isinstance(own, Beam):
        return Beam(beam or 1, n_best=beam or 1)
    beams = beam or own.beam_size
    return replace(own, beam_size=beams, n_best=beams)


def decode(
    run: "TrainedModel", text: str, beam: int | None, forced: Sequence[int], max_len: int | None, warn: Warn
) -> Decoded:
    """Translate or continue a text. Every output begins with the tokens `forced`."""
    texts, spec = ensemble([run], warn), beam_search(run, beam)
    if run.command == "translate":
        (ids,) = texts.sources([text])
        limits = Limits(derived=run.recipe.length_limit)
    else:
        new = max(max_len or NEW, len(forced) + 1)
        (ids,) = texts.prompts([text if text or texts.begin else "\n"], limits=Limits(max_len=new))
        left = texts.positions.left(len(ids))
        limits = Limits(max_len=new if left is None else max(1, min(new, left)))
    rows, seg = pad([ids])
    source = run.command == "translate"
    batch = Batch(rows, source=rows, source_seg=seg) if source else Batch(rows, target_seg=seg)
    if any(not 0 <= token < run.tokenizer.size for token in forced):
        raise SpecError("forced", f"has an id that is not in the vocabulary of {run.tokenizer.size:,} tokens")
    rules = bind_all(spec.constraints, run.tokenizer)
    if forced:
        rules = replace(rules, prefix=tuple(forced))
    job = prepare([run.model], batch.to(run.device), texts.ends, limits, rules, None)  # type: ignore[list-item]
    tree = BeamTree(texts.ends.eos, job.most[0])
    return Decoded(search(job, replace(spec, constraints=()), tree)[0], tree, spec)
