"""Recurrent layers: cells (Elman, GRU, LSTM), initial states, and a layer that applies a cell to a sequence."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import DataError
from regard.nn.cache import RecurrentState, Rows
from regard.nn.core import Site
from regard.nn.mask import Mask
from regard.nn.precision import full_precision
from regard.tree import Spec

State = tuple[Float[Tensor, "B H"], ...]  # (h,), or (h, c) for an LSTM
Direction = Literal["forwards", "backwards", "both"]


class Cell(Spec):
    """Abstract base class of specs for the cell of a recurrent layer, such as a GRU."""

    __slots__ = ()

    @abstractmethod
    def build(self, d_in: int, d_hidden: int, site: Site) -> "CellModule":
        """Build a cell with inputs of width d_in and hidden states of width d_hidden."""


@dataclass(frozen=True, slots=True)
class Elman(Cell):
    """Elman 1990: h_t = phi(W_x x_t + W_h h_(t-1) + b), with the activation phi."""

    kind = "elman"
    activation: Literal["tanh", "relu"] = "tanh"

    def build(self, d_in: int, d_hidden: int, site: Site) -> "CellModule":
        return ElmanModule(self.activation, d_in, d_hidden, site)


@dataclass(frozen=True, slots=True)
class GRU(Cell):
    """Cho et al. 2014, with the reset gate after the matrix product, as in cuDNN and torch.

    r = sigmoid(W_xr x + W_hr h + b_r), z = sigmoid(W_xz x + W_hz h + b_z), n = tanh(W_xn x + b_xn + r * (W_hn h +
    b_hn)), h' = (1 - z) * n + z * h.
    """

    kind = "gru"

    def build(self, d_in: int, d_hidden: int, site: Site) -> "CellModule":
        return GRUModule(3, d_in, d_hidden, site, hidden_bias=None)


@dataclass(frozen=True, slots=True)
class LSTM(Cell):
    """Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000.

    i, f, g, o = W_x x + W_h h + b, c' = sigmoid(f) * c + sigmoid(i) * tanh(g), h' = sigmoid(o) * tanh(c').

    `forget_bias` is the initial bias of f. The default of 1 is from Jozefowicz et al. 2015; torch uses 0.
    """

    kind = "lstm"
    forget_bias: float = 1.0

    def build(self, d_in: int, d_hidden: int, site: Site) -> "CellModule":
        return LSTMModule(self.forget_bias, d_in, d_hidden, site)


class CellModule(nn.Module):
    """Abstract base class of recurrent cells: `step` processes one token, `forward` processes a whole sequence."""

    parts: ClassVar[int] = 1  # number of vectors in a state; the first is h, the output

    def __init__(self, gates: int, d_in: int, d_hidden: int, site: Site, hidden_bias: bool | None = False) -> None:
        super().__init__()
        self.d_hidden = d_hidden
        self.input = site.linear(d_in, {"other": gates * d_hidden})
        self.hidden = site.linear(d_hidden, {"other": gates * d_hidden}, bias=hidden_bias)

    @abstractmethod
    def step(self, x: Float[Tensor, "B I"], state: State) -> State:
        """Return the state after one more token."""

    def forward(
        self, x: Float[Tensor, "B T I"], state: State, lengths: Int[Tensor, " B"] | None = None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        """Return h after every token, and the state after the last real token of each batch row.

        `lengths` is the number of real tokens in each batch row (default: T). The computation has the precision of the
        weights even under autocast, because rounding errors in the state accumulate.
        """
        dtype, precise = x.dtype, next(self.parameters()).dtype
        with full_precision(x.device):
            state, outputs = tuple(part.to(precise) for part in state), []
            for t, token in enumerate(x.to(precise).unbind(1)):
                new = self.step(token, state)
                outputs.append(new[0])
                if lengths is not None:
                    real = (t < lengths)[:, None]
                    new = tuple(torch.where(real, after, before) for after, before in zip(new, state, strict=True))
                state = new
        return torch.stack(outputs, 1).to(dtype), state


class ElmanModule(CellModule):
    def __init__(self, activation: Literal["tanh", "relu"], d_in: int, d_hidden: int, site: Site) -> None:
        super().__init__(1, d_in, d_hidden, site)
        self.activate = {"tanh": torch.tanh, "relu": torch.relu}[activation]

    def step(self, x: Float[Tensor, "B I"], state: State) -> State:
        return (self.activate(self.input(x) + self.hidden(state[0])),)


class GRUModule(CellModule):
    def step(self, x: Float[Tensor, "B I"], state: State) -> State:
        (h,) = state
        from_x, from_h = self.input(x).chunk(3, -1), self.hidden(h).chunk(3, -1)
        reset, update = (from_x[0] + from_h[0]).sigmoid(), (from_x[1] + from_h[1]).sigmoid()
        new = (from_x[2] + reset * from_h[2]).tanh()
        return (new + update * (h - new),)


class LSTMModule(CellModule):
    parts = 2

    def __init__(self, forget_bias: float, d_in: int, d_hidden: int, site: Site) -> None:
        super().__init__(4, d_in, d_hidden, site)
        bias = getattr(self.input, "bias", None)
        if bias is not None:
            with torch.no_grad():
                bias[d_hidden : 2 * d_hidden] = forget_bias
        elif forget_bias:
            raise site.error("forget_bias", "the model's linear layers have no biases; set it to 0")

    def step(self, x: Float[Tensor, "B I"], state: State) -> State:
        h, c = state
        i, f, g, o = (self.input(x) + self.hidden(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Start(Spec):
    """Abstract base class of specs for the initial state of a recurrent layer."""

    __slots__ = ()

    @abstractmethod
    def build(self, parts: int, d_hidden: int, site: Site) -> "StartModule":
        """Build an initial state of `parts` vectors of width d_hidden."""


@dataclass(frozen=True, slots=True)
class ZeroStart(Start):
    """An initial state of zeros."""

    kind = "zero_start"

    def build(self, parts: int, d_hidden: int, site: Site) -> "StartModule":  # noqa: ARG002
        return ZeroStartModule(parts, d_hidden)


@dataclass(frozen=True, slots=True)
class LearnedStart(Start):
    """A learned initial state, the same for all sequences."""

    kind = "learned_start"

    def build(self, parts: int, d_hidden: int, site: Site) -> "StartModule":
        return LearnedStartModule(parts, d_hidden, site)


class StartModule(nn.Module):
    """Abstract base class of modules that return an initial state. They are built by a `Start`."""

    @abstractmethod
    def forward(self, rows: int, like: Tensor) -> State:
        """Return the initial state for a batch of `rows` rows, with the dtype and device of `like`."""


class ZeroStartModule(StartModule):
    def __init__(self, parts: int, d_hidden: int) -> None:
        super().__init__()
        self.parts, self.d_hidden = parts, d_hidden

    def forward(self, rows: int, like: Tensor) -> State:
        return tuple(like.new_zeros(rows, self.d_hidden) for _ in range(self.parts))


class LearnedStartModule(StartModule):
    def __init__(self, parts: int, d_hidden: int, site: Site) -> None:
        super().__init__()
        self.state = site.parameter(parts, d_hidden, role="other")

    def forward(self, rows: int, like: Tensor) -> State:
        return tuple(part.to(like.dtype).expand(rows, -1).contiguous() for part in self.state)


class Layer(nn.Module):
    """A recurrent layer: forward, backward, or bidirectional (Schuster and Paliwal 1997).

    The backward direction starts at the last real token of each row, so that padding comes last in both directions.
    """

    def __init__(self, cell: Cell, d_in: int, d_hidden: int, direction: Direction, start: Start, site: Site) -> None:
        super().__init__()
        self.directions = ("forwards", "backwards") if direction == "both" else (direction,)
        self.width = len(self.directions) * d_hidden
        self.cells = nn.ModuleList([cell.build(d_in, d_hidden, site.inside("cell")) for _ in self.directions])
        self.parts: int = self.cells[0].parts  # type: ignore[reportAttributeAccessIssue]
        self.starts = nn.ModuleList([start.build(self.parts, d_hidden, site.inside("start")) for _ in self.directions])

    def initial_state(self, rows: int, direction: int = 0) -> State:
        """Return the initial state of one direction for a batch of `rows` rows."""
        return self.starts[direction](rows, next(self.cells[direction].parameters()))

    def forward(
        self, x: Float[Tensor, "B T I"], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T W"], State]:
        """Return h after every token, and the last state. The directions are concatenated."""
        outputs, last = [], []
        for i, direction in enumerate(self.directions):
            turn = reverse if direction == "backwards" else unchanged
            y, state = self.cells[i](turn(x, lengths), self.initial_state(x.shape[0], i), lengths)
            outputs.append(turn(y, lengths))
            last.append(state)
        if len(outputs) == 1:
            return outputs[0], last[0]
        return torch.cat(outputs, -1), tuple(torch.cat(part, -1) for part in zip(*last, strict=True))

    def start(self, rows: Rows) -> RecurrentState:
        """Return the initial decoding state for all batch rows of a new decoding session."""
        return RecurrentState(rows, self.initial_state(rows.lengths.shape[0]))

    def advance(self, x: Float[Tensor, "B T I"], hidden: RecurrentState) -> Float[Tensor, "B T W"]:
        """Return h after every new token of a decoding session, and store the last state in `hidden`."""
        y, last = self.cells[0](x, hidden.parts, hidden.rows.real if x.shape[1] > 1 else None)
        hidden.write(last)
        return y


def unchanged(x: Float[Tensor, "B T W"], lengths: Int[Tensor, " B"] | None) -> Float[Tensor, "B T W"]:  # noqa: ARG001
    """Return x itself, for the forward direction."""
    return x


def reverse(x: Float[Tensor, "B T W"], lengths: Int[Tensor, " B"] | None) -> Float[Tensor, "B T W"]:
    """Return x with the real tokens of every batch row reversed and padding still at the end."""
    if lengths is None:
        return x.flip(1)
    place = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths[:, None] - 1 - place
    order = torch.where(mirrored < 0, place, mirrored)
    return x.gather(1, order[:, :, None].expand(-1, -1, x.shape[2]))


def real_lengths(mask: Mask) -> Int[Tensor, " B"] | None:
    """Return the number of tokens in each batch row, or None if there is no padding. Packed rows are an error."""
    if mask.packed:
        raise DataError("packed: a recurrence would carry its state from one text of a row into the next; pad instead")
    return None if mask.k_seg is None else (mask.k_seg != 0).sum(1)
