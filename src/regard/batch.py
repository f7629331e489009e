"""`Batch`, the input of a model: rows of token ids or vectors, and the segment numbers of the tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.errors import DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of a model: `target` is the sequence to read or continue, and `labels` are the tokens to predict.

    `source` and `target` hold token ids, or vectors if the input layer reads vectors. Each token has a segment number.
    Segment 0 is padding, which is always at the end of a row. An unpacked row holds one sequence, segment 1. A packed
    row holds several sequences, segments 1, 2, ... in order, and segment n of a source row belongs to segment n of the
    target row.
    """

    target: Int[Tensor, "B T"] | Float[Tensor, "B T C"]
    labels: Int[Tensor, "B T"] | Int[Tensor, " n"] | None = None  # per token, or one per row (sentence classification)
    target_seg: Int[Tensor, "B T"] | None = None  # None: no padding
    source: Int[Tensor, "B S"] | Float[Tensor, "B S C"] | None = None
    source_seg: Int[Tensor, "B S"] | None = None
    weights: Float[Tensor, "B T"] | None = None  # one per label; None: 1 except for padding
    target_pos: Int[Tensor, "B T"] | None = None  # indices within the segment; None: 0, 1, ... along the row
    source_pos: Int[Tensor, "B S"] | None = None
    prefix: Bool[Tensor, "B T"] | None = None  # prefix LM: True at tokens that all tokens of the segment attend to
    types: Int[Tensor, "B T"] | None = None  # token types: BERT's sentence A and B
    packed: bool = False
    segments: int = 1  # maximum number of segments per row
    longest: int | None = None  # maximum number of tokens per segment

    def __post_init__(self) -> None:
        """Raise DataError for invalid or mismatched shapes, segments, positions or padding."""
        self._check_shapes()
        if self.packed:
            needed = ("target_seg", "target_pos", "source_seg", "source_pos")
            for name in needed[: 2 if self.source is None else 4]:
                require_data(getattr(self, name) is not None, f"{name}: a packed batch needs it")
            if self.labels is not None and self.labels.dim() == 1:
                raise DataError("labels: a packed row holds several texts but would have one label; use padded batches")
        for side in ("target", "source"):
            self._check_segments(f"{side}_seg", getattr(self, f"{side}_seg"))
            self._check_positions(f"{side}_pos", getattr(self, f"{side}_pos"))

    def _check_shapes(self) -> None:
        # All shapes are in host memory, so this check does not synchronise with a device.
        sides = {"target": self.target, "source": self.source}
        for side, values in sides.items():
            if values is not None and (values.dim() != 2 + values.is_floating_point() or not values.numel()):
                shape = f"{tuple(values.shape)} of {values.dtype}"
                raise DataError(f"{side}: needs rows of whole numbers (B, T), or of vectors (B, T, C), not {shape}")
        if self.source is not None and self.source.shape[0] != self.target.shape[0]:
            raise DataError(f"source: has {self.source.shape[0]} rows, but the target has {self.target.shape[0]}")
        for name in ("target_seg", "target_pos", "source_seg", "source_pos", "weights", "prefix", "types"):
            field, side = getattr(self, name), sides[name.split("_")[0] if "_" in name else "target"]
            if field is not None and (side is None or field.shape != side.shape[:2]):
                shape = None if side is None else tuple(side.shape[:2])
                raise DataError(f"{name}: the shape {tuple(field.shape)} does not match the shape of the ids, {shape}")
        if self.labels is not None and self.labels.shape not in (self.target.shape[:2], self.target.shape[:1]):
            raise DataError(f"labels: {tuple(self.labels.shape)} is neither one per token nor one per row of target")

    def _check_segments(self, name: str, seg: Tensor | None) -> None:
        if seg is None or not readable(seg):
            return
        check_padding(name, seg)
        if not self.packed:
            if bool((seg > 1).any()):
                raise DataError(f"{name}: an unpacked row has one segment, numbered 1; set packed=True")
            if bool((seg[:, 0] == 0).any()):
                raise DataError(f"{name}: row {int((seg[:, 0] == 0).nonzero()[0])} has no token; leave the row out")
        before, after = seg[:, :-1], seg[:, 1:]
        if bool(((after < before) & (after != 0)).any()) or bool((seg > self.segments).any()):
            raise DataError(f"{name}: segments are numbered 1, 2, ... along a row, up to segments={self.segments}")

    def _check_positions(self, name: str, pos: Tensor | None) -> None:
        if pos is None or not readable(pos):
            return
        limit = self.longest or pos.shape[1]
        if bool((pos < 0).any()) or bool((pos >= limit).any()):
            raise DataError(f"{name}: positions must lie in 0 .. {limit - 1}; set longest= if they may be larger")

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return the batch with all tensors moved to a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def copy_to(self, device: torch.device | str) -> "Batch":
        """Return a copy of the batch on a device. `fill` can overwrite the copy."""
        return self._each(lambda tensor: tensor.to(device, copy=True))

    def pinned(self) -> "Batch":
        """Return the batch in pinned memory, so that copies to a GPU are asynchronous."""
        return self._each(Tensor.pin_memory)

    def alike(self, other: "Batch") -> bool:
        """Return whether the tensors of both batches have the same shapes and dtypes and all other fields are equal."""

        def form(value: Any) -> Any:
            return (value.shape, value.dtype) if isinstance(value, Tensor) else value

        return all(form(getattr(self, field.name)) == form(getattr(other, field.name)) for field in fields(self))

    def fill(self, other: "Batch") -> None:
        """Copy the tensors of another batch of the same shapes into this batch in place, as CUDA graphs require."""
        for name, tensor in self._tensors().items():
            tensor.copy_(getattr(other, name), non_blocking=True)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(self, **{name: change(tensor) for name, tensor in self._tensors().items()})


