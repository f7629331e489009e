"""The models and the text of a benchmark: a few sizes, random sentences of realistic lengths, and batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from regard.batch import Batch, pack, translation
from regard.data.batching import Buckets, Packing, Plan
from regard.models.base import ModelSpec
from regard.presets import preset

PAD, BOS, EOS, FIRST = 0, 1, 2, 4  # FIRST: the first id that is not special
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a benchmarked Transformer (Vaswani et al. 2017, one tied embedding table) and of the training text."""

    depth: int
    d_model: int
    heads: int
    d_hidden: int
    vocab: int
    length: int  # mean number of tokens per sentence
    tokens: int  # per training batch on a CPU, with padding, in the source or the target, whichever is longer
    steps: int  # training steps per round on a CPU
    dropout: float = 0.1

    def spec(self, smoothing: float) -> ModelSpec:
        """Return the model spec, with sinusoids in Hugging Face's layout so that weights can be copied."""
        return preset(
            "transformer_base",
            **{
                "vocab": self.vocab,
                "d_model": self.d_model,
                "heads": self.heads,
                "dropout": self.dropout,
                "encoder.depth": self.depth,
                "decoder.depth": self.depth,
                "encoder.pattern[0].branches[1].d_hidden": self.d_hidden,
                "decoder.pattern[0].branches[2].d_hidden": self.d_hidden,
                "head.smoothing": smoothing,
                "input.position.layout": "halves",
            },
        )


SHAPES = {
    "tiny": Shape(1, 32, 2, 64, 200, 8, 64, 1),  # to try the command
    "small": Shape(3, 256, 4, 1024, 10_000, 14, 2048, 2),
    "base": Shape(6, 512, 8, 2048, 10_000, 26, 1024, 1),
    "big": Shape(6, 1024, 16, 4096, 32_000, 26, 1024, 1),
}
LONGEST = (150, 175)  # maximum tokens of a source and of a target


def sentences(shape: Shape, count: int, seed: int) -> list[Pair]:
    """Return sentence pairs of random ids with log-normal lengths. Source and target are about equally long.

    A source contains its end token. A target does not: the end token is added when the batch is built.
    """
    rng = np.random.default_rng(seed)
    sigma = 0.5
    target = rng.lognormal(math.log(shape.length) - sigma**2 / 2, sigma, count).clip(2, LONGEST[1])
    source = (target * rng.lognormal(0.0, 0.15, count)).clip(2, LONGEST[0])
    ids = [cast(list[int], rng.integers(FIRST, shape.vocab, round(n) - 1).tolist()) for n in (*source, *target)]
    return [([*s, EOS], t) for s, t in zip(ids[:count], ids[count:], strict=True)]


def padded(pairs: Sequence[Pair], tokens: int, seed: int, most: int | None = None) -> list[Batch]:
    """Return padded batches in random order. If `most` is given, return at most `most` batches.

    The source and the target of a batch have at most `tokens` tokens each, with padding.
    """
    plan = Buckets(tokens).plan(_lengths(pairs), np.arange(len(pairs)), np.random.default_rng(seed))
    batches = _batches(plan)[:most]
    return [translation([pairs[n] for row in rows for n in row.tolist()], BOS, EOS, source_end=()) for rows in batches]


def packed(pairs: Sequence[Pair], tokens: int, length: int, seed: int) -> list[Batch]:
    """Return packed batches of one fixed shape: `tokens` tokens in rows of `length` tokens, several pairs per row."""
    planned = Packing(tokens, length).plan(_lengths(pairs), np.arange(len(pairs)), np.random.default_rng(seed))
    batches = [[[pairs[n] for n in row.tolist()] for row in rows] for rows in _batches(planned)]
    segments = max(len(row) for rows in batches for row in rows)
    return [_packed(rows, length, segments) for rows in batches if len(rows) == tokens // length]


def _packed(rows: list[list[Pair]], length: int, segments: int) -> Batch:
    source, source_seg, source_pos = pack([[s for s, _ in row] for row in rows], length)
    target, target_seg, target_pos = pack([[[BOS, *t] for _, t in row] for row in rows], length)
    labels = pack([[[*t, EOS] for _, t in row] for row in rows], length)[0]
    places = {"target_pos": target_pos, "source_pos": source_pos}
    sizes = {"packed": True, "segments": segments, "longest": max(LONGEST) + 1}
    return Batch(target, labels, target_seg, source, source_seg, **places, **sizes)


def _lengths(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
    return {
        "source": np.array([len(source) for source, _ in pairs]),
        "target": np.array([len(target) + 1 for _, target in pairs]),
    }


def _batches(plan: Plan) -> list[list[np.ndarray]]:
    return [plan.batch(n) for n in range(len(plan))]


def labels(batch: Batch) -> int:
    """Return the number of target tokens in a batch, without padding."""
    return int((batch.target_seg != 0).sum()) if batch.target_seg is not None else batch.target.numel()
