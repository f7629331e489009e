"""Recurrent encoder-decoders, with or without attention."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.batch import Batch
from regard.models.base import own_mask
from regard.models.baselines.attention_score import AttentionScore, AttentionScoreModule, attend_to
from regard.models.decoding import Decoding, padding_mask
from regard.models.sequence_to_sequence import TwoSided, TwoSidedSpec, check_sides, sides
from regard.nn.cache import KVCache, RecurrentState, StaticKV
from regard.nn.checks import MOST_BLOCKS, MOST_CHANNELS, MOST_HEADS, check_count, check_rate, require
from regard.nn.core import Site
from regard.nn.embedding import Tokens
from regard.nn.init import Init, Xavier
from regard.nn.input import InputSpec
from regard.nn.linear import Dense, Linear
from regard.nn.mask import Mask, View
from regard.nn.recurrent import LSTM, Cell, Direction, Layer, Start, ZeroStart, real_lengths
from regard.nn.trace import Trace
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Sharing, TableSpec
from regard.tree import Spec

Reading = Literal["forwards", "backwards", "both", "first_both"]
States = list[tuple[Tensor, ...]]  # for every layer, the vectors (B, H) of its state; H may differ between layers
CROSS, OWN = "decoder.cross", "decoder.self"


class InitialState(Spec):
    """Base class of specs that compute the initial state of a recurrent decoder."""

    __slots__ = ()
    reads_source: ClassVar[bool] = False

    @abstractmethod
    def build(self, layers: list["Shape"], encoder: list["Shape"], site: Site) -> "InitialStateModule":
        """Build a module that maps the final states of the encoder layers to initial states of the decoder layers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a recurrent layer's state: `parts` vectors (2 for an LSTM, h and c) with `width` channels each."""

    parts: int
    width: int


@dataclass(frozen=True, slots=True)
class EncoderState(InitialState):
    """Initial decoder state phi(W s + b), where s is the encoder's final state.

    Every decoder layer has its own W and b. Layers are paired from the top: the n-th decoder layer from the top gets
    the state s of the n-th encoder layer from the top, or of the lowest encoder layer if there is no n-th one. phi
    is tanh (Bahdanau et al. 2015) or the identity. A decoder without attention receives nothing else from the source.
    """

    kind = "encoder_state"
    reads_source = True
    activation: Literal["tanh", "linear"] = "tanh"

    def build(self, layers: list[Shape], encoder: list[Shape], site: Site) -> "InitialStateModule":
        return EncoderStateModule(self, layers, encoder, site)


@dataclass(frozen=True, slots=True)
class ConstantState(InitialState):
    """Zero or learned initial decoder state, the same for all sources. The decoder must attend to the source."""

    kind = "constant_state"
    start: Start = ZeroStart()

    def build(self, layers: list[Shape], encoder: list[Shape], site: Site) -> "InitialStateModule":  # noqa: ARG002
        return ConstantStateModule(self, layers, site)


class InitialStateModule(nn.Module):
    """Abstract base class of the modules that `InitialState` specs build."""

    @abstractmethod
    def forward(self, last: States) -> States:
        """Return the initial state of every decoder layer, given the final states `last` of the encoder layers."""


class EncoderStateModule(InitialStateModule):
    def __init__(self, spec: EncoderState, layers: list[Shape], encoder: list[Shape], site: Site) -> None:
        super().__init__()
        self.activate = {"tanh": torch.tanh, "linear": nn.Identity()}[spec.activation]
        self.below = [max(0, len(encoder) - len(layers) + i) for i in range(len(layers))]
        self.maps = nn.ModuleList(
            nn.ModuleList(site.linear(encoder[below].width, {"other": layer.width}) for _ in range(layer.parts))
            for layer, below in zip(layers, self.below, strict=True)
        )

    def forward(self, last: States) -> States:
        states = []
        layers: Any = self.maps
        for below, maps in zip(self.below, layers, strict=True):
            inputs = [*last[below], *[last[below][0]] * len(maps)]  # c is computed from h if the encoder has no c
            states.append(tuple(self.activate(part(source)) for part, source in zip(maps, inputs, strict=False)))
        return states


