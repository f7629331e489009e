"""Recurrences: cells, what they remember before the first token, and a layer that runs them over a sequence."""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import DataError
from regard.nn.core import Site
from regard.nn.linear import is_plain
from regard.nn.mask import Mask
from regard.nn.precision import full_precision
from regard.nn.state import RecurrentState, Rows
from regard.tree import Spec

State = tuple[Float[Tensor, "B H"], ...]  # h alone, or h and c
Direction = Literal["forwards", "backwards", "both"]

CLOSED = 1e4  # what is added to a gate to shut it: its sigmoid is 0 or 1 exactly, in any precision

# cuDNN wants all weights in one piece of memory. Each has its own name in a checkpoint here, so they are put together
# in every call, which takes as long as reading them once.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk", UserWarning)


class Cell(Spec):
    """Slot: how one token changes what a recurrence remembers."""

    __slots__ = ()

    @abstractmethod
    def build(self, d_in: int, d_hidden: int, site: Site) -> "CellModule":
        """A cell that reads vectors of width d_in and remembers d_hidden numbers, or twice as many."""


@dataclass(frozen=True, slots=True)
class Elman(Cell):
    """Elman 1990: h_t = phi(W_x x_t + W_h h_(t-1) + b)."""

    kind = "elman"
    activation: Literal["tanh", "relu"] = "tanh"

    def build(self, d_in: int, d_hidden: int, site: Site) -> "CellModule":
        return ElmanModule(self.activation, d_in, d_hidden, site)


@dataclass(frozen=True, slots=True)
class GRU(Cell):
    """Cho et al. 2014 in cuDNN's and torch's form, which resets after the product and not before.

    r = sigmoid(W_xr x + W_hr h + b_r), z = sigmoid(W_xz x + W_hz h + b_z),
    n = tanh(W_xn x + b_xn + r * (W_hn h + b_hn)), h' = (1 - z) n + z h.
    """

    kind = "gru"

    def build(self, d_in: int, d_hidden: int, site: Site) -> "CellModule":
        return GRUModule(3, d_in, d_hidden, site, hidden_bias=None)


@dataclass(frozen=True, slots=True)
class LSTM(Cell):
    """Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000.

    i, f, g, o = W_x x + W_h h + b, c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c').

    `forget_bias` is what f's part of b starts at: at 1 a fresh cell remembers (Jozefowicz et al. 2015); torch's is 0.
    """

    kind = "lstm"
    forget_bias: float = 1.0

    def build(self, d_in: int, d_hidden: int, site: Site) -> "CellModule":
        return LSTMModule(self.forget_bias, d_in, d_hidden, site)


