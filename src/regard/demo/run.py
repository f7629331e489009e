"""The demo: train a model that translates numbers, dates, times and amounts of money, and show its translations."""

import random
import time
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from regard.demo.corpus import Example, generate
from regard.errors import DataError
from regard.evaluation import metrics
from regard.inspection import render
from regard.inspection.picture import heat_map
from regard.inspection.record import attention
from regard.planner import threads
from regard.recipe.recipe import request_from_record
from regard.runs.train import TrainingOptions, start_run
from regard.runs.trained_model import TrainedModel

PAIRS, VALIDATION = 100_000, 200
STEPS = 1800
SUBWORDS = 800
SHOWN = 8  # number of translations that are printed
NEXT = """
Next:

  echo 'four hundred and twenty-one' | regard translate {folder}
  regard show {folder}                      # the model, layer by layer
  regard train --tsv {folder}/text/train.tsv --variant swiglu --time 2m --out runs/swiglu
  regard train --source mine.en --target mine.de --out runs/mine      # your own files
  regard lens {folder}                      # look inside: attention, beam search, heads to switch off
"""


def recipe(text: Path, steps: int, seed: int) -> dict[str, Any]:
    """Return the recipe of the demo: 2 + 2 layers with rotary positions.

    There is no dropout, because the training text is too large to memorise.
    """
    return {
        "model": {
            "preset": "transformer_tiny",
            "variants": ["pre_norm", "rotary"],
            "dropout": 0.0,
            "head": {"label_smoothing": 0.0},  # every source has exactly one correct translation
            "encoder": {"depth": 2},
            "decoder": {"depth": 2},
        },
        "data": {
            "train": [{"kind": "tsv", "path": str(text / "train.tsv")}],
            "valid": [{"kind": "tsv", "path": str(text / "valid.tsv")}],
            "tokenizer": {"kind": "bpe", "vocab": SUBWORDS},
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
    """Run the demo and return its scores and the paths of its files.

    The demo generates a corpus, trains a model, translates held-out values and draws the attention of one example.
    """
    console = Console(quiet=quiet, emoji=False, highlight=False)
    folder = out or _free(Path("runs") / "demo")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):  # before anything is written into it
        raise DataError(f"{folder} exists; choose another folder with --out")
    steps = steps or STEPS
    console.print(f"Generating {PAIRS:,} pairs of English and '{language}' with num2words and Babel.", markup=False)
    corpus = generate(PAIRS, language, seed)
    if (cpu_threads := threads.for_training()) is not None:
        torch.set_num_threads(cpu_threads)
    text = folder / "text"
    request = request_from_record(recipe(text, steps, seed))
    folder.mkdir(parents=True, exist_ok=True)
    _write(text, corpus.train, corpus.test)
    started = time.perf_counter()
    trained, _ = start_run(request, folder, TrainingOptions("cpu", quiet=quiet, cache=False), beside=("text",))
    seconds = time.perf_counter() - started
    test = corpus.test[VALIDATION:]
    outputs = trained.translate([example.source for example in test], beam=1, batch_size=64)
    right = metrics.exact_match(outputs, [example.target for example in test])
    bleu = metrics.bleu(outputs, [example.target for example in test])
    console.print(
        f"\n[bold]{right.value:.1f} %[/] of {len(test)} held-out examples are translated without any error "
        f"(BLEU {bleu.value:.1f}).\nTraining took {seconds:.0f} s. The training text contains none of these values.\n",
        soft_wrap=True,
    )
    for example, translation in _sampled(list(zip(test, outputs, strict=True)), seed):
        mark = "" if translation == example.target else f"   (should be {example.target})"
        console.print(Text.assemble(f"  {example.source} -> ", (translation, "bold"), mark), soft_wrap=True)
    picture = _draw_attention(trained, test, outputs, console)
    console.print(f"\nThe run is in {folder}, the picture in {picture}.", markup=False, soft_wrap=True)
    console.print(NEXT.format(folder=folder), markup=False, soft_wrap=True)
    return {
        "exact_match": right.value,
        "bleu": bleu.value,
        "seconds": seconds,
        "examples": len(test),
        "language": language,
        "picture": str(picture),
        "run": str(folder),
    }


def _free(path: Path) -> Path:
    """Return the first of path, path-2, path-3, ... that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(free for free in chain([path], numbered) if not free.exists())


def _write(folder: Path, train: Sequence[Example], test: Sequence[Example]) -> None:
    folder.mkdir()
    for name, examples in (("train", train), ("valid", test[:VALIDATION]), ("test", test[VALIDATION:])):
        lines = "".join(f"{example.source}\t{example.target}\n" for example in examples)
        (folder / f"{name}.tsv").write_text(lines, encoding="utf-8", newline="\n")


def _sampled(pairs: list[tuple[Example, str]], seed: int) -> list[tuple[Example, str]]:
    """Return at most `SHOWN` random pairs (example, translation), taken from every kind of value in turn."""
    by_kind: dict[str, list[tuple[Example, str]]] = {}
    for pair in random.Random(seed).sample(pairs, len(pairs)):
        by_kind.setdefault(pair[0].kind, []).append(pair)
    turns = [pair for turn in zip(*by_kind.values(), strict=False) for pair in turn]
    return turns[:SHOWN]


def _draw_attention(trained: TrainedModel, test: Sequence[Example], outputs: Sequence[str], console: Console) -> Path:
    """Print the cross-attention of one example, save it as a picture, and return the path of the picture."""
    right = [example for example, text in zip(test, outputs, strict=True) if text == example.target] or list(test)
    spoken = [example for example in right if example.kind == "money" and "-" in example.source] or right
    example = min(spoken, key=lambda e: (abs(len(e.source) - 40), e.source))
    weights, rows, columns = cross_attention(trained, example.source, example.target)
    console.print(
        f"\nCross-attention (last layer, mean of heads)\nrows:    {example.target}\ncolumns: {example.source}\n",
        markup=False,
        soft_wrap=True,
    )
    console.print(render.terminal(weights, rows, columns, console.width), markup=False)
    path = trained.path / "attention.png"
    heat_map(weights, rows, columns, path, f"{example.source}  \u2192  {example.target}")
    return path


def cross_attention(trained: TrainedModel, source: str, target: str) -> tuple[torch.Tensor, list[str], list[str]]:
    """Return the cross-attention weights (T, S), the T subwords of the target, and the S subwords of the source.

    The weights are those of the last layer, averaged over the heads.
    """
    weights = attention(trained.model, trained.batch([(source, target)]))["decoder.cross"][-1][0].mean(0)
    rows, columns = (
        [*trained.tokenizers[name].tokens(trained.tokenizers[name].encode(text)), "end"]
        for name, text in (("target", target), ("source", source))
    )
    return weights.cpu(), rows, columns