def readable(seg: Tensor) -> bool:
    """Return whether the values of a tensor can be read without waiting for a device or breaking a compiled graph."""
    return seg.device.type == "cpu" and not torch.compiler.is_compiling()


def require_data(condition: bool, message: str) -> None:
    """Raise a DataError if the condition is false."""
    if not condition:
        raise DataError(message)


def check_padding(name: str, seg: Int[Tensor, "B T"]) -> None:
    """Raise DataError for padding that is not at the end of its row. Tensors on a GPU are not checked."""
    if readable(seg) and bool(((seg[:, :-1] == 0) & (seg[:, 1:] != 0)).any()):
        raise DataError(f"{name}: padding (segment 0) must be at the end of a row")


def pad(rows: Sequence[Sequence[int]], width: int | None = None) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return the rows, padded with 0 on the right, and their segment numbers (1 for tokens, 0 for padding)."""
    return pack([[row] for row in rows], width)[:2]


def pack(
    rows: Sequence[Sequence[Sequence[int]]], width: int | None = None
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return the ids, segments and positions of packed rows. Each row is given as a list of sequences to concatenate.

    Segments number the sequences of a row from 1. Positions count the tokens of each sequence from 0. Padding is 0.
    """
    width = width or max(sum(len(sequence) for sequence in row) for row in rows)
    ids, seg, pos = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    for i, row in enumerate(rows):
        begin = 0
        for n, sequence in enumerate(row, start=1):
            span = slice(begin, begin + len(sequence))
            ids[i, span] = torch.as_tensor(sequence, dtype=torch.int64)
            seg[i, span] = n
            pos[i, span] = torch.arange(len(sequence))
            begin += len(sequence)
    return ids, seg, pos


def translation(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    bos: int = 1,
    eos: int = 2,
    packed: bool = False,
    source_end: Sequence[int] | None = None,
) -> Batch:
    """Return a batch of translation pairs: source `s1 .. sm eos`, target `bos t1 .. tn`, labels `t1 .. tn eos`.

    `source_end` replaces the eos after every source; use `()` for sources that already end with eos. `packed` puts all
    pairs into one row. To build a batch from text, use `TrainedModel.batch`.
    """
    if not pairs:
        raise DataError("pairs: is empty; a batch needs at least one pair")
    if any(not len(source) for source, _ in pairs):
        raise DataError("source: an empty source has nothing to translate; leave the pair out")
    end = (eos,) if source_end is None else source_end
    read = [[bos, *target] for _, target in pairs]
    labels = [[*target, eos] for _, target in pairs]
    sources = [[*source, *end] for source, _ in pairs]
    if not packed:
        (source, source_seg), (target, target_seg) = pad(sources), pad(read)
        return Batch(target, pad(labels)[0], target_seg, source, source_seg)
    (source, source_seg, source_pos), (target, target_seg, target_pos) = pack([sources]), pack([read])
    return Batch(
        target,
        pack([labels])[0],
        target_seg,
        source,
        source_seg,
        target_pos=target_pos,
        source_pos=source_pos,
        packed=True,
        segments=len(pairs),
        longest=max(map(len, (*sources, *read))),
    )
