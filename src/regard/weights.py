"""Copy weights between regard models and other models. docs/weights.md lists the parameter names."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from regard.errors import DataError
from regard.models.embedding import Tables


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor to be computed from other tensors. Each input is a parameter name, a tensor or another `Source`."""

    inputs: tuple["str | Tensor | Source", ...]
    function: Callable[..., Tensor]


Input = str | Tensor | Source


def cat(*inputs: Input, dim: int = 0) -> Source:
    """Return a `Source` that concatenates tensors, by default by rows: `cat("q_proj", "k_proj", "v_proj")`."""
    return Source(inputs, lambda *tensors: torch.cat(tensors, dim))


def transpose(source: Input) -> Source:
    """Return a `Source` that transposes a matrix, such as the weight of GPT-2's `Conv1D`; a bias is not changed."""
    return Source((source,), lambda tensor: tensor.mT if tensor.dim() > 1 else tensor)


def rows(source: Input, start: int, stop: int | None = None) -> Source:
    """Return a `Source` for the rows from `start` to `stop` of a fused weight or bias: `rows("in_proj_{}", 0, 512)`."""
    return Source((source,), lambda tensor: tensor[start:stop])


def gates(source: Input, order: str, to: str = "ifgo") -> Source:
    """Return a `Source` that reorders the gates in a weight or bias of a recurrent cell; a gate is a block of rows.

    `order` has one letter for each gate in the source. `to` has the same letters in the order that regard uses: `ifgo`
    for an LSTM, `rzn` for a GRU. For example, `gates("kernel", "igfo")`.
    """
    if sorted(order) != sorted(to) or len(set(order)) < len(order):
        raise DataError(f"gates: {order!r} and {to!r} must hold the same letters, one for each gate")

    def reordered(tensor: Tensor) -> Tensor:
        if tensor.shape[0] % len(order):
            raise DataError(f"gates: {tensor.shape[0]} rows cannot be divided into {len(order)} gates")
        blocks = tensor.chunk(len(order))
        return torch.cat([blocks[order.index(gate)] for gate in to])

    return Source((source,), reordered)


def total(*inputs: Input) -> Source:
    """Return a `Source` that adds tensors, such as the two biases of torch's LSTM. A regard LSTM has only their sum."""
    return Source(inputs, lambda *tensors: torch.stack(tensors).sum(0))


def computed(function: Callable[..., Tensor], *inputs: Input) -> Source:
    """Return a `Source` that applies any function to tensors: `computed(lambda gain: gain + 1, "norm.gamma")`."""
    return Source(inputs, function)


