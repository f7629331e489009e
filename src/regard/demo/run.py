"""The demo: English numbers, dates, times and amounts of money into another language, trained in front of you."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from regard.data.objectives import Translation
from regard.demo.corpus import Example, generate
from regard.errors import DataError
from regard.evaluation import metrics
from regard.inspection import render
from regard.models.base import LanguageModel
from regard.nn.mask import Trace
from regard.recipe.recipe import asked
from regard.runs.train import TrainingOptions, start_run
from regard.runs.trained_model import TrainedModel

PAIRS, VALIDATION = 100_000, 200
STEPS = 1800
PIECES = 800
SHOWN = 8  # translations that are shown


def recipe(text: Path, steps: int, seed: int) -> dict[str, Any]:
    """Two layers a side, rotary positions, no dropout: there is more text than the model can learn by heart."""
    return {
        "model": {
            "preset": "transformer_tiny",
            "variants": ["pre_norm", "rotary"],
            "dropout": 0.0,
            "head": {"label_smoothing": 0.0},  # there is one right answer
            "encoder": {"depth": 2},
            "decoder": {"depth": 2},
        },
        "data": {
            "train": [{"kind": "tsv", "path": str(text / "train.tsv")}],
            "valid": [{"kind": "tsv", "path": str(text / "valid.tsv")}],
            "tokenizer": {"kind": "bpe", "vocab": PIECES},
            "batching": {"kind": "buckets", "tokens": 1000},
        },
        "train": {
            "steps": steps,
            "seed": seed,
            "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
            "schedule": {"kind": "linear", "warmup": min(100, steps // 4)},
            "validate_every": max(1, steps // 4),
            "log_every": 20,
            "decode": VALIDATION,
            "patience": 0,
            "criterion": "exact_match",
        },
    }


def run(out: Path | None, language: str, steps: int | None, seed: int, quiet: bool) -> dict[str, Any]:
    """Train, test, translate, show; the facts of it."""
    console = Console(quiet=quiet, emoji=False, highlight=False)
    folder = out or _free(Path("runs") / "demo")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):  # before anything is written into it
        raise DataError(f"{folder} exists; choose another folder with --out")
    steps = steps or STEPS
    console.print(f"Making {PAIRS:,} pairs of English and '{language}' from num2words and Babel.", markup=False)
    corpus = generate(PAIRS, language, seed)
    torch.set_num_threads(quickest_threads())
    text = folder / "text"
    wanted = asked(recipe(text, steps, seed))
    folder.mkdir(parents=True, exist_ok=True)
    _write(text, corpus.train, corpus.test)
    started = time.perf_counter()
    trained, _ = start_run(wanted, folder, TrainingOptions("cpu", quiet=quiet, cache=False), beside=("text",))
    seconds = time.perf_counter() - started
    test = corpus.test[VALIDATION:]
    said = trained.translate([example.source for example in test], beam=1, batch_size=64)
    right = metrics.exact_match(said, [example.target for example in test])
    bleu = metrics.bleu(said, [example.target for example in test])
    console.print(
        f"\n[bold]{right.value:.1f} %[/] of {len(test)} held-out examples are right to the letter "
        f"(BLEU {bleu.value:.1f}), after {seconds:.0f} s. Their values occur nowhere in the training text.\n",
        soft_wrap=True,
    )
    for example, translation in _sampled(list(zip(test, said, strict=True)), seed):
        mark = "" if translation == example.target else f"   (should be {example.target})"
        line = Text.assemble(f"  {example.source} -> ", (translation, "bold"), mark)
        console.print(line, soft_wrap=True)
    picture = _show(trained, test, said, console)
    console.print(
        f"\nThe run is in {folder}, the picture in {picture}. Use it, or train on your own files:\n",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"  echo 'four hundred and twenty-one' | regard translate {folder}", markup=False, soft_wrap=True)
    console.print("  regard train --source mine.en --target mine.de --out runs/mine", markup=False)
    return {
        "exact_match": right.value,
        "bleu": bleu.value,
        "seconds": seconds,
        "examples": len(test),
        "language": language,
        "picture": str(picture),
        "run": str(folder),
    }


def quickest_threads() -> int:
    """One thread, or torch's choice, whichever is quicker now: beside a busy process threads wait for each other."""
    usual = torch.get_num_threads()
    a, b = torch.rand(1000, 128), torch.rand(128, 512)
    seconds = {}
    for threads in (1, usual):
        torch.set_num_threads(threads)
        started = time.perf_counter()
        for _ in range(200):
            (a @ b).relu_()
        seconds[threads] = time.perf_counter() - started
    torch.set_num_threads(usual)
    return min(seconds, key=lambda threads: seconds[threads])


def _free(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that is free."""
    number = 2
    free = path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


def _write(folder: Path, train: Sequence[Example], test: Sequence[Example]) -> None:
    folder.mkdir()
    for name, examples in (("train", train), ("valid", test[:VALIDATION]), ("test", test[VALIDATION:])):
        lines = "".join(f"{example.source}\t{example.target}\n" for example in examples)
        (folder / f"{name}.tsv").write_text(lines, encoding="utf-8", newline="\n")


def _sampled(pairs: list[tuple[Example, str]], seed: int) -> list[tuple[Example, str]]:
    """A few pairs of every kind."""
    by_kind: dict[str, list[tuple[Example, str]]] = {}
    for pair in random.Random(seed).sample(pairs, len(pairs)):
        by_kind.setdefault(pair[0].kind, []).append(pair)
    turns = [pair for turn in zip(*by_kind.values(), strict=False) for pair in turn]
    return turns[:SHOWN]


def _show(trained: TrainedModel, test: Sequence[Example], said: Sequence[str], console: Console) -> Path:
    """The cross-attention of one example: on the terminal, and as a picture in the run."""
    right = [example for example, text in zip(test, said, strict=True) if text == example.target] or list(test)
    spoken = [example for example in right if example.kind == "date"] or right
    example = min(spoken, key=lambda e: (abs(len(e.source) - 36), e.source))
    weights, rows, columns = looked(trained, example.source, example.target)
    console.print(
        f"\nWhere it looked in '{example.source}' while it said '{example.target}' (last layer, mean of heads):\n",
        markup=False,
        soft_wrap=True,
    )
    console.print(render.terminal(weights, rows, columns, console.width), markup=False)
    path = trained.path / "attention.png"
    render.png(weights, rows, columns, path, f"{example.source}  ->  {example.target}")
    return path


@torch.no_grad()
def looked(trained: TrainedModel, source: str, target: str) -> tuple[torch.Tensor, list[str], list[str]]:
    """Cross-attention of the last layer, mean of the heads (T, S), and the pieces on either side."""
    objective, model = Translation(), trained.model
    assert isinstance(model, LanguageModel)
    table = objective.table([(source, target)], trained.tokenizers)
    item = objective.item(table.columns, [torch.zeros(1, dtype=torch.int64).numpy()])
    trace = Trace()
    model.log_probs(item.batch.to(trained.device), trace)
    weights = trace.weights["decoder.cross"][-1][0].mean(0)
    rows = [*trained.tokenizers["target"].pieces(table["target"][0].tolist()[1:-1]), "end"]
    columns = [*trained.tokenizers["source"].pieces(table["source"][0].tolist()[:-1]), "end"]
    return weights.cpu(), rows, columns
