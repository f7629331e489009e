"""Count the parameters and the forward FLOPs per token of each part of a model, on the meta device.

FLOPs are those of matrix products, convolutions and embedding bags in evaluation mode, two per multiply-add. Attention
counts all pairs of positions, including those that an attention pattern masks. In a mixture of experts, only the
experts to which a token is routed count. Elementwise operations do not count: norms, activations, and light and dynamic
convolutions.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.batch import Batch
from regard.errors import DataError
from regard.models.base import Classifier, LanguageModel, Model, ModelSpec
from regard.models.build import build
from regard.models.encoder_only import MaskedLMModel
from regard.nn.block import BlockModule
from regard.nn.branches.gated_delta import GatedDeltaModule
from regard.nn.core import Branch
from regard.nn.residual import ResidualBranch

# Where a word starts in the name of a class: SelfAttention -> self_attention, NoisyTopKExperts -> noisy_top_k_experts.
WORD_START = "(?<=[a-z])(?=[A-Z])|(?<=[a-z][A-Z])(?=[A-Z][a-z])"


@dataclass(frozen=True, slots=True)
class PartCost:
    """The parameters and the FLOPs per token of one part of a model, such as the attention of the decoder."""

    part: str
    parameters: int
    flops_per_token: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The parameters and forward FLOPs per target token (two per multiply-add) of a model, in total and per part."""

    parameters: int
    flops_per_token: float
    length: int
    parts: tuple[PartCost, ...]


def cost(spec: ModelSpec, length: int = 128) -> Cost:
    """Return the parameters and FLOPs of a model, for a source and a target of `length` tokens each."""
    if length < 1:
        raise DataError(f"length: must be at least 1, not {length}")
    # Without gradients, because the counter would register hooks on a part that returns one of its weights.
    model = build(spec, device="meta").eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, GatedDeltaModule):
            module.rule = _all_tokens  # type: ignore[reportAttributeAccessIssue]  # an attribute of this module alone
    owners = dict(_owners(model))
    parameters = dict.fromkeys(owners.values(), 0)
    for name, parameter in model.named_parameters():
        part = owners.get(_innermost(name, owners), "other")
        parameters[part] = parameters.get(part, 0) + parameter.numel()
    flops, total = _flops(model, owners, length)
    names = [part for part in dict.fromkeys((*parameters, *flops)) if parameters.get(part) or flops.get(part)]
    parts = tuple(PartCost(part, parameters.get(part, 0), flops.get(part, 0.0) / length) for part in names)
    return Cost(sum(parameters.values()), total / length, length, parts)


def _all_tokens(q: Tensor, k: Tensor, v: Tensor, _: Tensor, __: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes of `gated_delta_rule`, with its matrix products: three per token.

    Its loop over the tokens would take half an hour for 65,536 tokens.
    """
    each = state[:, :, None]
    y = q[..., None, :] @ each
    y = y + k[..., None, :] @ each
    state = state + (k[..., None] @ v[..., None, :]).sum(2)
    return y.squeeze(-2), state


def _owners(model: Model) -> Iterator[tuple[str, str]]:
    """Yield the module name and the part name of every module to which parameters and FLOPs are assigned.

    A branch belongs to a part named by its stack and class, such as `decoder.self_attention`. In a block that is not a
    `BlockModule`, each submodule is a part, named as in the block. All other parts are named as in the model.
    """
    stacks: dict[str, None] = {}  # an ordered set
    for name, module in model.named_modules():
        stack, _, place = name.partition(".blocks.")
        if isinstance(module, Branch) and not isinstance(module, ResidualBranch):
            stacks[stack] = None
            kind = type(module).__name__.removesuffix("Module")
            yield name, f"{stack}.{re.sub(WORD_START, '_', kind).lower()}"
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


def _innermost(name: str, owners: dict[str, str]) -> str:
    """Return the longest dotted prefix of the module name `name` that is in `owners`, or an empty string."""
    while name and name not in owners:
        name = name.rpartition(".")[0]
    return name


class CountedForward(nn.Module):
    """Wrapper that computes a model's output in `forward`, so that the FLOP counter has one root module."""

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
    """Interface of modules that also compute on padding, such as experts with unused capacity."""

    def idle_flops(self, tokens: int) -> int:
        """Return the FLOPs that a forward pass over `tokens` tokens spends on padding."""
        ...


def _bag(weight: torch.Size, indices: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of an embedding bag (a weighted sum of table rows), two per multiply-add."""
    return 2 * prod(indices) * weight[-1]


BAGS = {torch.ops.aten._embedding_bag: _bag, torch.ops.aten._embedding_bag_forward_only: _bag}


def _counted(model: Model, batch: Batch) -> tuple[dict[str, float], float]:
    """Return the FLOPs of a forward pass, keyed by module name, and their total. FLOPs for padding are left out."""
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
    flops: dict[str, float] = {}
    for name, ops in counter.get_flop_counts().items():
        path = name.removeprefix("CountedForward.model.")
        padding = sum(count for part, count in idle.items() if part == path or part.startswith(f"{path}."))
        flops[path] = float(sum(ops.values()) - padding)
    return flops, float(counter.get_total_flops() - idle.total())


def _flops(model: Model, owners: dict[str, str], length: int) -> tuple[dict[str, float], float]:
    counted, total = _counted(model, _batch(model, length))
    flops: dict[str, float] = {}
    own = {module: counted.get(module, 0.0) for module in owners}
    for module in owners:  # FLOPs of a module exclude those of the `owners` inside it
        outer = _innermost(module.rpartition(".")[0], owners)
        if outer:
            own[outer] -= counted.get(module, 0.0)
    for module, part in owners.items():
        # Modules called by other methods than `forward` are not counted, so the difference may be negative.
        flops[part] = flops.get(part, 0.0) + max(0.0, own[module])
    # Heads and vocabulary tables are called by other methods, so FLOPs that no module accounts for belong to the head.
    flops["head"] = flops.get("head", 0.0) + total - sum(flops.values())
    return flops, total


def _batch(model: Model, length: int) -> Batch:
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    return Batch(target=ids, source=ids if model.spec.reads_source else None)
