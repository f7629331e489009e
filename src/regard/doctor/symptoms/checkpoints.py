"""Checkpoints that were damaged."""

from collections.abc import Iterator

from regard.doctor.finding import SHOWN, Finding
from regard.doctor.run_record import RunRecord


def damaged_checkpoints(run: RunRecord) -> Iterator[Finding]:
    """Find checkpoints that training could not use, because their files had changed or were missing."""
    damaged = run.of_kind("damaged")
    if not damaged:
        return
    count = "1 damaged checkpoint was" if len(damaged) == 1 else f"{len(damaged):,} damaged checkpoints were"
    yield Finding(
        "checkpoints",
        "warning",
        f"{count} skipped",
        tuple(f"step {event['step']:,}: {event.get('problem')}" for event in damaged[:SHOWN]),
        f"look for faults of the disk that holds {run.folder.path}, and for programs that change its files; with a "
        "larger train.keep_state, training can resume from more checkpoints",
    )
