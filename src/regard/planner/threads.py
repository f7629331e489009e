"""Choose the number of CPU threads by measurement: on some machines one thread is fastest, on others all of them.

Threads wait for each other by spinning, so two threads can be many times slower than one if another process is busy.
The small matrix products of a decoding step often finish before a second thread has started. The best number cannot be
predicted from the hardware, so `regard train` measures it in a separate process, and stores the result in the cache if
the machine was idle. Without a measurement, a small model decodes with one thread. Decoding never uses more threads
than there are idle cores when it starts. A number set by the user (`--threads`, `OMP_NUM_THREADS`) is always used.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
import timeit
from importlib import metadata
from pathlib import Path
from typing import Literal

from regard.data import cache
from regard.processes import cores, python

Kind = Literal["train", "decode"]
Timings = dict[Kind, dict[int, float]]  # seconds, by task and number of threads
KINDS: tuple[Kind, ...] = ("train", "decode")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
GAIN = 1.1  # factor by which more threads must be faster; smaller differences are noise
SECONDS = 30  # time limit of a measurement, including the start of its process; it usually takes about 4 s
ROUNDS = 3
SMALL = 20_000_000  # number of parameters below which a model is small
INTERVAL = 0.1  # seconds during which idle cores are counted
STAT = Path("/proc/stat")


def for_training() -> int | None:
    """Return the fastest number of threads for training on this machine; measure it if no measurement is stored.

    Return None (torch's default) if the user has set the number, there is only one core, or the measurement fails.
    """
    if set_by_user() or cores() == 1:
        return None
    timings = _read()
    if timings is None:
        alone = quiet()
        timings = _measured()
        if timings is not None and alone:
            _write(timings)
    return None if timings is None else best(timings["train"])


def for_decoding(parameters: int | None = None) -> int | None:
    """Return the number of threads for decoding, or None if it is set by the user or there is one core.

    It is the fastest number measured on this machine. Without a measurement, it is 1 for a model of fewer than `SMALL`
    parameters, and torch's default for a larger model. It is never more than the number of idle cores: with one busy
    process on two cores, two threads were 2 to 15 times slower than one, for models of 2 to 52 million parameters.
    """
    if set_by_user() or cores() == 1:
        return None
    timings = _read()
    if timings is not None:
        threads = best(timings["decode"])
    elif parameters is not None and parameters < SMALL:
        threads = 1
    else:
        import torch  # noqa: PLC0415

        threads = torch.get_num_threads()
    return threads if threads == 1 else max(1, min(threads, round(idle_cores())))


def best(seconds: dict[int, float]) -> int:
    """Return the smallest number of threads whose time is at most `GAIN` times the shortest time."""
    fastest = min(seconds.values())
    return min(threads for threads, spent in seconds.items() if spent <= GAIN * fastest)


def set_by_user() -> bool:
    """Return whether the user has set the number of threads by an environment variable."""
    return any(os.environ.get(name) for name in VARIABLES)


def quiet() -> bool:
    """Return whether most cores are idle. On a busy machine, a measurement should not be stored."""
    return idle_cores() >= 0.75 * cores()


def idle_cores() -> float:
    """Return how many of the cores that this process may use are idle, from /proc/stat or the load average."""
    before = _ticks()
    if not before or not hasattr(os, "sched_getaffinity"):
        return max(0.0, cores() - os.getloadavg()[0]) if hasattr(os, "getloadavg") else float(cores())
    time.sleep(INTERVAL)
    now = _ticks()
    spent = {core: (now[core][0] - before[core][0], now[core][1] - before[core][1]) for core in before if core in now}
    return sum(idle / max(1, total) for core, (idle, total) in spent.items() if core in os.sched_getaffinity(0))


def _ticks() -> dict[int, tuple[int, int]]:
    """Return {core number: (idle clock ticks, all clock ticks)}, or an empty dict if the system reports no ticks."""
    try:
        rows = [line.split() for line in STAT.read_text().splitlines() if re.match(r"cpu\d", line)]
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user
        counts = {int(row[0][3:]): [int(count) for count in row[1:9]] for row in rows}
    except (OSError, ValueError):
        return {}
    return {core: (sum(ticks[3:5]), sum(ticks)) for core, ticks in counts.items() if any(ticks)}


def recorded(run: Path) -> int | None:
    """Return the number of threads stored in a run folder. Resuming with another number would round differently."""
    try:
        threads = json.loads((run / "environment.json").read_text())["threads"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return threads if isinstance(threads, int) and threads > 0 else None


def cpu() -> str:
    """Return the model name of the processor from /proc/cpuinfo, or else what Python's `platform` reports."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name.*?:(.*)", info.read_text(), re.MULTILINE) if info.exists() else []
    return names[0].strip() if names else platform.processor() or platform.machine()


def _file() -> Path:
    """Return the path of the stored measurements, which depends on processor, number of cores, system and torch."""
    return cache.timings_file(repr((cpu(), cores(), platform.platform(), metadata.version("torch"))))


def _read() -> Timings | None:
    try:
        return _parsed(_file().read_text())
    except OSError:
        return None


def _write(timings: Timings) -> None:
    cache.store_timings(_file(), timings)


def _measured() -> Timings | None:
    """Run `measure` in a separate process and return the result; None if the process fails for any reason."""
    command = python("regard.planner.threads")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return _parsed(done.stdout)


def _parsed(text: str) -> Timings | None:
    try:
        record = json.loads(text)
        timings: Timings = {kind: {int(n): float(seconds) for n, seconds in record[kind].items()} for kind in KINDS}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return timings if all(timings.values()) else None


def candidates(available: int) -> list[int]:
    """Return the numbers of threads to measure: one, half of the cores, and all cores."""
    return sorted({1, max(1, available // 2), available})


def measure() -> Timings:
    """Measure the seconds of a small training step and of a small beam search with each number of threads."""
    import torch  # noqa: PLC0415  # reading a stored measurement should not wait for these imports

    from regard.batch import Batch, translation  # noqa: PLC0415
    from regard.decoding.beam import Beam  # noqa: PLC0415
    from regard.decoding.hypothesis import Limits, SpecialTokens  # noqa: PLC0415
    from regard.decoding.search import find  # noqa: PLC0415
    from regard.models.base import Generator  # noqa: PLC0415
    from regard.models.build import build  # noqa: PLC0415
    from regard.presets import preset  # noqa: PLC0415

    sizes = {"d_model": 256, "heads": 4, "encoder.depth": 2, "decoder.depth": 2}
    model = build(preset("transformer_base", vocab=4000, **sizes))
    assert isinstance(model, Generator)
    ids = torch.randint(4, 4000, (16, 17), generator=torch.Generator().manual_seed(0)).tolist()
    batch = translation([(row, row) for row in ids], 1, 2, source_end=())
    sources = torch.tensor(ids[:8])

    def train() -> None:
        model.train().loss(batch).total.backward()

    def decode() -> None:
        find(model.eval(), Batch(sources[:, :1], source=sources), Beam(5), SpecialTokens(1, 2, 0), Limits(8, 8))

    timings: Timings = {"train": {}, "decode": {}}
    for threads in candidates(cores()):
        torch.set_num_threads(threads)
        for kind, work in zip(KINDS, (train, decode), strict=True):
            work()
            timings[kind][threads] = min(timeit.repeat(work, number=1, repeat=ROUNDS))
    return timings


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()))
