"""Overhead of composition: the library's encoder-decoder, compared with the same arithmetic written by hand.

Both models have the same weights, use the same batches and call the same kernels. The hand-written model consists of
plain functions, without interchangeable modules. Before time is measured, the losses and gradients of both models must
agree, in evaluation and (with the same random numbers) in training.

A round is one training step of each model (forward, loss, backward, fused AdamW, zero_grad) on one batch, in
alternating order. CPU seconds of one thread are measured. The result is the median over rounds of composed / hand, with
a 95 % bootstrap interval. If its upper end exceeds the limit, the exit code is 1. Decoding has no limit.

    python bench/overhead.py --rounds 60 --shapes small base
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import fast
from regard.batch import Batch, translation
from regard.fast.cross_entropy import CrossEntropy
from regard.fast.dropout import bit_dropout
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from regard.nn.embedding import Sinusoidal
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.softmax import Softmax

VOCAB = 10_000
Weights = list[Tensor]


@dataclass(frozen=True)
class Shape:
    """A model, the sizes of its sentences and batches, and the limit on the overhead (a ratio of times)."""

    preset: str
    mean_length: int
    tokens: int  # per padded target batch, or per decoded sentence
    limit: float | None


SHAPES = {
    "small": Shape("transformer_small", 14, 1500, 1.08),  # d 256, 3 + 3 layers
    "base": Shape("transformer_base", 26, 500, 1.05),  # d 512, 6 + 6 layers
    "decode": Shape("transformer_base", 26, 32, None),  # d 512, a sentence token by token
}


@dataclass(frozen=True)
class Result:
    """Medians over rounds: CPU seconds per step of both models, and the ratio composed / hand with an interval."""

    shape: str
    rounds: int
    composed: float
    hand: float
    ratio: float
    low: float
    high: float
    limit: float | None

    @property
    def ok(self) -> bool:
        """True if the overhead is within the limit."""
        return self.limit is None or self.high <= self.limit


class Hand:
    """The Transformer of Vaswani et al. 2017 in plain PyTorch, with the weights of the library's model."""

    def __init__(self, model: EncoderDecoderModel) -> None:
        spec, named = cast(EncoderDecoder, model.spec), dict(model.named_parameters())

        def layers(side: str, depth: int, branches: int) -> list[list[Weights]]:
            prefixes = [[f"{side}.blocks.{i}.branches.{j}." for j in range(branches)] for i in range(depth)]
            return [[[w for name, w in named.items() if name.startswith(p)] for p in block] for block in prefixes]

        self.table = named["tables.tables.source.weight"]
        self.encoder = layers("encoder", cast(Plain, spec.encoder).depth, 2)
        self.decoder = layers("decoder", cast(Plain, spec.decoder).depth, 3)
        self.width, self.heads = spec.d_model, spec.heads
        self.waves = Sinusoidal().table(256, self.width).float()
        self.p, self.label_smoothing, self.training = spec.dropout, cast(Softmax, spec.head).label_smoothing, True

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss per token of a padded batch."""
        source_seg, target_seg = cast(Tensor, batch.source_seg), cast(Tensor, batch.target_seg)
        real = (source_seg != 0)[:, None, None, :]
        memory = self.encode(cast(Tensor, batch.source), real)
        x = self.embed(batch.target)
        for own, cross, feed in self.decoder:
            x = self.self_attention(x, own, causal=True)
            x = self.cross_attention(x, cross, *self.keys_and_values(memory, cross), real)
            x = self.feed_forward(x, feed)
        weights = (target_seg != 0).float().flatten()
        rows = weights.nonzero().squeeze(-1)
        h, labels, weights = x.flatten(0, 1)[rows], cast(Tensor, batch.labels).flatten()[rows], weights[rows]
        smoothing = self.label_smoothing if self.training else 0.0
        total, _ = CrossEntropy.apply(h, self.table, None, labels, weights, smoothing, 0.0)
        return total / weights.sum()

    def start(self, source: Tensor, max_len: int) -> list[tuple[Tensor, ...]]:
        """Return, per decoder layer, empty key-value caches for self-attention, and keys and values of the source."""
        memory = self.encode(source)
        shape = (source.shape[0], self.heads, max_len, self.width // self.heads)
        return [(torch.zeros(shape), torch.zeros(shape), *self.keys_and_values(memory, w)) for _, w, _ in self.decoder]

    def step(self, ids: Tensor, at: int, cache: list[tuple[Tensor, ...]]) -> Tensor:
        """Return log-probabilities of the next token, given the token at position `at` of every sentence."""
        x = self.embed(ids, at)
        for (own, cross, feed), (keys, values, k, v) in zip(self.decoder, cache, strict=True):
            x = self.self_attention(x, own, past=(keys, values, at))
            x = self.feed_forward(self.cross_attention(x, cross, k, v), feed)
        return (x[:, -1] @ self.table.T).log_softmax(-1)

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(source)
        for own, feed in self.encoder:
            x = self.feed_forward(self.self_attention(x, own, mask), feed)
        return x

    def embed(self, ids: Tensor, at: int = 0) -> Tensor:
        return self.drop(F.embedding(ids, self.table) * math.sqrt(self.width) + self.waves[at : at + ids.shape[1]])

    def self_attention(
        self,
        x: Tensor,
        weights: Weights,
        mask: Tensor | None = None,
        causal: bool = False,
        past: tuple[Tensor, Tensor, int] | None = None,
    ) -> Tensor:
        w_qkv, b_qkv, w_out, b_out, gain, shift = weights
        q, k, v = (self.split(y) for y in F.linear(x, w_qkv, b_qkv).chunk(3, -1))
        if past is not None:
            keys, values, at = past
            keys[:, :, at : at + 1], values[:, :, at : at + 1] = k, v
            k, v = keys[:, :, : at + 1], values[:, :, : at + 1]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.join(x, F.linear(y.transpose(1, 2).flatten(2), w_out, b_out), gain, shift)

    def cross_attention(self, x: Tensor, weights: Weights, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        w_q, b_q, _, _, w_out, b_out, gain, shift = weights
        y = F.scaled_dot_product_attention(self.split(F.linear(x, w_q, b_q)), k, v, mask)
        return self.join(x, F.linear(y.transpose(1, 2).flatten(2), w_out, b_out), gain, shift)

    def keys_and_values(self, memory: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        k, v = F.linear(memory, weights[2], weights[3]).chunk(2, -1)
        return self.split(k), self.split(v)

    def feed_forward(self, x: Tensor, weights: Weights) -> Tensor:
        w_up, b_up, w_down, b_down, gain, shift = weights
        return self.join(x, F.linear(F.relu(F.linear(x, w_up, b_up)), w_down, b_down), gain, shift)

    def split(self, x: Tensor) -> Tensor:
        B, T, W = x.shape
        return x.view(B, T, self.heads, W // self.heads).transpose(1, 2)

    def join(self, x: Tensor, y: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(x + self.drop(y), (self.width,), gain, shift)

    def drop(self, x: Tensor) -> Tensor:
        return bit_dropout(x, self.p) if self.training and self.p > 0.0 else x


def composed_loss(model: EncoderDecoderModel, batch: Batch) -> Tensor:
    """Return the mean loss per token of a batch."""
    loss = model.loss(batch)
    return loss.total / loss.tokens


def sentences(shape: Shape, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return sentence pairs of random ids with log-normal lengths. Source and target have about the same length."""
    rng = np.random.default_rng(seed)
    sigma = 0.5
    target = rng.lognormal(math.log(shape.mean_length) - sigma**2 / 2, sigma, count).clip(1, 150)
    source = (target * rng.lognormal(0.0, 0.15, count)).clip(1, 150)
    ids = [cast(list[int], rng.integers(4, VOCAB, round(n)).tolist()) for n in (*source, *target)]
    return list(zip(ids[:count], ids[count:], strict=True))


