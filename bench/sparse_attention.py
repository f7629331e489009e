"""Race sparse attention against full causal attention, and measure a training step of a decoder on a long sequence.

    python bench/sparse_attention.py --json sparse.json          # a GPU: 8,192 to 65,536 tokens, about two minutes
    python bench/sparse_attention.py --device cpu --max 2048     # tiny sizes, to try the script

Attention: forward and backward pass of one sequence, by every kernel that supports the pattern. Masks are built from
nothing, either for each layer, or once for a stack of 8 layers, as in a model. Training: forward and backward pass,
clipping and optimizer of a language model, run as the trainer runs a step, with and without activation checkpointing.
In each round, all of them take turns. Times are medians over the rounds.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import fast
from regard.batch import Batch
from regard.bench.length import exponent
from regard.bench.live_memory import peak_bytes
from regard.bench.long_models import parameters
from regard.bench.race import orders, timed
from regard.bench.report import machine
from regard.errors import lacks_memory
from regard.fast import attention as kernels
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.nn.attention import split_heads
from regard.nn.big_bird import CausalBigBird
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.mask import Mask, View
from regard.nn.pattern import AttentionPattern, Blocks, Sinks, Window
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.runs.trained_model import choose_device
from regard.training.activation_checkpointing import checkpoint_blocks
from regard.training.executor import Eager, StepScalars, Update
from regard.training.optim import AdamW
from regard.training.spec import TrainSpec
from regard.training.trainer import precision

LAYERS = 8  # layers of a stack that share a mask
WARM_UP = 2
GIB = 2**30
FULL, WINDOW = "full", "window"
FASTER = {32_768: 8.0, 65_536: 20.0}  # how much faster than full attention a window must be, by length
MOST_MEMORY, MOST_EXPONENT = 40 * GIB, 1.1


@dataclass(frozen=True)
class Size:
    """The size of attention, of the patterns and of the decoder."""

    heads: int
    d_head: int
    window: int
    block: int
    depth: int
    vocab: int
    longest: int

    @property
    def patterns(self) -> dict[str, AttentionPattern | None]:
        return {
            FULL: None,
            WINDOW: Window(self.window),
            "blocks": Blocks(self.window),
            "sinks": Sinks(self.window, 4),
            "BigBird, causal": CausalBigBird(self.block),
        }


SIZES = {
    "cuda": Size(heads=8, d_head=64, window=512, block=64, depth=6, vocab=12_000, longest=65_536),
    "cpu": Size(heads=2, d_head=32, window=64, block=16, depth=2, vocab=500, longest=4096),
}


@dataclass(frozen=True)
class Row:
    """The time and the peak memory of one way to compute at one length. `failed` is the reason why they are missing."""

    name: str
    kernel: str  # for training: the parts that are not the default
    length: int
    seconds: float | None = None
    seconds_own_mask: float | None = None  # attention: with a mask built for each layer
    peak_bytes: int | None = None  # training: with weights and optimizer
    reserved_bytes: int | None = None  # training on CUDA: what the allocator took from the device
    chosen: bool = False  # attention: whether regard uses this kernel here
    parameters: int | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Contestant:
    """A way to compute, with the row of its results. Each step returns nothing; a turn is timed."""

    row: Row
    step: Callable[[], None]
    turns: dict[str, tuple[Callable[[], None], int]]  # field of the row: (what is timed, number of layers in it)
    kept: int = 0  # bytes that exist before the step


def report(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def attention(size: Size, length: int, device: torch.device) -> list[Contestant]:
    """Return the ways to compute attention over one sequence: each pattern with each kernel that supports it."""
    rng = torch.Generator().manual_seed(length)
    width, dtype = size.heads * size.d_head, torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, weights = (torch.randn(1, length, width, generator=rng).to(device, dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = []
    for name, pattern in size.patterns.items():
        call = kernels.Call(*heads(leaves, size), view_of(pattern, length, device), 1.0, 0.0)
        chosen = kernels.choose(call)
        names = [kernel for kernel in ("varlen", "flex", "chunked") if pattern is not None] or ["sdpa"]
        for kernel in names:
            if kernels.refusal(kernel, call) is None:
                row = Row(name, kernel, length, chosen=kernel == chosen)
                found.append(contestant(row, leaves, weights, pattern, size))
    return found


def view_of(pattern: AttentionPattern | None, length: int, device: torch.device) -> View:
    """Return a new causal view, whose masks are not built yet."""
    return View(Mask(causal=True, attention_pattern=pattern), length, length, device)


def heads(leaves: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, split into heads as in a model."""
    q, k, v = (split_heads(x, size.heads) for x in leaves)
    return q, k, v


