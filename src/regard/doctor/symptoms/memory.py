"""Training steps that ran out of memory and were computed in parts."""

from collections.abc import Iterator

from regard.doctor.finding import SHOWN, Finding
from regard.doctor.run_record import RunRecord


def split_batches(run: RunRecord) -> Iterator[Finding]:
    """Find batches that do not fit into memory as a whole."""
    splits = {str(event.get("shape")): event for event in run.of_kind("split")}  # the last event of each shape
    if not splits:
        return
    evidence = tuple(
        f"step {event['step']:,}: batches of {event.get('rows')} rows ({shape}) in {event.get('parts')} parts"
        for shape, event in splits.items()
    )
    parts = max(event["parts"] if type(event.get("parts")) is int else 1 for event in splits.values())
    tokens, accumulate = getattr(run.recipe.data.batching, "tokens", None), run.recipe.train.accumulate
    smaller = (
        f"--set data.batching.tokens={tokens // parts} and --set train.accumulate={accumulate * parts} have as many "
        "tokens per step"
        if tokens and tokens // parts
        else "choose smaller batches (data.batching) and more of them per step (train.accumulate)"
    )
    shapes = "batches of 1 shape are" if len(splits) == 1 else f"batches of {len(splits):,} shapes are"
    yield Finding(
        "memory",
        "warning",
        f"memory ran out in training steps; {shapes} computed in parts, which takes more time with the same gradient",
        evidence[:SHOWN],
        f"{smaller}; train.checkpoint_layers=true needs less memory",
    )
