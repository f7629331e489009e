"""Time budgets: the number of steps that fit into the remaining time, estimated while training runs."""

import time
from collections import deque

RECENT = 64  # number of steps over which the duration is averaged, because batches differ in size
SHARE = 0.1  # share of the time for validation
SPACING = 0.04  # smallest interval between validations, as a share of the budget
FIRST = 0.1  # largest time before the first validation, as a share of the budget


class Budget:
    """The time budget of a run, over all of its sessions, and the number of steps that fits into it.

    Time is wall-clock time, and includes reading the text, validation and saving. Random numbers depend on the step
    alone, and checkpoints store the number of steps. So a run with a budget resumes exactly, except that the number of
    steps is estimated again.
    """

    def __init__(self, seconds: float | None, began: float | None = None) -> None:
        """`seconds` is the budget (None: no limit); `began` is the `time.monotonic()` at which it began."""
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
        """Time left for steps in seconds, without the time for the last validations and for saving."""
        assert self.seconds is not None
        return self.seconds - self.elapsed - self.ending

    @property
    def ending(self) -> float:
        """Time in seconds from the last step to the end: two validations (last weights, checkpoint mean) and saving."""
        return 2 * self.validation + 2 * self.saving

    def add(self, steps: int, seconds: float) -> None:
        """Record that `steps` steps took `seconds`."""
        self.durations.append((steps, seconds))

    def forget(self) -> None:
        """Discard the recorded durations, because the next steps run at another speed."""
        self.durations.clear()

    def steps(self, step: int, planned: int) -> int:
        """Return the step at which training should end, estimated after `step`; `planned` is the previous estimate."""
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
        """Training time between two validations in seconds, so that validations take `SHARE` of the time."""
        assert self.seconds is not None
        return max(SPACING * self.seconds, self.validation * (1 - SHARE) / SHARE)

    def due(self) -> bool:
        """Return whether a validation is due now under a time budget; never shortly before the one at the last step."""
        if self.seconds is None:
            return False
        since = time.monotonic() - self.validated
        spacing = self.spacing if self.validation else FIRST * self.seconds
        return since >= spacing and self.left > spacing / 2

    def note_validation(self, seconds: float) -> None:
        """Record that a validation of this duration has just ended."""
        self.validation, self.validated = seconds, time.monotonic()
