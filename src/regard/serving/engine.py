"""The engine that decodes the texts of all requests together, and the functions that the scheduler's thread runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar, cast

from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, Piece
from regard.decoding.job import Job
from regard.decoding.search import Search
from regard.errors import SpecError
from regard.fast.beam_search import HOST, NotOnDeviceError, log_once
from regard.fast.beam_state import Request
from regard.inference.engine import Engine, Sources
from regard.inference.native import Native
from regard.runs.trained_model import TrainedModel
from regard.serving.scheduler import More, Scheduler
from regard.serving.ticket import Call, Classify, Decode, Row, Task, Ticket

Value = TypeVar("Value")


class SharedEngine(Engine):
    """Engine of one request. It passes the token ids to the scheduler of a model, and waits for the hypotheses.

    `regard.inference.text` calls it as it calls any other engine, so that texts are encoded, checked and decoded by the
    code of `run.translate`.
    """

    name = "shared"

    def __init__(self, scheduler: Scheduler, ticket: Ticket, engine: Engine) -> None:
        """`engine` is the engine that computes the batches."""
        self.scheduler, self.ticket, self.engine = scheduler, ticket, engine

    def adapted(self, search: Search, warn: Any) -> Search:
        return self.engine.adapted(search, warn)

    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None:
        self.engine.check(search, limits, rules)

    def find(
        self,
        sources: Sources,
        search: Search,
        batch_size: int,  # noqa: ARG002
        limits: Limits,
        rules: TokenConstraints,
        rows: Sequence[int],
    ) -> list[list[Hypothesis]]:
        on_gpu = isinstance(self.engine, Native) and self.engine.device.type == "cuda"
        tasks = [
            Decode(ids, search, limits, rules, row, True, same_rules=on_gpu)
            for ids, row in zip(sources, rows, strict=True)
        ]
        return submit(self.scheduler, self.ticket, tasks)

    def extend(
        self,
        prompts: Sources,
        search: Search,
        batch_size: int,  # noqa: ARG002
        limits: Sequence[Limits],
        rules: TokenConstraints,
        rows: Sequence[int],
    ) -> list[list[Hypothesis]]:
        each = zip(prompts, limits, rows, strict=True)
        tasks = [Decode(ids, search, bound, rules, row, False) for ids, bound, row in each]
        return submit(self.scheduler, self.ticket, tasks)

    def stream(
        self,
        ids: Sequence[int],
        search: Search,
        limits: Limits,
        rules: TokenConstraints,
        row: int,
        translates: bool,
    ) -> Iterator[list[Piece]]:
        self.scheduler.submit([Row(self.ticket, 0, Decode(ids, search, limits, rules, row, translates, True))])
        events = self.ticket.events(1)
        first = next(events)  # an error of the search is raised here, before the caller yields anything
        return ([event.value] for event in chain([first], events))


def submit(scheduler: Scheduler, ticket: Ticket, tasks: Sequence[Task]) -> list[Any]:
    """Compute tasks with equal keys in the thread of a scheduler, and return their results."""
    scheduler.submit([Row(ticket, index, task) for index, task in enumerate(tasks)])
    return ticket.results(len(tasks))


class BatchRunner:
    """Computes batches of one trained model, for `Scheduler`."""

    def __init__(self, run: TrainedModel, engine: Engine, places: int) -> None:
        """`places` is the maximum number of rows that are computed at a time."""
        self.run, self.engine, self.places = run, engine, places

    def __call__(self, rows: Sequence[Row], more: More) -> Iterator[None]:
        """Compute rows with equal keys, and yield after each step."""
        tasks: list[Any] = [row.task for row in rows]
        if isinstance(tasks[0], Call):
            return self._call(rows, tasks)
        if isinstance(tasks[0], Classify):
            return self._classify(rows, tasks)
        if not isinstance(self.engine, Native):
            return self._find(rows, tasks)
        return self._stream(rows, tasks) if tasks[0].streamed else self._decode(rows, tasks, more)

    def _call(self, rows: Sequence[Row], tasks: Sequence[Call]) -> Iterator[None]:
        for row, task in zip(rows, tasks, strict=True):
            row.finish(task.function())
            yield

    def _classify(self, rows: Sequence[Row], tasks: Sequence[Classify]) -> Iterator[None]:
        warnings: list[str] = []
        predictions = self.run.classify([task.text for task in tasks], len(tasks), warnings.append)
        for number, (row, prediction) in enumerate(zip(rows, predictions, strict=True), start=1):
            line = f"line {number}: "
            row.finish((prediction, [each.removeprefix(line) for each in warnings if each.startswith(line)]))
        yield

    def _find(self, rows: Sequence[Row], tasks: Sequence[Decode]) -> Iterator[None]:
        """Decode with an engine that needs the same length limit and the same constraints for all rows of a batch."""
        groups: dict[Any, list[int]] = {}
        for index, task in enumerate(tasks):
            groups.setdefault((task.limits, task.rules), []).append(index)
        for (limits, rules), indices in groups.items():
            sources, numbers = [tasks[i].ids for i in indices], [tasks[i].number for i in indices]
            results = self.engine.find(sources, tasks[0].search, len(indices), limits, rules, numbers)
            for index, hypotheses in zip(indices, results, strict=True):
                rows[index].finish(hypotheses)
            yield

    def _job(self, rows: Sequence[Row], tasks: Sequence[Decode]) -> Job:
        assert isinstance(self.engine, Native)
        job = self.engine.job(
            [task.ids for task in tasks],
            [task.limits for task in tasks],
            [task.number for task in tasks],
            tasks[0].search,
            [task.rules for task in tasks],
            tasks[0].translates,
        )
        return replace(job, cancelled=lambda index: rows[index].unwanted)

    def _decode(self, rows: Sequence[Row], tasks: Sequence[Decode], more: More) -> Iterator[None]:
        job, search = self._job(rows, tasks), tasks[0].search
        on_device = job.models.device_search
        if isinstance(search, Beam) and on_device is not None and on_device.accepts(job, search):
            rows = list(rows)
            yield from self._decode_on_device(rows, job, search, more)
            rows = [row for row in rows if not row.done and not row.unwanted]
            job = self._job(rows, [cast(Decode, row.task) for row in rows]) if rows else None
        for finished in search.find_by_row(job) if job is not None else ():
            for index, hypotheses in finished:
                rows[index].finish(hypotheses)
            yield

    def _decode_on_device(self, rows: list[Row], job: Job, search: Beam, more: More) -> Iterator[None]:
        """Decode on the GPU, where waiting rows replace finished rows. The new rows are appended to `rows`.

        Rows that cannot be decoded on the GPU have no result when the iterator ends.
        """

        def request(row: Row) -> Request:
            task = cast(Decode, row.task)
            return Request(tuple(task.ids), task.limits.min_len, task.limits.most(len(task.ids)))

        def refill(number: int, takes: Callable[[Request], bool]) -> list[Request]:
            added = more(number, lambda row: takes(request(row)))
            rows.extend(added)
            return [request(row) for row in added]

        live = replace(job, cancelled=lambda number: rows[number].unwanted)
        try:
            for finished in job.models.device_search.find_by_row(live, search, self.places, refill):
                for number, hypotheses in finished:
                    if hypotheses is not None:
                        rows[number].finish(hypotheses)
                yield
        except NotOnDeviceError as error:
            log_once(HOST + str(error))
        except SpecError as error:
            if not error.path.endswith("max_len"):  # the model may have too few learned positions for the longest text
                raise
            log_once(HOST + str(error))

    def _stream(self, rows: Sequence[Row], tasks: Sequence[Decode]) -> Iterator[None]:
        for pieces in tasks[0].search.stream(self._job(rows, tasks)):
            for piece in pieces:
                rows[piece.row].piece(piece)
            yield
