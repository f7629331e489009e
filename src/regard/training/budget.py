"""Time budget of training: estimate how many training steps fit into the remaining time."""

import time
from collections import deque

RECENT = 64  # number of recent step durations to average, because batches differ in size
SHARE = 0.1  # largest share of the training time for validation
SPACING = 0.04  # smallest interval between validations, as a share of the time budget
FIRST = 0.1  # largest time before the first validation, as a share of the time budget


class Budget:
    """The time budget of training, and an estimate of the number of steps that fit into the budget.

    The budget is wall-clock time, including the time for reading text, validation and saving, and including earlier
    sessions if training is resumed. Random numbers depend only on the step, and checkpoints store the number of steps.
    Training with a time budget therefore resumes exactly, except that the number of steps is estimated again.
    """

    def __init__(self, seconds: float | None, began: float | None = None) -> None:
        """`seconds` is the budget, or None for no limit. `began` is the `time.monotonic()` when the session began."""
        self.seconds = seconds
        self.began = time.monotonic() if began is None else began
        self.earlier = 0.0  # seconds of earlier sessions
        self.durations: deque[tuple[int, float]] = deque(maxlen=RECENT)  # (number of steps, seconds)
        self.validation = 0.0  # duration of the last validation in seconds
        self.validated = self.began
        self.saving = 0.0

    @property
    def elapsed(self) -> float:
        """Time used by all sessions so far, in seconds."""
        return self.earlier + time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds left for training steps, after subtracting the time for the last validations and for saving."""
        assert self.seconds is not None
        return self.seconds - self.elapsed - self.ending

    @property
    def ending(self) -> float:
        """Seconds from the last step to the end: validating the last and the averaged weights, and saving."""
        return 2 * self.validation + 2 * self.saving

    def add(self, steps: int, seconds: float) -> None:
        """Record that `steps` training steps took `seconds` seconds."""
        self.durations.append((steps, seconds))

    def forget(self) -> None:
        """Discard the recorded step durations, because the next steps run at another speed."""
        self.durations.clear()

    def steps(self, step: int, planned: int) -> int:
        """Estimate the step at which training should end. `planned` is the previous estimate."""
        if self.seconds is None:
            return planned
        if self.left <= 0:
            return step
        if not self.durations:
            return max(planned, step + 1)
        per_step = sum(seconds for _, seconds in self.durations) / sum(steps for steps, _ in self.durations)
        validation = self.validation / max(self.spacing, 1e-9)  # seconds of validation per second of training
        return step + max(1, round(self.left / (1 + validation) / max(per_step, 1e-9)))

    @property
    def spacing(self) -> float:
        """Seconds of training between two validations, so that validations take at most `SHARE` of the total time."""
        assert self.seconds is not None
        return max(SPACING * self.seconds, self.validation * (1 - SHARE) / SHARE)

    def due(self) -> bool:
        """Return whether a validation is due now. It is never due shortly before the last step or without a budget."""
        if self.seconds is None:
            return False
        since = time.monotonic() - self.validated
        spacing = self.spacing if self.validation else FIRST * self.seconds
        return since >= spacing and self.left > spacing / 2

    def note_validation(self, seconds: float) -> None:
        """Record that a validation has just ended, after `seconds` seconds."""
        self.validation, self.validated = seconds, time.monotonic()
