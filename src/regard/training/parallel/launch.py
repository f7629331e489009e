"""Start a command of regard in several processes of this machine, as `torchrun --standalone` does."""

import logging
import os
import signal
import uuid
from collections.abc import Sequence

import torch

from regard.errors import SpecError
from regard.processes import cores, python
from regard.training.parallel.joining import RankError, launched

THREADS = "OMP_NUM_THREADS"
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # SIGUSR1: Slurm's, before a time limit


def check_launch(gpus: int | None, ranks: int | None, device: str) -> None:
    """Raise an error if a command cannot run on this number of GPUs, or in this number of processes on the CPU."""
    option = "--ranks" if gpus is None else "--gpus"
    if launched():
        raise SpecError(option, "torchrun has already started several processes; leave this option out")
    if gpus is not None and ranks is not None:
        raise SpecError("--ranks", "trains on the CPU, and --gpus on GPUs; give one of the two")
    if ranks is not None and device not in ("auto", "cpu"):
        raise SpecError("--ranks", f"trains on the CPU, not on {device}; use --gpus for one process per GPU")
    if gpus is not None and device not in ("auto", "cuda"):
        raise SpecError("--gpus", f"trains on GPUs, not on {device}; use --ranks for processes on the CPU")
    here = torch.cuda.device_count()
    if gpus is not None and gpus > here:
        advice = f"use at most {here}" if here else f"use --ranks {gpus} to train in {gpus} processes on the CPU"
        raise SpecError("--gpus", f"this machine has {here or 'no'} GPU{'s' * (here != 1)}; {advice}")


def launch(words: Sequence[str], processes: int) -> int:
    """Run `regard` with the arguments `words` in several processes, and return the exit code.

    The processes exchange data on this machine only. If one of them fails, the others are stopped. A signal is passed
    on to the processes, which then have half a minute to save a checkpoint.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415  # slow to import
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it logs tracebacks of its own
    os.environ.setdefault(THREADS, str(max(1, cores() // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle=",".join(_passed_on()),
    )
    program, *arguments = python("regard")
    try:
        elastic_launch(config, program)(*arguments, *words)
    except ChildFailedError as error:
        return _exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _passed_on() -> list[str]:
    """Return the signals to pass on: those that end training, except signals that are ignored, as after `nohup`."""
    numbers = {name: getattr(signal, name, None) for name in SIGNALS}
    return [name for name, number in numbers.items() if number and signal.getsignal(number) is not signal.SIG_IGN]


def _exit_code(codes: dict[int, int]) -> int:
    """Return the exit code of a failed group; raise an error that names a rank that was killed by a signal."""
    for rank, code in sorted(codes.items()):
        if code < 0 and code != -signal.SIGTERM:  # SIGTERM stops the ranks that have not failed
            raise RankError(
                f"rank {rank} was killed by signal {-code}, perhaps because memory ran out; continue from the last "
                "checkpoint with regard resume"
            )
    return next((code for _, code in sorted(codes.items()) if code > 0), 2)
