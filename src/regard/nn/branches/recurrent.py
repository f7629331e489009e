"""A recurrence as a branch: RNN language models and classifiers are stacks of it."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from regard.nn.branches.base import BranchSpec
from regard.nn.checks import check_count
from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.recurrent import LSTM, Cell, Layer, Start, ZeroStart, real_lengths
from regard.nn.state import RecurrentState, Rows


@dataclass(frozen=True, slots=True)
class Recurrence(BranchSpec):
    """h_t = cell(x_t, h_(t-1)), and through W_o where asked for; or both ways, [forwards; backwards].

    With `no_residual` a stack of these is a plain RNN, with the other rules a residual one.
    """

    kind = "recurrence"
    packs = False
    ordered = True
    cell: Cell = LSTM()
    d_hidden: int | None = None  # of each direction; None: what makes up the stream
    bidirectional: bool = False
    start: Start = ZeroStart()
    output: bool = False  # W_o; without it the states are the stream themselves

    def check(self) -> None:
        check_count("d_hidden", self.d_hidden)

    def build(self, site: Site) -> Branch:
        ways = 2 if self.bidirectional else 1
        site.require(
            not (self.bidirectional and site.causal),
            "bidirectional",
            "backwards it would read what is yet to be said; use it in an encoder",
        )
        site.require(
            self.d_hidden is not None or site.d_model % ways == 0,
            "d_hidden",
            f"two directions cannot share d_model {site.d_model} evenly; say how wide",
        )
        d_hidden = self.d_hidden or site.d_model // ways
        site.require(
            self.output or ways * d_hidden == site.d_model,
            "output",
            f"without it the states must make up the stream: {ways} x {d_hidden} is not d_model {site.d_model}",
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
        else:  # padding stands behind all that is real, where only who reads backwards meets it first
            lengths = real_lengths(ctx.own.mask)
            y, _ = self.layer(x, lengths if len(self.layer.ways) > 1 else None)
        return y if self.output is None else self.output(y)

    def start(self, rows: Rows, ctx: Context) -> RecurrentState:  # noqa: ARG002
        return self.layer.start(rows)
