"""A race in training: real target tokens a second of forward, backward, clipping and optimizer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from regard.batch import Batch
from regard.bench.contest import Contestant, Row, Tell, UnfairError, check_sizes, race
from regard.bench.peers import Peer
from regard.bench.peers.base import Trainee, count
from regard.bench.shapes import Pair, Shape, labels, packed, padded, sentences
from regard.data.batching import Buckets
from regard.models.base import Model
from regard.models.build import build
from regard.planner import fit as fitting
from regard.training.executor import Captured, Eager, StepExecutor, Update
from regard.training.optim import AdamW

ADAMW, CLIP = AdamW(learning_rate=1e-4), 1.0
CORPUS = 10_000  # pairs: enough that sorting leaves hardly any padding
GPU_TOKENS = (16_384, 32_768)  # a side: peers take both, as some gain by it; ours is packed to the second
GPU_STEPS = 15
GPU_WARM = 50  # steps: every shape of the padded batches about once, so that no allocation is timed
TOLERANCE = 1e-4
CHECKED = 10  # pairs, of which the losses must agree


@dataclass(frozen=True)
class Work:
    """What is trained on, where, and how many steps of it are a turn."""

    shape: Shape
    smoothing: float
    device: torch.device
    pairs: Sequence[Pair]
    batches: list[Batch]
    steps: int

    @classmethod
    def of(cls, shape: Shape, smoothing: float, device: torch.device, turns: int) -> "Work":
        """Token-budget batches of sorted sentences; on a GPU everybody makes those that suit them."""
        pairs = sentences(shape, CORPUS if device.type == "cpu" else 3 * CORPUS, seed=0)
        return cls.on(pairs, shape, smoothing, device, turns)

    @classmethod
    def on(cls, pairs: Sequence[Pair], shape: Shape, smoothing: float, device: torch.device, turns: int) -> "Work":
        """The same with given sentences."""
        if device.type == "cpu":
            batches = padded(pairs, shape.tokens, seed=0, most=turns * shape.steps)
            return cls(shape, smoothing, device, pairs, batches, shape.steps)
        return cls(shape, smoothing, device, pairs, [], GPU_STEPS)


def train(work: Work, peers: Sequence[Peer], rounds: int, tell: Tell) -> list[Row]:
    """Ours and theirs. Before anything is timed, sizes are compared, and the loss of whoever has our weights."""
    torch.manual_seed(0)
    ours = build(work.shape.spec(work.smoothing), seed=1)
    contestants = our_contestants(work, ours)
    for peer in peers:
        contestants += their_contestants(work, lambda peer=peer: peer.code().trainee(work.shape, work.smoothing, ours))
    check_sizes(count(ours), contestants)
    return race(contestants, rounds, work.device, tell)


def our_contestants(work: Work, ours: Model) -> list[Contestant]:
    """Our step as training runs it: on a CPU over padded batches; on a GPU over packed ones, as one CUDA graph."""
    if work.device.type == "cpu":
        step = stepping(Eager(our_update(ours, work.device)))
        return [entered("regard", ours, step, counted(work.batches), work)]
    longest = max(max(len(source), len(target) + 1) for source, target in work.pairs)
    batching = fitting.packed(Buckets(GPU_TOKENS[1]), longest)
    fixed = [batch.pinned() for batch in packed(work.pairs, GPU_TOKENS[1], batching.length, seed=0)]
    programs: dict[str, Callable[[Update], StepExecutor]] = {
        "regard (graph)": lambda update: Captured(update, _silent),
        "regard (compiled graph)": lambda update: Captured(update.compiled(), _silent),
    }
    found = []
    for title, program in programs.items():
        model = build(ours.spec, seed=1)
        running = program(our_update(model, work.device))
        found.append(entered(title, model, stepping(running), counted(fixed), replace(work, batches=fixed)))
        assert isinstance(running, Captured)
        if running.graph is None:
            raise UnfairError(f"{title}: its step was not captured: {running.failed or 'there were too few of them'}")
    return found


def counted(batches: Sequence[Batch]) -> list[tuple[Batch, int]]:
    """Batches with their labels, which are known on the host before a step begins."""
    return [(batch, labels(batch)) for batch in batches]


def our_update(model: Model, device: torch.device) -> Update:
    """A change of the weights, as the trainer makes it."""
    optimizer = ADAMW.build(model.to(device))
    dtype = None if device.type == "cpu" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    return Update(model, model.loss, optimizer, CLIP, device, dtype, scaler, None)


def stepping(program: StepExecutor) -> Callable[[tuple[Batch, int]], None]:
    """Its steps over batches with their labels."""

    def step(of: tuple[Batch, int]) -> None:
        program.run([of[0]], (float(of[1]), 0.0, 1.0), seed=1)

    return step


def _silent(*_: Any, **__: Any) -> None:
    """Nobody is told how a step of a race is run."""


def their_contestants(work: Work, make: Callable[[], Trainee]) -> list[Contestant]:
    """The loop that a careful user writes; on a GPU in autocast, and with bfloat16 weights where they can."""
    trainee = make()
    if trainee.copied:
        check_loss(work, trainee)
    if work.device.type == "cpu":
        return [_theirs(work, trainee, trainee.title, nullcontext)]
    found = []
    for tokens in GPU_TOKENS:
        sized = replace(work, batches=padded(work.pairs, tokens, seed=0))
        title = f"{trainee.title}, {tokens // 1024}k"
        found.append(_theirs(sized, make(), f"{title} (autocast)", lambda: autocast(work.device)))
        if trainee.pure_half:
            rounded = make()
            rounded.model.bfloat16()
            found.append(_theirs(sized, rounded, f"{title} (bf16)", nullcontext))
    return found


def _theirs(
    work: Work, trainee: Trainee, title: str, precision: Callable[[], AbstractContextManager[Any]]
) -> Contestant:
    model = trainee.model.to(work.device)
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
            loss = trainee.loss(inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    inputs = [trainee.prepare(batch.to(work.device)) for batch in work.batches]
    return entered(title, model, step, inputs, work)


def entered(title: str, model: nn.Module, step: Callable[[Any], None], inputs: Sequence[Any], work: Work) -> Contestant:
    """Somebody who takes turns of `steps` steps over the inputs, which are the batches of the work in their form."""
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
    """The most memory, in bytes, that these steps held beyond what was there: gradients, moments, activations."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for n in range(GPU_WARM):
        step(inputs[n % len(inputs)])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 products on a GPU; a CPU trains in float32."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def check_loss(work: Work, trainee: Trainee) -> None:
    """Refuse to compare what does not compute the same loss from the same weights."""
    batch = padded(work.pairs[:CHECKED], GPU_TOKENS[0], seed=0, most=1)[0]
    still = build(replace(work.shape, dropout=0.0).spec(work.smoothing), seed=1).train()
    trainee.model.eval()
    with torch.no_grad():
        loss = still.loss(batch)
        ours = float(loss.total / loss.tokens)
        theirs = float(trainee.loss(trainee.prepare(batch)))
    if abs(ours - theirs) > TOLERANCE * abs(ours):
        raise UnfairError(f"{trainee.title} finds a loss of {theirs:.6f} where regard finds {ours:.6f}")
