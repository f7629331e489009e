"""Training speed on real text: the command `regard train` with data loading, and a benchmark of other libraries.

`regard train` runs for a while with each batch size (0: regard's choice). The speed is read from the training log,
after the last message about compilation or CUDA graphs. Then other libraries are benchmarked on the first sentences of
the same text, with the same tokenizer. Their batches are moved to the device before time is measured.

    python bench/text.py train.en train.de --shape base --tokens 0 16384 32768 --max-time 75s --against hf
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from regard.bench.peers import chosen
from regard.bench.race import WARM_UP
from regard.bench.shapes import EOS, LONGEST, SHAPES, Pair
from regard.bench.train import CORPUS, TrainingWork, train
from regard.data.text import lines
from regard.runs.trained_model import choose_device, load

SMOOTHING = 0.1


def trained(options: argparse.Namespace, run: Path, tokens: int) -> dict[str, Any]:
    """Run `regard train`. Return the median speed in its log, after the last compilation or CUDA graph capture."""
    words = ["--source", options.source, "--target", options.target, "--preset", f"transformer_{options.shape}"]
    words += ["--out", str(run), "--max-time", options.max_time, "--device", options.device]
    changes = [f"train.log_every={options.log_every}", f"model.head.smoothing={SMOOTHING}"]
    changes += [f"data.batching.tokens={tokens}"] if tokens else []
    words += [word for change in changes for word in ("--set", change)]
    subprocess.run([sys.executable, "-m", "regard", "train", *words], check=True, stdout=sys.stderr)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    programs = [event for event in log if event["event"] == "executor"]
    settled = max((event["step"] for event in programs), default=0)
    steps = [event for event in log if event["event"] == "step" and event["step"] >= settled + options.log_every]
    return {
        "tokens": tokens,
        "tokens_per_second": median(event["tokens_per_second"] for event in steps) if steps else None,
        "noted": len(steps),
        "programs": [event["executor"] for event in programs],
        "mfu": steps[-1].get("mfu") if steps else None,
    }


def read(options: argparse.Namespace, run: Path, count: int) -> tuple[list[Pair], int]:
    """Return (the first `count` pairs of the text without very long ones, as token ids; the vocabulary size)."""
    translator = load(run, device="cpu")
    sides = [
        translator.tokenizer.encode_batch(list(islice(lines(file), 2 * count)))
        for file in (options.source, options.target)
    ]
    pairs = [([*s, EOS], t) for s, t in zip(*sides, strict=True) if 0 < len(s) < LONGEST[0] and 0 < len(t) < LONGEST[1]]
    return pairs[:count], translator.model.spec.vocab  # source and target share one vocabulary


def main() -> None:
    """Measure `regard train`, run the benchmark, and print both results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--shape", choices=("small", "base", "big"), default="base")
    parser.add_argument("--tokens", type=int, nargs="+", default=[0])
    parser.add_argument("--max-time", default="75s")
    parser.add_argument("--against", default="hf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device, (peers, _) = choose_device(options.device), chosen(options.against.split(","), "train")
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for tokens in options.tokens:
            runs.append(trained(options, Path(scratch) / f"run{tokens}", tokens))
            print(json.dumps(runs[-1]), flush=True)
        pairs, vocab = read(options, Path(scratch) / f"run{options.tokens[0]}", 3 * CORPUS)
    torch.manual_seed(0)
    shape = replace(SHAPES[options.shape], vocab=vocab)
    work = TrainingWork.of(shape, SMOOTHING, device, WARM_UP + options.rounds, pairs)
    rows = train(work, peers, options.rounds, lambda message: print(message, file=sys.stderr, flush=True))
    for row in rows:
        print(json.dumps(row.record()))
    for peer in (row for row in rows if not row.name.startswith("regard")):
        for run in (run for run in runs if run["tokens_per_second"]):
            ratio = run["tokens_per_second"] / peer.tokens_per_second
            print(f"regard train, batches of {run['tokens'] or 'its choice'}: {ratio:.2f} of {peer.name}")


if __name__ == "__main__":
    main()
