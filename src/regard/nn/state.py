"""Decode state: what a branch remembers between steps. State belongs to a call of a block, never to a module."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import SpecError
from regard.nn.mask import Mask, View


@dataclass(slots=True)
class Rows:
    """How far each row of one decoding has been read; shared by all its states.

    `bound` is a host-side upper bound of `lengths`, so that slicing needs no device sync. A `static` decoding always
    looks at the first `window` places, so that every step has the same shapes and can be captured as a CUDA graph.
    """

    lengths: Int[Tensor, " B"]
    max_len: int
    beams: int = 1  # rows of each source
    bound: int = 0
    uniform: bool = True  # every row is exactly at `bound`
    static: bool = False
    window: int | None = None  # of a static decoding; None: all of max_len
    counted: bool = False  # by the owner of `lengths`
    real: Int[Tensor, " B"] | None = None  # how many of the tokens that are read now are no padding; None: all

    @staticmethod
    def start(sources: int, beams: int, device: torch.device, max_len: int, static: bool) -> "Rows":
        """Rows that have read nothing yet, `beams` for each source."""
        for name, number in (("beams", beams), ("max_len", max_len)):
            if number < 1:
                raise SpecError(name, f"must be at least 1, not {number}")
        lengths = torch.zeros(sources * beams, dtype=torch.int64, device=device)
        return Rows(lengths, max_len, beams, uniform=not static, static=static)

    def claim(self, T: int, counts: Int[Tensor, " B"] | None = None) -> None:
        """Begin to read T tokens, `counts` of them real in each row (None: all). Refuse what there is no room for."""
        if self.bound + T > self.max_len:
            raise SpecError("max_len", f"{self.bound} + {T} tokens do not fit in a decoding of {self.max_len}")
        self.real = counts

    def reach(self, T: int) -> int:
        """How many key positions exist once T more tokens are read."""
        return (self.window or self.max_len) if self.static else self.bound + T

    def positions(self, T: int) -> Int[Tensor, "B T"]:
        """Where the next T tokens of each row go."""
        first = self.lengths[:, None]
        return first if T == 1 else first + torch.arange(T, device=self.lengths.device)

    def mask(self, T: int, prefix: Int[Tensor, " B"] | None = None) -> Mask:
        """What the next T tokens see of the past and of themselves."""
        S = self.reach(T)
        shared = None
        if prefix is not None:
            shared = torch.arange(S, device=prefix.device) < prefix[:, None]
        if self.uniform and not self.static:
            return Mask(causal=True, start=self.bound, prefix=shared)
        return Mask(causal=True, q_pos=self.positions(T), prefix=shared)

    def view(self, T: int, prefix: Int[Tensor, " B"] | None = None) -> View:
        """The view of the next T tokens."""
        return View(self.mask(T, prefix), T, self.reach(T), self.lengths.device)

    def advance(self, T: int, counts: Int[Tensor, " B"] | None) -> None:
        """Note that T tokens were read, of which `counts` per row were real (None: all)."""
        if self.counted:
            return
        self.lengths += T if counts is None else counts
        self.bound += T
        self.uniform = self.uniform and counts is None

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Row i continues what row parent[i] has read."""
        if not self.counted:
            self.lengths.copy_(self.lengths.index_select(0, parent))

    def restart(self, rows: Int[Tensor, " n"]) -> None:
        """These rows have read nothing yet; what their caches hold is written over before it is looked at."""
        self.lengths.index_fill_(0, rows, 0)

    def follow(self, read: Int[Tensor, "b k"]) -> None:
        """From now on `read` is how much the beams of every source of a static decoding have read.

        Its owner counts, so that nothing has to be done here from step to step.
        """
        self.counted, self.lengths = True, read.view(-1)

    def keep(self, rows: Int[Tensor, " n"]) -> None:
        """Only these rows go on, in this order."""
        self.lengths = self.lengths.index_select(0, rows)


