"""Convolutions over n-grams: dense filters of several widths side by side."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.activation import ACTIVATIONS, Activation
from regard.nn.branches.base import BranchSpec
from regard.nn.causal_convolution import foreign, read, taps
from regard.nn.checks import MOST_CHANNELS, MOST_TAPS, check_count, require
from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.state import ActivationCache, Rows


@dataclass(frozen=True, slots=True)
class NGramConvolution(BranchSpec):
    """Dense filters over n-grams, Kim 2014: y_t = concat_w(phi(sum_i x_(t+i) W_w,i + b_w)) W_o + o, w in `widths`.

    The taps i are around t, or up to t where no later token may be read; beyond either end of a text they read zeros.
    `output=False` leaves out W_o and o: the filters are the stream. With it, under the residual rule `no_residual` and
    the maximum over tokens as pooling, a sentence classifier is Kim's; differs from the paper: n-grams that reach
    beyond an end of the text count too.
    """

    kind = "ngram_convolution"
    ordered = True
    widths: tuple[int, ...] = (3, 4, 5)
    filters: int | None = None  # of each width; None: d_model of all widths together
    activation: Activation = "relu"
    output: bool = True
    bias: bool | None = None  # None: as the model's linear slot says

    def check(self) -> None:
        require(len(self.widths) > 0, "widths", "must name at least one width")
        for i, width in enumerate(self.widths):
            check_count(f"widths[{i}]", width, MOST_TAPS)
        check_count("filters", self.filters, MOST_CHANNELS)

    def build(self, site: Site) -> Branch:
        return NGramConvolutionModule(self, site)


class NGramConvolutionModule(Branch):
    def __init__(self, spec: NGramConvolution, site: Site) -> None:
        super().__init__()
        D, N = site.d_model, len(spec.widths)
        share = [D // N + (i < D % N) for i in range(N)]
        filters = share if spec.filters is None else [spec.filters] * N
        site.require(
            min(filters) >= 1, "filters", f"{N} widths cannot share d_model {D}; name fewer widths or set filters"
        )
        site.require(
            spec.output or sum(filters) == D,
            "output",
            f"without it the filters must make up the stream: {N} x {spec.filters} is not d_model {D}",
        )
        self.widest = taps(max(spec.widths), site)
        self.ngrams = nn.ModuleList(
            site.linear(width * D, {"up": count}, bias=spec.bias)
            for width, count in zip(spec.widths, filters, strict=True)
        )
        # Where the taps of each width lie among those of the widest, which are read once for all.
        first = [self.widest.before - taps(width, site).before for width in spec.widths]
        self.columns = [slice(i * D, (i + width) * D) for i, width in zip(first, spec.widths, strict=True)]
        self.output = site.linear(sum(filters), {"down": D}, bias=spec.bias) if spec.output else nn.Identity()
        self.activate, self.dropout = ACTIVATIONS[spec.activation], nn.Dropout(site.activation_dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: ActivationCache | None = None
    ) -> Float[Tensor, "B T D"]:
        stream, T = read(x, self.widest, ctx.own, state), x.shape[1]
        near = [stream[:, i : i + T] for i in self.widest.places()]
        others = foreign(self.widest, ctx.own)
        if others is not None:
            near = [tap.masked_fill(other[:, :, None], 0.0) for tap, other in zip(near, others, strict=True)]
        window = torch.cat(near, -1)
        filtered = [ngram(window[..., columns]) for ngram, columns in zip(self.ngrams, self.columns, strict=True)]
        return self.output(self.dropout(self.activate(torch.cat(filtered, -1))))

    def start(self, rows: Rows, ctx: Context) -> ActivationCache:  # noqa: ARG002
        return ActivationCache(rows)
