"""The schedulers that start the jobs of a cluster, by submitit: Slurm, and the `local` executor for tests.

submitit writes the sbatch file and starts local jobs. Its pickled functions and results are not used: a job is a
command line, and its result a JSON file (`regard.cluster.job`).
"""

import getpass
import math
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from regard.errors import DataError, SpecError, nearest
from regard.processes import cores

MINUTES = 60 * 24 * 365  # time limit of submitit's local executor, whose default is two minutes
KINDS = ("local", "slurm")
CONTROLLERS = "controllers.log"  # what submitit's local controllers write to stderr
GPU_OPTIONS = ("gres", "gpus_per_node", "gpus_per_task")
LISTS, FIXED = ("setup", "teardown", "srun_args"), ("partition", "nodes", "ntasks_per_node", "additional_parameters")


@dataclass(frozen=True)
class Cluster:
    """Where jobs run: `slurm`, or `local` for jobs of submitit's local executor on this machine."""

    kind: str
    partition: str | None = None
    options: tuple[str, ...] = ()  # KEY=VALUE: options of sbatch
    retries: int = 3  # how often a job that dies is submitted again

    def check(self) -> None:
        """Raise an error if the settings are invalid, submitit is missing, or there is no Slurm on this machine."""
        if self.kind not in KINDS:
            raise SpecError("--cluster", f"unknown cluster {self.kind!r}; {nearest(self.kind, KINDS)}")
        if find_spec("submitit") is None:
            raise SpecError("--cluster", "needs submitit, which is not installed: pip install 'regard[cluster]'")
        if self.kind == "local":
            for name, value in (("--partition", self.partition), ("--cluster-option", self.options)):
                if value:
                    raise SpecError(name, "applies to --cluster slurm; leave it out")
            return
        missing = [name for name in SlurmScheduler.commands if shutil.which(name) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise SpecError(
                "--cluster",
                f"{', '.join(missing)} {verb} not on the PATH, so this machine cannot submit jobs to Slurm; run the "
                "command on a login node of the cluster",
            )
        self.parameters()
        known = partitions()
        if self.partition is not None and known and self.partition not in known:
            raise SpecError("--partition", f"unknown partition {self.partition!r}; {nearest(self.partition, known)}")

    @property
    def has_gpus(self) -> bool:
        """True if the jobs request GPUs."""
        return any(option.partition("=")[0].replace("-", "_") in GPU_OPTIONS for option in self.options)

    @property
    def at_once(self) -> int:
        """The default number of jobs that are submitted at the same time."""
        return 64 if self.kind == "slurm" else cores()

    def parameters(self) -> dict[str, Any]:
        """Return the options of sbatch as parameters of submitit's Slurm executor."""
        from submitit.slurm.slurm import SlurmExecutor  # noqa: PLC0415  # an optional dependency

        known = SlurmExecutor._valid_parameters() - {*FIXED, "num_gpus"}
        # Without a time, the limit of the partition applies; submitit's default is five minutes.
        parameters: dict[str, Any] = {"time": None, "wckey": None, "job_name": "regard"}
        for option in self.options:
            key, equals, text = option.partition("=")
            name = key.strip().lstrip("-").replace("-", "_")
            if not equals:
                raise SpecError("--cluster-option", f"{option!r} has no value; write KEY=VALUE, such as time=120")
            if name == "partition":
                raise SpecError("--cluster-option", "the partition has its own option; use --partition")
            if name not in known:
                raise SpecError("--cluster-option", f"unknown key {key!r}; {nearest(name, known)}")
            value: Any = int(text) if re.fullmatch(r"\d+", text) else text
            parameters[name] = [*parameters.get(name, ()), text] if name in LISTS else value
        return parameters | ({} if self.partition is None else {"partition": self.partition})

    def scheduler(self, folder: Path) -> "Scheduler":
        """Return the scheduler, which writes the logs of the jobs to `folder`."""
        self.check()
        folder.mkdir(parents=True, exist_ok=True)
        return SlurmScheduler(folder, self) if self.kind == "slurm" else LocalScheduler(folder)


class Scheduler(Protocol):
    """Protocol of schedulers: submit command lines, and report which of them have ended."""

    kind: ClassVar[str]
    interval: ClassVar[float]  # seconds between two looks at the jobs
    grace: ClassVar[float]  # seconds after the end of a job within which its files become visible

    def submit(self, command: Sequence[str], name: str) -> str:
        """Submit a command line and return the identifier of the job."""
        ...

    def alive(self, jobs: Iterable[str]) -> set[str]:
        """Return the jobs that have not ended: those that wait, run, or wait to be run again."""
        ...

    def cancel(self, jobs: Iterable[str]) -> None:
        """End the jobs."""
        ...

    def close(self) -> None:
        """Wait for processes of this machine, after all jobs have ended or been cancelled."""
        ...

    def why(self, job: str) -> str:
        """Return how a job ended, such as `OUT_OF_MEMORY`, or an empty string."""
        ...

    def logs(self, job: str) -> list[Path]:
        """Return the files that contain the output of a job."""
        ...


class LocalScheduler:
    """Runs every job at once on this machine, with submitit's local executor."""

    kind: ClassVar[str] = "local"
    interval: ClassVar[float] = 0.1
    grace: ClassVar[float] = 1.0

    def __init__(self, folder: Path) -> None:
        from submitit.local.local import LocalExecutor  # noqa: PLC0415  # an optional dependency

        self.folder = folder.absolute()
        self.executor = LocalExecutor(self.folder)
        self.executor.update_parameters(timeout_min=MINUTES)
        self.jobs: dict[str, Any] = {}

    def submit(self, command: Sequence[str], name: str) -> str:  # noqa: ARG002  # one signature for all schedulers
        from submitit.core.utils import environment_variables  # noqa: PLC0415  # an optional dependency

        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")  # which submitit replaces
        visible = ["-u", "CUDA_VISIBLE_DEVICES"] if gpus is None else [f"CUDA_VISIBLE_DEVICES={gpus}"]
        # submitit's controller imports nothing from the working folder, and its traceback after Ctrl-C is not shown.
        with environment_variables(PYTHONSAFEPATH="1"), _stderr_of_processes(self.folder / CONTROLLERS):
            job = self.executor._submit_command(shlex.join(["env", *visible, *command]))
        self.jobs[job.job_id] = job
        return job.job_id

    def alive(self, jobs: Iterable[str]) -> set[str]:
        return {job for job in jobs if job in self.jobs and not self.jobs[job].done()}

    def cancel(self, jobs: Iterable[str]) -> None:
        for job in jobs:
            if job in self.jobs:
                with suppress(ProcessLookupError):
                    self.jobs[job].cancel(check=False)

    def close(self) -> None:
        for job in self.jobs.values():  # a controller ends with its job, or within about a second of SIGINT
            try:
                job._process.wait(5)
            except subprocess.TimeoutExpired:  # it ignores SIGINT, as a background process of a shell does
                job._process.kill()
                job._process.wait()
        (self.folder / CONTROLLERS).unlink(missing_ok=True)

    def why(self, job: str) -> str:  # noqa: ARG002
        return ""

    def logs(self, job: str) -> list[Path]:
        return [self.folder / f"{job}_0_log.{name}" for name in ("err", "out")]


class SlurmScheduler:
    """Submits jobs with sbatch. The sbatch file is written by submitit."""

    kind: ClassVar[str] = "slurm"
    interval: ClassVar[float] = 2.0
    grace: ClassVar[float] = 15.0
    spacing: ClassVar[float] = 15.0  # seconds between two calls of squeue, which burden the controller of the cluster
    commands: ClassVar[Sequence[str]] = ("sbatch", "srun", "squeue", "scancel")

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        from submitit.slurm.slurm import SlurmExecutor  # noqa: PLC0415  # an optional dependency

        self.folder = folder.absolute()
        self.executor = SlurmExecutor(self.folder)
        self.executor.update_parameters(**cluster.parameters())
        self.asked = -math.inf  # when squeue was last called
        self.listed: set[str] | None = None  # the jobs that it listed, and those submitted since

    def submit(self, command: Sequence[str], name: str) -> str:
        path = self.folder / f"{name}.sh"
        path.write_text(self.executor._make_submission_file_text(shlex.join(command), name), encoding="utf-8")
        answer = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
        number = re.search(r"job (\d+)", answer.stdout)
        if answer.returncode == 0 and number:
            if self.listed is not None:
                self.listed.add(number[1])
            return number[1]
        said = " ".join((answer.stderr or answer.stdout).split()) or f"exit code {answer.returncode}"
        raise DataError(f"sbatch refused the job: {said}; change --partition or --cluster-option")

    def alive(self, jobs: Iterable[str]) -> set[str]:
        if time.monotonic() - self.asked >= self.spacing:
            self.asked = time.monotonic()
            command = ["squeue", "--noheader", "--format=%i", f"--user={getpass.getuser()}"]
            with suppress(OSError, subprocess.SubprocessError):  # without an answer, the last one holds
                answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
                self.listed = set(answer.stdout.split())
        return set(jobs) if self.listed is None else set(jobs) & self.listed

    def cancel(self, jobs: Iterable[str]) -> None:
        if listed := list(jobs):
            _output("scancel", *listed)

    def close(self) -> None:
        pass

    def why(self, job: str) -> str:
        states = _output("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}", "--format=State")
        return states.split()[-1] if states.split() else ""

    def logs(self, job: str) -> list[Path]:
        return [self.folder / f"{job}_0_log.{name}" for name in ("err", "out")]


@contextmanager
def _stderr_of_processes(path: Path) -> Iterator[None]:
    """Append what processes write to stderr to a file, if they are started inside a `with` block."""
    try:
        before = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def partitions() -> set[str]:
    """Return the partitions of Slurm, or an empty set if sinfo does not list them."""
    return set(_output("sinfo", "--noheader", "--format=%R").split())


def _output(*command: str) -> str:
    """Return the output of a command of Slurm, or an empty string if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def cluster_from_options(
    cluster: str | None = None, partition: str | None = None, cluster_options: str | Sequence[str] | None = None
) -> Cluster | None:
    """Return the `Cluster` for the options of a command, after checking it; None if the options request no cluster."""
    options = (cluster_options,) if isinstance(cluster_options, str) else tuple(cluster_options or ())
    if cluster is None:
        for name, value in (("--partition", partition), ("--cluster-option", options)):
            if value:
                raise SpecError(name, "applies to --cluster slurm, which is not given; add it")
        return None
    chosen = Cluster(cluster, partition, options)
    chosen.check()
    return chosen