def contestant(
    row: Row, leaves: Sequence[Tensor], weights: Tensor, pattern: AttentionPattern | None, size: Size
) -> Contestant:
    """Return the contestant for a pattern and a kernel."""

    def layer(view: View) -> None:
        with kernels.use(row.kernel):
            y = kernels.attend(*heads(leaves, size), view, scale=size.d_head**-0.5)
        y.backward(split_heads(weights, size.heads))
        for leaf in leaves:
            leaf.grad = None

    def one() -> None:
        layer(view_of(pattern, row.length, weights.device))

    def each() -> None:
        for _ in range(LAYERS):
            one()

    def stack() -> None:
        view = view_of(pattern, row.length, weights.device)
        for _ in range(LAYERS):
            layer(view)

    return Contestant(row, one, {"seconds": (stack, LAYERS), "seconds_own_mask": (each, LAYERS)})


def training(size: Size, length: int, device: torch.device) -> list[Contestant]:
    """Return training steps of a decoder with a window and with full attention, with and without checkpointing."""
    return [
        decoder(name, size.patterns[name], checkpointed, size, length, device)
        for name in (WINDOW, FULL)
        for checkpointed in (False, True)
    ]


def decoder(
    name: str, pattern: AttentionPattern | None, checkpointed: bool, size: Size, length: int, device: torch.device
) -> Contestant:
    """Return the training step of a decoder, composed as in `regard.training.trainer`."""
    width = size.heads * size.d_head
    block = Block((SelfAttention(attention_pattern=pattern), FeedForward(4 * width)), PreNorm())
    spec = DecoderOnly(vocab=size.vocab, d_model=width, heads=size.heads, decoder=Plain((block,), size.depth))
    model = build(spec, device, seed=1).train()
    fast.install(model, device)
    if checkpointed:
        checkpoint_blocks(model)
    train = TrainSpec(optimizer=AdamW(1e-4))
    assert train.optimizer is not None
    dtype = precision(train, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    optimizer = train.optimizer.build(model)
    update = Update(model, model.loss, optimizer, train.clip, device, dtype, scaler, None)
    ids = torch.randint(size.vocab, (1, length + 1), generator=torch.Generator().manual_seed(length))
    batch, executor = Batch(ids[:, :-1], ids[:, 1:]).to(device), Eager(update)

    def step() -> None:
        executor.run([batch], StepScalars(float(length), 0.0, [1.0]), seed=1)

    step()  # the optimizer creates its state
    kept = [*model.parameters(), *optimizer.state().values()]
    row = Row(name, "checkpoint_layers" if checkpointed else "", length, parameters=parameters(model))
    bytes_kept = sum(x.untyped_storage().nbytes() for x in kept if x.device.type == device.type)
    return Contestant(row, step, {"seconds": (step, 1)}, bytes_kept)


def measured(contestants: Sequence[Contestant], rounds: int, device: torch.device) -> list[Row]:
    """Measure memory, then times in rounds in which all contestants take turns. Return the rows with the results."""
    rows = [with_memory(each, device) for each in contestants]
    seconds: list[dict[str, list[float]]] = [{field: [] for field in each.turns} for each in contestants]
    for order in orders(rounds, len(contestants)):
        for j in order:
            if rows[j].failed is None:
                for field, (turn, layers) in contestants[j].turns.items():
                    seconds[j][field].append(timed(turn, device)[1] / layers)
    found = []
    for row, times in zip(rows, seconds, strict=True):
        medians = {field: float(np.median(listed)) for field, listed in times.items() if listed}
        found.append(replace(row, **medians))
        report(line(found[-1]))
    return found


def with_memory(each: Contestant, device: torch.device) -> Row:
    """Run the step until kernels are compiled, then measure its peak memory. Return the row with the result."""
    reserved = None
    try:
        for _ in range(WARM_UP):
            each.step()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        peak = each.kept + peak_bytes(each.step, device)
        if device.type == "cuda" and each.kept:
            reserved = torch.cuda.max_memory_reserved(device)
    except Exception as error:  # whatever it is, the others are measured
        why = (
            "out of memory" if lacks_memory(error) else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )
        report(f"{each.row.length:,} tokens, {each.row.name} {each.row.kernel}: {why}")
        return replace(each.row, failed=why)
    report(f"{each.row.length:,} tokens, {each.row.name} {each.row.kernel}: {peak / 1e6:,.0f} MB")
    return replace(each.row, peak_bytes=peak, reserved_bytes=reserved)


def line(row: Row) -> str:
    """Return the row as a line of the table."""
    times = [row.seconds, row.seconds_own_mask]
    cells = [f"{1e3 * x:10.3f}" if x is not None else " " * 10 for x in times]
    memory = f"{row.peak_bytes / 1e6:10,.0f}" if row.peak_bytes else f"{'':10}"
    name = f"{row.name}{', ' if row.kernel else ''}{row.kernel}{' *' if row.chosen else ''}"
    return f"{row.length:8,}  {name:28}{''.join(cells)}{memory}  {row.failed or ''}".rstrip()


def checks(attended: Sequence[Row], trained: Sequence[Row]) -> list[str]:
    """Return the sentences that compare the results with what is required on a GPU."""
    found = []
    times = {(row.name, row.length): row.seconds_own_mask for row in attended if row.chosen or row.name == FULL}
    for (name, length), seconds in times.items():
        full = times.get((FULL, length))
        if name == WINDOW and seconds and full:
            needed = f" (required: {FASTER[length]:g})" if length in FASTER else ""
            ratio = full / seconds
            found.append(f"{length:,} tokens: a window is {ratio:.1f} times as fast as full attention{needed}")
    for name, kernel in dict.fromkeys((row.name, row.kernel) for row in attended):
        mine = [row for row in attended if (row.name, row.kernel) == (name, kernel) and row.peak_bytes and row.seconds]
        by_memory = exponent([row.length for row in mine], [row.peak_bytes or 0 for row in mine])
        by_time = exponent([row.length for row in mine], [row.seconds or 0.0 for row in mine])
        if by_memory is not None and by_time is not None:
            found.append(
                f"{name}, {kernel}: memory grows as length^{by_memory:.2f} (required: at most {MOST_EXPONENT}), "
                f"time as length^{by_time:.2f}"
            )
    for row in trained:
        if row.peak_bytes is not None and row.name == WINDOW:
            needed = f" (required: at most {MOST_MEMORY / GIB:g})" if row.length in FASTER else ""
            taken = f", {row.reserved_bytes / GIB:.2f} GiB with the allocator's reserve" if row.reserved_bytes else ""
            found.append(
                f"{row.length:,} tokens: a training step of {row.parameters:,} parameters"
                f"{', ' if row.kernel else ''}{row.kernel} needs {row.peak_bytes / GIB:.2f} GiB{needed}{taken}"
            )
    return found


def main() -> None:
    """Measure attention at three lengths and training at the longest, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--max", type=int, metavar="T", help="Tokens in the longest sequence.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="Number of rounds.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the results into this file.")
    options = parser.parse_args()
    device = choose_device(options.device)
    torch.set_num_threads(1)
    size = SIZES[device.type]
    longest = options.max or size.longest
    attended: list[Row] = []
    for length in (longest // 8, longest // 2, longest):
        attended += measured(attention(size, length, device), options.rounds, device)
    trained = measured(training(size, longest, device), options.rounds, device)
    sentences = checks(attended, trained)
    print(f"{size.heads} heads of {size.d_head}, windows and blocks of {size.window} tokens; *: the kernel regard uses")
    print(f"{'tokens':>8}  {'forward and backward':28}{'ms':>10}{'own mask':>10}{'MB':>10}")
    for row in attended:
        print(line(row))
    print(f"\n{'tokens':>8}  {'training step':28}{'ms':>10}{'':10}{'MB':>10}")
    for row in trained:
        print(line(row))
    print("", *sentences, sep="\n")
    if options.json is not None:
        facts: dict[str, Any] = {"device": device.type, "rounds": options.rounds, "size": asdict(size)}
        facts |= {"machine": machine(device), "checks": sentences}
        rows = {"attention": [asdict(row) for row in attended], "training": [asdict(row) for row in trained]}
        options.json.write_text(json.dumps(facts | rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
