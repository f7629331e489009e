"""The outputs of the model: one output for all sources, copies of the source, loops, outputs that ignore the source."""

from collections import Counter
from collections.abc import Iterator

from regard.doctor.finding import SHOWN, Finding, quoted, share
from regard.doctor.run_record import Outputs, RunRecord
from regard.training import degenerate

LEAST = 10  # smallest number of outputs that are judged
SAME = 0.2  # share of equal outputs above which, beyond that of the references, the output has collapsed
FEW = 0.25  # and the share of different outputs, relative to that of the references
COPIED = 0.3  # share of outputs that copy the source, beyond that of the references
USE = 0.05  # nats per token by which the own source must be better than that of another example


def collapse(run: RunRecord) -> Iterator[Finding]:
    """Find the same output for many different sources."""
    found = run.outputs
    if found is None or len(found.outputs) < LEAST:
        return
    (text, count), references = Counter(found.outputs).most_common(1)[0], Counter(found.references)
    usual = references.most_common(1)[0][1]
    total, different = len(found.outputs), len(set(found.outputs))
    evidence = (
        f"{quoted(text)} for {count:,} of {total:,} sources; the most frequent reference occurs {usual:,} times",
        f"{different:,} different outputs, {len(references):,} different references",
    )
    same = (count - usual) / total > SAME
    few = different < FEW * len(references) and len(references) > LEAST
    if run.objective_model == "classifier":
        same = different == 1 and len(references) > 1
        few = False
    if same or few:
        what = f"writes the same sentence for {share(count, total)} of the validation examples"
        if run.objective_model == "classifier":
            what = f"predicts {quoted(text)} for all validation examples"
        elif not same:
            what = f"writes only {different:,} different sentences for {total:,} sources"
        yield Finding(
            "outputs",
            "error",
            f"output collapse: the model {what}",
            evidence,
            "lower the learning rate or lengthen the warm-up; check that source and target lines belong together; "
            "train longer, if the loss still falls",
        )


def copying(run: RunRecord) -> Iterator[Finding]:
    """Find outputs that are copies of their source."""
    found = run.outputs
    if found is None or run.objective_model != "sequence_to_sequence" or len(found.outputs) < LEAST:
        return
    copied = [i for i, output in enumerate(found.outputs) if _same(output, found.sources[i])]
    right = sum(_same(found.references[i], found.sources[i]) for i in range(len(found.outputs)))
    total = len(found.outputs)
    if right > 0.5 * total:
        yield Finding(
            "copies",
            "warning",
            f"in {share(right, total)} of the validation examples the reference is the source, so copying is rewarded",
            tuple(
                f"{quoted(found.sources[i])}"
                for i in range(min(SHOWN, total))
                if _same(found.references[i], found.sources[i])
            ),
            "remove copies from the validation text: its scores say nothing about translation",
        )
    elif (len(copied) - right) / total > COPIED:
        yield Finding(
            "copies",
            "error",
            f"copy collapse: {share(len(copied), total)} of the outputs are the source "
            f"({share(right, total)} of the references)",
            _examples(found, copied),
            "remove untranslated copies from the training text (regard doctor --source ... --target ...)",
        )


def _same(one: str, other: str) -> bool:
    return one.split() == other.split()


def _examples(found: Outputs, chosen: list[int]) -> tuple[str, ...]:
    return tuple(
        f"{quoted(found.sources[i])} -> {quoted(found.outputs[i])}, reference {quoted(found.references[i])}"
        for i in chosen[:SHOWN]
    )


def endings(run: RunRecord) -> Iterator[Finding]:
    """Find outputs that do not end, and outputs with repetition loops."""
    for sentence in degenerate.warnings(run.scores):
        what, _, advice = sentence.partition("; ")
        level = "warning" if run.step > run.steps / 2 else "note"
        yield Finding("endings", level, what, advice=advice)


def source_use(run: RunRecord) -> Iterator[Finding]:
    """Compare the validation loss with the right sources and with the sources of other examples."""
    gain = run.source_gain()
    if gain is None:
        return
    own, other = gain
    evidence = (f"validation loss with the right sources {own:.3f}, with those of other examples {other:.3f}",)
    if other - own < USE and run.step > run.warmup:
        yield Finding(
            "use of the source",
            "error",
            "the model ignores the source: its predictions are as good with the sources of other examples",
            evidence,
            "check that source and target lines belong together (regard doctor --source ... --target ...); otherwise "
            "train longer, with a lower learning rate",
        )
