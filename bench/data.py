"""What feeding a model costs, planning included, and that a token costs no more in a corpus of ten times the size.

Two corpora of pairs with lengths like those of parliament speech, one ten times as large, lie in token stores on disk.
A round reads as many tokens from each, in alternating order: an epoch of the large one, ten of the small one. Reported
are real target tokens per CPU second of one thread (medians), how full the rows are, what planning takes of it, and the
ratio large / small as the median over rounds; the exit code is 1 if it is more than 5 % below 1.

    python bench/data.py --pairs 25000 --rounds 7 --batching packing
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from regard.data.batching import Batching, Buckets, Packing
from regard.data.loader import BatchLoader, Examples
from regard.data.objectives import Translation
from regard.data.token_store import Column, Table, Writer

VOCAB = 20_000
TIMES = 10  # how much larger the large corpus is
LIMIT = 0.95
BATCHINGS: dict[str, Batching] = {"packing": Packing(32_768, 512), "buckets": Buckets(32_768)}


def corpus(folder: Path, pairs: int) -> Table:
    """Pairs on disk: log-normal lengths, the target a little longer than the source."""
    rng = np.random.default_rng(pairs)
    target = np.clip(rng.lognormal(3.3, 0.7, pairs), 2, 256).astype(np.int64)
    source = np.clip(target * rng.normal(0.93, 0.15, pairs), 2, 256).astype(np.int64)
    with Writer(folder, ("source", "target"), VOCAB) as writer:
        sides = {name: _random(rng, lengths) for name, lengths in (("source", source), ("target", target))}
        writer.add(Table(sides))
        return writer.close()


def _random(rng: np.random.Generator, lengths: np.ndarray) -> Column:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Column(rng.integers(3, VOCAB, offsets[-1], dtype=np.uint32), offsets)


@dataclass(frozen=True)
class Read:
    """What a reading of some epochs found."""

    seconds: float
    labels: int
    places: int
    padding: int
    batches: int


def read(table: Table, batching: Batching, epochs: int) -> Read:
    """Read whole epochs, from the plan of the first on; no plan is begun that is not read."""
    begin = time.process_time()
    stream = BatchLoader(Examples([table], [1.0], Translation()), batching, seed=1)
    labels = places = padding = batches = 0
    for epoch in range(epochs):
        plan = stream.plan(epoch)
        for position in range(len(plan)):
            item = stream.item(plan, position)
            labels, places, padding = labels + item.labels, places + item.places, padding + item.padding
        batches += len(plan)
    return Read(time.process_time() - begin, labels, places, padding, batches)


def planning(table: Table, batching: Batching) -> float:
    """CPU seconds for the plan of an epoch."""
    stream = BatchLoader(Examples([table], [1.0], Translation()), batching, seed=1)
    begin = time.process_time()
    stream.plan(0)
    return time.process_time() - begin


def main() -> int:
    """Compare, and print a table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--pairs", type=int, default=25_000, help="of the small corpus")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--batching", choices=BATCHINGS, default="packing")
    given = options.parse_args()
    batching = BATCHINGS[given.batching]
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"small": given.pairs, "large": TIMES * given.pairs}
        tables = {name: corpus(Path(folder) / name, pairs) for name, pairs in sizes.items()}
        epochs = {"small": TIMES, "large": 1}
        found: dict[str, list[Read]] = {name: [] for name in sizes}
        for number in range(given.rounds + 1):
            for name in sorted(sizes, reverse=bool(number % 2)):
                one = read(tables[name], batching, epochs[name])
                if number:  # the first round brings the files into memory
                    found[name].append(one)
        plans = {name: planning(table, batching) * epochs[name] for name, table in tables.items()}
    rates = {name: [one.labels / one.seconds for one in reads] for name, reads in found.items()}
    for name, reads in found.items():
        one, seconds = reads[0], median(one.seconds for one in reads)
        print(
            f"{sizes[name]:>9,} pairs: {median(rates[name]):>11,.0f} target tokens per CPU second, "
            f"{1000 * seconds / one.batches:.1f} ms a batch, {1 - one.padding / one.places:.2%} of the places of both "
            f"sides filled, {plans[name] / seconds:.0%} of the time is planning"
        )
    ratio = median(large / small for large, small in zip(rates["large"], rates["small"], strict=True))
    print(f"large / small: {ratio:.3f} (at least {LIMIT})")
    return int(ratio < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
