"""The training speed of a model on this device, measured or estimated, and stored in the cache.

On a CPU, a few training steps are timed. On a GPU, a step would have to be captured as a CUDA graph or compiled first,
which takes too long. So on a GPU, the speed of a matrix product is measured, and the speed of a model is estimated from
its FLOPs.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

import torch

from regard.batch import Batch, translation
from regard.catalogue import PARTS
from regard.data import cache as cached
from regard.models.base import ModelSpec
from regard.models.build import build
from regard.training.optim import AdamW, muon_matrices
from regard.tree import to_record

PROBED = 1024  # number of tokens in the batch with which steps are timed
STEPS = 3
PATIENCE = 4.0  # maximum seconds for timing one model
UTILISATION = 0.25  # FLOP/s of a captured training step at d_model 512, relative to a matrix product (H200: 0.25)
LEAST_STEP = 2.5e-3  # seconds of a captured step of the smallest models on an H200

Lengths = tuple[int, int]  # mean number of tokens of a source and of a target; 0 if there is none


@dataclass(frozen=True)
class Hardware:
    """The device for which to plan. `speed` returns the training speed of a model in target tokens per second."""

    kind: str  # cpu, cuda or mps
    memory: float  # bytes
    speed: Callable[[ModelSpec, Lengths], float]


def hardware(device: torch.device, keep: bool = True) -> Hardware:
    """Return the `Hardware` of a device. Speeds are measured when they are needed; `keep` stores them in the cache."""
    count = torch.get_num_threads()

    def speed(spec: ModelSpec, lengths: Lengths) -> float:
        facts = (_name(device), count, torch.__version__, lengths, json.dumps(to_record(spec, PARTS)))
        path = cached.timings_file(repr(facts))
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            stored = json.loads(path.read_text())["tokens_per_second"]
            if isinstance(stored, float) and stored > 0:
                return stored
        if device.type == "cuda":
            measured = _estimated(spec, lengths, _product(device) * UTILISATION, device.type)
        else:
            measured = _timed(spec, lengths, device)
        if keep:
            cached.store_timings(path, {"tokens_per_second": measured})
        return measured

    return Hardware(device.type, memory(device), speed)


def nominal(kind: str, memory: float = 16e9) -> Hardware:
    """Return a typical `Hardware` (two laptop cores or a data-centre GPU) with estimated, not measured, speeds."""
    flops = 60e9 if kind == "cpu" else 150e12
    return Hardware(kind, memory, partial(_estimated, flops=flops, kind=kind))


def memory(device: torch.device) -> float:
    """Return the total memory of a device in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    if hasattr(os, "sysconf"):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return 8e9


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {platform.processor()} {os.cpu_count()}"


def _product(device: torch.device) -> float:
    """Measure the FLOP/s of a large matrix product in the precision that training uses on the device."""
    side, real = 4096, torch.cuda.is_bf16_supported(including_emulation=False)
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16 if real else torch.float16)
    for _ in range(3):
        torch.mm(a, a)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(10):
        torch.mm(a, a)
    torch.cuda.synchronize(device)
    return 10 * 2 * side**3 / (time.perf_counter() - began)


def _estimated(spec: ModelSpec, lengths: Lengths, flops: float, kind: str) -> float:
    """Estimate the target tokens per second of training. `flops` is the FLOP/s of a training step at d_model 512."""
    source, target = lengths
    per_token = _flops_per_token(spec)
    if source and target:
        per_token *= (source + target) / (2 * target)
    if kind == "cpu":
        return flops / per_token
    return min(flops * min(1.0, getattr(spec, "d_model", 512) / 512) / per_token, 16384 / LEAST_STEP)


@cache
def _flops_per_token(spec: ModelSpec) -> float:
    """Return the FLOPs of a training step per token: six per parameter (Kaplan et al. 2020)."""
    return 6.0 * sum(parameter.numel() for parameter in build(spec, device="meta").parameters())


@cache
def muon_share(spec: ModelSpec, tokens: int) -> float:
    """Return the FLOPs of Muon's matrix products in a step, relative to the FLOPs of the model for `tokens` tokens.

    A matrix with m rows and n >= m columns takes five iterations, each with two products of 2 * m^2 * n FLOPs and one
    of 2 * m^3 FLOPs.
    """
    matrices = [sorted(matrix.shape[-2:]) for matrix in muon_matrices(build(spec, device="meta")).values()]
    products = sum(20.0 * m * m * n + 10.0 * m**3 for m, n in matrices)
    return products / (_flops_per_token(spec) * tokens)


def _timed(spec: ModelSpec, lengths: Lengths, device: torch.device) -> float:
    """Measure the target tokens per second of a few training steps on a batch of random token ids."""
    batch, labels = _batch(spec, lengths)
    batch = batch.to(device)
    with torch.random.fork_rng(devices=[]):
        model = build(spec, device).train()
        optimizer = AdamW(learning_rate=1e-4).build(model)
        durations: list[float] = []
        while len(durations) <= STEPS and sum(durations) < PATIENCE:
            start = time.perf_counter()
            loss = model.loss(batch)
            (loss.total / labels).backward()
            optimizer.step()
            optimizer.zero()
            loss.total.item()  # waits for an asynchronous device
            durations.append(time.perf_counter() - start)
    timed = durations[1:] or durations  # the first step is a warm-up
    return labels * len(timed) / sum(timed)


def _batch(spec: ModelSpec, lengths: Lengths) -> tuple[Batch, int]:
    """Return a batch of random token ids, with the given lengths of source and target, and its number of labels."""
    source, target = lengths
    generator = torch.Generator().manual_seed(0)

    def ids(vocab: int, length: int, rows: int) -> list[list[int]]:
        return torch.randint(4, max(5, vocab), (rows, length), generator=generator).tolist()

    vocab: int = getattr(spec, "vocab", 32000)
    target_vocab: int = getattr(spec, "target_vocab", None) or vocab
    rows = max(1, PROBED // max(source, target))
    if source and target:
        pairs = zip(ids(vocab, source, rows), ids(target_vocab, target, rows), strict=True)
        return translation(list(pairs), 1, 2, source_end=()), rows * (target + 1)
    if target:
        text = torch.tensor(ids(vocab, target + 1, rows))
        return Batch(text[:, :-1], text[:, 1:]), rows * target
    return Batch(torch.tensor(ids(vocab, source, rows)), torch.zeros(rows, dtype=torch.long)), rows * source