class ConstantStateModule(InitialStateModule):
    def __init__(self, spec: ConstantState, layers: list[Shape], site: Site) -> None:
        super().__init__()
        self.starts = nn.ModuleList(
            spec.start.build(layer.parts, layer.width, site.inside("start")) for layer in layers
        )

    def forward(self, last: States) -> States:
        h = last[0][0]
        return [start(h.shape[0], h) for start in self.starts]


@dataclass(frozen=True, slots=True)
class RecurrentEncoder(Spec):
    """Stacked recurrent layers over the source.

    All layers read in the given `direction`: "forwards", "backwards" (Sutskever et al. 2014) or "both". With
    "first_both", the first layer reads in both directions and the others forwards (Wu et al. 2016). The outputs of both
    directions are concatenated.
    """

    kind = "recurrent_encoder"
    cell: Cell = LSTM()
    depth: int = 2
    d_hidden: int | None = None  # width of the state in each direction; None: d_model
    direction: Reading = "both"
    residual_from: int | None = None  # lowest layer with a residual connection, counted from 1; None: no layer
    start: Start = ZeroStart()

    def check(self) -> None:
        check_count("d_hidden", self.d_hidden)
        check_depth(self.depth, self.residual_from)

    def build(self, site: Site) -> "RecurrentEncoderModule":
        return RecurrentEncoderModule(self, site)


@dataclass(frozen=True, slots=True)
class RecurrentDecoder(Spec):
    """Stacked recurrent layers over the target, with optional attention to the source and to previous decoder states.

    With `query` "top" (Luong et al. 2015), the state h of the top layer is the query, and the head reads tanh(W [h;
    context]). With "bottom" (Wu et al. 2016), the state of the lowest layer is the query, and the context vector is
    concatenated to the input of every layer above the lowest.

    With `input_feeding` "context", the context vector of the previous step is concatenated to the input of the lowest
    layer. With "output", it is the decoder's output of the previous step instead; this requires `query` "top". In both
    cases, tokens are processed one at a time. With "none", each layer processes all tokens at once.
    """

    kind = "recurrent_decoder"
    cell: Cell = LSTM()
    depth: int = 2
    residual_from: int | None = None  # as in the encoder
    initial_state: InitialState = EncoderState()
    attention: AttentionScore | None = None  # attention to the source; None: no attention
    self_attention: AttentionScore | None = None  # attention to previous query states; None: no attention
    query: Literal["top", "bottom"] = "top"
    input_feeding: Literal["none", "context", "output"] = "none"

    def check(self) -> None:
        check_depth(self.depth, self.residual_from)
        unread = f"{self.initial_state.kind!r} does not read the source; set attention or use 'encoder_state'"
        require(self.attention is not None or self.initial_state.reads_source, "initial_state", unread)
        attends, fed, top = self.attention or self.self_attention, self.input_feeding, self.query == "top"
        require(attends is not None or top, "query", "'bottom' needs attention; set attention or use 'top'")
        needed = "needs attention; set attention or use 'none'"
        require(attends is not None or fed == "none", "input_feeding", needed)
        above = "with query 'bottom', a second layer must read the context vector; use at least 2 layers"
        require(top or self.depth >= 2, "depth", above)
        no_output = "with query 'bottom', there is no output to feed; use 'context' or 'none'"
        require(top or fed != "output", "input_feeding", no_output)

    def build(self, memory: int, encoder: list[Shape], site: Site) -> "RecurrentDecoderModule":
        return RecurrentDecoderModule(self, memory, encoder, site)


def check_depth(depth: int, residual_from: int | None) -> None:
    """Raise an error for an invalid number of layers, or if `residual_from` is not a layer from 2 to `depth`."""
    check_count("depth", depth, MOST_BLOCKS)
    exists = residual_from is None or 2 <= residual_from <= depth
    require(exists, "residual_from", f"must be one of layers 2 to {depth}, not {residual_from}; or leave it out")


