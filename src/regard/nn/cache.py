"""Decoding states, such as key-value caches: what layers store between the steps of a decoding session."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import SpecError
from regard.nn.mask import Mask, View


@dataclass(slots=True)
class Rows:
    """Lengths of the batch rows in a decoding session (tokens read so far), shared by the caches of all layers.

    `bound` is a host-side upper bound of `lengths`, so that slicing needs no device sync. In a `static` session,
    attention always reads the keys of the first `window` positions, because a CUDA graph needs constant shapes.
    """

    lengths: Int[Tensor, " B"]
    max_len: int
    beams: int = 1  # batch rows per source
    bound: int = 0
    uniform: bool = True  # whether the length of every row is `bound`
    static: bool = False
    window: int | None = None  # number of keys in a static session; None: max_len
    counted: bool = False  # whether the search updates `lengths` itself; `advance` then does nothing
    real: Int[Tensor, " B"] | None = None  # number of new tokens per row that are not padding; None: all

    @staticmethod
    def start(sources: int, beams: int, device: torch.device, max_len: int, static: bool) -> "Rows":
        """Return the `Rows` of a new session: `beams` batch rows of length 0 for each source."""
        for name, number in (("beams", beams), ("max_len", max_len)):
            if number < 1:
                raise SpecError(name, f"must be at least 1, not {number}")
        lengths = torch.zeros(sources * beams, dtype=torch.int64, device=device)
        return Rows(lengths, max_len, beams, uniform=not static, static=static)

    def claim(self, T: int, counts: Int[Tensor, " B"] | None = None) -> None:
        """Check that T more tokens fit. Store `counts`, the number of real tokens in each batch row (default: T)."""
        if self.bound + T > self.max_len:
            raise SpecError(
                "max_len", f"{self.bound} + {T} tokens are more than this session's maximum of {self.max_len}"
            )
        self.real = counts

    def reach(self, T: int) -> int:
        """Return the number of keys that attention reads when T more tokens are appended."""
        return (self.window or self.max_len) if self.static else self.bound + T

    def positions(self, T: int) -> Int[Tensor, "B T"]:
        """Return the positions of the next T tokens of each batch row."""
        first = self.lengths[:, None]
        return first if T == 1 else first + torch.arange(T, device=self.lengths.device)

    def mask(self, T: int, prefix: Int[Tensor, " B"] | None = None) -> Mask:
        """Return the causal mask of the next T tokens, which are the queries.

        In a prefix LM, `prefix` is the length of the prefix in each batch row. All tokens may attend to the prefix.
        """
        S = self.reach(T)
        shared = None
        if prefix is not None:
            shared = torch.arange(S, device=prefix.device) < prefix[:, None]
        if self.uniform and not self.static:
            return Mask(causal=True, start=self.bound, prefix=shared)
        return Mask(causal=True, q_pos=self.positions(T), prefix=shared)

    def view(self, T: int, prefix: Int[Tensor, " B"] | None = None) -> View:
        """Return the `View` (mask and sizes for attention) of the next T tokens. `prefix` is as in `mask`."""
        return View(self.mask(T, prefix), T, self.reach(T), self.lengths.device)

    def advance(self, T: int, counts: Int[Tensor, " B"] | None) -> None:
        """Add `counts` (real tokens per batch row, default T) to the lengths. Do nothing if the search updates them."""
        if self.counted:
            return
        self.lengths += T if counts is None else counts
        self.bound += T
        self.uniform = self.uniform and counts is None

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Replace the content of each batch row i by that of row parent[i], as beam search requires."""
        if not self.counted:
            self.lengths.copy_(self.lengths.index_select(0, parent))

    def restart(self, rows: Int[Tensor, " n"]) -> None:
        """Set the lengths of the batch rows `rows` to 0. Old cache entries are hidden until new ones overwrite them."""
        self.lengths.index_fill_(0, rows, 0)

    def follow(self, read: Int[Tensor, "b k"]) -> None:
        """Use the tensor `read` as the lengths of a static session. The search updates this tensor at each step."""
        self.counted, self.lengths = True, read.view(-1)

    def keep(self, rows: Int[Tensor, " n"]) -> None:
        """Keep only the batch rows with the indices `rows`, in this order."""
        self.lengths = self.lengths.index_select(0, rows)


