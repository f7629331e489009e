"""Translation with several worker processes that share the weights in memory (`--workers`).

Each worker has one thread and memory-maps the weights file, so that the weights are in memory only once. Input lines
are divided into chunks as they arrive, and outputs are returned in the order of the input. The outputs equal those of a
single process, because the translation of a line does not depend on other lines.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from regard.decoding.hypothesis import Limits
from regard.decoding.length_limit import LengthLimit
from regard.decoding.search import Search
from regard.errors import DataError
from regard.inference.text import AHEAD, Constraints, Output
from regard.processes import JobError, ProcessPool, WorkerDiedError
from regard.recipe.recipe import PARTS
from regard.runs.decode import TextDecoder, ensemble
from regard.runs.trained_model import choose_device, load
from regard.tree import read, to_record

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
Task = Mapping[str, Any]  # what a worker process needs to translate, as a JSON object


def task_of(decoder: TextDecoder, runs: Sequence[str], loading: Mapping[str, Any]) -> Task:
    """Return a task with the settings of `decoder`; workers load the run folders `runs` with the options `loading`."""
    return {
        "runs": list(runs),
        "loading": {name: loading[name] for name in ("average", "trust_code", "plain") if name in loading},
        "search": to_record(decoder.search, PARTS),
        "limits": to_record(decoder.limits),
        "constraints": asdict(decoder.constraints),
        "batch_size": decoder.batch_size,
    }


class WorkerError(DataError):
    """Raised for lines that have no translation because a worker process failed."""


class Input:
    """Input lines, read in advance by a background thread. At most `ahead` lines wait for translation."""

    def __init__(self, lines: Iterable[str], ahead: int) -> None:
        self.lines, self.ahead = lines, ahead
        self.changed = threading.Condition()
        self.waiting: deque[str] = deque()
        self.ended = False
        self.error: Exception | None = None  # raised by the iterable
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self.lines:
                with self.changed:
                    self.changed.wait_for(lambda: len(self.waiting) < self.ahead or self.ended)
                    if self.ended:
                        return
                    self.waiting.append(line)
                    self.changed.notify_all()
        except Exception as error:
            self.error = error
        self.end()

    def end(self) -> None:
        """Stop reading input lines and wake all waiting threads."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def notify(self, _: object = None) -> None:
        """Wake the threads that wait for lines or for translations."""
        with self.changed:
            self.changed.notify_all()


@dataclass(frozen=True)
class Chunk:
    """Consecutive input lines that one worker translates."""

    first: int
    lines: int
    loaded: threading.Event  # set once the worker has loaded the models
    future: "Future[dict[str, Any]]"

    @property
    def failed(self) -> bool:
        """True if the worker failed."""
        return self.future.done() and self.future.exception() is not None

    def result(self) -> dict[str, Any]:
        """Wait for the outputs and warnings of the worker and return them; raise an error if the worker failed."""
        try:
            return self.future.result()
        except WorkerDiedError as error:
            lines = f"while it translated lines {self.first + 1} to {self.first + self.lines}"
            where = lines if self.loaded.is_set() else "before it translated anything"
            advice = "if memory ran out, use fewer --workers or a smaller --batch-size"
            raise WorkerError(f"a worker {error.how} {where}; {advice}") from None
        except JobError as error:
            raise WorkerError(str(error)) from None


class Workers:
    """Worker processes for translation. The processes end with the `with` block."""

    def __init__(self, count: int, task: Task) -> None:
        self.count, self.task = count, task
        self.pool = ProcessPool([ONE_THREAD] * count)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *given: object) -> None:
        self.pool.__exit__(*given)

    def translate(self, lines: Iterable[str], warn: Callable[[str], None] = lambda _: None) -> Iterator[list[Output]]:
        """Yield the n best outputs for each line, in the order of the lines, as soon as they are available."""
        source = Input(lines, self.count * AHEAD * self.task["batch_size"])
        chunks: deque[Chunk] = deque()  # in progress, or waiting to be returned in order
        first = 0
        try:
            while True:
                with source.changed:
                    source.changed.wait_for(lambda: self._ready(source, chunks))
                    taken = [source.waiting.popleft() for _ in range(self._size(source, chunks))]
                    source.changed.notify_all()
                if taken:
                    chunks.append(self._submit(first, taken, source))
                    first += len(taken)
                elif chunks:
                    result = chunks.popleft().result()
                    for sentence in result["warnings"]:
                        warn(sentence)
                    yield from map(outputs_of, result["outputs"])
                elif source.error is not None:
                    raise source.error
                else:
                    return
        finally:
            source.end()

    def _ready(self, source: Input, chunks: Sequence[Chunk]) -> bool:
        if chunks and chunks[0].future.done():
            return True
        return bool(self._size(source, chunks)) or (source.ended and not source.waiting and not chunks)

    def _size(self, source: Input, chunks: Sequence[Chunk]) -> int:
        """Return the number of lines in the next chunk, or 0 if no chunk can be submitted now."""
        busy = sum(not chunk.future.done() for chunk in chunks)
        under_way = sum(chunk.lines for chunk in chunks)
        if busy == self.count or under_way >= source.ahead or any(chunk.failed for chunk in chunks):
            return 0
        waiting = len(source.waiting)
        # If many lines wait, the chunks are large, so that the lines of a chunk can be sorted by length.
        share = waiting // (2 * self.count)
        return min(max(share, self.task["batch_size"]), AHEAD * self.task["batch_size"], waiting)

    def _submit(self, first: int, lines: list[str], source: Input) -> Chunk:
        loaded, record = threading.Event(), json.dumps(self.task)
        future = self.pool.submit(translate, record, first, lines, on_event=lambda _: loaded.set())
        future.add_done_callback(source.notify)
        return Chunk(first, len(lines), loaded, future)


def outputs_of(best: Sequence[Any]) -> list[Output]:
    """Return the n best outputs for a line, which a worker sent as JSON."""
    lists = ("tokens", "ids", "read")
    return [Output(**output | {name: tuple(output[name]) for name in lists}) for output in best]


def translate(record: str, first: int, lines: list[str], emit: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Translate lines in a worker process, which loads the models with its first chunk; return outputs and warnings."""
    decoder, warnings = _loaded(record)
    if emit is not None:
        emit("loaded")
    outputs = [[asdict(output) for output in best] for best in decoder.outputs(lines, first)]
    answer = {"outputs": outputs, "warnings": list(warnings)}
    warnings.clear()
    return answer


@lru_cache(maxsize=1)
def _loaded(record: str) -> tuple[TextDecoder, list[str]]:
    """Return the decoder that `task_of` converted to a JSON object, and a list that receives its warnings."""
    import torch  # noqa: PLC0415  # only in a worker

    warnings: list[str] = []
    task: Task = json.loads(record)
    torch.set_num_threads(task.get("threads", 1))
    device = str(choose_device(task.get("device", "cpu")))
    loaded = [load(run, device, mapped=device == "cpu", **task["loading"]) for run in task["runs"]]
    texts = ensemble(loaded, warnings.append)
    search: Any = read(task["search"], Search, "", PARTS, task["loading"].get("trust_code", False))
    limits: Limits = read(task["limits"], Limits, "", {part.kind: part for part in (Limits, LengthLimit)})
    constraints = Constraints(**task["constraints"])
    return TextDecoder(texts, True, search, limits, constraints, task["batch_size"]), warnings
