"""The training benchmark: target tokens (without padding) per second, in training steps with gradient clipping."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from regard import fast
from regard.batch import Batch
from regard.bench.peers import Peer
from regard.bench.peers.base import TrainingModel, count
from regard.bench.race import Contestant, Report, Row, UnfairError, check_sizes, race
from regard.bench.shapes import Pair, Shape, labels, packed, padded, sentences
from regard.data.batching import Buckets
from regard.models.base import Model
from regard.models.build import build
from regard.planner import fit as fitting
from regard.runs.assemble import keep_compiled_code
from regard.training.executor import Captured, Eager, StepExecutor, StepScalars, Update
from regard.training.optim import AdamW

ADAMW, CLIP = AdamW(learning_rate=1e-4), 1.0
CORPUS = 10_000  # pairs; enough for batches of sorted pairs to contain hardly any padding
# Tokens in the source or target of a batch. Peers are measured with both numbers, regard with the second.
GPU_TOKENS = (16_384, 32_768)
GPU_STEPS = 15
GPU_WARM = 50  # warm-up steps: about one for every shape of a padded batch, so that no allocation is timed
TOLERANCE = 1e-4
CHECKED = 10  # pairs on which the losses must agree


@dataclass(frozen=True)
class TrainingWork:
    """The work of a training benchmark: the batches, the device, and the number of training steps per round."""

    shape: Shape
    smoothing: float
    device: torch.device
    pairs: Sequence[Pair]
    batches: list[Batch]
    steps: int

    @classmethod
    def of(
        cls, shape: Shape, smoothing: float, device: torch.device, turns: int, pairs: Sequence[Pair] | None = None
    ) -> "TrainingWork":
        """Return the work for training on `pairs`, or on random sentences if `pairs` is None.

        On a CPU, all contestants share the same batches. On a GPU, each contestant builds batches from the pairs.
        """
        on_cpu = device.type == "cpu"
        pairs = pairs or sentences(shape, CORPUS if on_cpu else 3 * CORPUS, seed=0)
        batches = padded(pairs, shape.tokens, seed=0, most=turns * shape.steps) if on_cpu else []
        return cls(shape, smoothing, device, pairs, batches, shape.steps if on_cpu else GPU_STEPS)


def train(work: TrainingWork, peers: Sequence[Peer], rounds: int, report: Report) -> list[Row]:
    """Benchmark regard and the peers (other libraries), and return one table row per model.

    Raise an error if model sizes differ, or if a peer with regard's weights computes a different loss.
    """
    torch.manual_seed(0)
    ours = build(work.shape.spec(work.smoothing), seed=1)
    contestants = our_contestants(work, ours)
    for peer in peers:
        contestants += their_contestants(work, partial(peer.code().training_model, work.shape, work.smoothing, ours))
    check_sizes(count(ours), contestants)
    return race(contestants, rounds, work.device, report)


def our_contestants(work: TrainingWork, ours: Model) -> list[Contestant]:
    """Return regard's models to benchmark: padded batches on a CPU, packed batches and CUDA graphs on a GPU."""
    if work.device.type == "cpu":
        return [our_contestant("regard", ours, Eager(our_update(ours, work.device)), work)]
    keep_compiled_code()
    longest = max(max(len(source), len(target) + 1) for source, target in work.pairs)
    batching = fitting.packed(Buckets(GPU_TOKENS[1]), longest)
    fixed = [batch.pinned() for batch in packed(work.pairs, GPU_TOKENS[1], batching.length, seed=0)]
    contestants = []
    for title, compiled in (("regard (graph)", False), ("regard (compiled graph)", True)):
        model = build(ours.spec, seed=1)
        update = our_update(model, work.device)
        executor = Captured(update.compiled() if compiled else update, _silent)
        contestants.append(our_contestant(title, model, executor, replace(work, batches=fixed)))
        if executor.graph is None:
            raise UnfairError(f"{title}: its step was not captured: {executor.failed or 'there were too few steps'}")
    return contestants


def our_update(model: Model, device: torch.device) -> Update:
    """Install the fast layers in the model, and return the trainer's update (the training step) for the model."""
    fast.install(model.to(device), device)
    optimizer = ADAMW.build(model)
    dtype = None if device.type == "cpu" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    return Update(model, model.loss, optimizer, CLIP, device, dtype, scaler, None)


