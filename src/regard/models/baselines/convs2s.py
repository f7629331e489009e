"""ConvS2S: gated convolutions with attention to the source in every decoder layer. Gehring et al. 2017."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.batch import Batch
from regard.models.base import check_unpacked
from regard.models.baselines.weight_norm import NormedEmbeddings, WeightNorm
from regard.models.decoding import Decoding, padding_mask
from regard.models.sequence_to_sequence import TwoSided, TwoSidedSpec, check_sides, sides
from regard.nn.attention import attend
from regard.nn.attention_heads import attention_weights
from regard.nn.block import state_at
from regard.nn.cache import ConvolutionCache, Rows
from regard.nn.causal_convolution import kernel_extent, receptive_field, unfold
from regard.nn.checks import MOST_CHANNELS, MOST_TAPS, check_count, check_rate, require
from regard.nn.core import Site
from regard.nn.embedding import Tokens
from regard.nn.init import ConvS2SInit, Init
from regard.nn.input import InputSpec
from regard.nn.linear import Linear
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.position.additive import Learned
from regard.nn.trace import Trace
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Sharing, TableSpec

HALF = math.sqrt(0.5)  # keeps the variance of a sum of two terms of equal variance

Layers = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ConvS2S(TwoSidedSpec):
    """Gated convolutions in encoder and decoder, with attention in every decoder layer. Gehring et al. 2017.

    `encoder` and `decoder` list the layers as pairs (width, kernel size). Each layer maps h to a new h:

        y = GLU(conv(drop(h))), then in the decoder y <- (W_o c + y) * r, then h <- (y + h) * r,    r = sqrt(1/2)
        c = sqrt(S) * softmax((W_q y + e) * r . z_j) * (z_j + e_j) * r, summed over the S tokens j of the source

    where e_j and e are the embeddings (tokens plus learned positions) of source token j and of the target token, and
    z_j is the encoder's output. h is projected where the width changes. The decoder's convolutions are causal. The
    encoder's gradients are divided by twice the number of decoder layers. All layers have weight normalisation.
    """

    kind = "convs2s"
    ordered = True
    vocab: int = 10000
    target_vocab: int | None = None  # None: equal to `vocab`
    d_model: int = 256  # width of the embeddings and of the encoder's output
    d_out: int | None = None  # width of the decoder's output; None: d_model
    encoder: Layers = ((256, 3),) * 4
    decoder: Layers = ((256, 3),) * 3
    dropout: float = 0.1
    table: TableSpec = Embeddings()
    output_table: TableSpec | None = NormedEmbeddings()  # used if the output has a table of its own; None: like `table`
    sharing: Sharing = Sharing(source_target=False, input_output=False)
    input: InputSpec = Tokens(scaled=False, position=Learned(1024))
    head: HeadSpec = Softmax(bias=True)
    linear: Linear = WeightNorm()
    init: Init = ConvS2SInit()

    def check(self) -> None:
        for name in ("d_model", "d_out"):
            check_count(name, getattr(self, name), MOST_CHANNELS)
        check_rate("dropout", self.dropout)
        for name in ("encoder", "decoder"):
            layers = getattr(self, name)
            require(len(layers) > 0, name, "needs at least one layer (width, kernel)")
            for i, (width, kernel) in enumerate(layers):
                check_count(f"{name}[{i}]", width, MOST_CHANNELS)
                check_count(f"{name}[{i}]", kernel, MOST_TAPS)
        check_sides(self)

    def receptive_fields(self) -> tuple[int, int]:
        """Return the receptive fields of encoder and decoder, in tokens."""
        encoder, decoder = ([(kernel, 1) for _, kernel in layers] for layers in (self.encoder, self.decoder))
        return receptive_field(encoder), receptive_field(decoder)

    def build(self, init: Init) -> "ConvS2SModel":
        return ConvS2SModel(self, init)


class ConvS2SModel(TwoSided):
    def __init__(self, spec: ConvS2S, init: Init) -> None:
        super().__init__()
        self.spec = spec
        depths = (len(spec.encoder), len(spec.decoder))
        source, target = sides(spec, init, depths, depths[0] + 2 * depths[1])
        d_out = spec.d_out or spec.d_model
        vocab = self.tables_and_inputs(spec, source, target, d_out)
        self.encoder = ConvS2SEncoder(spec, source.inside("encoder"))
        self.decoder = ConvS2SDecoder(spec.decoder, d_out, target.inside("decoder"))
        self.head = spec.head.build(vocab, target.inside("head", d_model=d_out))

    def encode(self, batch: Batch) -> Memory:
        """Return the memory: keys z (encoder outputs) and values (z + e) * sqrt(1/2), with the source embeddings e."""
        e, view = self.read_source(batch)
        z = self.encoder(e, view)
        return Memory((z, ((z + e) * HALF).to(z.dtype)), batch.source_seg)

    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        memory = self.encode(batch)
        e, ctx = self.read_target(batch, memory, losses, trace)
        return self.decoder(e, ctx, source_lengths(memory, ctx.own.mask))

    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        check_unpacked(batch)
        memory = self.encode(batch)
        sources, S, _ = memory.x[0].shape
        rows = self.new_rows(sources, beams, memory.x[0].device, max_len, static)
        cross = View(padding_mask(memory.seg, static), beams, S, memory.x[0].device)
        return Decoding(rows, self.decoder.start(rows), beams, memory, cross)

    def step(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T D"]:
        assert decoding.memory is not None
        e, ctx = self.read_next(ids, decoding)
        lengths = source_lengths(decoding.memory, Mask()).repeat_interleave(decoding.beams, 0)
        return self.decoder(e, ctx, lengths, decoding.states, counts)


def source_lengths(memory: Memory, own: Mask) -> Int[Tensor, "b t"]:
    """Return the number of source tokens that each target token may attend to.

    All tokens in a batch row have the same number, except if rows are packed.
    """
    z, seg = memory.x[0], memory.seg
    if seg is None:
        return torch.full(z.shape[:1], z.shape[1], device=z.device)[:, None]
    if not own.packed:
        return (seg != 0).sum(1, keepdim=True)
    assert own.q_seg is not None
    lengths = torch.zeros(seg.shape[0], own.segments + 1, dtype=torch.int64, device=seg.device)
    lengths.scatter_add_(1, seg.long(), torch.ones_like(seg, dtype=torch.int64))
    return lengths.gather(1, own.q_seg.long())


def _layers(
    block: type["ConvS2SBlock"], layers: Layers, d_out: int, site: Site
) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """Return three modules: the projection before the layers, the layers, and the projection after the layers."""
    widths = [layers[0][0], *(width for width, _ in layers)]
    enter = site.linear(site.d_model, {"other": widths[0]})
    blocks = nn.ModuleList(block(widths[i], width, kernel, site) for i, (width, kernel) in enumerate(layers))
    return enter, blocks, replace(site, dropout=0.0).linear(widths[-1], {"other": d_out})  # its input has no dropout


class ConvS2SEncoder(nn.Module):
    def __init__(self, spec: ConvS2S, site: Site) -> None:
        super().__init__()
        self.enter, self.blocks, self.leave = _layers(ConvS2SEncoderBlock, spec.encoder, site.d_model, site)
        self.factor = 1.0 / (2 * len(spec.decoder))

    def forward(self, e: Float[Tensor, "B S D"], view: View) -> Float[Tensor, "B S D"]:
        h = self.enter(e)
        for block in self.blocks:
            h = block(h, view)
        # The encoder receives the summed gradients of all attentions. Unscaled, it would learn in larger steps
        # than the decoder.
        return ScaledGradient.apply(self.leave(h), self.factor)


class ConvS2SDecoder(nn.Module):
    def __init__(self, layers: Layers, d_out: int, site: Site) -> None:
        super().__init__()
        self.enter, self.blocks, self.leave = _layers(ConvS2SDecoderBlock, layers, d_out, site)
        self.dropout = nn.Dropout(site.dropout)

    def start(self, rows: Rows) -> list[Any]:
        """Return the convolution cache of each layer."""
        return [block.start(rows) for block in self.blocks]  # type: ignore[reportCallIssue]

    def forward(
        self,
        e: Float[Tensor, "B T D"],
        ctx: Context,
        lengths: Int[Tensor, "B t"],
        states: list[Any] | None = None,
        counts: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T W"]:
        h = self.enter(e)
        for i, block in enumerate(self.blocks):
            h = block(h, e, ctx, lengths, state_at(states, i), counts)
        return self.dropout(self.leave(h))


class ConvS2SBlock(nn.Module):
    """Base class of blocks: GLU(conv(drop(h))) with a residual connection."""

    def __init__(self, d_in: int, width: int, kernel: int, site: Site) -> None:
        super().__init__()
        self.extent = kernel_extent(kernel, site)
        self.convolution = site.linear(kernel * d_in, {"up": width, "gate": width})
        bare = replace(site, dropout=0.0)  # for weights whose input has no dropout
        self.match = None if d_in == width else bare.linear(d_in, {"other": width})
        self.dropout = nn.Dropout(site.dropout)

    def gated(
        self,
        h: Float[Tensor, "B T C"],
        view: View,
        cache: ConvolutionCache | None = None,
        counts: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T W"]:
        """Return GLU(conv(drop(h)))."""
        h = self.dropout(h)
        return F.glu(self.convolution(unfold(h, self.extent, view, cache, counts)), -1)

    def join(self, y: Float[Tensor, "B T W"], h: Float[Tensor, "B T C"]) -> Float[Tensor, "B T W"]:
        """Return (y + h) * sqrt(1/2). If their widths differ, h is projected to the width of y."""
        return (y + (h if self.match is None else self.match(h))) * HALF


class ConvS2SEncoderBlock(ConvS2SBlock):
    def forward(self, h: Float[Tensor, "B S C"], view: View) -> Float[Tensor, "B S W"]:
        return self.join(self.gated(h, view), h)


class ConvS2SDecoderBlock(ConvS2SBlock):
    def __init__(self, d_in: int, width: int, kernel: int, site: Site) -> None:
        super().__init__(d_in, width, kernel, site)
        self.attention = ConvS2SAttention(width, replace(site, dropout=0.0))

    def start(self, rows: Rows) -> ConvolutionCache | None:
        """Return the convolution cache, or None for a kernel of size 1."""
        return ConvolutionCache(rows, self.extent.left, self.extent.dilation) if self.extent.left else None

    def forward(
        self,
        h: Float[Tensor, "B T C"],
        e: Float[Tensor, "B T D"],
        ctx: Context,
        lengths: Int[Tensor, "B t"],
        cache: ConvolutionCache | None,
        counts: Int[Tensor, " B"] | None,
    ) -> Float[Tensor, "B T W"]:
        y = self.gated(h, ctx.own, cache, counts)
        return self.join(self.attention(y, e, ctx, lengths), h)


class ConvS2SAttention(nn.Module):
    """Unscaled single-head attention to the source. All decoder layers share the same keys and values."""

    name = "decoder.cross"
    attend = staticmethod(attend)  # regard.fast installs faster kernels here

    def __init__(self, width: int, site: Site) -> None:
        super().__init__()
        self.query = site.linear(width, {"query": site.d_model})
        self.output = site.linear(site.d_model, {"attend_out": width})

    def forward(
        self, y: Float[Tensor, "B T W"], e: Float[Tensor, "B T D"], ctx: Context, lengths: Int[Tensor, "B t"]
    ) -> Float[Tensor, "B T W"]:
        assert ctx.cross is not None
        assert ctx.memory is not None
        k, v = (x[:, None] for x in ctx.memory.x)  # (b, 1, S, D)
        q = ((self.query(y) + e) * HALF).to(k.dtype)
        # The queries of all beams of a source share one batch row.
        queries = q.reshape(k.shape[0], 1, -1, q.shape[-1])
        if ctx.trace is not None and ctx.trace.wants(self.name, (*queries.shape[:3], k.shape[2])):
            weights = attention_weights(queries, k, ctx.cross, 1.0, ctx.trace.rows)
            ctx.trace.add(self.name, weights.reshape(q.shape[0], 1, -1, weights.shape[3]))
        c = self.attend(queries, k, v, ctx.cross, scale=1.0).reshape(q.shape)
        # With uniform weights, the variance of a mean of S values is 1 / S times the variance of a value.
        return (self.output(c * lengths.to(c.dtype).sqrt()[:, :, None]) + y) * HALF


class ScaledGradient(torch.autograd.Function):
    """The identity function, with its gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor, None]:
        return d_outputs[0] * ctx.factor, None
