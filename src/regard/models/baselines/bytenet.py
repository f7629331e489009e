"""ByteNet: dilated convolutions, with the decoder stacked on the encoder. Kalchbrenner et al. 2016."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.batch import Batch
from regard.errors import DataError
from regard.models.base import refuse
from regard.models.decoding import Decoding
from regard.models.sequence_to_sequence import TwoSided, TwoSidedSpec, check_sides, sides
from regard.nn.block import state_at
from regard.nn.cache import ConvolutionCache, Rows
from regard.nn.causal_convolution import kernel_extent, receptive_field, unfold
from regard.nn.checks import MOST_BLOCKS, MOST_TAPS, check_count, check_not_negative, check_rate, require
from regard.nn.core import Site
from regard.nn.embedding import Tokens
from regard.nn.init import Init, Xavier
from regard.nn.input import InputSpec
from regard.nn.linear import Dense, Linear
from regard.nn.mask import Mask, View
from regard.nn.memory import Memory
from regard.nn.norm import LayerNorm, Norm
from regard.nn.trace import Trace
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Sharing, TableSpec

ROUNDING = 1e-6  # subtracted before rounding up, because 1.2 * 35 exceeds 42 in floating point


@dataclass(frozen=True, slots=True)
class ByteNet(TwoSidedSpec):
    """ByteNet: residual blocks of dilated convolutions. The decoder's input at t includes the encoder's output at t.

        block(x) = x + W_2 r(conv(r(W_1 r(x)))),   r(x) = ReLU(norm(x)),   W_1 from d_model to d_model / 2, W_2 back

    Block i has dilation `dilations[i mod n]`, where n is the number of dilations. The decoder's convolutions are
    causal. A source of s tokens is padded with a learned vector to ceil(stretch * s) + extra positions, an estimate of
    the target's length. The encoder's output at position t is concatenated to the embedding of target token t and
    projected to the decoder's input. Beyond the estimated length, the encoder's output is zero, so that longer targets
    are possible.

    Differs from Kalchbrenner et al. 2016: there is dropout on the input and on the output of each block, one norm at
    the end of the decoder instead of further convolutions, and a projection of the decoder's input.
    """

    kind = "bytenet"
    packs = False
    ordered = True
    vocab: int = 300
    target_vocab: int | None = None  # None: equal to `vocab`
    d_model: int = 800
    encoder_blocks: int = 30
    decoder_blocks: int = 30
    kernel: int = 3
    dilations: tuple[int, ...] = (1, 2, 4, 8, 16)
    stretch: float = 1.2
    extra: int = 0
    dropout: float = 0.1
    table: TableSpec = Embeddings()
    output_table: TableSpec | None = None  # used if the output has a table of its own; None: like `table`
    sharing: Sharing = Sharing()
    input: InputSpec = Tokens(scaled=False, position=None)
    norm: Norm = LayerNorm()
    head: HeadSpec = Softmax()
    linear: Linear = Dense()
    init: Init = Xavier()

    def check(self) -> None:
        halved = f"must be even, because blocks have half this width, and at most 2^20, not {self.d_model}"
        require(self.d_model % 2 == 0 and 2 <= self.d_model <= 2**20, "d_model", halved)
        check_rate("dropout", self.dropout)
        for name in ("encoder_blocks", "decoder_blocks"):
            check_count(name, getattr(self, name), MOST_BLOCKS)
        odd = self.kernel > 0 and self.kernel % 2 == 1
        require(odd, "kernel", f"must be odd, so that the filter is symmetric, not {self.kernel}")
        check_count("kernel", self.kernel, MOST_TAPS)
        positive = min(self.dilations, default=0) >= 1
        require(positive, "dilations", f"needs at least one dilation, each at least 1, not {list(self.dilations)}")
        bounds = f"must lie between 1 and 100 (less than 1 would cut sources), not {self.stretch}"
        require(1.0 <= self.stretch <= 100.0, "stretch", bounds)
        check_not_negative("extra", self.extra)
        check_sides(self)

    def dilation(self, block: int) -> int:
        """Return the dilation of the block with index `block`."""
        return self.dilations[block % len(self.dilations)]

    def estimate(self, length: int) -> int:
        """Return the estimated target length, to which a source of `length` tokens is padded."""
        return math.ceil(self.stretch * length - ROUNDING) + self.extra

    def estimates(self, lengths: Int[Tensor, "B 1"]) -> Int[Tensor, "B 1"]:
        """Return the estimated target length of every source, given the source lengths `lengths`."""
        return torch.ceil(self.stretch * lengths.double() - ROUNDING).long() + self.extra

    def receptive_fields(self) -> tuple[int, int]:
        """Return the receptive fields of encoder and decoder, in tokens."""
        depth = max(self.encoder_blocks, self.decoder_blocks)
        blocks = [(self.kernel, self.dilation(i)) for i in range(depth)]
        return receptive_field(blocks[: self.encoder_blocks]), receptive_field(blocks[: self.decoder_blocks])

    def build(self, init: Init) -> "ByteNetModel":
        return ByteNetModel(self, init)


class ByteNetModel(TwoSided):
    def __init__(self, spec: ByteNet, init: Init) -> None:
        super().__init__()
        self.spec, self.estimate, self.estimates = spec, spec.estimate, spec.estimates
        depths = (spec.encoder_blocks, spec.decoder_blocks)
        source, target = sides(spec, init, depths, sum(depths))
        vocab = self.tables_and_inputs(spec, source, target)
        self.filler = source.parameter(1, spec.d_model, role="embedding")
        self.encoder = ByteNetStack(spec, source.inside("encoder"))
        self.join = target.linear(2 * spec.d_model, {"other": spec.d_model})
        self.decoder = ByteNetStack(spec, target.inside("decoder"))
        self.norm = spec.norm.build(target.inside("norm"))
        self.head = spec.head.build(vocab, target.inside("head"))

    def encode(self, batch: Batch) -> Memory:
        """Return the encoder's output for sources padded to estimated target lengths. Outputs beyond these are 0."""
        if batch.source is None:
            raise DataError("source: a ByteNet needs one; give the batch a source or use a decoder-only model")
        if batch.packed:
            raise DataError("packed: a ByteNet aligns one source and one target per row; give it padded batches")
        refuse(batch, "prefix", "types", "source_pos", "target_pos")
        ids, seg, S = batch.source, batch.source_seg, batch.source.shape[1]
        wide = self.estimate(S)
        x = self.embed("source", ids, Mask(), S)
        filler, filled = self.filler.to(x.dtype), None
        if seg is not None:
            real = seg != 0
            x = torch.where(real[:, :, None], x, filler)
            filled = (torch.arange(wide, device=ids.device) < self.estimates(real.sum(1, keepdim=True))).long()
        x = torch.cat((x, filler.expand(x.shape[0], wide - S, -1)), 1)
        x = self.encoder(x, View(Mask(q_seg=filled, k_seg=filled), wide, wide, ids.device))
        return Memory((x if filled is None else x.masked_fill((filled == 0)[:, :, None], 0.0),))

    def hidden(
        self,
        batch: Batch,
        losses: list[Tensor] | None = None,  # noqa: ARG002
        trace: Trace | None = None,  # noqa: ARG002
    ) -> Float[Tensor, "B T D"]:
        columns, T = self.encode(batch).x[0], batch.target.shape[1]
        mask = Mask(causal=True, q_seg=batch.target_seg, k_seg=batch.target_seg)
        e = self.embed("target", batch.target, mask, T)
        columns = F.pad(columns[:, :T], (0, 0, 0, max(0, T - columns.shape[1])))
        x = self.join(torch.cat((columns.to(e.dtype), e), -1))
        return self.norm(self.decoder(x, View(mask, T, T, e.device)))

    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        memory = self.encode(batch)
        sources, device = memory.x[0].shape[0], memory.x[0].device
        rows = self.new_rows(sources, beams, device, max_len, static)
        return Decoding(rows, self.decoder.start(rows), beams, memory)

    def step(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T D"]:
        assert decoding.memory is not None
        (e, ctx), columns = self.read_next(ids, decoding), decoding.memory.x[0]
        positions = decoding.rows.positions(ids.shape[1])
        source = torch.arange(ids.shape[0], device=ids.device)[:, None] // decoding.beams
        here = columns[source, positions.clamp(max=columns.shape[1] - 1)]
        here = here.masked_fill((positions >= columns.shape[1])[:, :, None], 0.0)
        x = self.join(torch.cat((here.to(e.dtype), e), -1))
        return self.norm(self.decoder(x, ctx.own, decoding.states, counts))


class ByteNetStack(nn.Module):
    def __init__(self, spec: ByteNet, site: Site) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ByteNetBlock(spec, spec.dilation(i), site) for i in range(site.depth))

    def start(self, rows: Rows) -> list[Any]:
        """Return the convolution cache of each block."""
        return [block.start(rows) for block in self.blocks]  # type: ignore[reportCallIssue]

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        view: View,
        states: list[Any] | None = None,
        counts: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        for i, block in enumerate(self.blocks):
            x = block(x, view, state_at(states, i), counts)
        return x


class ByteNetBlock(nn.Module):
    """A residual block: x + W_2 r(conv(r(W_1 r(x)))), where r(x) = ReLU(norm(x))."""

    def __init__(self, spec: ByteNet, dilation: int, site: Site) -> None:
        super().__init__()
        d, inner = site.d_model, site.d_model // 2
        self.extent, self.dropout = kernel_extent(spec.kernel, site, dilation), nn.Dropout(site.dropout)
        self.norms = nn.ModuleList(spec.norm.build(site.inside("norm"), width) for width in (d, inner, inner))
        self.narrow = site.linear(d, {"up": inner})
        self.convolution = site.linear(spec.kernel * inner, {"other": inner})
        self.widen = site.linear(inner, {"down": d})

    def start(self, rows: Rows) -> ConvolutionCache | None:
        """Return the convolution cache, or None for a kernel of size 1."""
        return ConvolutionCache(rows, self.extent.left, self.extent.dilation) if self.extent.left else None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        view: View,
        cache: ConvolutionCache | None = None,
        counts: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        first, second, third = self.norms
        y = self.narrow(first(x).relu())
        y = self.convolution(unfold(second(y).relu(), self.extent, view, cache, counts))
        y = self.widen(third(y).relu())
        return x + self.dropout(y)