def training_batches(shape: Shape, count: int = 5, seed: int = 0) -> list[Batch]:
    """Return padded batches of similar lengths, with at most `shape.tokens` tokens, in random order.

    The number should be odd, so that both models come first for every batch in half of the rounds.
    """
    pool = sorted(sentences(shape, 2000, seed), key=lambda pair: (len(pair[1]), len(pair[0])))
    batches, rows = [], []
    for pair in pool:
        if (len(rows) + 1) * (len(pair[1]) + 1) > shape.tokens:
            batches.append(translation(rows, source_end=()))
            rows = []
        rows.append(pair)
    chosen = np.random.default_rng(seed).permutation(len(batches))[:count]
    return [batches[i] for i in chosen]


def check(model: EncoderDecoderModel, hand: Hand, batch: Batch) -> None:
    """Raise an error if losses or gradients of the two models differ, without or with dropout."""
    for training in (False, True):
        model.train(training)
        hand.training = training
        losses, gradients = [], []
        for loss in (partial(composed_loss, model), hand.loss):
            torch.manual_seed(0)
            losses.append(loss(batch))
            gradients.append(torch.autograd.grad(losses[-1], list(model.parameters())))
        torch.testing.assert_close(losses[0], losses[1], rtol=0.0, atol=1e-6)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def interleave(sides: list[Callable[[int], float]], rounds: int, warm_up: int) -> np.ndarray:
    """Return the CPU seconds (rounds, functions) of calls of all functions. Every other round is in reverse order."""
    seconds = np.zeros((warm_up + rounds, len(sides)))
    gc.disable()
    for i in range(warm_up + rounds):
        gc.collect()
        for j in range(len(sides))[:: -1 if i % 2 else 1]:
            seconds[i, j] = sides[j](i)
    gc.enable()
    return seconds[warm_up:]


