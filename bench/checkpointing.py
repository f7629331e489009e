"""Cost of checkpoints: training with checkpoints in the background, compared with training without checkpoints.

One model is trained throughout, in rounds. A round has three segments of the same number of steps, in rotating order:
no checkpoint, one checkpoint that is written in the background, and one checkpoint that is waited for. Wall-clock time
is measured from the first step of a segment until its last step is done and its checkpoint is on the disk. The result
is the median over rounds of the time of a segment, divided by the time of the segment without a checkpoint in the same
round, with a 95 % bootstrap interval. If the median of the background exceeds the limit, the exit code is 1.

On a machine that is busy with other work, wall-clock times vary too much. With --cpu, the CPU seconds of the process
are compared instead, including those of the thread that writes. This is the cost if no other core is free.

    python bench/checkpointing.py --rounds 12 --steps 40
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.data.batching import Buckets
from regard.data.loader import BatchLoader, Examples, Prefetch
from regard.data.objectives import Translation
from regard.data.token_store import Table
from regard.models.build import build
from regard.presets import preset
from regard.training.checkpoint import RunFolder
from regard.training.optim import AdamW
from regard.training.spec import TrainSpec
from regard.training.trainer import Trainer

SEGMENTS = ("none", "background", "foreground")
VOCAB = 8000
LIMIT = 1.03


def trainer(name: str, tokens: int, folder: Path, device: str) -> Trainer:
    """Return a trainer of the preset `name` on random pairs of sentences."""
    rng = np.random.default_rng(0)
    source, target = ([rng.integers(3, VOCAB, rng.integers(8, 30)).tolist() for _ in range(4000)] for _ in range(2))
    table = Table.of(source=[[*s, 2] for s in source], target=[[1, *t, 2] for t in target])
    loader = BatchLoader(Examples([table], [1.0], Translation()), Buckets(tokens), seed=1)
    changes: Any = {"vocab": VOCAB}
    model = build(preset(name, **changes), device, seed=1)
    made = Trainer(model, TrainSpec(steps=10**6, optimizer=AdamW(1e-4)), loader, RunFolder(folder))
    made.prefetch = Prefetch(loader, made.progress.place)
    return made


def segment(training: Trainer, kind: str, steps: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of a segment, and how long training stood still for its checkpoint."""
    began, stall = clock(), 0.0
    for step in range(steps):
        training.step()
        training.window.results.clear()
        if step == 0 and kind != "none":
            saving = clock()
            training.save()
            if kind == "foreground":
                training.saver.wait()
            stall = clock() - saving
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    training.saver.wait()
    return clock() - began, stall


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (10_000, len(ratios))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def main() -> int:
    """Measure and print the cost of checkpoints, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="transformer_small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=1500, help="target tokens per batch")
    parser.add_argument("--steps", type=int, default=40, help="steps per segment, which has one checkpoint")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--cpu", action="store_true", help="compare CPU seconds instead of wall-clock time")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        training = trainer(options.preset, options.tokens, Path(folder), options.device)
        segment(training, "background", 3, clock)  # warms up
        times: dict[str, list[float]] = {kind: [] for kind in SEGMENTS}
        stalls: dict[str, list[float]] = {kind: [] for kind in SEGMENTS}
        for number in range(options.rounds):
            for kind in SEGMENTS[number % 3 :] + SEGMENTS[: number % 3]:
                seconds, stall = segment(training, kind, options.steps, clock)
                times[kind].append(seconds)
                stalls[kind].append(stall)
        size = sum(path.stat().st_size for path in Path(folder).glob("*-*.safetensors")) / 2  # two are kept
        assert training.prefetch is not None
        training.prefetch.close()
    result: dict[str, Any] = {"preset": options.preset, "steps": options.steps, "megabytes": size / 1e6}
    for kind in SEGMENTS:
        ratios = [a / b for a, b in zip(times[kind], times["none"], strict=True)]
        about = {"seconds": statistics.median(times[kind]), "stall": statistics.median(stalls[kind])}
        result[kind] = about | {"ratio": statistics.median(ratios), "interval": interval(ratios)}
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{options.preset}, {size / 1e6:.0f} MB per checkpoint, one every {options.steps} steps")
        print(f"{'checkpoint':<12}{'seconds':>10}{'stall':>10}{'ratio':>8}   95 % interval")
        for kind in SEGMENTS:
            row = result[kind]
            low, high = row["interval"]
            print(
                f"{kind:<12}{row['seconds']:>10.2f}{row['stall']:>10.3f}{row['ratio']:>8.3f}   {low:.3f} to {high:.3f}"
            )
    return 0 if result["background"]["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
