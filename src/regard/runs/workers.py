"""Many processes that translate with one run: `python -m regard.runs.workers`.

Each has one thread and maps the weights from their file, which is then in memory once however many they are. Lines are
handed out in pieces as they come, and what is found comes back in the order of the input: the same as from one process,
because what is found for a line depends on no other. A worker reads orders from its standard input and answers on its
standard output, a JSON object a line; when its input ends, whoever gave the orders is gone, and it leaves.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from regard.decoding.hypothesis import Limits
from regard.decoding.length_limit import LengthLimit
from regard.decoding.search import Search
from regard.errors import DataError, RegardError
from regard.inference.text import AHEAD, Constraints, Output, Texts
from regard.processes import python
from regard.recipe.recipe import PARTS
from regard.runs.decode import ensemble
from regard.runs.trained_model import load
from regard.tree import read, to_record

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Task:
    """All that a worker has to know before the first line."""

    AS_THEY_ARE: ClassVar = ("batch_size", "average", "trust_code", "plain")  # fields that JSON holds unchanged

    runs: Sequence[str]
    search: Search
    batch_size: int = 32
    limits: Limits = Limits()
    wishes: Constraints = Constraints()
    average: int | None = None
    trust_code: bool = False
    plain: bool = False

    def order(self) -> dict[str, Any]:
        """The same as JSON has it."""
        limits, wishes = to_record(self.limits), asdict(self.wishes)
        whole = {"runs": list(self.runs), "search": to_record(self.search, PARTS), "limits": limits, "wishes": wishes}
        return whole | {name: getattr(self, name) for name in self.AS_THEY_ARE}

    @classmethod
    def of(cls, order: Mapping[str, Any]) -> "Task":
        """A task that was told."""
        wishes = Constraints(**order["wishes"])
        search: Any = read(order["search"], Search, "", PARTS, order["trust_code"])
        limits: Limits = read(order["limits"], Limits, "", {part.kind: part for part in (Limits, LengthLimit)})
        rest = {name: order[name] for name in cls.AS_THEY_ARE}
        return cls(order["runs"], search, limits=limits, wishes=wishes, **rest)

    def texts(self, warn: Callable[[str], None]) -> Texts:
        """The runs, loaded."""
        return ensemble(
            [load(run, "cpu", self.average, None, self.trust_code, mapped=True, plain=self.plain) for run in self.runs],
            warn,
        )


@dataclass
class Work:
    """What all threads of the one who gives orders know, and change only while they hold `changed`."""

    ahead: int  # lines that may be under way
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[str] = field(default_factory=deque)  # lines that nobody has yet
    given: int = 0  # lines that somebody has or had
    written: int = 0  # lines whose outputs were taken
    found: dict[int, dict[str, Any]] = field(default_factory=dict)  # answers by their first line
    ended: bool = False  # there are no more lines
    failed: Exception | None = None  # of the input or of a worker

    def fail(self, error: Exception) -> None:
        """Go no further."""
        with self.changed:
            self.failed = self.failed or error
            self.ended = True
            self.changed.notify_all()


class Workers:
    """Processes that translate, from `with` to its end; whatever ends it, none is left."""

    command: ClassVar[Sequence[str]] = python("regard.runs.workers")

    def __init__(self, count: int, task: Task) -> None:
        self.count, self.task = count, task
        self.processes: list[subprocess.Popen[str]] = []
        self.serving: list[tuple[Work, threading.Thread]] = []

    def __enter__(self) -> "Workers":
        for _ in range(self.count):
            self.processes.append(
                subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | ONE_THREAD,
                    text=True,
                    encoding="utf-8",
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for work, thread in self.serving:
            work.fail(WorkerError("the workers were sent home"))
            thread.join()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what could not be written is not missed
                    pipe.close()  # type: ignore[reportOptionalMemberAccess]

    def translate(self, lines: Iterable[str], warn: Callable[[str], None] = lambda _: None) -> Iterator[list[Output]]:
        """The best outputs for every line, in order, as soon as they are there."""
        work = Work(self.count * AHEAD * self.task.batch_size)
        threading.Thread(target=self._read, args=(lines, work), daemon=True).start()
        for number in range(self.count):
            thread = threading.Thread(target=self._serve, args=(number, work), daemon=True)
            self.serving.append((work, thread))
            thread.start()
        while True:
            with work.changed:
                # Outputs that are whole come before the sentence about what went wrong after them.
                while work.written not in work.found and not self._over(work):
                    work.changed.wait()
                if work.written not in work.found:
                    if work.failed is not None:
                        raise work.failed
                    return
                answer = work.found.pop(work.written)
            for sentence in answer["warnings"]:
                warn(sentence)
            for best in answer["outputs"]:
                yield [Output(**one | {name: tuple(one[name]) for name in ("tokens", "ids", "read")}) for one in best]
            with work.changed:
                work.written += len(answer["outputs"])
                work.changed.notify_all()

    def _over(self, work: Work) -> bool:
        dead = isinstance(work.failed, WorkerError)
        return dead or (work.ended and not work.waiting and work.written == work.given)

    def _read(self, lines: Iterable[str], work: Work) -> None:
        """Take lines as they come, not many more than are needed."""
        try:
            for line in lines:
                with work.changed:
                    while len(work.waiting) >= work.ahead:
                        work.changed.wait()
                    work.waiting.append(line)
                    work.changed.notify_all()
        except Exception as error:
            work.fail(error)
        with work.changed:
            work.ended = True
            work.changed.notify_all()

    def _serve(self, number: int, work: Work) -> None:
        """Hand lines to one worker, and take its answers, until there are no more lines."""
        process = self.processes[number]
        try:
            self._ask(process, self.task.order())
            while (piece := self._piece(work)) is not None:
                first, lines = piece
                answer = self._ask(process, {"first": first, "lines": lines}, first, len(lines))
                with work.changed:
                    work.found[first] = answer
                    work.changed.notify_all()
        except Exception as error:
            work.fail(error)

    def _piece(self, work: Work) -> tuple[int, list[str]] | None:
        """The next lines to translate: many while many wait, so that they can be sorted by length; never too many."""
        with work.changed:
            while not work.waiting or work.given - work.written >= work.ahead:
                if isinstance(work.failed, WorkerError) or (work.ended and not work.waiting):
                    return None
                work.changed.wait()
            share = len(work.waiting) // (2 * self.count)
            size = min(max(share, self.task.batch_size), AHEAD * self.task.batch_size, len(work.waiting))
            lines = [work.waiting.popleft() for _ in range(size)]
            first = work.given
            work.given += size
            work.changed.notify_all()
            return first, lines

    def _ask(self, process: "subprocess.Popen[str]", order: dict[str, Any], first: int = 0, count: int = 0) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with suppress(OSError):  # a broken pipe: there will be no answer
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            process.kill()
            raise WorkerError(_why(process.wait(), first, count)) from None
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer


class WorkerError(DataError):
    """A worker cannot go on, and so nothing can."""


def _why(code: int, first: int, count: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    where = f"while it translated lines {first + 1} to {first + count}" if count else "before it translated anything"
    return f"a worker {how} {where}; if memory ran out, use fewer --workers or a smaller --batch-size"


def main() -> None:
    """Load the runs, then translate what comes, until nothing more does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the one that gives the orders decides
    told = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a library prints must not come between the lines
    import torch  # noqa: PLC0415  # with one thread, as the environment says

    torch.set_num_threads(1)
    warnings: list[str] = []
    orders = (json.loads(line) for line in sys.stdin)
    task = texts = None
    for order in orders:
        try:
            if task is None or texts is None:
                task = Task.of(order)
                texts, answer = task.texts(warnings.append), {}
            else:
                answer = _translated(task, texts, order)
            told.write(json.dumps(answer | {"warnings": warnings}) + "\n")
        except RegardError as error:
            told.write(json.dumps({"error": str(error)}) + "\n")
        except Exception as error:
            told.write(json.dumps({"error": f"a worker failed ({type(error).__name__}: {error})"}) + "\n")
        warnings.clear()


def _translated(task: Task, texts: Texts, order: Mapping[str, Any]) -> dict[str, Any]:
    found = texts.translate(
        order["lines"], task.search, task.batch_size, task.limits, task.wishes, first=order["first"]
    )
    return {"outputs": [[asdict(one) for one in best] for best in found]}


if __name__ == "__main__":
    main()
