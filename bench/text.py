"""Training speed on real text, data loading included: `regard train` as a user calls it, and a race on the same text.

For each size of a batch (0: the one that regard chooses) a run is trained for a while, and its own log says what it
made after the last word about its program (captured, compiled). Then peers are raced on the first sentences of the same
text in the pieces of the same tokenizer, with batches that lie on the device before anything is timed.

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


def trained(given: argparse.Namespace, run: Path, tokens: int) -> dict[str, Any]:
    """A run of `regard train`: tokens a second by its log, median over what it noted since its program was settled."""
    words = ["--source", given.source, "--target", given.target, "--preset", f"transformer_{given.shape}"]
    words += ["--out", str(run), "--max-time", given.max_time, "--device", given.device]
    changes = [f"train.log_every={given.log_every}", f"model.head.smoothing={SMOOTHING}"]
    changes += [f"data.batching.tokens={tokens}"] if tokens else []
    words += [word for change in changes for word in ("--set", change)]
    subprocess.run([sys.executable, "-m", "regard", "train", *words], check=True, stdout=sys.stderr)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    programs = [event for event in log if event["event"] == "executor"]
    settled = max((event["step"] for event in programs), default=0)
    steps = [event for event in log if event["event"] == "step" and event["step"] >= settled + given.log_every]
    return {
        "tokens": tokens,
        "tokens_per_second": median(event["tokens_per_second"] for event in steps) if steps else None,
        "noted": len(steps),
        "programs": [event["executor"] for event in programs],
        "mfu": steps[-1].get("mfu") if steps else None,
    }


def read(given: argparse.Namespace, run: Path, count: int) -> tuple[list[Pair], int]:
    """The first pairs of the text that are not too long for a race, in pieces of a run's tokenizer; its vocabulary."""
    used = load(run, device="cpu")
    sides = [used.tokenizer.encode_batch(list(islice(lines(file), 2 * count))) for file in (given.source, given.target)]
    pairs = [([*s, EOS], t) for s, t in zip(*sides, strict=True) if 0 < len(s) < LONGEST[0] and 0 < len(t) < LONGEST[1]]
    return pairs[:count], used.model.spec.vocab  # translation has one


def main() -> None:
    """Train, race, and print both."""
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
    given = parser.parse_args()
    device, (peers, _) = choose_device(given.device), chosen(given.against.split(","), "train")
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for tokens in given.tokens:
            runs.append(trained(given, Path(scratch) / f"run{tokens}", tokens))
            print(json.dumps(runs[-1]), flush=True)
        pairs, vocab = read(given, Path(scratch) / f"run{given.tokens[0]}", 3 * CORPUS)
    torch.manual_seed(0)
    shape = replace(SHAPES[given.shape], vocab=vocab)
    work = TrainingWork.of(shape, SMOOTHING, device, WARM_UP + given.rounds, pairs)
    rows = train(work, peers, given.rounds, lambda said: print(said, file=sys.stderr, flush=True))
    for row in rows:
        print(json.dumps(row.record()))
    for peer in (row for row in rows if not row.name.startswith("regard")):
        for run in (run for run in runs if run["tokens_per_second"]):
            ratio = run["tokens_per_second"] / peer.tokens_per_second
            print(f"regard train, batches of {run['tokens'] or 'its choice'}: {ratio:.2f} of {peer.name}")


if __name__ == "__main__":
    main()
