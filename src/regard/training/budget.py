"""Time budgets: how many steps fit into the time that is left, estimated again while training runs."""

import time
from collections import deque

RECENT = 64  # steps whose mean duration is the estimate: batches differ in size
SHARE = 0.1  # of the time goes into validation
SPACING = 0.04  # of the budget lies at least between two validations
FIRST = 0.1  # of the budget, at most, before the first validation


class Budget:
    """Wall-clock seconds of a run over all of its sessions, and the number of steps that they allow.

    The clock of a run includes reading the text, validation and saving. What is random in training depends on the step
    alone, so a run under a budget is resumed exactly, up to the next estimate: the number of steps is part of its
    checkpoints.
    """

    def __init__(self, seconds: float | None, began: float | None = None) -> None:
        """`seconds` is the budget (None: no limit); `began` the time.monotonic() at which this session began."""
        self.seconds = seconds
        self.began = time.monotonic() if began is None else began
        self.earlier = 0.0  # seconds of earlier sessions
        self.durations: deque[tuple[int, float]] = deque(maxlen=RECENT)  # steps and their seconds
        self.validation = 0.0  # seconds of the last validation
        self.validated = self.began
        self.saving = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds of all sessions so far."""
        return self.earlier + time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds left for steps: the end takes a validation of the last weights, perhaps one of a mean, and saving."""
        assert self.seconds is not None
        return self.seconds - self.elapsed - self.ending

    @property
    def ending(self) -> float:
        """Seconds between the last step and the end of the run."""
        return 2 * self.validation + 2 * self.saving

    def add(self, steps: int, seconds: float) -> None:
        """Record the duration of steps."""
        self.durations.append((steps, seconds))

    def forget(self) -> None:
        """Drop the recorded durations: what follows runs at another speed."""
        self.durations.clear()

    def steps(self, step: int, planned: int) -> int:
        """The step at which training ends, given that `step` is done; `planned` while nothing is known."""
        if self.seconds is None:
            return planned
        if self.left <= 0:
            return step
        if not self.durations:
            return max(planned, step + 1)
        each = sum(seconds for _, seconds in self.durations) / sum(steps for steps, _ in self.durations)
        # What is left holds validations, too.
        share = self.validation / max(self.spacing, 1e-9)
        return step + max(1, round(self.left / (1 + share) / max(each, 1e-9)))

    @property
    def spacing(self) -> float:
        """Seconds of training between two validations, so that they take their share."""
        assert self.seconds is not None
        return max(SPACING * self.seconds, self.validation * (1 - SHARE) / SHARE)

    def due(self) -> bool:
        """Return whether a validation is due under a budget; not shortly before the last step, which has one."""
        if self.seconds is None:
            return False
        since = time.monotonic() - self.validated
        spacing = self.spacing if self.validation else FIRST * self.seconds
        return since >= spacing and self.left > spacing / 2

    def note_validation(self, seconds: float) -> None:
        """Record that a validation of this duration has just ended."""
        self.validation, self.validated = seconds, time.monotonic()
