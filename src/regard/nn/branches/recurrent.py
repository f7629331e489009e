"""A recurrent layer as a branch, for RNN language models and classifiers."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from regard.nn.branches.base import BranchSpec
from regard.nn.cache import RecurrentState, Rows
from regard.nn.checks import check_count
from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.recurrent import LSTM, Cell, Layer, Start, ZeroStart, real_lengths


@dataclass(frozen=True, slots=True)
class Recurrence(BranchSpec):
    """A recurrent layer h_t = cell(x_t, h_(t-1)), with an optional output projection W_o.

    If `bidirectional`, the hidden states of the forward and the backward direction are concatenated. With the
    residual rule `no_residual`, a stack of these branches is a plain RNN. With any other rule, it is a residual RNN.
    """

    kind = "recurrence"
    packs = False
    ordered = True
    cell: Cell = LSTM()
    d_hidden: int | None = None  # per direction; None: d_model divided by the number of directions
    bidirectional: bool = False
    start: Start = ZeroStart()
    output: bool = False  # whether there is an output projection W_o

    def check(self) -> None:
        check_count("d_hidden", self.d_hidden)

    def build(self, site: Site) -> Branch:
        directions = 1 + self.bidirectional
        site.require(
            not (self.bidirectional and site.causal),
            "bidirectional",
            "a causal stack must not read later tokens; use a bidirectional layer in an encoder",
        )
        site.require(
            self.d_hidden is not None or site.d_model % directions == 0,
            "d_hidden",
            f"two directions cannot share d_model {site.d_model} evenly; set d_hidden",
        )
        d_hidden = self.d_hidden or site.d_model // directions
        site.require(
            self.output or directions * d_hidden == site.d_model,
            "output",
            f"without W_o the states must be d_model {site.d_model} wide, not {directions} x {d_hidden}",
        )
        return RecurrenceModule(self, d_hidden, site)


class RecurrenceModule(Branch):
    def __init__(self, spec: Recurrence, d_hidden: int, site: Site) -> None:
        super().__init__()
        direction = "both" if spec.bidirectional else "forwards"
        self.layer = Layer(spec.cell, site.d_model, d_hidden, direction, spec.start, site)
        self.output = site.linear(self.layer.width, {"attend_out": site.d_model}) if spec.output else None

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: RecurrentState | None = None
    ) -> Float[Tensor, "B T D"]:
        if state is not None:
            y = self.layer.advance(x, state)
        else:  # padding is at the end of a batch row and affects only the backward direction
            lengths = real_lengths(ctx.own.mask)
            y, _ = self.layer(x, lengths if len(self.layer.directions) > 1 else None)
        return y if self.output is None else self.output(y)

    def start(self, rows: Rows, ctx: Context) -> RecurrentState:  # noqa: ARG002
        return self.layer.start(rows)
