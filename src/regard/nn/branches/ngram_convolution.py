"""N-gram convolutions: dense (not depthwise) filters of several widths in parallel."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.activation import ACTIVATIONS, Activation
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import ActivationCache, Rows
from regard.nn.causal_convolution import kernel_extent, pad_stream, windows
from regard.nn.checks import MOST_CHANNELS, MOST_TAPS, check_count, require
from regard.nn.core import Branch, Site
from regard.nn.mask import Context


@dataclass(frozen=True, slots=True)
class NGramConvolution(BranchSpec):
    """Convolution over n-grams (Kim 2014), with one group of dense filters for each width w in `widths`.

    y_t = concat_w(phi(sum_i x_(t+i) W_w,i + b_w)) W_o + o, with the activation phi. Filters are centred on t, or end at
    t in a causal stack. The text is padded with zeros. `output=False` omits W_o and o. The classifier of Kim 2014 has
    `output=False`, the residual rule `no_residual`, and max pooling over tokens.

    Differs from the paper: n-grams that extend beyond the ends of the text are included.
    """

    kind = "ngram_convolution"
    ordered = True
    widths: tuple[int, ...] = (3, 4, 5)
    filters: int | None = None  # per width; None: d_model filters, divided among the widths
    activation: Activation = "relu"
    output: bool = True
    bias: bool | None = None  # None: the default of the model's linear layers

    def check(self) -> None:
        require(len(self.widths) > 0, "widths", "needs at least one width")
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
            min(filters) >= 1, "filters", f"{N} widths cannot share d_model {D}; give fewer widths or set filters"
        )
        site.require(
            spec.output or sum(filters) == D,
            "output",
            f"without an output projection the filters must add up to d_model {D}, not {N} x {spec.filters}",
        )
        self.widest = kernel_extent(max(spec.widths), site)
        self.ngrams = nn.ModuleList(
            site.linear(width * D, {"up": count}, bias=spec.bias)
            for width, count in zip(spec.widths, filters, strict=True)
        )
        # The widest window is built once; the window of each width is a range of its channels.
        first = [self.widest.left - kernel_extent(width, site).left for width in spec.widths]
        self.columns = [slice(i * D, (i + width) * D) for i, width in zip(first, spec.widths, strict=True)]
        self.output = site.linear(sum(filters), {"down": D}, bias=spec.bias) if spec.output else nn.Identity()
        self.activate, self.dropout = ACTIVATIONS[spec.activation], nn.Dropout(site.activation_dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: ActivationCache | None = None
    ) -> Float[Tensor, "B T D"]:
        window = windows(pad_stream(x, self.widest, ctx.own, state), self.widest, ctx.own)
        filtered = [ngram(window[..., columns]) for ngram, columns in zip(self.ngrams, self.columns, strict=True)]
        return self.output(self.dropout(self.activate(torch.cat(filtered, -1))))

    def start(self, rows: Rows, ctx: Context) -> ActivationCache:  # noqa: ARG002
        return ActivationCache(rows)
