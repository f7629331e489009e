"""Choose the number of CPU threads by measuring, because neither one thread nor all threads are best on every machine.

Threads wait for each other by spinning, so that two threads can be many times slower than one if another process is
busy, and the small matrix products of a decoding step often finish before a second thread has started. The best number
cannot be predicted from the hardware, so `regard train` measures it in a separate process, and stores the result in the
cache if the machine was idle. Without a measurement, a small model decodes with one thread. Decoding never uses more
threads than there are idle cores when it starts. A number set by the user (`--threads`, `OMP_NUM_THREADS`) is always
used.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from regard.data import cache
from regard.errors import SpecError
from regard.files import replace_text
from regard.processes import python

Kind = Literal["train", "decode"]
KINDS: tuple[Kind, ...] = ("train", "decode")
SAID = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
GAIN = 1.1  # factor by which more threads must be faster; smaller differences are noise
SECONDS = 30  # time limit of a measurement, including the start of its process; it usually takes about 4 s
ROUNDS = 3
SMALL = 20_000_000  # number of parameters below which a model is small
INTERVAL = 0.1  # seconds during which idle cores are counted
STAT = Path("/proc/stat")


def for_training() -> int | None:
    """Return the number of threads for training, as measured on this machine; measure it if that has not been done.

    None means torch's default: the user has set the number, there is only one core, or the measurement failed.
    """
    if said() or cores() == 1:
        return None
    known = _read()
    if known is None:
        alone = quiet()
        known = _measured()
        if known is not None and alone:
            _write(known)
    return None if known is None else best(known["train"])


def for_decoding(parameters: int | None = None) -> int | None:
    """Return the number of threads for decoding; None means torch's default (set by the user, or only one core).

    This is the number measured on this machine. Without a measurement, it is 1 for a model of fewer than `SMALL`
    parameters, and torch's default for a larger model. It is never more than the number of idle cores: with one busy
    process on two cores, two threads were 2 to 15 times slower than one, for models of 2 to 52 million parameters.
    """
    if said() or cores() == 1:
        return None
    known = _read()
    if known is not None:
        wanted = best(known["decode"])
    elif parameters is not None and parameters < SMALL:
        wanted = 1
    else:
        import torch  # noqa: PLC0415

        wanted = torch.get_num_threads()
    return wanted if wanted == 1 else max(1, min(wanted, round(idle_cores())))


def best(seconds: dict[int, float]) -> int:
    """Return the smallest number of threads that is as fast as any other, up to noise."""
    fastest = min(seconds.values())
    return min(threads for threads, spent in seconds.items() if spent <= GAIN * fastest)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def said() -> bool:
    """Return whether environment variables set the number of threads."""
    return any(os.environ.get(name) for name in SAID)


def quiet() -> bool:
    """Return whether most cores are idle; a measurement on a busy machine should not be stored."""
    return idle_cores() >= 0.75 * cores()


def idle_cores() -> float:
    """Return the number of idle cores among those of this process, from /proc/stat, else from the load average."""
    before = _ticks()
    if not before or not hasattr(os, "sched_getaffinity"):
        return max(0.0, cores() - os.getloadavg()[0]) if hasattr(os, "getloadavg") else float(cores())
    time.sleep(INTERVAL)
    now = _ticks()
    spent = {core: (now[core][0] - before[core][0], now[core][1] - before[core][1]) for core in before if core in now}
    return sum(idle / max(1, every) for core, (idle, every) in spent.items() if core in os.sched_getaffinity(0))


def _ticks() -> dict[int, tuple[int, int]]:
    """Return (idle clock ticks, all clock ticks) of each core; empty if the system does not report them."""
    try:
        rows = [line.split() for line in STAT.read_text().splitlines() if re.match(r"cpu\d", line)]
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user
        counts = {int(row[0][3:]): [int(count) for count in row[1:9]] for row in rows}
    except (OSError, ValueError):
        return {}
    return {core: (sum(each[3:5]), sum(each)) for core, each in counts.items() if any(each)}


def recorded(run: Path) -> int | None:
    """Return the number of threads that a run was trained with; resuming with another would round differently."""
    try:
        threads = json.loads((run / "environment.json").read_text())["threads"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return threads if isinstance(threads, int) and threads > 0 else None


def _file() -> Path:
    """Return the path of the measurements in the cache; its key is everything that the measurements depend on."""
    facts = (cpu(), cores(), platform.platform(), metadata.version("torch"))
    return cache.timings_file(repr(facts))


def cpu() -> str:
    """Return the name of the processor, as precisely as the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _read() -> dict[Kind, dict[int, float]] | None:
    try:
        return _parsed(_file().read_text())
    except OSError:
        return None


def _write(found: dict[Kind, dict[int, float]]) -> None:
    """Store the measurements atomically. If that fails, they are measured again next time."""
    path = _file()
    try:
        if not cache.size_limit():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(found))
    except (OSError, SpecError):
        return


def _measured() -> dict[Kind, dict[int, float]] | None:
    """Return the measurements of a separate process; None if the process fails for any reason."""
    try:
        done = subprocess.run(
            python("regard.planner.threads"), capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _parsed(done.stdout)


def _parsed(text: str) -> dict[Kind, dict[int, float]] | None:
    try:
        record = json.loads(text)
        found: dict[Kind, dict[int, float]] = {
            kind: {int(n): float(spent) for n, spent in record[kind].items()} for kind in KINDS
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found if all(found.values()) else None


def candidates(available: int) -> list[int]:
    """Return the numbers of threads to measure: one, half of the cores, and all cores."""
    return sorted({1, max(1, available // 2), available})


def measure() -> dict[Kind, dict[int, float]]:
    """Return the seconds of a small training step and a small beam search per number of threads: best of `ROUNDS`."""
    import torch  # noqa: PLC0415  # reading a stored measurement should not wait for this import

    work = _work()
    found: dict[Kind, dict[int, float]] = {kind: {} for kind in KINDS}
    for threads in candidates(cores()):
        torch.set_num_threads(threads)
        for kind in KINDS:
            work[kind]()
            found[kind][threads] = min(_seconds(work[kind]) for _ in range(ROUNDS))
    return found


def _work() -> dict[Kind, Callable[[], Any]]:
    import torch  # noqa: PLC0415

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
    learned = translation([(row, row) for row in ids], 1, 2, source_end=())
    sources = torch.tensor(ids[:8])

    def train() -> None:
        model.train().loss(learned).total.backward()

    def decode() -> None:
        find(model.eval(), Batch(sources[:, :1], source=sources), Beam(5), SpecialTokens(1, 2, 0), Limits(8, 8))

    return {"train": train, "decode": decode}


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()))
