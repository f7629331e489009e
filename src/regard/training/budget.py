"""Time budgets: the number of steps that fit into the remaining time, estimated while training runs."""

import time
from collections import deque

RECENT = 64  # steps over which the duration is averaged, because batches differ in size
SHARE = 0.1  # of the time is for validation
SPACING = 0.04  # smallest interval of validations, as a share of the budget
FIRST = 0.1  # largest time before the first validation, as a share of the budget


class Budget:
    """The wall-clock time of a run over all of its sessions, and the number of steps that it allows.

    The clock includes reading the text, validation and saving. Random numbers depend on the step alone and the number
    of steps is part of a checkpoint, so a run under a budget resumes exactly, up to the next estimate.
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
        """Seconds left for steps, without those of the final validations and of saving."""
        assert self.seconds is not None
        return self.seconds - self.elapsed - self.ending

    @property
    def ending(self) -> float:
        """Seconds from the last step to the end: validations of the last weights and of a mean, and saving."""
        return 2 * self.validation + 2 * self.saving

    def add(self, steps: int, seconds: float) -> None:
        """Record the duration of steps."""
        self.durations.append((steps, seconds))

    def forget(self) -> None:
        """Drop the recorded durations: what follows runs at another speed."""
        self.durations.clear()

    def steps(self, step: int, planned: int) -> int:
        """Return the step at which training ends, after `step` of them; `planned` while no step was timed."""
        if self.seconds is None:
            return planned
        if self.left <= 0:
            return step
        if not self.durations:
            return max(planned, step + 1)
        each = sum(seconds for _, seconds in self.durations) / sum(steps for steps, _ in self.durations)
        # The remaining time also includes validations.
        share = self.validation / max(self.spacing, 1e-9)
        return step + max(1, round(self.left / (1 + share) / max(each, 1e-9)))

    @property
    def spacing(self) -> float:
        """Seconds of training between two validations, so that they take `SHARE` of the time."""
        assert self.seconds is not None
        return max(SPACING * self.seconds, self.validation * (1 - SHARE) / SHARE)

    def due(self) -> bool:
        """Return whether a validation is due under a budget; never shortly before that of the last step."""
        if self.seconds is None:
            return False
        since = time.monotonic() - self.validated
        spacing = self.spacing if self.validation else FIRST * self.seconds
        return since >= spacing and self.left > spacing / 2

    def note_validation(self, seconds: float) -> None:
        """Record that a validation of this duration has just ended."""
        self.validation, self.validated = seconds, time.monotonic()
