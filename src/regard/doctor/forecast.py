"""Findings about what training needs: memory for the worst batch, time, disk space."""

from collections.abc import Iterator

from regard.doctor.finding import Finding, Level, share
from regard.doctor.probe import Probe
from regard.doctor.trial import SAFE

MANY = 0.02  # share of examples left out because of their length, above which there is a warning


def forecast(probe: Probe, free: int) -> Iterator[Finding]:
    """State whether the worst batch fits, the largest batch that does, and the time and disk space of training.

    `free` is the free disk space in bytes.
    """
    yield _memory(probe)
    yield Finding("time", "note", _time(probe))
    level: Level = "warning" if probe.disk > free else "note"
    yield Finding(
        "disk",
        level,
        f"the run folder needs up to {gigabytes(probe.disk)}; a checkpoint has {gigabytes(probe.checkpoint)}, and "
        f"{gigabytes(free)} are free",
        advice="free disk space, or keep fewer checkpoints (train.keep=1)" if level == "warning" else "",
    )
    if probe.left_out:
        part = probe.left_out / max(1, probe.examples)
        yield Finding(
            "left out",
            "warning" if part > MANY else "note",
            f"{probe.left_out:,} of {probe.examples:,} examples are too long and are left out ({share(part, 1)})",
            advice="split long texts into sentences, or increase data.max_len" if part > MANY else "",
        )


def _time(probe: Probe) -> str:
    how = "timed on typical batches" if probe.timed else "estimated"
    if probe.limit is not None and probe.seconds >= probe.limit:
        return f"training uses the whole time limit, {duration(probe.limit)}, on {probe.device} ({how})"
    return f"training takes about {duration(probe.seconds)} for {probe.steps:,} steps on {probe.device} ({how})"


def _memory(probe: Probe) -> Finding:
    how = "measured" if probe.measured else "estimated, not run"
    on = f"{gigabytes(probe.available)} available on {probe.device}"
    worst = f"the worst batch has {probe.worst}"
    largest = ""
    if probe.largest is not None:
        how_large = "found by bisection" if probe.largest_measured else "computed from two sizes"
        least = "at least " if probe.capped else ""
        largest = f"the largest batch that fits has {least}{probe.largest:,} tokens ({how_large})"
    evidence = tuple(line for line in (worst, largest) if line)
    needed = "more than there is" if probe.peak is None else gigabytes(probe.peak)
    if probe.fits:
        message = f"a step on the worst batch fits: {needed} of {on} ({how})"
        return Finding("memory", "note", message, evidence)
    message = f"a step on the worst batch does not fit: it needs {needed}, {on} ({how}; at most {SAFE:.0%} are used)"
    if probe.largest is None:
        advice = (
            f"the longest example has {probe.longest:,} tokens: leave it out with --set data.max_len=N, take a smaller "
            "model, or set train.checkpoint_layers=true"
        )
    else:
        times = -(-probe.tokens // max(1, probe.largest))
        advice = f"--set data.batching.tokens={probe.largest} --set train.accumulate={times}"
    return Finding("memory", "error", message, evidence, advice)


def gigabytes(size: float | int) -> str:
    """Return a number of bytes as text, such as "1.2 GB" or "35 MB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(1, round(size / 1e6)):,} MB"


def duration(seconds: float) -> str:
    """Return a duration as text, such as "40 s", "12 min" or "3.5 hours"."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} hours"
