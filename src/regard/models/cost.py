"""Count exact parameters and forward FLOPs per token, by part, on the meta device.

FLOPs are those of matrix products, convolutions and sums over looked-up rows, two per multiply-add, in evaluation.
Attention counts all pairs of positions, even those that a pattern hides. Of the experts, only those that a token uses
are counted. Elementwise operations are not: norms, activations, the taps of light and dynamic convolutions.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from regard.batch import Batch
from regard.errors import DataError
from regard.models.base import Classifier, LanguageModel, Model, ModelSpec
from regard.models.build import build
from regard.models.encoder_only import MaskedLMModel
from regard.nn.block import BlockModule
from regard.nn.core import Branch
from regard.nn.residual import ResidualBranch


@dataclass(frozen=True, slots=True)
class PartCost:
    """One row of the table: a part of the model, its parameters, its FLOPs per token."""

    part: str
    parameters: int
    flops_per_token: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a model. FLOPs are those of a forward pass, two per multiply-add, per target token."""

    parameters: int
    flops_per_token: float
    length: int
    parts: tuple[PartCost, ...]


def cost(spec: ModelSpec, length: int = 128) -> Cost:
    """Count a model on sequences of `length` (source and target alike)."""
    if length < 1:
        raise DataError(f"length: must be at least 1, not {length}")
    # Without gradients: the counter would hang hooks on a part that returns a weight of its own.
    model = build(spec, device="meta").eval().requires_grad_(False)
    owners = dict(_owners(model))
    parameters = dict.fromkeys(owners.values(), 0)
    for name, parameter in model.named_parameters():
        part = _owner(name, owners)
        parameters[part] = parameters.get(part, 0) + parameter.numel()
    flops, total = _flops(model, owners, length)
    names = [part for part in dict.fromkeys((*parameters, *flops)) if parameters.get(part) or flops.get(part)]
    parts = tuple(PartCost(part, parameters.get(part, 0), flops.get(part, 0.0) / length) for part in names)
    return Cost(sum(parameters.values()), total / length, length, parts)


def _owners(model: Model) -> Iterator[tuple[str, str]]:
    """Module prefix -> part: a stack's branches by their kind, everything else by its place in the model.

    In a model with blocks of its own kind, the parts of a block by their names.
    """
    stacks: dict[str, None] = {}  # in order
    for name, module in model.named_modules():
        stack, _, place = name.partition(".blocks.")
        if isinstance(module, Branch) and not isinstance(module, ResidualBranch):
            stacks[stack] = None
            kind = type(module).__name__.removesuffix("Module")
            yield name, f"{stack}.{re.sub('(?<=[a-z])(?=[A-Z])', '_', kind).lower()}"
        elif isinstance(module, BlockModule):
            yield name, f"{stack}.norms"
        elif place.count(".") == 1 and not isinstance(model.get_submodule(name.rpartition(".")[0]), BlockModule):
            stacks[stack] = None
            yield name, f"{stack}.{place.rpartition('.')[2]}"
    for name in stacks:
        whole = any(isinstance(module, BlockModule) for module in model.get_submodule(name).modules())
        yield name, f"{name} (position, final norm)" if whole else f"{name} (rest)"
    for name, _ in model.named_children():
        if name not in stacks:
            yield name, f"{name} (rest)" if any(stack.startswith(f"{name}.") for stack in stacks) else name


def _owner(name: str, owners: dict[str, str]) -> str:
    """The part of the longest prefix of `name` among the owners."""
    while name and name not in owners:
        name = name.rpartition(".")[0]
    return owners.get(name, "other")


def _holder(name: str, owners: dict[str, str]) -> str | None:
    """The nearest owner around a module."""
    while name:
        name = name.rpartition(".")[0]
        if name in owners:
            return name
    return None


class CountedForward(nn.Module):
    """A model behind one call, so that the counter sees all of it under one root."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> None:
        if isinstance(self.model, LanguageModel | MaskedLMModel):
            self.model.log_probs(batch)
        elif isinstance(self.model, Classifier):
            self.model.scores(batch)
        else:
            self.model(batch)


@runtime_checkable
class Idle(Protocol):
    """A part that also computes padding, such as unused places in the capacity of experts."""

    def idle_flops(self, tokens: int) -> int:
        """Return the FLOPs that a call with `tokens` tokens spends on empty places."""
        ...


def _bag(weight: torch.Size, indices: torch.Size, *_: Any, **__: Any) -> int:
    """FLOPs of a weighted sum of table rows: one multiply-add per element."""
    return 2 * prod(indices) * weight[-1]


BAGS = {torch.ops.aten._embedding_bag: _bag, torch.ops.aten._embedding_bag_forward_only: _bag}


def _counted(model: Model, batch: Batch) -> tuple[dict[str, float], float]:
    """The FLOPs of each module by name, and their total."""
    idle: Counter[str] = Counter()

    def note(name: str, module: Idle) -> Any:
        def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
            idle[name] += module.idle_flops(prod(given[0].shape[:-1]))

        return hook

    parts: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, Idle)}
    hooks = [part.register_forward_pre_hook(note(name, part)) for name, part in parts.items()]
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=BAGS) as counter:
        CountedForward(model)(batch)
    for hook in hooks:
        hook.remove()
    found: dict[str, float] = {}
    for name, ops in counter.get_flop_counts().items():
        inside = name.removeprefix("CountedForward.model.")
        of_no_use = sum(count for part, count in idle.items() if part == inside or part.startswith(f"{inside}."))
        found[inside] = float(sum(ops.values()) - of_no_use)
    return found, float(counter.get_total_flops() - idle.total())


def _flops(model: Model, owners: dict[str, str], length: int) -> tuple[dict[str, float], float]:
    counted, total = _counted(model, _batch(model, length))
    flops: dict[str, float] = {}
    own = {module: counted.get(module, 0.0) for module in owners}
    for module in owners:  # what holds other parts has what they leave of it
        holder = _holder(module, owners)
        if holder is not None:
            own[holder] -= counted.get(module, 0.0)
    for module, part in owners.items():
        # A model's children and stacks may be called by method; what was not counted has nothing left.
        flops[part] = flops.get(part, 0.0) + max(0.0, own[module])
    # Heads and tables are called by method and not as modules: what no module accounts for is theirs.
    flops["head"] = flops.get("head", 0.0) + total - sum(flops.values())
    return flops, total


def _batch(model: Model, length: int) -> Batch:
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    return Batch(target=ids, source=ids if model.spec.reads_source else None)