@runtime_checkable
class State(Protocol):
    """Interface of decoding states: what a layer stores between the steps of a decoding session."""

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Replace the content of each batch row i by that of row parent[i], as beam search requires."""
        ...


@runtime_checkable
class Droppable(State, Protocol):
    """Interface of decoding states that can drop batch rows before the decoding session ends."""

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:
        """Keep only the batch rows with the indices `rows`, which are all beams of the sources `sources`."""
        ...


@runtime_checkable
class Refillable(State, Protocol):
    """Interface of decoding states in which sources can be replaced during a session (continuous batching)."""

    def put(self, fresh: Any, of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
        """Replace the content of source `at[i]` by that of source `of[i]` in `fresh`, for each i.

        `fresh` is the state of the same layer in a new session.
        """
        ...


class Rewritten:
    """Base class of caches that start empty. If a source is replaced, its new length in `Rows` hides old entries."""

    def put(self, fresh: Any, of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
        """Do nothing, because the new batch rows have length 0 in `Rows`, which hides all old entries."""


class KVCache(Rewritten):
    """Key-value cache of self-attention. New entries are written in place, at the end of each batch row."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.row: Tensor | None = None

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T V"], view: View
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S V"], View]:
        """Store new keys and values. Return all keys and values so far, and `view` unchanged."""
        if self.keys is None or self.values is None:
            self.keys = k.new_zeros(*k.shape[:2], self.rows.max_len, k.shape[3])
            self.values = v.new_zeros(*v.shape[:2], self.rows.max_len, v.shape[3])
        T, reach = k.shape[2], self.rows.reach(k.shape[2])
        if self.rows.uniform and not self.rows.static:
            at = self.rows.bound
            self.keys[:, :, at : at + T] = k
            self.values[:, :, at : at + T] = v
        else:
            if self.row is None or self.row.shape[0] != k.shape[0]:
                self.row = torch.arange(k.shape[0], device=k.device)[:, None]
            row, at = self.row, self.rows.positions(T)
            self.keys[row, :, at] = k.transpose(1, 2)
            self.values[row, :, at] = v.transpose(1, 2)
        return self.keys[:, :, :reach], self.values[:, :, :reach], view

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        if self.keys is None or self.values is None:
            return
        live = self.rows.reach(0)
        for cache in (self.keys, self.values):  # in place, because a CUDA graph needs fixed addresses
            cache[:, :, :live] = cache[:, :, :live].index_select(0, parent)

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Move the batch rows with the indices `rows` to the front of the cache, and drop all other rows."""
        if self.keys is None or self.values is None:
            return
        n, live = rows.shape[0], self.rows.reach(0)
        for cache in (self.keys, self.values):
            cache[:n, :, :live] = cache[:, :, :live].index_select(0, rows)
        self.keys, self.values = self.keys[:n], self.values[:n]


class ActivationCache(Rewritten):
    """Cache of all past inputs of a convolution. New inputs are written in place, at the end of each batch row."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.x: Tensor | None = None

    def append(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B S D"]:
        """Store new inputs, and return all inputs so far. Entries beyond the length of a batch row are undefined."""
        if self.x is None:
            self.x = x.new_zeros(x.shape[0], self.rows.max_len, x.shape[2])
        T = x.shape[1]
        if self.rows.uniform and not self.rows.static:
            self.x[:, self.rows.bound : self.rows.bound + T] = x
        else:
            row = torch.arange(x.shape[0], device=x.device)[:, None]
            self.x[row, self.rows.positions(T)] = x
        return self.x[:, : self.rows.reach(T)]

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        if self.x is not None:
            live = self.rows.reach(0)
            self.x[:, :live] = self.x[:, :live].index_select(0, parent)

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Move the batch rows with the indices `rows` to the front of the cache, and drop all other rows."""
        if self.x is not None:
            n, live = rows.shape[0], self.rows.reach(0)
            self.x[:n, :live] = self.x[:, :live].index_select(0, rows)
            self.x = self.x[:n]


class ConvolutionCache(Rewritten):
    """Ring buffer of the last `size` = (kernel size - 1) * dilation inputs of a causal convolution.

    The input at position p is stored at index p mod size. Batch rows may have different lengths.
    """

    def __init__(self, rows: Rows, size: int, dilation: int) -> None:
        self.rows, self.size, self.dilation = rows, size, dilation
        self.x: Tensor | None = None  # (B, size, D)

    def unfold(self, x: Float[Tensor, "B T D"], counts: Int[Tensor, " B"] | None) -> Float[Tensor, "B T W"]:
        """Return the convolution window that ends at each new input, oldest input first, padded with zeros on the left.

        Only the first `counts` new inputs of each batch row are stored. The others are padding, which must not
        overwrite real inputs. If `counts` is None, all inputs are stored.
        """
        if self.x is None:
            self.x = x.new_zeros(x.shape[0], self.size, x.shape[2])
        if x.shape[1] > 1 or counts is not None:
            return self._unfold_many(self.x, x, counts)
        if self.rows.static or not self.rows.uniform:
            return self._unfold_ragged(self.x, x)
        at = self.rows.bound
        past = [self.x[:, (at - back) % self.size] for back in range(self.size, 0, -self.dilation)]
        window = torch.cat((*past, x[:, 0]), -1)
        self.x[:, at % self.size] = x[:, 0]  # overwrites the oldest input, which `window` has copied
        return window[:, None]

    def _unfold_ragged(self, ring: Float[Tensor, "B R D"], x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 W"]:
        """Return the window of one new input per batch row, without a device sync. Rows may have different lengths."""
        row, first = torch.arange(x.shape[0], device=x.device)[:, None], self.rows.lengths[:, None]
        back = torch.arange(self.size, 0, -self.dilation, device=x.device)
        past = ring[row, (first - back) % self.size].masked_fill((first < back)[:, :, None], 0.0)
        window = torch.cat((past, x), 1).flatten(1)
        ring[row, first % self.size] = x
        return window[:, None]

    def _unfold_many(
        self, ring: Float[Tensor, "B R D"], x: Float[Tensor, "B T D"], counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T W"]:
        """Return the window of each new input. In `ring`, store the last inputs of each row that are not padding."""
        T = x.shape[1]
        row, place = torch.arange(x.shape[0], device=x.device)[:, None], torch.arange(self.size, device=x.device)
        first = self.rows.lengths[:, None]
        before = ring[row, (first + place) % self.size].masked_fill((first + place < self.size)[:, :, None], 0.0)
        whole = torch.cat((before, x), 1)  # positions first - size .. first + T - 1
        real = torch.full_like(first, T) if counts is None else counts[:, None]
        ring.copy_(whole[row, real + (place - first - real) % self.size])
        return torch.cat([whole[:, i : i + T] for i in range(0, self.size + 1, self.dilation)], -1)

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        if self.x is not None:  # in place, because a CUDA graph needs fixed addresses
            self.x.copy_(self.x.index_select(0, parent))

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Keep only the batch rows with the indices `rows`."""
        if self.x is not None:
            self.x = self.x.index_select(0, rows)


@dataclass(slots=True)
class StaticKV:
    """Keys and values of cross-attention, computed once from the encoder output and shared by the beams of a source."""

    keys: Float[Tensor, "b G S K"]
    values: Float[Tensor, "b G S V"]

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Do nothing: a beam and its parent have the same source."""

    def put(self, fresh: "StaticKV", of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
        """Replace the keys and values of source `at[i]` by those of source `of[i]` in `fresh`, for each i."""
        self.keys.index_copy_(0, at, fresh.keys.index_select(0, of))
        self.values.index_copy_(0, at, fresh.values.index_select(0, of))

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Keep only the sources with the indices `sources`."""
        self.keys, self.values = self.keys.index_select(0, sources), self.values.index_select(0, sources)


class RecurrentState:
    """The hidden state of a recurrent layer: tensors with one entry per batch row, such as h and c of an LSTM."""

    def __init__(self, rows: Rows, parts: tuple[Float[Tensor, "B ..."], ...]) -> None:
        self.rows = rows
        self.parts = tuple(part.clone() for part in parts)

    def write(self, parts: tuple[Float[Tensor, "B ..."], ...]) -> None:
        """Overwrite the state with `parts`, except in batch rows whose new tokens are all padding."""
        real = self.rows.real
        for old, new in zip(self.parts, parts, strict=True):
            old.copy_(new if real is None else torch.where((real > 0).view(-1, *(1,) * (old.dim() - 1)), new, old))

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        for part in self.parts:
            part.copy_(part.index_select(0, parent))

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Keep only the batch rows with the indices `rows`."""
        self.parts = tuple(part.index_select(0, rows) for part in self.parts)

    def put(self, fresh: "RecurrentState", of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
        """Replace the states of all beams of source `at[i]` by those of source `of[i]` in `fresh`, for each i."""
        beams = (-1, self.rows.beams)
        for own, new in zip(self.parts, fresh.parts, strict=True):
            own.unflatten(0, beams).index_copy_(0, at, new.unflatten(0, beams).index_select(0, of))