@dataclass(frozen=True, slots=True)
class Recurrent(TwoSidedSpec):
    """Recurrent encoder-decoder, without attention (Sutskever et al. 2014) or with attention (Bahdanau et al. 2015).

    Without `decoder.attention`, the decoder receives only the final states of the encoder. `heads` is the number of
    attention heads. Batch rows cannot be packed, because the state would carry over from one text to the next.
    """

    kind = "recurrent"
    ordered = True
    packs = False
    vocab: int = 32000
    target_vocab: int | None = None  # None: equal to `vocab`
    d_model: int = 512  # width of the embeddings and of the decoder's states
    heads: int = 1
    dropout: float = 0.2
    attention_dropout: float = 0.0
    table: TableSpec = Embeddings()
    output_table: TableSpec | None = None  # used if the output has a table of its own; None: like `table`
    sharing: Sharing = Sharing()
    input: InputSpec = Tokens(position=None)  # scaled to unit variance: unscaled embeddings learn much more slowly
    encoder: RecurrentEncoder = RecurrentEncoder()
    decoder: RecurrentDecoder = RecurrentDecoder()
    head: HeadSpec = Softmax()
    linear: Linear = Dense()
    init: Init = Xavier()

    def check(self) -> None:
        check_count("d_model", self.d_model, MOST_CHANNELS)
        check_count("heads", self.heads, MOST_HEADS)
        for name in ("dropout", "attention_dropout"):
            check_rate(name, getattr(self, name))
        not_divided = f"{self.heads} heads do not divide d_model {self.d_model}; choose a divisor"
        require(self.d_model % self.heads == 0, "heads", not_divided)
        if self.decoder.attention is None and self.decoder.self_attention is None:
            for name, nothing in (("heads", 1), ("attention_dropout", 0.0)):
                remedy = f"use {nothing} or set decoder.attention"
                require(getattr(self, name) == nothing, name, f"needs attention in the decoder; {remedy}")
        check_sides(self)

    def build(self, init: Init) -> "RecurrentModel":
        return RecurrentModel(self, init)


