"""Losses that are not finite, skipped steps, and gradients that explode."""

from collections.abc import Iterator
from statistics import median

from regard.doctor.finding import Finding
from regard.doctor.run_record import RunRecord

SPIKE = 50.0  # a gradient norm of this multiple of the median is a spike
GROWTH = 20.0  # the gradient has exploded if the last norms are this multiple of the median
LEAST = 6  # smallest number of gradient norms in the log
ADVICE = (
    "lower train.optimizer.learning_rate, lengthen train.schedule.warmup, or clip more (train.clip=0.5); "
    "if one batch is to blame, look at its text"
)


def divergence(run: RunRecord) -> Iterator[Finding]:
    """Find steps whose loss or gradient was NaN or infinite."""
    finite = max((step for step, _ in run.train_loss), default=-1)
    bad = [
        f"step {event['step']:,}: the {name} is not a finite number"
        for event in run.of_kind("step")
        for name in ("loss", "gradient")
        # Training that went on had only skipped these steps.
        if name in event and event[name] is None and event["step"] >= finite
    ]
    if bad:
        step = int(bad[0].split(":")[0].removeprefix("step ").replace(",", ""))
        before = [value for at, value in run.train_loss if at < step]
        loss = f"the training loss was {before[-1]:.3f} before" if before else "the first losses are already not finite"
        yield Finding("divergence", "error", f"training diverged at step {step:,}", (*bad[:3], loss), ADVICE)
    skipped = run.of_kind("skipped")
    if skipped:
        told = tuple(
            ", ".join(
                [f"step {event['step']:,}", *(str(event[name]) for name in ("problem", "file") if event.get(name))]
            )
            for event in skipped[:3]
        )
        many = len(skipped) > 0.01 * max(1, run.step)
        yield Finding(
            "divergence",
            "error" if many else "warning",
            f"{len(skipped):,} steps were skipped, because the loss or the gradient was not finite",
            told,
            f"look at the saved batches; {ADVICE}",
        )


def gradients(run: RunRecord) -> Iterator[Finding]:
    """Find gradient norms that are far above the usual ones after the warm-up."""
    norms = [(step, value) for step, value in run.curve("step", "gradient") if step > run.warmup]
    if len(norms) < LEAST:
        return
    usual = median(value for _, value in norms)
    last = median(value for _, value in norms[-max(1, len(norms) // 5) :])
    first = median(value for _, value in norms[: max(1, len(norms) // 2)])
    spikes = [(step, value) for step, value in norms if value > SPIKE * max(usual, 1e-12)]
    evidence = tuple(f"step {step:,}: gradient norm {value:.3g}, median {usual:.3g}" for step, value in spikes[:3])
    if last > GROWTH * max(first, 1e-12):
        yield Finding(
            "gradients",
            "error",
            f"the gradient explodes: its norm has grown from {first:.3g} to {last:.3g}",
            evidence,
            ADVICE,
        )
    elif spikes:
        yield Finding(
            "gradients",
            "warning" if len(spikes) > 2 else "note",
            f"the gradient norm has {len(spikes)} spikes of more than {SPIKE:.0f} times the median",
            evidence,
            ADVICE,
        )
