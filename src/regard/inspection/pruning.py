"""Remove attention heads from a model: their rows of W_q, W_k and W_v, columns of W_o, and position parameters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.errors import SpecError
from regard.inspection.importance import Importance, head_values
from regard.inspection.interventions import Head, attention_layers, check_heads
from regard.models.base import Model
from regard.models.build import build
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention, CrossAttentionModule
from regard.nn.branches.self_attention import SelfAttention, SelfAttentionModule
from regard.nn.linear import Projection
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi, DistanceBias, T5Bias, alibi_slopes
from regard.nn.stacks.base import Stack
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.tree import swap, walk

AttentionModule = SelfAttentionModule | CrossAttentionModule
AttentionSpec = SelfAttention | CrossAttention


def pruned(model: Model, heads: Collection[Head]) -> Model:
    """Return a new model without the given heads. Its outputs equal those of `model` with these heads switched off.

    The numbers of heads in its spec are those of every layer, so spec and weights can be saved as usual. `regard.fast`
    is not installed in the new model. Raise a SpecError for heads that cannot be removed: all heads of a layer, a part
    of a group that shares keys and values, or heads of a layer that shares its parameters with other layers.
    """
    kept = _kept(model, heads)
    weights = dict(model.state_dict())
    stacks = {
        side: StackPruner(model, side, kept, weights).stack()
        for side in dict.fromkeys(head.kind.partition(".")[0] for head in heads)
    }
    first = next(model.parameters())
    smaller = build(replace(model.spec, **stacks), init=False)  # type: ignore[reportArgumentType]
    smaller.to(first.device, first.dtype).load_state_dict(weights)
    return smaller.train(model.training)


def least_important(model: Model, importance: Importance, share: float, by_layer: bool = False) -> list[Head]:
    """Return the least important heads, about `share` of all heads; `by_layer` is as in `head_values`.

    Heads that share keys and values are kept or removed together, by the sum of their importance. Every layer keeps at
    least one such group. Raise a SpecError if the share is impossible, or if some heads of the model cannot be pruned.
    """
    if not 0.0 < share < 1.0:
        raise SpecError("heads", f"{share:g} is not a share of the heads; give a number between 0 and 1, or a list")
    layers = attention_layers(model)
    groups = {
        (kind, n): _groups(layer.module, f"layer {n} of {kind}")
        for kind, each in layers.items()
        for n, layer in enumerate(each)
    }
    values = head_values(importance, by_layer)
    units = [
        [Head(*layer, head) for head in range(g * size, (g + 1) * size)]
        for layer, (count, size) in groups.items()
        for g in range(count)
    ]
    wanted, left = round(share * len(values)), {layer: count for layer, (count, _) in groups.items()}
    chosen: list[Head] = []
    for unit in sorted(units, key=lambda unit: sum(values[head] for head in unit)):
        layer = unit[0][:2]
        if left[layer] > 1 and len(chosen) + len(unit) <= wanted:
            left[layer] -= 1
            chosen += unit
    if not chosen:
        raise SpecError("heads", f"{share:g} of {len(values)} heads is less than can be removed; give a larger share")
    if wanted - len(chosen) >= max(map(len, units)):
        raise SpecError(
            "heads",
            f"every layer keeps at least one head, so at most {len(chosen)} of {len(values)} heads can be removed; "
            "give a smaller share",
        )
    return sorted(chosen)


@dataclass(frozen=True)
class Kept:
    """The heads that an attention module keeps, and the groups of heads (with shared keys and values) that it keeps."""

    heads: list[int]
    groups: list[int]


def _kept(model: Model, heads: Collection[Head]) -> dict[nn.Module, Kept]:
    """Return, for each attention module that loses some of the given heads, the heads that it keeps."""
    check_heads(model, heads)
    removed: dict[tuple[str, int], set[int]] = {}
    for kind, layer, head in heads:
        removed.setdefault((kind, layer), set()).add(head)
    layers, kept = attention_layers(model), {}
    for (kind, n), lost in removed.items():
        module, where = layers[kind][n].module, f"layer {n} of {kind}"
        count, size = _groups(module, where)
        if sum(layer.module is module for layer in layers[kind]) > 1:
            raise SpecError("heads", f"{where} shares its parameters with other layers, so its heads cannot be pruned")
        groups = [g for g in range(count) if not lost >= set(range(g * size, (g + 1) * size))]
        own = [head for head in range(count * size) if head // size in groups]
        if lost & set(own):
            some = ", ".join(map(str, sorted(lost & set(own))))
            raise SpecError(
                "heads", f"{where}: head {some} shares keys and values with others; remove all {size} heads of a group"
            )
        if not own:
            raise SpecError("heads", f"{where} would have no head left; keep at least one head in every layer")
        kept[module] = Kept(own, groups)
    return kept


def _groups(module: nn.Module, where: str) -> tuple[int, int]:
    """Return the number of key-value heads, and the number of query heads that share each of them.

    Raise SpecError if the heads of the module cannot be pruned.
    """
    if not isinstance(module, AttentionModule):
        kind = type(module).__name__.removesuffix("Module")
        raise SpecError("heads", f"{where} is {kind}; only heads of self_attention and cross_attention can be pruned")
    if not all(isinstance(projection, Projection) for projection in _projections(module).values()):
        raise SpecError(
            "heads", f"{where} has other projections than W_q, W_k, W_v and W_o of kind 'dense'; keep its heads"
        )
    return module.kv_heads, module.heads // module.kv_heads


def _projections(module: AttentionModule) -> dict[str, Any]:
    names = ("qkv", "output") if isinstance(module, SelfAttentionModule) else ("query", "kv", "output")
    return {name: getattr(module, name) for name in names}


class StackPruner:
    """Removes heads from the encoder or decoder: computes its new spec, and changes `weights` of the model in place."""

    def __init__(self, model: Model, side: str, kept: Mapping[nn.Module, Kept], weights: dict[str, Tensor]) -> None:
        spec = getattr(model.spec, side, None)
        if not isinstance(spec, Plain | Funnel) or getattr(spec, "unique", None) not in (None, spec.blocks()):
            raise SpecError(side, "only 'plain' and 'funnel' stacks without shared layers can be pruned")
        self.spec, self.kept, self.weights = spec, kept, weights
        if self.spec.positions:
            raise SpecError(f"{side}.positions", "depend on the numbers of heads, so the stack cannot be pruned")
        self.names = {module: name for name, module in model.named_modules()}
        modules = getattr(model, side).modules()
        self.module: Any = next(module for module in modules if isinstance(module, Stack))
        self.heads = getattr(model.spec, "heads", 1)

    def stack(self) -> Plain | Funnel:
        """Return the new spec of the stack, with a block of its own for every layer."""
        pattern = tuple(self.block(self.spec.block_of(i), block) for i, block in enumerate(self.module.blocks))
        position = self.spec.position
        parts = [part for block in pattern for part in walk(block) if isinstance(part, BranchSpec) and part.attends]
        if position is not None and all(getattr(part, "position", None) is not None for part in parts):
            prefix = f"{self.names[self.module]}.position."
            for name in [name for name in self.weights if name.startswith(prefix)]:
                del self.weights[name]
            position = None
        return replace(self.spec, pattern=pattern, position=position)

    def block(self, block: Block, built: nn.Module) -> Block:
        """Return the new spec of a block. `built` is the module built from the old block."""
        modules = iter([module for module in built.modules() if isinstance(module, AttentionModule)])

        def smaller(branch: BranchSpec) -> BranchSpec:
            if not isinstance(branch, SelfAttention | CrossAttention):
                return branch
            module = next(modules)
            return self.branch(branch, module, self.kept[module]) if module in self.kept else branch

        return swap(block, BranchSpec, smaller)

    def branch(self, spec: AttentionSpec, module: AttentionModule, kept: Kept) -> AttentionSpec:
        """Return the new spec of an attention layer, and remove the rows and columns of its weights."""
        H, G, name = module.heads, module.kv_heads, self.names[module]
        for projection, linear in _projections(module).items():
            if projection == "output":
                columns = _of_heads(linear.weight.shape[1], H, kept.heads)
                self.weights[f"{name}.output.weight"] = linear.weight.detach()[:, columns]
                continue
            rows, start = [], 0
            for role, width in linear.row_widths.items():
                own = (H, kept.heads) if role == "query" else (G, kept.groups)
                rows.append(start + _of_heads(width, *own))
                start += width
            for each, tensor in linear.named_parameters():
                self.weights[f"{name}.{projection}.{each}"] = tensor.detach()[torch.cat(rows)]
        inputs, *_, output = _projections(module).values()
        widths = {"d_head": inputs.row_widths["query"] // H, "d_value": output.weight.shape[1] // H}
        sizes = {"heads": len(kept.heads), **widths}
        sizes["kv_heads"] = None if G == H else len(kept.groups)
        position = self.position(spec, name, kept) if isinstance(spec, SelfAttention) else None
        return replace(spec, **sizes) if position is None else replace(spec, **sizes, position=position)

    def position(self, spec: SelfAttention, name: str, kept: Kept) -> Position | None:
        """Return the position scheme of a smaller layer, or None if it remains the same."""
        scheme, source = spec.position, f"{name}.position.weight"
        if scheme is None:
            scheme, source = self.spec.position, f"{self.names[self.module]}.position.weight"
        if scheme is None or "heads" not in scheme.shaped_by:
            return None
        if isinstance(scheme, ALiBi):
            slopes = scheme.slopes or tuple(alibi_slopes(spec.heads or self.heads))
            return ALiBi(tuple(slopes[head] for head in kept.heads))
        if not isinstance(scheme, T5Bias | DistanceBias):
            raise SpecError(
                "heads", f"{name}: the position scheme {scheme.kind!r} is not made of heads, so they cannot be pruned"
            )
        self.weights[f"{name}.position.weight"] = self.weights[source][kept.heads]
        return scheme


def _of_heads(width: int, heads: int, kept: list[int]) -> Int[Tensor, " n"]:
    """Return the indices of the channels of the kept heads, among `width` channels of `heads` heads."""
    return torch.arange(width).view(heads, -1)[kept].flatten()