class RecurrentEncoderModule(nn.Module):
    def __init__(self, spec: RecurrentEncoder, site: Site) -> None:
        super().__init__()
        self.dropout, self.added = nn.Dropout(site.dropout), _added(spec)
        hidden, width = spec.d_hidden or site.d_model, site.d_model
        layers = []
        for i, added in enumerate(self.added):
            direction: Direction = "forwards" if i else "both"
            if spec.direction != "first_both":
                direction = spec.direction
            layer = Layer(spec.cell, width, hidden, direction, spec.start, site)
            unequal = f"layer {i + 1} has {layer.width} outputs and {width} inputs, which cannot be added"
            site.require(layer.width == width or not added, "residual_from", f"{unequal}; set d_hidden")
            layers.append(layer)
            width = layer.width
        self.layers = nn.ModuleList(layers)
        self.shapes, self.width = [Shape(layer.parts, layer.width) for layer in layers], width

    def forward(
        self, x: Float[Tensor, "B S D"], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B S M"], States]:
        """Return the output at every token, and the final state of every layer."""
        last = []
        for layer, added in zip(self.layers, self.added, strict=True):
            y, state = layer(x, lengths)
            y = self.dropout(y)
            x = x + y if added else y
            last.append(state)
        return x, last


def _added(spec: RecurrentEncoder | RecurrentDecoder) -> list[bool]:
    """Return, for each layer, whether it has a residual connection (its input is added to its output)."""
    return [spec.residual_from is not None and layer >= spec.residual_from for layer in range(1, spec.depth + 1)]


@dataclass(slots=True)
class DecoderState:
    """State of a recurrent decoder between two tokens: states of the layers, and the vector for input feeding."""

    states: States  # of every decoder layer
    fed: Float[Tensor, "B F"]  # concatenated to the next input; F = 0 without input feeding


def _attention(spec: AttentionScore | None, d_query: int, d_memory: int, site: Site) -> AttentionScoreModule | None:
    return None if spec is None else spec.build(d_query, d_memory, site)


class RecurrentDecoderModule(nn.Module):
    """Stacked recurrent layers with optional attention to the source and to previous decoder states."""

    def __init__(self, spec: RecurrentDecoder, memory: int, encoder: list[Shape], site: Site) -> None:
        super().__init__()
        D, self.dropout, self.input_feeding = site.d_model, nn.Dropout(site.dropout), spec.input_feeding
        self.cross = _attention(spec.attention, D, memory, site.inside("attention"))
        self.own = _attention(spec.self_attention, D, D, site.inside("self_attention"))
        self.context_width = sum(score.width for score in (self.cross, self.own) if score is not None)
        self.fed = {"none": 0, "context": self.context_width, "output": D}[spec.input_feeding]
        self.query_layers = {"bottom": 1, "top": spec.depth}[spec.query]  # number of layers below the attention
        above = spec.depth - self.query_layers
        widths = [D + self.fed, *[D] * (self.query_layers - 1), *[D + self.context_width] * above]
        self.cells = nn.ModuleList(spec.cell.build(width, D, site.inside("cell")) for width in widths)
        self.added = _added(spec)
        self.joint = None
        if self.context_width and spec.query == "top":
            self.joint = site.linear(D + self.context_width, {"attend_out": D}, bias=False)
        cells: Any = self.cells
        shapes = [Shape(cell.parts, D) for cell in cells]
        self.opening = spec.initial_state.build(shapes, encoder, site.inside("initial_state"))
        scores = {CROSS: self.cross, OWN: self.own}
        self.traces = nn.ModuleList(AttentionTrace(name) for name, score in scores.items() if score is not None)

    def initial_state(self, last: States) -> DecoderState:
        """Return the decoder state before the first token, given the final states `last` of the encoder layers."""
        states = self.opening(last)
        h = states[0][0]
        return DecoderState(states, h.new_zeros(h.shape[0], self.fed))

    def keys_and_values(self, memory: Float[Tensor, "B S M"]) -> StaticKV | None:
        """Return keys and values for the source, or None if the decoder does not attend to the source."""
        return None if self.cross is None else StaticKV(*self.cross.keys_and_values(memory))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S M"],
        last: States,
        cross: View,
        trace: Trace | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return the decoder's output at every token of whole targets, which is the input of the vocabulary head."""
        own = None if self.own is None else AttentionHistory()
        attention = DecoderAttention(self.keys_and_values(memory), cross, own, None, trace)
        return self.run(x, self.initial_state(last), attention)

    def run(
        self,
        x: Float[Tensor, "B T D"],
        decoder_state: DecoderState,
        attention: "DecoderAttention",
        lengths: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return the decoder's output for the next tokens, and update the decoder state.

        The new state is the state after the first `lengths` tokens of each row. If `lengths` is None, it is the state
        after all tokens.
        """
        attention.select(self, x)
        h, context, y = (self.run_stepwise if self.fed else self.run_parallel)(x, decoder_state, attention, lengths)
        if self.query_layers < len(self.cells):
            assert context is not None
            y = self.run_layers(h, context, decoder_state.states, range(self.query_layers, len(self.cells)), lengths)
        for attention_trace in self.traces:
            attention_trace(attention)
        return y

    def run_parallel(
        self,
        x: Float[Tensor, "B T I"],
        decoder_state: DecoderState,
        attention: "DecoderAttention",
        lengths: Int[Tensor, " B"] | None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T C"] | None, Float[Tensor, "B T D"]]:
        """Compute all tokens in parallel. Return query states, context vectors, and the output combined from both."""
        h = self.run_layers(x, None, decoder_state.states, range(self.query_layers), lengths)
        context = attention(self, h) if self.context_width else None
        return h, context, self.combine(h, context)

    def run_stepwise(
        self,
        x: Float[Tensor, "B T D"],
        decoder_state: DecoderState,
        attention: "DecoderAttention",
        lengths: Int[Tensor, " B"] | None,  # noqa: ARG002  # with input feeding, decoding passes one token at a time
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T C"] | None, Float[Tensor, "B T D"]]:
        """Compute `run_parallel` token by token, because each input contains a vector from the previous step."""
        steps = []
        for token in x.split(1, 1):
            x_fed = torch.cat((token, decoder_state.fed[:, None].to(token.dtype)), -1)
            h, context, y = self.run_parallel(x_fed, decoder_state, attention, None)
            assert context is not None
            decoder_state.fed = (context if self.input_feeding == "context" else y)[:, 0].to(decoder_state.fed.dtype)
            steps.append((h, context, y))
        h, context, y = (torch.cat(parts, 1) for parts in zip(*steps, strict=True))
        return h, context, y

    def run_layers(
        self,
        x: Float[Tensor, "B T I"],
        beside: Float[Tensor, "B T C"] | None,
        states: States,
        layers: range,
        lengths: Int[Tensor, " B"] | None,
    ) -> Float[Tensor, "B T D"]:
        """Return the output of `layers` and update `states`. `beside` is concatenated to the input of each layer."""
        for i in layers:
            cell: Any = self.cells[i]
            y, states[i] = cell(x if beside is None else torch.cat((x, beside), -1), states[i], lengths)
            y = self.dropout(y)
            x = x + y if self.added[i] else y
        return x

    def combine(self, h: Float[Tensor, "B T D"], context: Float[Tensor, "B T C"] | None) -> Float[Tensor, "B T D"]:
        """Return tanh(W [h; context]) (Luong et al. 2015), or h if the decoder has no such projection."""
        if self.joint is None or context is None:
            return h
        return self.dropout(self.joint(torch.cat((h, context), -1)).tanh())


@dataclass
class DecoderAttention:
    """Keys, values and masks of a decoder's attention to the source and to its previous states, in a forward pass."""

    source: StaticKV | None
    cross: View | None
    own: "KVCache | AttentionHistory | None"
    own_view: View | None
    trace: Trace | None
    weights: dict[str, list[Tensor]] = field(default_factory=lambda: {CROSS: [], OWN: []})
    recorded: set[str] = field(default_factory=set)

    def __call__(self, decoder: RecurrentDecoderModule, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T C"]:
        """Return the context vectors for the query states `h`."""
        contexts = []
        if decoder.cross is not None:
            assert self.source is not None
            assert self.cross is not None
            k, v = self.source.keys, self.source.values
            contexts.append(attend_to(decoder.cross, h, k, v, self.cross, self._weights(CROSS)))
        if decoder.own is not None:
            contexts.append(self.attend_to_past(decoder.own, h))
        return torch.cat(contexts, -1)

    def attend_to_past(self, score: AttentionScoreModule, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T C"]:
        """Return the context vectors from attention to all decoder states so far, including `h`."""
        assert self.own is not None
        keys, values = score.keys_and_values(h)
        k, v, view = self.own.append(keys, values, self.own_view)  # type: ignore[reportArgumentType]  # a cache has one
        return attend_to(score, h, k, v, view, self._weights(OWN))

    def select(self, decoder: RecurrentDecoderModule, h: Float[Tensor, "B T D"]) -> None:
        """Set `recorded` to the names of the attention layers whose weights the trace records for these tokens."""
        if self.trace is None:
            return
        B, T = h.shape[:2]
        S = {CROSS: 0 if self.source is None else self.source.keys.shape[2], OWN: T}
        scores = {CROSS: decoder.cross, OWN: decoder.own}
        present = {name: score.heads for name, score in scores.items() if score is not None}
        self.recorded = {name for name, heads in present.items() if self.trace.wants(name, (B, heads, T, S[name]))}

    def _weights(self, name: str) -> list[Tensor] | None:
        return self.weights[name] if name in self.recorded else None


class AttentionHistory:
    """Keys and values so far in a forward pass. They are never overwritten in place, so gradients can flow."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def append(
        self,
        k: Float[Tensor, "B H T K"],
        v: Float[Tensor, "B H T V"],
        view: View | None = None,
    ) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S V"], View]:
        """Store new keys and values. Return all keys and values so far, and a causal `View` unless one is given."""
        self.keys.append(k)
        self.values.append(v)
        keys, T = torch.cat(self.keys, 2), k.shape[2]
        S = keys.shape[2]
        return keys, torch.cat(self.values, 2), view or View(Mask(causal=True, start=S - T), T, S, k.device)


class AttentionTrace(nn.Module):
    """Module that records the attention weights of all steps of a forward pass as one entry of the trace."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, attention: DecoderAttention) -> None:
        if attention.trace is not None and self.name in attention.recorded:
            weights = attention.weights[self.name]
            S = max(w.shape[3] for w in weights)
            attention.trace.add(self.name, torch.cat([F.pad(w, (0, S - w.shape[3])) for w in weights], 2))


class RecurrentModel(TwoSided):
    def __init__(self, spec: Recurrent, init: Init) -> None:
        super().__init__()
        self.spec = spec
        depths = (spec.encoder.depth, spec.decoder.depth)
        source, target = sides(spec, init, depths, sum(depths))
        vocab = self.tables_and_inputs(spec, source, target)
        self.encoder = spec.encoder.build(source.inside("encoder"))
        self.decoder = spec.decoder.build(self.encoder.width, self.encoder.shapes, target.inside("decoder"))
        self.head = spec.head.build(vocab, target.inside("head"))

    def encode(self, batch: Batch) -> tuple[Float[Tensor, "B S M"], States]:
        """Return the encoder's output at every token, and the final state of every encoder layer."""
        x, view = self.read_source(batch)
        return self.encoder(x, real_lengths(view.mask))

    def hidden(
        self,
        batch: Batch,
        losses: list[Tensor] | None = None,  # noqa: ARG002  # no part has an auxiliary loss
        trace: Trace | None = None,
    ) -> Float[Tensor, "B T D"]:
        memory, last = self.encode(batch)
        ids, (T, S) = batch.target, (batch.target.shape[1], memory.shape[1])
        x = self.embed("target", ids, own_mask(batch, batch.target_pos, batch.target_seg, causal=True), T)
        cross = View(Mask(k_seg=batch.source_seg), T, S, ids.device)
        return self.decoder(x, memory, last, cross, trace)

    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        memory, last = self.encode(batch)
        sources, S, _ = memory.shape
        rows = self.new_rows(sources, beams, memory.device, max_len, static)
        decoder_state = self.decoder.initial_state(last)
        states = (*decoder_state.states, (decoder_state.fed,))
        hidden = [RecurrentState(rows, tuple(part.repeat_interleave(beams, 0) for part in state)) for state in states]
        own = None if self.decoder.own is None else KVCache(rows)
        cross = View(padding_mask(batch.source_seg, static), beams, S, memory.device)
        return Decoding(rows, [*hidden, self.decoder.keys_and_values(memory), own], beams, cross=cross)

    def consume(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B D"]:
        """Process new tokens (one at a time with input feeding) and return the last hidden state of each row."""
        if not self.decoder.fed or ids.shape[1] == 1:
            return super().consume(ids, decoding, counts)
        decoding.rows.claim(ids.shape[1])
        last: Tensor | None = None
        for t, column in enumerate(ids.split(1, 1)):
            real = None if counts is None else (counts > t).long()
            new = super().consume(column, decoding, real)
            last = new if real is None or last is None else torch.where(real[:, None] > 0, new, last)
        assert last is not None
        return last

    def step(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T D"]:
        *hidden, fed, source, own = decoding.states
        x, ctx = self.read_next(ids, decoding)
        decoder_state = DecoderState([layer.parts for layer in hidden], fed.parts[0])
        attention = DecoderAttention(source, ctx.cross, own, ctx.own, decoding.trace)
        y = self.decoder.run(x, decoder_state, attention, counts if ids.shape[1] > 1 else None)
        for layer, state in zip((*hidden, fed), (*decoder_state.states, (decoder_state.fed,)), strict=True):
            layer.write(state)
        return y