def train(shape: Shape, rounds: int) -> np.ndarray:
    """Return the CPU seconds (rounds, 2) of training steps of both models."""
    spec = cast(EncoderDecoder, regard.preset(shape.preset, vocab=VOCAB))
    model = cast(EncoderDecoderModel, regard.build(spec))
    fast.install(model)  # as in training
    hand, batches = Hand(model), training_batches(shape)
    check(model, hand, batches[0])
    # One optimizer for both: the same weights, moments and memory, so that only the code between them differs.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(loss: Callable[[Batch], Tensor], i: int) -> float:
        batch = batches[i % len(batches)]
        began = time.process_time()
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - began

    sides = [partial(step, loss) for loss in (partial(composed_loss, model), hand.loss)]
    return interleave(sides, rounds, warm_up=len(batches))


def decode(shape: Shape, rounds: int) -> np.ndarray:
    """Return the CPU seconds per token (rounds, 2) of decoding one token at a time with both models."""
    spec = cast(EncoderDecoder, regard.preset(shape.preset, vocab=VOCAB))
    model = cast(EncoderDecoderModel, regard.build(spec)).eval()
    fast.install(model)
    hand = Hand(model)
    hand.training = False
    source = torch.randint(4, VOCAB, (1, shape.mean_length))
    ids = torch.randint(4, VOCAB, (1, shape.tokens)).split(1, 1)

    def composed(_: int) -> tuple[float, list[Tensor]]:
        decoding = model.start(Batch(ids[0], source=source), shape.tokens)
        began = time.process_time()
        log_probs = [model.advance(token, decoding) for token in ids]
        return (time.process_time() - began) / len(ids), log_probs

    def by_hand(_: int) -> tuple[float, list[Tensor]]:
        cache = hand.start(source, shape.tokens)
        began = time.process_time()
        log_probs = [hand.step(token, at, cache) for at, token in enumerate(ids)]
        return (time.process_time() - began) / len(ids), log_probs

    with torch.inference_mode():
        torch.testing.assert_close(composed(0)[1], by_hand(0)[1], rtol=0.0, atol=1e-5)
        return interleave([lambda i: composed(i)[0], lambda i: by_hand(i)[0]], rounds, warm_up=2)


def summarise(name: str, seconds: np.ndarray) -> Result:
    """Return the median ratio over all rounds, with a percentile interval of 2,000 bootstrap resamples."""
    ratios = seconds[:, 0] / seconds[:, 1]
    rng = np.random.default_rng(0)
    medians = np.median(ratios[rng.integers(0, len(ratios), (2000, len(ratios)))], 1)
    low, high = np.percentile(medians, (2.5, 97.5))
    composed, hand = np.median(seconds, 0)
    ratio, limit = float(np.median(ratios)), SHAPES[name].limit
    return Result(name, len(ratios), float(composed), float(hand), ratio, float(low), float(high), limit)


def main() -> int:
    """Measure, print the results, and return 1 if a limit is exceeded, otherwise 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds per shape; use at least 20")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = []
    if not options.json:
        print(f"torch {torch.__version__}, 1 thread, {options.rounds} rounds; CPU seconds of a step, medians")
        print(f"{'shape':8}{'composed':>10}{'by hand':>10}{'ratio':>8}{'95 % interval':>17}{'limit':>7}")
    for name in options.shapes:
        measure = decode if SHAPES[name].limit is None else train
        result = summarise(name, measure(SHAPES[name], options.rounds))
        results.append(result)
        if not options.json:
            interval, limit = f"{result.low:.3f} .. {result.high:.3f}", result.limit or "-"
            verdict = "" if result.ok else "  exceeded"
            times = f"{result.composed:10.4f}{result.hand:10.4f}"
            print(f"{name:8}{times}{result.ratio:8.3f}{interval:>17}{limit:>7}{verdict}", flush=True)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    return int(not all(result.ok for result in results))


if __name__ == "__main__":
    sys.exit(main())