@runtime_checkable
class State(Protocol):
    """What a branch keeps between steps of one decoding."""

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Row i continues row parent[i]."""
        ...


@runtime_checkable
class Droppable(State, Protocol):
    """A state that can also forget rows. One that cannot is carried through to the end of its decoding."""

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:
        """Only these rows go on, in this order; they are the beams of these sources."""
        ...


@runtime_checkable
class Refillable(State, Protocol):
    """A state whose sources can give up their place to others in the middle of a decoding."""

    def put(self, fresh: Any, of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
        """Source at[i] is from now on source of[i] of `fresh`, the same state of a decoding that has read nothing."""
        ...


class Rewritten:
    """A cache that holds nothing of a source before its first step: written over, never looked at before that."""

    def put(self, fresh: Any, of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
        """Nothing to do: `Rows` knows that nothing has been read."""


class KVCache(Rewritten):
    """Keys and values of self-attention, written in place at each row's own length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.row: Tensor | None = None

    def append(self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T V"]) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; return all that may be looked at so far."""
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
        return self.keys[:, :, :reach], self.values[:, :, :reach]

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        if self.keys is None or self.values is None:
            return
        live = self.rows.reach(0)
        for cache in (self.keys, self.values):  # in place: a captured graph keeps its addresses
            cache[:, :, :live] = cache[:, :, :live].index_select(0, parent)

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """The rows move to the front of the storage, of which only that part is used from now on."""
        if self.keys is None or self.values is None:
            return
        n, live = rows.shape[0], self.rows.reach(0)
        for cache in (self.keys, self.values):
            cache[:n, :, :live] = cache[:, :, :live].index_select(0, rows)
        self.keys, self.values = self.keys[:n], self.values[:n]


class ActivationCache(Rewritten):
    """The stream of a branch that reads its own past, written in place at each row's own length: convolutions."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.x: Tensor | None = None

    def append(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B S D"]:
        """Store what is new; return all so far, by position. What lies beyond a row's length is not to be read."""
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
        """The rows move to the front of the storage, of which only that part is used from now on."""
        if self.x is not None:
            n, live = rows.shape[0], self.rows.reach(0)
            self.x[:n, :live] = self.x[:, :live].index_select(0, rows)
            self.x = self.x[:n]


class ConvolutionCache(Rewritten):
    """The last `size` = (taps - 1) * step inputs of a causal convolution; that of position p lies in place p mod size.

    However long the text, a layer keeps no more than its next output can read. Rows may stand at different lengths.
    """

    def __init__(self, rows: Rows, size: int, step: int) -> None:
        self.rows, self.size, self.step = rows, size, step
        self.x: Tensor | None = None  # (B, size, D)

    def read(self, x: Float[Tensor, "B T D"], counts: Int[Tensor, " B"] | None) -> Float[Tensor, "B T W"]:
        """What the taps of each new input read, oldest first and side by side; zeros where a row had not begun.

        Of the new ones, the first `counts` (None: all) of each row are remembered: what is no token would take the
        place of one that is still needed.
        """
        if self.x is None:
            self.x = x.new_zeros(x.shape[0], self.size, x.shape[2])
        if x.shape[1] > 1 or counts is not None:
            return self._several(self.x, x, counts)
        if self.rows.static or not self.rows.uniform:
            return self._one_each(self.x, x)
        at = self.rows.bound
        seen = [self.x[:, (at - back) % self.size] for back in range(self.size, 0, -self.step)]
        window = torch.cat((*seen, x[:, 0]), -1)
        self.x[:, at % self.size] = x[:, 0]  # in the place of the oldest, which the window has a copy of
        return window[:, None]

    def _one_each(self, ring: Float[Tensor, "B R D"], x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 W"]:
        """One input for every row, wherever it stands; nothing here depends on numbers that only a device knows."""
        row, first = torch.arange(x.shape[0], device=x.device)[:, None], self.rows.lengths[:, None]
        back = torch.arange(self.size, 0, -self.step, device=x.device)
        seen = ring[row, (first - back) % self.size].masked_fill((first < back)[:, :, None], 0.0)
        window = torch.cat((seen, x), 1).flatten(1)
        ring[row, first % self.size] = x
        return window[:, None]

    def _several(
        self, ring: Float[Tensor, "B R D"], x: Float[Tensor, "B T D"], counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T W"]:
        """Many inputs at once: the ring is unrolled, and wound up again around each row's last real input."""
        T = x.shape[1]
        row, place = torch.arange(x.shape[0], device=x.device)[:, None], torch.arange(self.size, device=x.device)
        first = self.rows.lengths[:, None]
        before = ring[row, (first + place) % self.size].masked_fill((first + place < self.size)[:, :, None], 0.0)
        whole = torch.cat((before, x), 1)  # positions first - size .. first + T - 1
        real = torch.full_like(first, T) if counts is None else counts[:, None]
        ring.copy_(whole[row, real + (place - first - real) % self.size])
        return torch.cat([whole[:, i : i + T] for i in range(0, self.size + 1, self.step)], -1)

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        if self.x is not None:  # in place: a captured graph keeps its addresses
            self.x.copy_(self.x.index_select(0, parent))

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Only these rows go on."""
        if self.x is not None:
            self.x = self.x.index_select(0, rows)


@dataclass(slots=True)
class StaticKV:
    """Keys and values of a memory. The beams of a source row share them, so reordering beams changes nothing."""

    keys: Float[Tensor, "b G S K"]
    values: Float[Tensor, "b G S V"]

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Nothing to do: a beam's parent has the same source."""

    def put(self, fresh: "StaticKV", of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
        """Some sources of another memory take the place of some of these."""
        self.keys.index_copy_(0, at, fresh.keys.index_select(0, of))
        self.values.index_copy_(0, at, fresh.values.index_select(0, of))

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Only these sources are looked at from now on."""
        self.keys, self.values = self.keys.index_select(0, sources), self.values.index_select(0, sources)


class RecurrentState:
    """The state of a recurrence: one vector of each row, or two (h and c of an LSTM), however much was read."""

    def __init__(self, rows: Rows, parts: tuple[Float[Tensor, "B H"], ...]) -> None:
        self.rows = rows
        self.parts = tuple(part.clone() for part in parts)

    def write(self, parts: tuple[Float[Tensor, "B H"], ...]) -> None:
        """What is remembered from now on, in place. A row that has read nothing but padding remembers what it did."""
        real = self.rows.real
        for old, new in zip(self.parts, parts, strict=True):
            old.copy_(new if real is None else torch.where(real[:, None] > 0, new, old))

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        for part in self.parts:
            part.copy_(part.index_select(0, parent))

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Only these rows are remembered from now on."""
        self.parts = tuple(part.index_select(0, rows) for part in self.parts)

    def put(self, fresh: "RecurrentState", of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
        """All beams of some sources begin as those of another decoding did."""
        beams = (-1, self.rows.beams)
        for mine, its in zip(self.parts, fresh.parts, strict=True):
            mine.unflatten(0, beams).index_copy_(0, at, its.unflatten(0, beams).index_select(0, of))
