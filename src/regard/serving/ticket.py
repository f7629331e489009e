"""Rows that wait for a model, and the ticket by which a request receives their results."""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Limits, Piece
from regard.decoding.search import Search


class Event(NamedTuple):
    """A result for one row of a ticket: a piece of an output, the whole result, or an error."""

    row: int
    value: Any = None
    last: bool = True
    error: BaseException | None = None


class Ticket:
    """The results that one request waits for. It can be cancelled from any thread; its rows are then dropped."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """True after `cancel`."""
        return self._cancelled.is_set()

    def cancel(self, error: BaseException) -> None:
        """Drop all rows of the ticket. A thread that waits for a result receives `error`."""
        if not self.cancelled:
            self._cancelled.set()
            self._events.put(Event(-1, error=error))

    def put(self, event: Event) -> None:
        """Store a result, unless the ticket is cancelled."""
        if not self.cancelled:
            self._events.put(event)

    def events(self, rows: int) -> Iterator[Event]:
        """Yield the results of `rows` rows until all of them are complete; raise the error of a row that failed."""
        while rows:
            event = self._events.get()
            if event.error is not None:
                raise event.error
            rows -= event.last
            yield event

    def results(self, rows: int) -> list[Any]:
        """Wait for `rows` rows, and return their results in the order of their indices."""
        results = {event.row: event.value for event in self.events(rows) if event.last}
        return [results[index] for index in range(rows)]


@dataclass(frozen=True, slots=True)
class Decode:
    """A source to translate (`translates`) or a prompt to continue. With `streamed`, each token is a result."""

    ids: Sequence[int]
    search: Search
    limits: Limits
    rules: TokenConstraints
    number: int  # index of the text in its request, for the random numbers of sampling
    translates: bool
    streamed: bool = False
    same_rules: bool = False  # True: only rows with the same constraints share a batch, as the search on a GPU requires

    @property
    def key(self) -> Hashable:
        """Rows with equal keys can be decoded in one batch."""
        rules = self.rules if self.same_rules else bool(self.rules.required)
        return Decode, self.search, self.translates, self.streamed, rules

    @property
    def length(self) -> int:
        """The number of tokens that the model reads first."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Classify:
    """A text to classify."""

    text: str
    key: Hashable = "classify"

    @property
    def length(self) -> int:
        """The number of characters."""
        return len(self.text)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A function to call while the model computes nothing else."""

    function: Callable[[], Any]
    length: int = 0

    @property
    def key(self) -> Hashable:
        """A key that is equal to no other."""
        return id(self)


Task = Decode | Classify | Call


@dataclass(slots=True, eq=False)
class Row:
    """A task of a ticket."""

    ticket: Ticket
    index: int
    task: Task
    done: bool = False
    begun: bool = False  # a part of the result was sent
    dropped: bool = False  # the rest of the result is not needed

    @property
    def unwanted(self) -> bool:
        """True if the computation of the row can end now."""
        return self.dropped or self.ticket.cancelled

    def finish(self, result: Any) -> None:
        """Store the result."""
        self.done = True
        self.ticket.put(Event(self.index, result))

    def piece(self, piece: Piece) -> None:
        """Store new tokens. The last piece contains the whole output."""
        self.begun, self.done = True, piece.hypothesis is not None
        self.ticket.put(Event(self.index, piece, self.done))

    def fail(self, error: BaseException) -> None:
        """Store the error with which the computation ended."""
        self.done = True
        self.ticket.put(Event(self.index, error=error))
