"""Train tiny models with known faults, and measure whether the doctor names the fault."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from regard.demo.corpus import generate
from regard.doctor.examine import examine_run
from regard.doctor.finding import Report
from regard.errors import RegardError
from regard.runs.train import train

Pairs = list[tuple[str, str]]
TINY = (
    "model.d_model=32", "model.heads=2", "model.encoder.depth=1", "model.decoder.depth=1", "model.dropout=0.0",
    "model.head.label_smoothing=0.0", "data.tokenizer.vocab=500", "data.batching.tokens=500", "train.decode=30",
    "train.log_every=10", "train.validate_every=40", "train.patience=0", "train.schedule.warmup=30",
)  # fmt: skip
RATE = 7e-3


@dataclass(frozen=True)
class Degenerate:
    """A training run with a planted fault, and the check and level of the finding that names the fault."""

    name: str
    check: str  # "": nothing is wrong
    level: str = "error"
    change: Callable[[Pairs, random.Random], Pairs] = lambda pairs, _: pairs
    rate: float = RATE
    examples: int = 2000
    steps: int = 240


def _shifted(pairs: Pairs, _: random.Random) -> Pairs:
    targets = [target for _, target in pairs]
    return [(source, target) for (source, _), target in zip(pairs, targets[1:] + targets[:1], strict=True)]


def _copied(pairs: Pairs, rng: random.Random) -> Pairs:
    return [(source, source if rng.random() < 0.9 else target) for source, target in pairs]


TRAININGS = (
    Degenerate("healthy", "", examples=3000, steps=320),
    Degenerate("learning rate too high", "learning rate", rate=0.3),
    Degenerate("shifted lines", "alignment", change=_shifted),
    Degenerate("copies in the training text", "copies", change=_copied),
    Degenerate("overfitting", "fitting", "warning", examples=120, steps=320),
)


def examined(training: Degenerate, folder: Path, seed: int) -> Report:
    """Train a tiny model with a fault in a new folder, and return the doctor's report."""
    corpus = generate(training.examples, "de", seed, held_out=100)
    pairs = [(example.source, example.target) for example in corpus.train]
    pairs = training.change(pairs, random.Random(seed))
    files = {
        "source": [source for source, _ in pairs],
        "target": [target for _, target in pairs],
        "valid_source": [example.source for example in corpus.test],
        "valid_target": [example.target for example in corpus.test],
    }
    folder.mkdir(parents=True)
    for name, lines in files.items():
        (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
    rate = f"train.optimizer.learning_rate={training.rate}"
    source, target, valid_source, valid_target = (folder / name for name in files)
    try:
        train(
            folder / "run",
            source=source,
            target=target,
            valid_source=valid_source,
            valid_target=valid_target,
            preset="transformer_tiny",
            steps=training.steps,
            changes=[*TINY, rate, f"train.seed={seed}"],
            device="cpu",
            cache=False,
        )
    except RegardError:  # a learning rate that is too high may also diverge, and the log shows that
        if not (folder / "run" / "log.jsonl").exists():
            raise
    return examine_run(folder / "run", device="cpu")


def named(training: Degenerate, report: Report) -> bool:
    """Return whether the first finding of a report names the fault.

    For a training run without a fault, return whether the report has neither errors nor warnings.
    """
    if not training.check:
        return report.healthy
    worst = report.worst_first
    return bool(worst) and (worst[0].check, worst[0].level) == (training.check, training.level)