def unfused(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights of a model by name, with one name for each part of a fused projection.

    For example, `branch.qkv.weight` is returned as `branch.query.weight`, `branch.key.weight` and
    `branch.value.weight`, and `gate_up` as `gate` and `up`. The tensors share memory with the model. A tied tensor has
    one name.
    """
    names = _names(model)
    return {name: tensor.detach() for name, (tensor, parts) in names.items() if parts == (name,)}


def copy_from(
    model: nn.Module,
    mapping: Mapping[str, Input],
    source: nn.Module | Mapping[str, Tensor] | None = None,
    unused: Collection[str] = (),
) -> None:
    """Copy weights into `model`; its dtypes and its device do not change.

    `mapping` maps parameter names of `model` to parameter names of `source` (a module or a state dict), to tensors, or
    to a `Source` returned by `cat`, `transpose`, `rows`, `gates`, `total` or `computed`. In names,

    - `query.weight`, `key.weight` and `value.weight` may be used instead of `qkv.weight`, as in `unfused`;
    - a module name stands for all parameters of the module: `{"norm": "ln_1"}` copies `ln_1.weight` to `norm.weight`
      and `ln_1.bias` to `norm.bias`, and `in_proj_{}` stands for `in_proj_weight` and `in_proj_bias`;
    - `*` stands for every number: `{"blocks.*.norm": "layers.*.ln_1"}`.

    Every weight of `model` must be mapped, and every weight of `source` used, except buffers of a module and names that
    match a pattern in `unused`. All of this is checked before anything is copied.
    """
    names = _names(model)
    tensors = source.state_dict(keep_vars=True) if isinstance(source, nn.Module) else source or {}
    used: set[tuple[int, int]] = set()
    mapped: dict[str, str] = {}  # name of each mapped part -> the key of `names` that maps it
    values: dict[str, Tensor] = {}
    for name, entry, rename in _expanded(model, mapping, names):
        for part in names[name][1]:
            if part in mapped:
                raise DataError(f"{name}: mapped twice, also as {mapped[part]}; keep one of the two")
            mapped[part] = name
        values[name] = _value(name, entry, rename, tensors, used)
        _check_shape(name, names[name][0], values[name])
    missing = [part for _, parts in names.values() for part in parts if part not in mapped]
    if missing:
        shape, others = tuple(names[missing[0]][0].shape), len(set(missing)) - 1
        more = f", nor from {others} others" if others else ""
        raise DataError(f"{missing[0]}: nothing is mapped to this parameter of shape {shape}{more}; map every one")
    learned = dict(source.named_parameters()) if isinstance(source, nn.Module) else tensors
    left = [name for name, tensor in learned.items() if _identity(tensor) not in used]
    left = [name for name in left if not any(fnmatchcase(name, pattern) for pattern in unused)]
    if left:
        shape = tuple(learned[left[0]].shape)
        more = f", and {len(left) - 1} others" if len(left) > 1 else ""
        problem = f"{left[0]}: the mapping leaves out this tensor of the source, of shape {shape}{more}"
        raise DataError(f"{problem}; map it or list it in `unused`")
    with torch.no_grad():
        for name, value in values.items():
            names[name][0].copy_(value)


Names = dict[str, tuple[Tensor, tuple[str, ...]]]


def _names(model: nn.Module) -> Names:
    """Return a dict of all weight names that a mapping may use. The values are pairs (tensor, parts).

    A fused weight such as qkv has a name for the whole tensor, and `parts` are the names of query, key and value. Each
    of these is a name, too, for a slice of the tensor. Any weight that is not fused has itself as its only part. All
    names of a tied weight have the same tensor and parts.
    """
    names: Names = {}
    first: dict[int, str] = {}
    widths = {name: getattr(module, "row_widths", {}) for name, module in model.named_modules()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = first.setdefault(id(tensor), name)
        if owner != name:
            names[name] = names[owner]
            continue
        fused = _fused(name, widths)
        if len(widths.get(fused, {})) < 2 or tensor.shape[:1] != (sum(widths[fused].values()),):
            names[name] = (tensor, (name,))
            continue
        prefix, suffix = fused.rpartition(".")[0], name.removeprefix(fused)
        parts = {f"{prefix}.{role}{suffix}".removeprefix("."): rows for role, rows in widths[fused].items()}
        names[name] = (tensor, tuple(parts))
        for part, piece in zip(parts, tensor.split(list(parts.values())), strict=True):
            names[part] = (piece, (part,))
    return names


def _fused(name: str, widths: Mapping[str, object]) -> str:
    """Return the name of the fused projection that contains a parameter (the innermost one), or "" if there is none."""
    while name and not widths.get(name):
        name = name.rpartition(".")[0]
    return name


def _nearest(name: str, names: Iterable[str], otherwise: str) -> str:
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else otherwise


Rename = Callable[[str], str]


def _expanded(model: nn.Module, mapping: Mapping[str, Input], names: Names) -> Iterator[tuple[str, Input, Rename]]:
    """Yield (name, source, rename) for each weight of the model that a key of the mapping matches.

    `rename` completes a name in `source`: it replaces `*` by layer numbers and adds parameter names to module names.
    """
    for key, source in mapping.items():
        pattern = re.compile(re.escape(key).replace(r"\*", r"(\d+)"))
        matched = False
        for name in names:
            module, _, leaf = name.rpartition(".")
            whole = pattern.fullmatch(name)
            match = whole or pattern.fullmatch(module)
            if match is not None:
                matched = True
                yield name, source, partial(_renamed, numbers=match.groups(), leaf=leaf, append=whole is None)
        if not matched:
            raise DataError(f"{key}: this model has no such weight or module; {_hint(model, key)}")


def _renamed(name: str, numbers: tuple[str, ...], leaf: str, append: bool) -> str:
    """Return the name of a source tensor: layer numbers replace `*`, and `leaf` replaces `{}` or is appended."""
    for number in numbers:
        name = name.replace("*", number, 1)
    if "{}" in name:
        return name.replace("{}", leaf)
    return f"{name}.{leaf}" if append else name


def _hint(model: nn.Module, key: str) -> str:
    """Return a hint for an unknown name: the table to which an embedding table is tied, or else the nearest name."""
    for name, module in model.named_modules():
        use = key.removeprefix(f"{name}.tables.").partition(".")[0]
        owner = module.owner.get(use) if isinstance(module, Tables) else None
        if owner is not None and owner != use:
            return f"the table is tied, so map {name}.tables.{owner} instead"
    return _nearest(key, _names(model), "`unfused` returns all names")


def _value(
    name: str, entry: Input, rename: Rename, tensors: Mapping[str, Tensor], used: set[tuple[int, int]]
) -> Tensor:
    """Return the tensor to copy into one weight, and add the source tensors from which it is computed to `used`."""
    if isinstance(entry, Tensor):
        return entry.detach()
    if isinstance(entry, Source):
        inputs = [_value(name, each, rename, tensors, used) for each in entry.inputs]
        try:
            return entry.function(*inputs)
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
            message = str(error).splitlines()[0]
            raise DataError(f"{name}: cannot be computed from tensors of shape {shapes}: {message}") from None
    renamed = rename(entry)
    if renamed not in tensors:
        hint = _nearest(renamed, tensors, "correct the mapping")
        raise DataError(f"{name}: the source has no tensor {renamed!r}; {hint}")
    used.add(_identity(tensors[renamed]))
    return tensors[renamed].detach()


def _check_shape(name: str, target: Tensor, value: Tensor) -> None:
    if target.shape != value.shape:
        raise DataError(
            f"{name}: the parameter has the shape {tuple(target.shape)}, the tensor mapped to it {tuple(value.shape)}; "
            "transpose, slice or concatenate it in the mapping"
        )
    if target.is_meta:
        raise DataError(f"{name}: a model on the device 'meta' holds no weights; build it on another device")


def _identity(tensor: Tensor) -> tuple[int, int]:
    """Return a key that is equal for tied tensors."""
    return tensor.data_ptr() or id(tensor), tensor.numel()
