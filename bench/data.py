"""Speed of data loading, including batch planning, and a test that it does not fall with the size of the corpus.

Two random corpora, one ten times as large, with sentence lengths as in parliament speeches, are written to disk. Every
round reads one epoch of the large corpus and ten epochs of the small one, in alternating order. The script prints
target tokens without padding per CPU second of one thread (medians), the fractions of padding and of planning time, and
the median of the ratio large / small. If this ratio is below 0.95, the exit code is 1.

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
    """Write random pairs with log-normal lengths to disk. Targets are a little longer than sources."""
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
    """The time and the counts of reading some epochs. `places` are tokens with padding."""

    seconds: float
    labels: int
    places: int
    padding: int
    batches: int


def read(table: Table, batching: Batching, epochs: int) -> Read:
    """Plan and read whole epochs, and return the time and the counts."""
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
    """Return the CPU seconds for planning the batches of one epoch."""
    stream = BatchLoader(Examples([table], [1.0], Translation()), batching, seed=1)
    begin = time.process_time()
    stream.plan(0)
    return time.process_time() - begin


def main() -> int:
    """Measure both corpora, print the results, and return 1 if the large corpus is slower, otherwise 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=25_000, help="number of pairs in the small corpus")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batching", choices=BATCHINGS, default="packing")
    options = parser.parse_args()
    batching = BATCHINGS[options.batching]
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"small": options.pairs, "large": TIMES * options.pairs}
        tables = {name: corpus(Path(folder) / name, pairs) for name, pairs in sizes.items()}
        epochs = {"small": TIMES, "large": 1}
        reads_by_corpus: dict[str, list[Read]] = {name: [] for name in sizes}
        for number in range(options.rounds + 1):
            for name in sorted(sizes, reverse=bool(number % 2)):
                result = read(tables[name], batching, epochs[name])
                if number:  # the first round brings the files into memory
                    reads_by_corpus[name].append(result)
        plans = {name: planning(table, batching) * epochs[name] for name, table in tables.items()}
    rates = {name: [result.labels / result.seconds for result in reads] for name, reads in reads_by_corpus.items()}
    for name, reads in reads_by_corpus.items():
        first, seconds = reads[0], median(result.seconds for result in reads)
        print(
            f"{sizes[name]:>9,} pairs: {median(rates[name]):>11,.0f} target tokens per CPU second, "
            f"{1000 * seconds / first.batches:.1f} ms per batch, {first.padding / first.places:.2%} of the tokens are "
            f"padding, {plans[name] / seconds:.0%} of the time is planning"
        )
    ratio = median(large / small for large, small in zip(rates["large"], rates["small"], strict=True))
    print(f"large / small: {ratio:.3f} (at least {LIMIT})")
    return int(ratio < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
