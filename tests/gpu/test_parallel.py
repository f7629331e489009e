"""Training on GPUs in a group with NCCL: losses and speed of one rank are those of a process that trains alone.

With several GPUs, the group has one rank for each of them.
"""

import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.batching import Packing
from regard.models.build import build
from regard.presets import preset
from regard.training.checkpoint import RunFolder
from regard.training.executor import choose_executor
from regard.training.parallel.group import ALONE, joined
from regard.training.spec import TrainSpec
from regard.training.trainer import Trainer
from tests.gpu.test_training import PACKED, SPEC, Notes, Repeated, loader, model
from tests.ranks import Ranks

pytestmark = pytest.mark.gpu
GPUS = max(1, min(4, torch.cuda.device_count()))
ROUNDS, STEPS = 5, 40


def losses(folder: str, spec: TrainSpec, grouped: bool) -> dict[str, Any]:
    """Return the losses of a training run, and how its steps ran."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    with joined("cuda") as group:
        notes = Notes()
        built = model() if spec.parallel == "replicate" else build(model().spec, "cpu", seed=1)
        trainer = Trainer(built, spec, loader(PACKED), RunFolder(folder), watchers=[notes], group=group)
        trainer.fit()
        assert (group is ALONE) != grouped
    steps = [event["loss"] for event in notes if event["event"] == "step"]
    return {"losses": steps, "executors": [event["executor"] for event in notes.executors]}


@pytest.mark.parametrize("accumulate", [GPUS, 2 * GPUS])
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_ranks_have_the_losses_of_one_process(tmp_path: Path, parallel: Any, accumulate: int) -> None:
    """Steps of replicated weights are captured as CUDA graphs; those of sharded weights run eagerly."""
    spec = replace(SPEC, accumulate=accumulate, parallel=parallel, precision="float32")
    for name in ("alone", "group"):
        (tmp_path / name).mkdir()
    (expected,) = [losses(str(tmp_path / "alone"), replace(spec, parallel="replicate"), False)]
    first, *others = Ranks(tmp_path, GPUS, losses, str(tmp_path / "group"), spec, True).results()
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert first["executors"] == (["graph"] if parallel == "replicate" else ["eager"])
    assert all(other["losses"] == first["losses"] for other in others)


def speeds(folder: str) -> list[float]:
    """Return the medians of the seconds for `STEPS` steps of the base model: alone, and in a group of one rank.

    The same full batches are repeated, so that neither waits for the next batch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    with joined("cuda") as group:
        trainers, notes = [], Notes()
        examples = loader(Packing(16_384, 64), 10_000)
        full = list(islice(examples.once(), 4))
        for number, each in enumerate((ALONE, group)):
            base = build(preset("transformer_base", vocab=8000), "cuda", seed=1)
            spec = replace(SPEC, steps=10_000, log_every=10_000)
            batches = Repeated(full, examples)
            trainer = Trainer(base, spec, batches, RunFolder(f"{folder}/{number}"), watchers=[notes], group=each)
            trainer.prefetch = trainer.batches()
            trainer.executor = choose_executor(trainer.update, True, False, trainer.seconds_left, trainer.emit)
            trainers.append(trainer)
        seconds: list[list[float]] = [[], []]
        for number in range(ROUNDS + 1):
            for which in (0, 1) if number % 2 else (1, 0):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(STEPS):
                    trainers[which].step()
                torch.cuda.synchronize()
                seconds[which].append(time.perf_counter() - began)
        for trainer in trainers:
            trainer.prefetch.close()
        assert [event["executor"] for event in notes.executors] == ["graph", "graph"]
        return [sorted(each[1:])[ROUNDS // 2] for each in seconds]


def test_one_rank_has_95_percent_of_the_speed_of_one_process(tmp_path: Path) -> None:
    ((alone, grouped),) = Ranks(tmp_path, 1, speeds, str(tmp_path)).results()
    assert grouped < alone / 0.95
