"""Dynamic batching: one thread per model, which decodes the rows of all requests in batches."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from regard.serving.ticket import Row

PATIENCE = 0.05  # seconds that rows wait before they start beside a running batch
BATCHES = 8  # maximum number of batches that take turns, one step each
FAIRNESS = 0.5  # seconds after which a row that cannot join a running batch keeps others from joining it
AHEAD = 4  # rows of similar length are chosen from so many times the free places

_log = logging.getLogger("regard.serving")

# Computes rows with equal keys. Yields after each step. `more(n, fits)` returns up to n further rows with the same key
# for which `fits` is true.
More = Callable[[int, Callable[[Row], bool]], list[Row]]
Runner = Callable[[Sequence[Row], More], Iterator[None]]


class ClosedError(Exception):
    """Raised for rows that are submitted after `Scheduler.close`."""


@dataclass(eq=False, slots=True)
class Waiting:
    """The rows of one ticket that have not started. All have the same key."""

    rows: deque[Row]
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False, slots=True)
class RunningBatch:
    """Rows that are computed together, one step at a time."""

    rows: list[Row]
    steps: Iterator[None] = field(init=False)

    @property
    def left(self) -> list[Row]:
        """The rows without a result."""
        return [row for row in self.rows if not row.done]


class Scheduler:
    """Collect the rows of waiting requests into batches, and compute the batches in a background thread.

    A batch contains rows with equal keys and similar lengths. Requests take turns, so that a long document does not
    delay short ones. While a batch runs, another one starts if half of the places are free and a row has waited for
    50 ms; running batches take turns, one step each. Rows of cancelled tickets are dropped.
    """

    def __init__(self, runner: Runner, places: int, observe: Callable[[int], None] = lambda _: None) -> None:
        """`places` is the maximum number of rows that are computed at a time. `observe` receives each batch size."""
        self.runner, self.places, self.observe = runner, places, observe
        self.changed = threading.Condition()
        self.waiting: deque[Waiting] = deque()
        self.alone: deque[list[Row]] = deque()  # rows of a batch that failed, to be computed ticket by ticket
        self.running: list[RunningBatch] = []
        self.closed = False
        self.thread: threading.Thread | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of rows that wait, and the number of rows that are being computed."""
        with self.changed:
            return sum(len(each.rows) for each in self.waiting), sum(len(batch.left) for batch in self.running)

    def submit(self, rows: Sequence[Row]) -> None:
        """Add the rows of a ticket to the queue. All must have the same key."""
        if not rows:
            return
        with self.changed:
            if self.closed:
                raise ClosedError("the server is stopping")
            self.waiting.append(Waiting(deque(rows)))
            if self.thread is None:
                self.thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def close(self, timeout: float | None = None) -> None:
        """Compute all rows that were submitted, and end the thread."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            thread = self.thread
        if thread is not None:
            thread.join(timeout)

    def _loop(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.running or self.alone or self.closed)
                if self.closed and not (self.waiting or self.running or self.alone):
                    return
                self._drop_cancelled()
                rows = self._next_rows()
            if rows:
                self._start(rows)
            for batch in list(self.running):
                self._step(batch)

    def _drop_cancelled(self) -> None:
        for each in self.waiting:
            each.rows = deque(row for row in each.rows if not row.ticket.cancelled)
        self.waiting = deque(each for each in self.waiting if each.rows)
        self.alone = deque(rows for rows in self.alone if not rows[0].ticket.cancelled)

    def _next_rows(self) -> list[Row]:
        """Remove the rows of the next batch from the queue, and return them; [] if no batch should start now."""
        if self.alone and not self.running:
            return self.alone.popleft()
        if not self.waiting:
            return []
        free = self.places - sum(len(batch.left) for batch in self.running)
        patient = time.monotonic() - self.waiting[0].since < PATIENCE
        if self.running and (patient or 2 * free < self.places or len(self.running) >= BATCHES):
            return []
        return self._take(self.waiting[0].rows[0], free)

    def _take(self, head: Row, free: int, fits: Callable[[Row], bool] = lambda _: True) -> list[Row]:
        """Remove up to `free` rows with the key of `head` from the queue: `head`, and rows of similar length."""
        key = head.task.key
        same = [each for each in self.waiting if each.rows[0].task.key == key]
        found: list[Row] = []
        turn = 0
        while len(found) < AHEAD * free:  # one row of every request, then the second row of every request, ...
            rows = [each.rows[turn] for each in same if turn < len(each.rows)]
            if not rows:
                break
            found += filter(fits, rows)
            turn += 1
        found.sort(key=lambda row: row.task.length)
        at = found.index(head) if head in found else 0
        first = max(0, min(at - free // 2, len(found) - free))
        chosen = found[first : first + free]
        taken = set(map(id, chosen))
        for each in same:
            each.rows = deque(row for row in each.rows if id(row) not in taken)
        self.waiting = deque(each for each in self.waiting if each.rows)
        if self.waiting and self.waiting[0] in same:
            self.waiting.rotate(-1)
        return chosen

    def _more(self, key: object, number: int, fits: Callable[[Row], bool]) -> list[Row]:
        """Remove up to `number` rows with this key from the queue, for places that became free in a running batch.

        If a row that cannot join the batch has waited for half a second, return no rows, so that the batch ends.
        """
        with self.changed:
            self._drop_cancelled()
            for each in self.waiting:
                joins = each.rows[0].task.key == key and fits(each.rows[0])
                if joins and number > 0:
                    return self._take(each.rows[0], number, fits)
                if not joins and time.monotonic() - each.since > FAIRNESS:
                    return []
            return []

    def _start(self, rows: list[Row]) -> None:
        batch = RunningBatch(rows)
        key = rows[0].task.key

        def more(number: int, fits: Callable[[Row], bool]) -> list[Row]:
            added = self._more(key, number, fits)
            batch.rows = batch.left + added
            return added

        self.observe(len(rows))
        try:
            batch.steps = self.runner(rows, more)
        except Exception as error:
            self._end(rows, error)
            return
        with self.changed:
            self.running.append(batch)

    def _step(self, batch: RunningBatch) -> None:
        """Compute one step of a batch, and remove the batch if that was its last step."""
        try:
            if any(not row.ticket.cancelled for row in batch.left):
                next(batch.steps)
                return
            error: BaseException = RuntimeError("the batch ended without a result for this row")
        except StopIteration:
            error = RuntimeError("the batch ended without a result for this row")
        except Exception as raised:  # whatever a model raises must reach the request, and not end this thread
            error = raised
        with self.changed:
            self.running.remove(batch)
        self._end(batch.left, error)

    def _end(self, left: list[Row], error: BaseException) -> None:
        """Handle rows that have no result at the end of a batch.

        If the batch had rows of several tickets, the rows of each ticket are computed again in a batch of their own,
        because another ticket may have caused the error. Otherwise, and if a part of an output was already sent, the
        rows get `error`.
        """
        tickets = list(dict.fromkeys(row.ticket for row in left if not row.ticket.cancelled))
        for ticket in tickets:
            rows = [row for row in left if row.ticket is ticket]
            if len(tickets) > 1 and not any(row.begun for row in rows):
                with self.changed:
                    self.alone.append(rows)
                continue
            for row in rows:
                row.fail(error)