class CellModule(nn.Module):
    """Abstract: a cell, for one token (`step`) or for a whole sequence (`forward`)."""

    parts: ClassVar[int] = 1  # vectors that are remembered; the first is h, what others see

    def __init__(self, gates: int, d_in: int, d_hidden: int, site: Site, hidden_bias: bool | None = False) -> None:
        super().__init__()
        self.d_hidden = d_hidden
        self.input = site.linear(d_in, {"other": gates * d_hidden})
        self.hidden = site.linear(d_hidden, {"other": gates * d_hidden}, bias=hidden_bias)

    @abstractmethod
    def step(self, x: Float[Tensor, "B I"], state: State) -> State:
        """What is remembered after one more token: the formula."""

    @abstractmethod
    def fused(
        self, x: Float[Tensor, "B T I"], state: State, weights: list[Tensor], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        """All tokens by one of torch's kernels (cuDNN, oneDNN, or a loop in C++)."""

    def forward(
        self, x: Float[Tensor, "B T I"], state: State, lengths: Int[Tensor, " B"] | None = None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        """h after every token, and what is remembered after the last of `lengths` (None: of all).

        In the precision of the weights, also where autocast has less: an error in the state is carried from token to
        token, and cuDNN knows no bfloat16 here.
        """
        given, precise = x.dtype, next(self.parameters()).dtype
        with full_precision(x.device):
            x, state = x.to(precise), tuple(part.to(precise) for part in state)
            if x.shape[1] > 1 and is_plain(self.input) and is_plain(self.hidden):
                y, last = self.fused(x, state, self._weights(), lengths)
            else:
                y, last = self._looped(x, state, lengths)
        return y.to(given), last

    def _looped(
        self, x: Float[Tensor, "B T I"], state: State, lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        seen = []
        for t, token in enumerate(x.unbind(1)):
            new = self.step(token, state)
            seen.append(new[0])
            if lengths is not None:
                going = (t < lengths)[:, None]
                new = tuple(torch.where(going, after, before) for after, before in zip(new, state, strict=True))
            state = new
        return torch.stack(seen, 1), state

    def _weights(self) -> list[Tensor]:
        """W_x, W_h and their biases; a bias that is not there is zero."""
        maps: list[Any] = [self.input, self.hidden]
        zeros = [one.weight.new_zeros(one.weight.shape[0]) if one.bias is None else one.bias for one in maps]
        return [*(one.weight for one in maps), *zeros]


class HiddenStateCell(CellModule):
    """Abstract: a cell that remembers nothing but what it shows."""

    kernel: Callable[..., tuple[Tensor, Tensor]]

    def fused(
        self, x: Float[Tensor, "B T I"], state: State, weights: list[Tensor], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        y, _ = self.kernel(x, state[0][None], weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)
        return y, (at_last(y, lengths),)


class ElmanModule(HiddenStateCell):
    def __init__(self, activation: Literal["tanh", "relu"], d_in: int, d_hidden: int, site: Site) -> None:
        super().__init__(1, d_in, d_hidden, site)
        self.activate = {"tanh": torch.tanh, "relu": torch.relu}[activation]
        self.kernel = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[activation]

    def step(self, x: Float[Tensor, "B I"], state: State) -> State:
        return (self.activate(self.input(x) + self.hidden(state[0])),)


class GRUModule(HiddenStateCell):
    kernel = staticmethod(torch.gru)

    def step(self, x: Float[Tensor, "B I"], state: State) -> State:
        (h,) = state
        read, kept = self.input(x).chunk(3, -1), self.hidden(h).chunk(3, -1)
        reset, update = (read[0] + kept[0]).sigmoid(), (read[1] + kept[1]).sigmoid()
        new = (read[2] + reset * kept[2]).tanh()
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
            raise site.error("forget_bias", "the model's linear slot gives no biases; set it to 0")

    def step(self, x: Float[Tensor, "B I"], state: State) -> State:
        h, c = state
        enter, keep, new, show = (self.input(x) + self.hidden(h)).chunk(4, -1)
        c = keep.sigmoid() * c + enter.sigmoid() * new.tanh()
        return show.sigmoid() * c.tanh(), c

    def fused(
        self, x: Float[Tensor, "B T I"], state: State, weights: list[Tensor], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        if lengths is not None:
            # Kernels return c after the last column alone. So one more input says which tokens are padding, and those
            # shut the input gate and open the forget gate: c stays what it was, to the last bit.
            padding = lengths[:, None] <= torch.arange(x.shape[1], device=x.device)
            x = torch.cat((x, padding[:, :, None].to(x.dtype)), -1)
            gates = x.new_tensor([-CLOSED, CLOSED, 0.0, 0.0]).repeat_interleave(self.d_hidden)
            weights = [torch.cat((weights[0], gates[:, None]), 1), *weights[1:]]
        h, c = state
        y, _, last = torch.lstm(x, (h[None], c[None]), weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)
        return y, (at_last(y, lengths), last[0])


def at_last(y: Float[Tensor, "B T H"], lengths: Int[Tensor, " B"] | None) -> Float[Tensor, "B H"]:
    """What stands at the last real token of every row."""
    if lengths is None:
        return y[:, -1]
    return y.gather(1, (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, y.shape[2])).squeeze(1)


class Start(Spec):
    """Slot: what a recurrence remembers before the first token."""

    __slots__ = ()

    @abstractmethod
    def build(self, parts: int, d_hidden: int, site: Site) -> "StartModule":
        """So many vectors of this width."""


@dataclass(frozen=True, slots=True)
class ZeroStart(Start):
    """Nothing: zeros."""

    kind = "zero_start"

    def build(self, parts: int, d_hidden: int, site: Site) -> "StartModule":  # noqa: ARG002
        return ZeroStartModule(parts, d_hidden)


@dataclass(frozen=True, slots=True)
class LearnedStart(Start):
    """The same learned vectors for every text."""

    kind = "learned_start"

    def build(self, parts: int, d_hidden: int, site: Site) -> "StartModule":
        return LearnedStartModule(parts, d_hidden, site)


class StartModule(nn.Module):
    """Abstract: the module a Start builds."""

    @abstractmethod
    def forward(self, rows: int, like: Tensor) -> State:
        """The state of so many rows, of the type and on the device of `like`."""


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
    """A recurrence over a sequence: forwards, backwards, or both side by side (Schuster and Paliwal 1997).

    Backwards begins at the last real token of each row, so padding is never read before anything else.
    """

    def __init__(self, cell: Cell, d_in: int, d_hidden: int, direction: Direction, start: Start, site: Site) -> None:
        super().__init__()
        self.ways = ("forwards", "backwards") if direction == "both" else (direction,)
        self.width = len(self.ways) * d_hidden
        self.cells = nn.ModuleList([cell.build(d_in, d_hidden, site.inside("cell")) for _ in self.ways])
        self.parts: int = self.cells[0].parts  # type: ignore[reportAttributeAccessIssue]
        self.starts = nn.ModuleList([start.build(self.parts, d_hidden, site.inside("start")) for _ in self.ways])

    def begin(self, rows: int, way: int = 0) -> State:
        """What is remembered before the first token."""
        return self.starts[way](rows, next(self.cells[way].parameters()))

    def forward(
        self, x: Float[Tensor, "B T I"], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T W"], State]:
        """The states after every token, and those after the last one; ways side by side."""
        seen, last = [], []
        for i, way in enumerate(self.ways):
            back = way == "backwards"
            y, state = self.cells[i](turned(x, lengths) if back else x, self.begin(x.shape[0], i), lengths)
            seen.append(turned(y, lengths) if back else y)
            last.append(state)
        if len(seen) == 1:
            return seen[0], last[0]
        return torch.cat(seen, -1), tuple(torch.cat(part, -1) for part in zip(*last, strict=True))

    def start(self, rows: Rows) -> RecurrentState:
        """The state of a decoding, forwards."""
        return RecurrentState(rows, self.begin(rows.lengths.shape[0]))

    def advance(self, x: Float[Tensor, "B T I"], hidden: RecurrentState) -> Float[Tensor, "B T W"]:
        """The states after every new token of a decoding, which is remembered."""
        y, last = self.cells[0](x, hidden.parts, hidden.rows.real if x.shape[1] > 1 else None)
        hidden.write(last)
        return y


def turned(x: Float[Tensor, "B T W"], lengths: Int[Tensor, " B"] | None) -> Float[Tensor, "B T W"]:
    """Every row from its last real token to its first; padding stays where it is."""
    if lengths is None:
        return x.flip(1)
    place = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths[:, None] - 1 - place
    order = torch.where(mirrored < 0, place, mirrored)
    return x.gather(1, order[:, :, None].expand(-1, -1, x.shape[2]))


def real_lengths(mask: Mask) -> Int[Tensor, " B"] | None:
    """How many tokens of each row are real (None: all). Texts that share a row would leak into each other."""
    if mask.packed:
        raise DataError("packed: a recurrence would carry its state from one text of a row into the next; pad instead")
    return None if mask.k_seg is None else (mask.k_seg != 0).sum(1)
