import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from regard.serving.scheduler import ClosedError, More, Scheduler
from regard.serving.ticket import Call, Row, Ticket


class Task(Call):
    """A task with a key and a length that a test chooses."""

    def __init__(self, key: object, length: int = 1) -> None:
        super().__init__(lambda: None, length)
        object.__setattr__(self, "chosen", key)

    @property
    def key(self) -> object:
        return self.chosen  # type: ignore[attr-defined]


class Recorder:
    """A runner that needs `steps` steps for a batch, waits for `gate` before each, and records the batches."""

    def __init__(self, steps: int = 1) -> None:
        self.batches: list[list[Row]] = []
        self.steps, self.done = steps, 0
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, rows: Sequence[Row], more: More) -> Iterator[None]:
        self.batches.append(list(rows))
        for _ in range(self.steps):
            self.gate.wait(10)
            self.done += 1
            yield
        for row in rows:
            if row.task.key == "bad" or row.task.length < 0:
                raise ValueError("negative length")
            row.finish(row.task.length)
        yield


def rows(ticket: Ticket, *tasks: Task) -> list[Row]:
    return [Row(ticket, index, task) for index, task in enumerate(tasks)]


def until(condition: object, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.005)
    assert condition()  # type: ignore[operator]


def test_rows_that_wait_are_computed_in_one_batch() -> None:
    runner = Recorder()
    runner.gate.clear()
    scheduler = Scheduler(runner, places=8)
    tickets = [Ticket() for _ in range(5)]
    scheduler.submit(rows(tickets[0], Task("a")))
    until(lambda: runner.batches)
    for ticket in tickets[1:]:
        scheduler.submit(rows(ticket, Task("a", 3)))
    runner.gate.set()
    assert [ticket.results(1) for ticket in tickets] == [[1], [3], [3], [3], [3]]
    assert [len(batch) for batch in runner.batches] == [1, 4]
    scheduler.close()


def test_results_are_in_the_order_of_the_rows_and_keys_are_not_mixed() -> None:
    runner = Recorder()
    scheduler = Scheduler(runner, places=4)
    tickets = {key: Ticket() for key in "ab"}
    for key, ticket in tickets.items():
        scheduler.submit(rows(ticket, *(Task(key, n) for n in (5, 1, 9, 2, 7, 3))))
    assert all(ticket.results(6) == [5, 1, 9, 2, 7, 3] for ticket in tickets.values())
    assert all(len({row.task.key for row in batch}) == 1 and len(batch) <= 4 for batch in runner.batches)
    scheduler.close()


def test_rows_of_similar_length_share_a_batch() -> None:
    runner = Recorder()
    runner.gate.clear()
    scheduler = Scheduler(runner, places=2)
    first, second = Ticket(), Ticket()
    scheduler.submit(rows(first, Task("a")))
    until(lambda: runner.batches)
    scheduler.submit(rows(second, *(Task("a", n) for n in (10, 50, 11, 51))))
    runner.gate.set()
    second.results(4)
    assert sorted(sorted(row.task.length for row in batch) for batch in runner.batches[1:]) == [[10, 11], [50, 51]]
    scheduler.close()


def test_requests_take_turns_so_that_a_document_does_not_delay_a_sentence() -> None:
    runner = Recorder()
    runner.gate.clear()
    scheduler = Scheduler(runner, places=4)
    document, sentence = Ticket(), Ticket()
    scheduler.submit(rows(document, *(Task("a", 1) for _ in range(40))))
    until(lambda: runner.batches)
    scheduler.submit(rows(sentence, Task("a", 1)))
    runner.gate.set()
    sentence.results(1)
    document.results(40)
    (place,) = [i for i, batch in enumerate(runner.batches) if any(row.ticket is sentence for row in batch)]
    assert place == 1
    scheduler.close()


def test_cancelled_rows_are_dropped_and_the_waiting_thread_receives_the_error() -> None:
    runner = Recorder()
    runner.gate.clear()
    scheduler = Scheduler(runner, places=1)
    running, waiting = Ticket(), Ticket()
    scheduler.submit(rows(running, Task("a")))
    until(lambda: runner.batches)
    scheduler.submit(rows(waiting, Task("a")))
    waiting.cancel(KeyError("gone"))
    with pytest.raises(KeyError):
        waiting.results(1)
    runner.gate.set()
    running.results(1)
    scheduler.close()
    assert len(runner.batches) == 1
    assert scheduler.sizes == (0, 0)


def test_batch_without_wanted_rows_ends_at_once() -> None:
    runner = Recorder(steps=10**6)
    scheduler = Scheduler(runner, places=4)
    ticket = Ticket()
    scheduler.submit(rows(ticket, Task("a"), Task("a")))
    until(lambda: runner.done > 2)
    ticket.cancel(KeyError("gone"))
    until(lambda: scheduler.sizes == (0, 0))
    assert runner.done < 10**6
    scheduler.close()


def test_row_that_waits_starts_beside_a_long_batch() -> None:
    runner = Recorder(steps=10**6)
    scheduler = Scheduler(runner, places=4)
    long, short = Ticket(), Ticket()
    scheduler.submit(rows(long, Task("a")))
    until(lambda: runner.done > 2)
    runner.steps = 1
    scheduler.submit(rows(short, Task("b", 7)))
    assert short.results(1) == [7]
    long.cancel(KeyError("enough"))
    scheduler.close()


def test_error_reaches_only_the_request_that_caused_it() -> None:
    runner = Recorder()
    runner.gate.clear()
    scheduler = Scheduler(runner, places=8)
    first, good, bad = Ticket(), Ticket(), Ticket()
    scheduler.submit(rows(first, Task("a")))
    until(lambda: runner.batches)
    scheduler.submit(rows(good, Task("a", 2), Task("a", 3)))
    scheduler.submit(rows(bad, Task("a", -1)))
    runner.gate.set()
    assert good.results(2) == [2, 3]
    with pytest.raises(ValueError, match="negative length"):
        bad.results(1)
    assert first.results(1) == [1]
    scheduler.close()


def test_close_computes_what_was_submitted_and_refuses_more() -> None:
    runner = Recorder()
    runner.gate.clear()
    scheduler = Scheduler(runner, places=1)
    tickets = [Ticket() for _ in range(5)]
    for ticket in tickets:
        scheduler.submit(rows(ticket, Task("a", 4)))
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    until(lambda: scheduler.closed)
    with pytest.raises(ClosedError):
        scheduler.submit(rows(Ticket(), Task("a")))
    runner.gate.set()
    closing.join(10)
    assert [ticket.results(1) for ticket in tickets] == [[4]] * 5
