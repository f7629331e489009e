"""A pool of cluster jobs with the interface of `concurrent.futures`.

`ClusterPool.submit(function, *arguments)` is like `ProcessPool.submit`, but the call is a job of a scheduler. A job
that dies is submitted again, and so is a job that stopped before its time limit. A finished job is never repeated: the
same call in the same folder returns the stored result, also in a later process.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.cluster.job import JobFolder, call
from regard.cluster.schedulers import Cluster
from regard.files import remove, replace_text
from regard.processes import JobError, python, sentence

OnEvent = Callable[[Any], None]


@dataclass
class _Submitted:
    """A job that has not finished, and what is known of its latest submission."""

    folder: JobFolder
    label: str
    future: "Future[Any]"
    listeners: list[OnEvent]
    submissions: list[str] = field(default_factory=list)  # identifiers of the scheduler
    deaths: int = 0
    offset: int = 0  # bytes of the events that have been read
    started: bool = False  # the latest submission has started
    stopped: str | None = None  # why the latest submission stopped early
    gone: float | None = None  # when the latest submission was first seen to have ended


class ClusterPool(Executor):
    """An executor whose calls are jobs of a cluster, each with a folder in `folder`.

    `environment` has environment variables for the jobs. `report` receives a sentence when a job is submitted again;
    `label(*arguments)` is the name of a call in these sentences. With `keep`, the folders of finished jobs are kept
    until `clear`, so that a later pool does not repeat them either.
    """

    command = tuple(python("regard.cluster.job"))

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        environment: dict[str, str] | None = None,
        report: Callable[[str], None] = lambda _: None,
        label: Callable[..., str] | None = None,
        keep: bool = False,
    ) -> None:
        self.cluster, self.folder, self.environment = cluster, folder.absolute(), environment or {}
        self.report, self.label, self.keep = report, label, keep
        self.scheduler = cluster.scheduler(self.folder / "logs")
        self._jobs: dict[str, _Submitted] = {}  # by the identifier of the call
        self._changing = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cluster jobs", daemon=True)
        self._thread.start()

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, on_event: OnEvent | None = None, **kwargs: Any
    ) -> "Future[Any]":
        """Call `fn(*args, **kwargs)` in a job. `fn` must be a module-level function with JSON values as arguments.

        With `on_event`, `fn` also receives a function `emit`. Every JSON value that `fn` emits is passed to
        `on_event`, which runs in this process, in another thread.
        """
        key, record = call(f"{fn.__module__}:{fn.__qualname__}", args, kwargs)
        record |= {"emits": on_event is not None, "environment": self.environment}
        listeners = [] if on_event is None else [on_event]
        with self._changing:
            if self._closed.is_set():
                raise RuntimeError("cannot submit a job to a pool that was closed")
            if key in self._jobs:
                self._jobs[key].listeners += listeners
                return self._jobs[key].future
            folder, future = JobFolder(self.folder / key), Future()
            future.set_running_or_notify_cancel()
            job = _Submitted(folder, self.label(*args) if self.label else record["function"], future, listeners)
            before = folder.read_submissions()
            if before.get("scheduler") == self.scheduler.kind:
                job.submissions = list(before.get("jobs", []))  # of an earlier process
            found = self._found(job)
            answer = folder.read_result()  # after `_found`, because the job may end in between
            if answer is not None and "result" in answer:
                self._finish(job, answer)
                return future
            if not found:
                job.offset = folder.write(record)
                try:
                    self._start(job)
                except BaseException:
                    remove(folder.path)
                    raise
            self._jobs[key] = job
            return future

    def _found(self, job: _Submitted) -> bool:
        """Return whether an earlier process submitted this job, and the scheduler still has it."""
        if not self.scheduler.alive(job.submissions[-1:]):
            return False
        number = job.submissions[-1]
        self.report(f"{job.label}: job {number} of an earlier command is still there; waiting for it")
        return True

    def _start(self, job: _Submitted) -> None:
        """Submit a job to the scheduler."""
        name = f"{job.folder.path.name}-{len(job.submissions) + 1}"
        number = self.scheduler.submit([*self.command, str(job.folder.path)], name)
        job.submissions.append(number)
        job.started, job.stopped, job.gone = False, None, None
        record = {"scheduler": self.scheduler.kind, "jobs": job.submissions}
        replace_text(job.folder.submitted, json.dumps(record))

    def _watch(self) -> None:
        """Read the events and results of all jobs until the pool is closed."""
        while not self._closed.wait(self.scheduler.interval):
            with self._changing:
                alive = self.scheduler.alive([job.submissions[-1] for job in self._jobs.values()])
                for key, job in list(self._jobs.items()):
                    try:
                        over = self._look(job, job.submissions[-1] in alive)
                    except Exception as error:  # such as a submission that the scheduler refuses
                        job.future.set_exception(JobError(f"{job.label}: {sentence(error)}"))
                        over = True
                    if over:
                        del self._jobs[key]

    def _look(self, job: _Submitted, alive: bool) -> bool:
        """Read the events of a job and return True if its future is done; submit it again if it has died."""
        self._read_events(job)
        if (answer := job.folder.read_result()) is not None:
            self._read_events(job)  # those written before the result
            self._finish(job, answer)
            return True
        if alive:
            job.gone = None  # it may have been missing for a moment, while it was requeued
            return False
        job.gone = job.gone or time.monotonic()
        if time.monotonic() - job.gone < self.scheduler.grace:
            return False
        return self._again(job)

    def _read_events(self, job: _Submitted) -> None:
        events, job.offset = job.folder.events_after(job.offset)
        for event in events:
            if "started" in event:  # perhaps again, if the scheduler requeued the job
                job.started, job.stopped = True, None
            job.stopped = event.get("stopped", job.stopped)
            for listener in job.listeners if "event" in event else ():
                listener(event["event"])

    def _again(self, job: _Submitted) -> bool:
        """Submit a job again that ended without a result, or return True if it died too often."""
        before = job.submissions[-1]
        if job.stopped is None:
            job.deaths += 1
            how = self._how_it_died(job)
            if job.deaths > self.cluster.retries:
                job.future.set_exception(JobError(f"its job died {job.deaths} times: {how}"))
                return True
            self._start(job)
            again = (
                f"submitted again as job {job.submissions[-1]}, attempt {job.deaths + 1} of {self.cluster.retries + 1}"
            )
            self.report(f"{job.label}: job {before} {how}; {again}")
        else:
            why = job.stopped
            self._start(job)
            self.report(
                f"{job.label}: job {before} saved its state and stopped ({why}); job {job.submissions[-1]} goes on"
            )
        return False

    def _how_it_died(self, job: _Submitted) -> str:
        number = job.submissions[-1]
        state, last = self.scheduler.why(number), self._last_line(number)
        reason = ": ".join(part for part in (state, last) if part)
        if job.started:
            return f"died ({reason})" if reason else "died"
        advice = f"check that all nodes share {self.folder} and have this Python"
        return f"ended before it started on its node ({reason or 'without a word in its log'}; {advice})"

    def _last_line(self, number: str) -> str:
        """Return the last line that a job wrote to its log."""
        for path in self.scheduler.logs(number):
            with suppress(OSError):
                written = path.read_text(encoding="utf-8", errors="replace").split("\n")
                lines = [line.strip() for line in written[-50:] if line.strip()]
                if lines:
                    return lines[-1][:200]
        return ""

    def _finish(self, job: _Submitted, answer: dict[str, Any]) -> None:
        """Set the result of a job, and remove its files unless they are kept."""
        if "error" in answer or not self.keep:
            for path in (*self._logs(job), job.folder.path):
                with suppress(OSError):
                    remove(path)
        if "error" in answer:
            job.future.set_exception(JobError(answer["error"]))
        else:
            job.future.set_result(answer["result"])

    def _logs(self, job: _Submitted) -> Iterator[Path]:
        for number, submission in enumerate(job.submissions, 1):
            yield from self.scheduler.logs(submission)
            yield self.folder / "logs" / f"{job.folder.path.name}-{number}.sh"

    def clear(self) -> None:
        """Remove all kept results. The pool has no unfinished job."""
        for path in list(self.folder.iterdir()):
            remove(path)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Close the pool. With `wait` and without `cancel_futures`, wait for all jobs first; otherwise cancel them."""
        if wait and not cancel_futures:
            for job in list(self._jobs.values()):
                with suppress(Exception):
                    job.future.exception()
        with self._changing:
            if self._closed.is_set():
                return
            self._closed.set()
            jobs, self._jobs = list(self._jobs.values()), {}
        self.scheduler.cancel([job.submissions[-1] for job in jobs])
        self.scheduler.close()
        for job in jobs:
            job.future.set_exception(JobError("its pool was closed"))
        self._thread.join()
        for path in (self.folder / "logs", self.folder):
            with suppress(OSError):  # logs of jobs that failed, or results that are kept
                path.rmdir()

    def __exit__(self, *_: object) -> None:
        """Cancel all jobs that have not finished. Submitting them again continues them."""
        self.shutdown(wait=False, cancel_futures=True)
