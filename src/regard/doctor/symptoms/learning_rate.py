"""A learning rate that is too high: the loss stays near that of token frequencies, or rises after the warm-up."""

from collections.abc import Iterator
from statistics import mean

from regard.doctor.finding import Finding
from regard.doctor.run_record import RunRecord
from regard.planner import suggested_rate

NEAR = 0.92  # a loss above this share of the unigram entropy has hardly used the context
RISE, SHARE = 0.3, 0.1  # nats, and share of the loss, by which it has risen above its minimum
TIMES = 4.0  # a learning rate is high from this multiple of the one that is suggested for the width of the model
PATIENT = 150  # steps after the warm-up that a model needs to do better than token frequencies
LEAST = 3  # smallest number of losses in the log


def learning_rate(run: RunRecord) -> Iterator[Finding]:
    """Find a loss that rises after the warm-up, or that does not fall below the entropy of the token frequencies."""
    losses = [(step, value) for step, value in run.train_loss if step > run.warmup] or run.train_loss
    if len(losses) < LEAST:
        return
    tail = losses[-max(2, len(losses) // 5) :]
    last = mean(value for _, value in tail)
    step, low = min(run.train_loss, key=lambda point: point[1])
    entropy, rate = run.unigram_entropy, run.peak_rate
    suggested = _suggested(run)
    high = bool(suggested) and rate > TIMES * suggested
    evidence = [f"training loss {last:.3f} in steps {tail[0][0]:,} to {tail[-1][0]:,}"]
    if entropy is not None:
        evidence.append(f"entropy of the token frequencies: {entropy:.3f}")
    evidence.append(f"peak learning rate {rate:g}" + (f"; {suggested:g} suits the model" if suggested else ""))
    advice = f"lower the peak learning rate: --set train.optimizer.learning_rate={_lower(rate, suggested):.2g}"
    if last > low + max(RISE, SHARE * low) and step < 0.7 * run.step:
        evidence.insert(0, f"lowest training loss {low:.3f} at step {step:,}")
        yield Finding(
            "learning rate", "error", "the training loss has risen after the warm-up", tuple(evidence), advice
        )
    elif entropy is not None and last > NEAR * entropy and run.step > run.warmup + PATIENT:
        message = f"the training loss stays near that of token frequencies ({last:.2f} of {entropy:.2f} nats)"
        if high:
            yield Finding(
                "learning rate", "error", f"{message}: the learning rate is too high", tuple(evidence), advice
            )
        else:
            other = "train longer (--time), check the text with the doctor, and try a lower and a higher learning rate"
            yield Finding(
                "learning rate", "warning", f"{message}: the model has learned nothing", tuple(evidence), other
            )
    elif high:
        message = (
            f"the peak learning rate is {rate / suggested:.0f} times the suggested one, and yet training is stable"
        )
        yield Finding("learning rate", "note", message, tuple(evidence[-1:]))


def _suggested(run: RunRecord) -> float:
    optimizer = run.recipe.train.optimizer
    if optimizer is None or not run.peak_rate or optimizer.kind not in ("adamw", "muon"):
        return 0.0
    return suggested_rate(run.recipe.data.objective, run.recipe.model, optimizer)


def _lower(rate: float, suggested: float) -> float:
    return min(rate / 3, suggested) if suggested else rate / 3