def our_contestant(title: str, model: Model, executor: StepExecutor, work: TrainingWork) -> Contestant:
    """Return a contestant that trains regard's model."""

    def step(batch_and_labels: tuple[Batch, int]) -> None:
        batch, tokens = batch_and_labels
        executor.run([batch], StepScalars(float(tokens), 0.0, [1.0]), seed=1)

    counted = [(batch, labels(batch)) for batch in work.batches]  # here, because this part is not timed
    return contestant(title, model, step, counted, work)


def _silent(*_: Any, **__: Any) -> None:
    """Discard messages about capture and compilation."""


def their_contestants(work: TrainingWork, make: Callable[[], TrainingModel]) -> list[Contestant]:
    """Return the models of another library to benchmark, trained as a careful user would train them.

    On a GPU, one model uses autocast, and another uses bfloat16 weights if the library supports them.
    """
    training_model = make()
    if training_model.copied:
        check_loss(work, training_model)
    if work.device.type == "cpu":
        return [_theirs(work, training_model, training_model.title, nullcontext)]
    contestants = []
    autocast = partial(torch.autocast, "cuda", torch.bfloat16)
    for tokens in GPU_TOKENS:
        sized = replace(work, batches=padded(work.pairs, tokens, seed=0))
        title = f"{training_model.title}, {tokens // 1024}k"
        contestants.append(_theirs(sized, make(), f"{title} (autocast)", autocast))
        if training_model.pure_half:
            half = make()
            half.model.bfloat16()
            contestants.append(_theirs(sized, half, f"{title} (bf16)", nullcontext))
    return contestants


def _theirs(
    work: TrainingWork, training_model: TrainingModel, title: str, precision: Callable[[], AbstractContextManager[Any]]
) -> Contestant:
    model = training_model.model.to(work.device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=ADAMW.learning_rate or 0.0,
        betas=ADAMW.betas,
        eps=ADAMW.eps,
        weight_decay=ADAMW.weight_decay,
        fused=True,
    )

    def step(inputs: Any) -> None:
        with precision():
            loss = training_model.loss(inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    inputs = [training_model.prepare(batch.to(work.device)) for batch in work.batches]
    return contestant(title, model, step, inputs, work)


def contestant(
    title: str, model: nn.Module, step: Callable[[Any], None], inputs: Sequence[Any], work: TrainingWork
) -> Contestant:
    """Return a contestant that trains `work.steps` steps per round. `inputs` are batches in the format of `step`."""
    tokens = [labels(batch) for batch in work.batches]
    model.train()
    memory = None
    if work.device.type == "cuda":
        weights = sum(parameter.nbytes for parameter in model.parameters())
        memory = (weights + _warmed(step, inputs, work.device)) / 1e9

    def turn(number: int) -> int:
        chosen = [n % len(inputs) for n in range(number * work.steps, (number + 1) * work.steps)]
        for n in chosen:
            step(inputs[n])
        return sum(tokens[n] for n in chosen)

    return Contestant(title, count(model), turn, memory)


def _warmed(step: Callable[[Any], None], inputs: Sequence[Any], device: torch.device) -> int:
    """Run the warm-up and return its peak memory in bytes for gradients, optimizer moments and activations."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for n in range(GPU_WARM):
        step(inputs[n % len(inputs)])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def check_loss(work: TrainingWork, training_model: TrainingModel) -> None:
    """Raise `UnfairError` if another library with regard's weights does not compute the same loss as regard."""
    batch = padded(work.pairs[:CHECKED], GPU_TOKENS[0], seed=0, most=1)[0]
    without_dropout = build(replace(work.shape, dropout=0.0).spec(work.smoothing), seed=1).train()
    training_model.model.eval()
    with torch.no_grad():
        loss = without_dropout.loss(batch)
        ours = float(loss.total / loss.tokens)
        theirs = float(training_model.loss(training_model.prepare(batch)))
    if abs(ours - theirs) > TOLERANCE * abs(ours):
        raise UnfairError(f"{training_model.title} computes a loss of {theirs:.6f}, but regard {ours:.6f}")
