"""Prove that training fits the device: plan it, run one step on the worst batch, and predict time and disk space."""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from regard.data.cache import Cache
from regard.data.prepare import ROOM, Prepared, prepare
from regard.doctor.resources import available_memory, disk_space
from regard.doctor.trial import SAFE, Peak, Trial, Worst
from regard.planner.speed import hardware
from regard.planner.threads import quiet
from regard.recipe.recipe import Recipe, RecipeRequest
from regard.runs.assemble import assemble
from regard.runs.request import check_request
from regard.runs.resolve import resolve
from regard.runs.trained_model import choose_device
from regard.training.checkpoint import RunFolder


@dataclass(frozen=True)
class Probe:
    """The requirements of a training run: memory, time and disk space. Sizes are in bytes."""

    device: str
    parameters: int
    steps: int
    tokens: int  # the planned token budget of a batch
    worst: Worst
    peak: Peak
    measured: bool  # False: the peak is computed, not measured
    available: int
    largest: int | None  # the largest token budget that fits, or None if not even the longest example does
    largest_measured: bool
    capped: bool  # True: no larger budget was tried
    longest: int  # tokens of the longest example
    seconds: float  # of the whole training, without a time limit
    limit: float | None  # the time limit in seconds
    timed: bool  # True: typical batches were timed on this device
    checkpoint: int
    disk: int  # of a whole run folder
    left_out: int  # examples that are longer than the limit
    examples: int
    plan: tuple[str, ...]  # what was chosen, and why

    @property
    def fits(self) -> bool:
        """True if the worst batch fits into the memory of the device."""
        return self.peak is not None and self.peak <= SAFE * self.available

    def record(self) -> dict[str, Any]:
        """Return the measurements as a JSON object."""
        return asdict(self) | {"fits": self.fits}


def probe(request: RecipeRequest, device: str = "auto", report: Callable[[str], None] = lambda _: None) -> Probe:
    """Plan the training of a request, run one step on its worst batch, and predict time, memory and disk space."""
    chosen = choose_device(device)
    check_request(request)
    with tempfile.TemporaryDirectory(prefix="regard-doctor-") as name:
        folder = RunFolder(name)
        room = ROOM if chosen.type == "cuda" else ROOM // 2
        data = prepare(request.data, folder.data, request.train.seed, None, report, Cache.default(), room)
        reasons = list(data.report)
        report("planning")
        recipe = resolve(request, data, chosen, reasons.append, hardware=hardware(chosen, keep=quiet()))
        report(f"running the worst batch on {chosen}")
        return _measured(recipe, data, folder, chosen, tuple(reasons))


def _measured(
    recipe: Recipe, data: Prepared, folder: RunFolder, device: torch.device, reasons: tuple[str, ...]
) -> Probe:
    trainer = assemble(recipe, data, folder, device)
    trial = Trial(trainer, recipe.model)
    tokens = getattr(recipe.data.batching, "tokens", None) or 0
    available = available_memory(device)
    state = trial.small_step()
    peak, worst, measured = trial.peak(tokens, available, state)
    largest, largest_measured = trial.largest(tokens, peak, available)
    seconds, timed = trial.seconds()
    checkpoint, disk = disk_space(trainer, folder)
    return Probe(
        device=str(device),
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        steps=recipe.train.steps or 0,
        tokens=tokens,
        worst=worst,
        peak=peak,
        measured=measured,
        available=available,
        largest=largest,
        largest_measured=largest_measured,
        capped=largest is not None and largest >= trial.most(tokens) // 64 * 64,
        longest=trial.longest,
        seconds=seconds,
        limit=recipe.train.time,
        timed=timed,
        checkpoint=checkpoint,
        disk=disk,
        left_out=data.survey.long,
        examples=data.survey.records,
        plan=reasons,
    )
