"""Translation of large files by jobs of a cluster (`--cluster`): shards of lines, each translated by one job.

Outputs are returned in the order of the input, and equal those of a single process. The outputs of finished shards are
kept in a folder until the whole input is translated, so that the same command continues after an interruption. A job
that ends early keeps the lines that it has translated, and the next job translates the others.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from regard.cluster.job import call
from regard.cluster.pool import ClusterPool
from regard.cluster.schedulers import Cluster
from regard.errors import DataError, SpecError
from regard.files import LOCK, locked, remove, replace_text
from regard.inference.text import AHEAD, Output
from regard.processes import JobError, StoppedError, stop_requested
from regard.runs.workers import Task, outputs_of, translate

LINES = 10_000  # lines per shard


def node_task(task: Task, device: str, threads: int | None) -> Task:
    """Return a task for jobs on other machines: absolute paths, the state of the weights, the device and the threads.

    The state of the weights consists of the names, sizes and times of the files. If the weights change, stored outputs
    of the earlier weights are not used.
    """
    runs = [Path(run).absolute() for run in task["runs"]]
    weights = [
        [path.name, path.stat().st_size, path.stat().st_mtime_ns]
        for run in runs
        for path in sorted(run.glob("weights-*.safetensors"))
    ]
    return {**task, "runs": list(map(str, runs)), "weights": weights, "device": device, "threads": threads or 1}


def translate_shard(record: str, first: int, lines: list[str], kept: str) -> dict[str, Any]:
    """Translate a shard in a job of a cluster; return outputs and warnings.

    The answer for every piece of the shard is written to the folder `kept`, and pieces that an earlier job has written
    there are not translated again. After a warning of the scheduler, the job stops at the end of a piece. A job that
    has not translated any piece goes on, because otherwise the jobs of a slow model would stop again and again.
    """
    size, worked = AHEAD * json.loads(record)["batch_size"], False  # pieces that a decoder would also form
    answer: dict[str, Any] = {"outputs": [], "warnings": []}
    Path(kept).mkdir(exist_ok=True)
    for begin in range(0, len(lines), size):
        path = Path(kept) / f"{begin}.json"
        if not path.exists():
            if worked and (why := stop_requested()):
                raise StoppedError(why)
            replace_text(path, json.dumps(translate(record, first + begin, lines[begin : begin + size])))
            worked = True
        piece = json.loads(path.read_text(encoding="utf-8"))
        for name in answer:
            answer[name] += piece[name]
    return answer


class Shards:
    """Jobs that translate shards of `lines` lines, at most `at_once` of them at the same time.

    `folder` keeps the finished shards. Jobs end with the `with` block.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        task: Task,
        at_once: int | None = None,
        lines: int | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        _check_folder(folder)
        self.folder, self.task = folder, task
        self.at_once, self.lines = at_once or cluster.at_once, lines or LINES
        self._locked = locked(folder, lambda: _check_folder(folder), wait=None)
        self._locked.__enter__()
        try:
            threads = {"OMP_NUM_THREADS": str(task["threads"]), "TOKENIZERS_PARALLELISM": "false"}
            self.pool = ClusterPool(cluster, folder / "shards", threads, report, _label, keep=True)
        except BaseException:
            self._locked.__exit__(None, None, None)
            raise

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *given: Any) -> None:
        self.pool.__exit__(*given)
        self._locked.__exit__(*given)

    def translate(self, lines: Iterable[str], warn: Callable[[str], None] = lambda _: None) -> Iterator[list[Output]]:
        """Yield the n best outputs for each line, in the order of the lines, and then remove the finished shards."""
        record, source, first = json.dumps(self.task, sort_keys=True), iter(lines), 0
        shards: deque[tuple[int, int, Path, Future[Any]]] = deque()
        while True:
            while sum(not future.done() for *_, future in shards) < self.at_once and len(shards) < 4 * self.at_once:
                if not (shard := list(islice(source, self.lines))):
                    break
                kept = self.pool.folder / f"{call('lines', (record, first, shard), {})[0]}-lines"
                future = self.pool.submit(translate_shard, record, first, shard, str(kept))
                shards.append((first, len(shard), kept, future))
                first += len(shard)
            if not shards:
                break
            yield from self._outputs(*shards.popleft(), warn)
        self.pool.clear()

    def _outputs(
        self, first: int, lines: int, kept: Path, future: "Future[Any]", warn: Callable[[str], None]
    ) -> Iterator[list[Output]]:
        try:
            answer = future.result()
        except JobError as error:
            raise DataError(f"lines {first + 1} to {first + lines} have no translation: {error}") from None
        with suppress(OSError):
            remove(kept)
        for sentence in answer["warnings"]:
            warn(sentence)
        yield from map(outputs_of, answer["outputs"])


def _label(_: str, first: int, lines: Sequence[str], kept: str) -> str:  # noqa: ARG001  # arguments of the call
    return f"lines {first + 1:,} to {first + len(lines):,}"


def _check_folder(folder: Path) -> None:
    """Raise an error if the folder contains something other than shards."""
    if folder.exists() and (not folder.is_dir() or any(path.name not in (LOCK, "shards") for path in folder.iterdir())):
        raise DataError(f"{folder} contains other files; choose another folder with --work")


def check_options(cluster: Cluster | None, engine: str, work: Any, shard_lines: int | None) -> None:
    """Raise an error for options that have no effect together."""
    if cluster is None:
        for name, value in (("--work", work), ("--shard-lines", shard_lines)):
            if value is not None:
                raise SpecError(name, "applies to --cluster, which is not given; add it")
    elif engine != "native":
        raise SpecError("--cluster", f"jobs compute with the native engine, not with {engine!r}; leave out --engine")
