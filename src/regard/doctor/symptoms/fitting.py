"""Over- and under-fitting: whether to continue, to stop, or to change the dropout rate or the size of the model."""

from collections.abc import Iterator
from statistics import mean

from regard.doctor.finding import Finding
from regard.doctor.run_record import RunRecord

WORSE, NATS = 0.04, 0.05  # share, and nats, by which the validation loss has risen above its minimum
BETTER = 0.01  # share by which the validation loss still falls over the last quarter of the validations
LEAST = 3  # smallest number of validations


def fitting(run: RunRecord) -> Iterator[Finding]:
    """Compare the trends of training and validation loss, and advise to continue or to stop."""
    valid = run.valid_loss
    if len(valid) < LEAST:
        return
    best, low = min(valid, key=lambda point: point[1])
    step, last = valid[-1]
    train_best, train_last = _train_loss_near(run, best), _train_loss_near(run, step)
    evidence = [f"lowest validation loss {low:.3f} at step {best:,}; {last:.3f} at step {step:,}"]
    if train_best is not None and train_last is not None:
        evidence.append(f"training loss {train_best:.3f} and {train_last:.3f} at these steps")
    falls = train_best is None or train_last is None or train_last < train_best
    if last > low + max(NATS, WORSE * low) and falls and best < step:
        yield Finding(
            "fitting",
            "warning",
            "the model overfits: the validation loss rises while the training loss falls",
            tuple(evidence),
            f"stop: more steps do not help, and step {best:,} is the best. For a better model: more training text, "
            f"more dropout (model.dropout is {getattr(run.recipe.model, 'dropout', 0.0):g}), a smaller model",
        )
    elif run.end is None or not run.end.get("finished"):
        yield _unfinished(run, evidence)
    else:
        yield _finished(run, evidence, train_last, last)


def _unfinished(run: RunRecord, evidence: list[str]) -> Finding:
    valid = [value for _, value in run.valid_loss]
    recent = valid[-max(2, len(valid) // 4) :]
    earlier = valid[: -len(recent)] or valid[:1]
    falling = min(recent) < (1 - BETTER) * min(earlier)
    if falling:
        return Finding("fitting", "note", "go on: the validation loss still falls", tuple(evidence))
    message = f"the validation loss has not fallen in the last {len(recent)} validations"
    return Finding("fitting", "note", message, tuple(evidence), "let early stopping decide, or stop and use the model")


def _finished(run: RunRecord, evidence: list[str], train: float | None, last: float) -> Finding:
    if train is not None and train >= 0.98 * last and run.objective_model != "classifier":
        return Finding(
            "fitting",
            "note",
            "training has finished, and the model does not overfit: it could learn more",
            tuple(evidence),
            "for a better model, train again with more time (--time), a larger model, or less dropout",
        )
    return Finding(
        "fitting",
        "note",
        "training has finished, with the usual distance between training and validation loss",
        tuple(evidence),
        "for a better model, more training text helps most; then more dropout and more time",
    )


def _train_loss_near(run: RunRecord, step: int) -> float | None:
    """Return the mean of the training losses that were logged just before a step."""
    values = [value for at, value in run.train_loss if at <= step][-3:]
    return mean(values) if values else None
