"""How many CPU threads: measured once on a machine, for neither one nor all of them are best everywhere.

Threads wait for each other by spinning, so that beside another busy process two of them can be many times slower than
one, and the small products of a decoding step are often over before a second thread has begun. Nothing that is known
about a machine tells this, so `regard train` tries it out, in a process of its own. What it finds on a machine with
nothing else to do is kept in the cache. Without a measurement, a small model decodes with one thread; and no decoding
has more threads than there are idle cores when it starts. Whoever says how many (--threads, OMP_NUM_THREADS) gets as
many.
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
GAIN = 1.1  # more threads must be faster by this much: what is within it is noise
SECONDS = 30  # that a measurement may take, with the start of its process; it takes about four
ROUNDS = 3
SMALL = 20_000_000  # parameters
INTERVAL = 0.1  # seconds in which idle cores are counted
STAT = Path("/proc/stat")


def for_training() -> int | None:
    """Return how many threads to train with: what was measured on this machine, now if it was not before.

    None: torch's choice, because it was said, there is one core, or the measurement failed.
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
    """Return how many threads to decode with; None: torch's choice, because it was said or there is one core.

    That is what was measured on this machine; else 1 for a model of fewer than `SMALL` parameters, and torch's choice
    for a larger one; but never more than there are idle cores. Two threads beside one busy process on two cores were 2
    to 15 times slower than one, for models of 2 to 52 million parameters.
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
    """The fewest threads that are as fast as any."""
    fastest = min(seconds.values())
    return min(threads for threads, spent in seconds.items() if spent <= GAIN * fastest)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def said() -> bool:
    """Whether the environment says how many threads there are to be."""
    return any(os.environ.get(name) for name in SAID)


def quiet() -> bool:
    """Return whether the cores are idle. What is measured beside them holds for now only."""
    return idle_cores() >= 0.75 * cores()


def idle_cores() -> float:
    """Return how many of the cores of this process have nothing to do: by /proc/stat, else by the load average."""
    before = _ticks()
    if not before or not hasattr(os, "sched_getaffinity"):
        return max(0.0, cores() - os.getloadavg()[0]) if hasattr(os, "getloadavg") else float(cores())
    time.sleep(INTERVAL)
    now = _ticks()
    spent = {core: (now[core][0] - before[core][0], now[core][1] - before[core][1]) for core in before if core in now}
    return sum(idle / max(1, every) for core, (idle, every) in spent.items() if core in os.sched_getaffinity(0))


def _ticks() -> dict[int, tuple[int, int]]:
    """Return the clock ticks that each core has been idle, and all it has counted; empty where the system has none."""
    try:
        rows = [line.split() for line in STAT.read_text().splitlines() if re.match(r"cpu\d", line)]
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user
        counts = {int(row[0][3:]): [int(count) for count in row[1:9]] for row in rows}
    except (OSError, ValueError):
        return {}
    return {core: (sum(each[3:5]), sum(each)) for core, each in counts.items() if any(each)}


def recorded(run: Path) -> int | None:
    """How many threads a run was trained with: going on with another number would round differently."""
    try:
        threads = json.loads((run / "environment.json").read_text())["threads"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return threads if isinstance(threads, int) and threads > 0 else None


def _file() -> Path:
    """Where the measurements of this machine are, by all that they depend on."""
    facts = (cpu(), cores(), platform.platform(), metadata.version("torch"))
    return cache.timings_file(repr(facts))


def cpu() -> str:
    """The name of the processor, as far as the system tells it."""
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
    """Whole or not at all. A folder that cannot be written to only means that it is measured again."""
    path = _file()
    try:
        if not cache.size_limit():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(found))
    except (OSError, SpecError):
        return


def _measured() -> dict[Kind, dict[int, float]] | None:
    """What a process of its own finds; None if it fails, for whatever reason."""
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
    """The numbers that are tried: one, half and all of the cores."""
    return sorted({1, max(1, available // 2), available})


def measure() -> dict[Kind, dict[int, float]]:
    """Seconds of a small training step and of a small beam search with every number of threads, the best of some."""
    import torch  # noqa: PLC0415  # whoever asks what is known already should not wait for it

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
