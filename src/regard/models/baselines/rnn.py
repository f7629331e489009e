"""The encoder-decoder before the Transformer: two recurrences, and the attention that was added to them."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.batch import Batch
from regard.models.base import ModelSpec, own_mask, source_of
from regard.models.baselines.attention_score import AttentionScore, AttentionScoreModule, look
from regard.models.build import check_vocab
from regard.models.decoding import Decoding, padding_mask
from regard.models.embedding import check_input
from regard.models.sequence_to_sequence import TwoSided, sides
from regard.nn.checks import MOST_BLOCKS, MOST_CHANNELS, MOST_HEADS, check_count, check_rate, require
from regard.nn.core import Site
from regard.nn.embedding import Tokens
from regard.nn.init import Init, Xavier
from regard.nn.input import InputSpec
from regard.nn.linear import Dense, Linear
from regard.nn.mask import Mask, View
from regard.nn.recurrent import LSTM, Cell, Direction, Layer, Start, ZeroStart, real_lengths
from regard.nn.state import KVCache, RecurrentState, StaticKV
from regard.nn.trace import Trace
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.heads import Softmax
from regard.nn.vocab.tables import Embeddings, Sharing, TableSpec
from regard.tree import Spec

Reading = Literal["forwards", "backwards", "both", "first_both"]
States = list[tuple[Tensor, ...]]  # of every layer: vectors (B, H), each layer of its own width
CROSS, OWN = "decoder.cross", "decoder.self"


class InitialState(Spec):
    """Slot: what the decoder remembers before it says anything."""

    __slots__ = ()
    tells: ClassVar[bool] = False  # something of the source

    @abstractmethod
    def build(self, layers: list["Shape"], encoder: list["Shape"], site: Site) -> "InitialStateModule":
        """The first states of these layers of the decoder, after those of the encoder."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer remembers: so many vectors of this width."""

    parts: int
    width: int


@dataclass(frozen=True, slots=True)
class EncoderState(InitialState):
    """phi(W s + b) of the source's last state s: all that a decoder without attention knows of it (the bottleneck).

    Every layer has maps of its own from the encoder's layer at its height, counted from the top; where the encoder is
    shallower, from its lowest. phi is tanh (Bahdanau et al. 2015) or nothing.
    """

    kind = "encoder_state"
    tells = True
    activation: Literal["tanh", "linear"] = "tanh"

    def build(self, layers: list[Shape], encoder: list[Shape], site: Site) -> "InitialStateModule":
        return EncoderStateModule(self, layers, encoder, site)


@dataclass(frozen=True, slots=True)
class ConstantState(InitialState):
    """The same for every source: zeros, or what is learned. For a decoder that looks at the source itself."""

    kind = "constant_state"
    start: Start = ZeroStart()

    def build(self, layers: list[Shape], encoder: list[Shape], site: Site) -> "InitialStateModule":  # noqa: ARG002
        return ConstantStateModule(self, layers, site)


class InitialStateModule(nn.Module):
    """Abstract: the module an InitialState builds."""

    @abstractmethod
    def forward(self, last: States) -> States:
        """The first state of every layer, from the last ones of the encoder's layers."""


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
        opened = []
        layers: Any = self.maps
        for below, maps in zip(self.below, layers, strict=True):
            read = [*last[below], *[last[below][0]] * len(maps)]  # who remembers more parts reads h for the others
            opened.append(tuple(self.activate(part(given)) for part, given in zip(maps, read, strict=False)))
        return opened


class ConstantStateModule(InitialStateModule):
    def __init__(self, spec: ConstantState, layers: list[Shape], site: Site) -> None:
        super().__init__()
        made = [spec.start.build(layer.parts, layer.width, site.inside("start")) for layer in layers]
        self.starts = nn.ModuleList(made)

    def forward(self, last: States) -> States:
        h = last[0][0]
        return [start(h.shape[0], h) for start in self.starts]


@dataclass(frozen=True, slots=True)
class RecurrentEncoder(Spec):
    """Recurrences one above the other over the source.

    `direction`: all layers forwards, backwards (Sutskever et al. 2014) or both ways, or only the first one both ways
    (Wu et al. 2016). Two directions stand side by side and make a vector twice as wide.
    """

    kind = "recurrent_encoder"
    cell: Cell = LSTM()
    depth: int = 2
    d_hidden: int | None = None  # of each direction; None: d_model
    direction: Reading = "both"
    residual_from: int | None = None  # the lowest layer, counted from 1, that is added to what it reads; None: none is
    start: Start = ZeroStart()

    def check(self) -> None:
        check_count("d_hidden", self.d_hidden)
        check_depth(self.depth, self.residual_from)

    def build(self, site: Site) -> "RecurrentEncoderModule":
        return RecurrentEncoderModule(self, site)


@dataclass(frozen=True, slots=True)
class RecurrentDecoder(Spec):
    """Recurrences one above the other over the target, which may look at the source and at their own past.

    With `asks="top"` (Luong et al. 2015) the state h of the top layer looks things up, and tanh(W [h; found]) goes to
    the head. With "bottom" (Wu et al. 2016) that of the lowest layer does, and what it finds stands beside the input of
    every layer above.

    `feeding` takes the last step's "found" or, with the top, "output" into the lowest layer's next input: what was
    looked up becomes part of the state update, where the `heads` look-ups are aggregated (CS 182). That is one step
    after the other; without it all tokens are run through a layer at once.
    """

    kind = "recurrent_decoder"
    cell: Cell = LSTM()
    depth: int = 2
    residual_from: int | None = None  # as in the encoder
    initial_state: InitialState = EncoderState()
    attention: AttentionScore | None = None  # to the source
    self_attention: AttentionScore | None = None  # to the states so far of the layer that asks
    query: Literal["top", "bottom"] = "top"
    input_feeding: Literal["none", "found", "output"] = "none"

    def check(self) -> None:
        check_depth(self.depth, self.residual_from)
        looks = self.attention is not None or self.self_attention is not None
        require(
            self.attention is not None or self.initial_state.tells,
            "initial_state",
            f"without attention {self.initial_state.kind!r} tells nothing of the source",
        )
        require(looks or self.query == "top", "query", "nothing is looked up; leave it at 'top' or add an attention")
        require(
            looks or self.input_feeding == "none",
            "input_feeding",
            "nothing is looked up that could be fed; set it to 'none' or add an attention",
        )
        require(
            self.query == "top" or self.depth >= 2,
            "depth",
            "there is no layer above the bottom that could use what it finds; add one",
        )
        require(
            self.query == "top" or self.input_feeding != "output",
            "input_feeding",
            "the bottom is run before there is an output; set it to 'found' or 'none'",
        )

    def build(self, memory: int, encoder: list[Shape], site: Site) -> "RecurrentDecoderModule":
        return RecurrentDecoderModule(self, memory, encoder, site)


def check_depth(depth: int, residual_from: int | None) -> None:
    """Refuse depths that cannot be, and residuals of layers that are not there."""
    check_count("depth", depth, MOST_BLOCKS)
    require(
        residual_from is None or 2 <= residual_from <= depth,
        "residual_from",
        f"must be one of layers 2 to {depth}, not {residual_from}; or leave it out",
    )


@dataclass(frozen=True, slots=True)
class Recurrent(ModelSpec):
    """Sutskever et al. 2014, Bahdanau et al. 2015: a recurrence reads the source, another one says the target.

    Without `decoder.attention` the last state is all that the decoder gets of the source. With it, `heads` look-ups are
    made for every token that is said. Texts cannot be packed: a state would run from one into the next.
    """

    kind = "recurrent"
    reads_source = True
    ordered = True
    packs = False
    vocab: int = 32000
    target_vocab: int | None = None  # None: the same
    d_model: int = 512  # of words and of the decoder's states
    heads: int = 1
    dropout: float = 0.2
    attention_dropout: float = 0.0
    table: TableSpec = Embeddings()
    output_table: TableSpec | None = None  # where the output has a table of its own; None: like `table`
    sharing: Sharing = Sharing()
    input: InputSpec = Tokens(position=None)  # vectors of unit variance: unscaled ones are learned much more slowly
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
        require(
            self.d_model % self.heads == 0,
            "heads",
            f"{self.heads} heads do not divide d_model {self.d_model}; choose a divisor",
        )
        if self.decoder.attention is None and self.decoder.self_attention is None:
            for name, nothing in (("heads", 1), ("attention_dropout", 0.0)):
                require(
                    getattr(self, name) == nothing,
                    name,
                    f"nothing is looked up; set it to {nothing} or give the decoder an attention",
                )
        check_vocab("vocab", self.vocab)
        check_vocab("target_vocab", self.target_vocab)
        check_input(self.input)

    def build(self, init: Init) -> "RecurrentModel":
        return RecurrentModel(self, init)


class RecurrentEncoderModule(nn.Module):
    """The source as states: after every token, and of every layer after the last."""

    def __init__(self, spec: RecurrentEncoder, site: Site) -> None:
        super().__init__()
        self.dropout = nn.Dropout(site.dropout)
        hidden, width = spec.d_hidden or site.d_model, site.d_model
        layers = []
        for i in range(spec.depth):
            direction: Direction = "forwards" if i else "both"
            if spec.direction != "first_both":
                direction = spec.direction
            layer = Layer(spec.cell, width, hidden, direction, spec.start, site)
            site.require(
                layer.width == width or not _added(spec, i),
                "residual_from",
                f"layer {i + 1} makes {layer.width} channels of {width}, which cannot be added up",
            )
            layers.append(layer)
            width = layer.width
        self.layers = nn.ModuleList(layers)
        self.added = [_added(spec, i) for i in range(spec.depth)]
        self.shapes, self.width = [Shape(layer.parts, layer.width) for layer in layers], width

    def forward(
        self, x: Float[Tensor, "B S D"], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B S M"], States]:
        last = []
        for layer, added in zip(self.layers, self.added, strict=True):
            y, state = layer(x, lengths)
            y = self.dropout(y)
            x = x + y if added else y
            last.append(state)
        return x, last


def _added(spec: RecurrentEncoder | RecurrentDecoder, layer: int) -> bool:
    return spec.residual_from is not None and layer + 1 >= spec.residual_from


@dataclass(slots=True)
class Carried:
    """What a decoder carries from one token to the next."""

    states: States  # of every layer
    fed: Float[Tensor, "B F"]  # what the last step left for the input of the next; F = 0 if nothing is fed


def _lookup(spec: AttentionScore | None, d_query: int, d_memory: int, site: Site) -> AttentionScoreModule | None:
    return None if spec is None else spec.build(d_query, d_memory, site)


class RecurrentDecoderModule(nn.Module):
    """States of the target, and what they look up."""

    def __init__(self, spec: RecurrentDecoder, memory: int, encoder: list[Shape], site: Site) -> None:
        super().__init__()
        D, self.dropout, self.input_feeding = site.d_model, nn.Dropout(site.dropout), spec.input_feeding
        self.cross = _lookup(spec.attention, D, memory, site.inside("attention"))
        self.own = _lookup(spec.self_attention, D, D, site.inside("self_attention"))
        self.found = sum(lookup.width for lookup in (self.cross, self.own) if lookup is not None)
        self.fed = {"none": 0, "found": self.found, "output": D}[spec.input_feeding]
        self.asking = 1 if spec.query == "bottom" else spec.depth  # so many layers are run before anything is looked up
        widths = [D + self.fed, *(D + (self.found if i >= self.asking else 0) for i in range(1, spec.depth))]
        self.cells = nn.ModuleList(spec.cell.build(width, D, site.inside("cell")) for width in widths)
        self.added = [_added(spec, i) for i in range(spec.depth)]
        self.joint = None
        if self.found and spec.query == "top":
            self.joint = site.linear(D + self.found, {"attend_out": D}, bias=False)
        cells: Any = self.cells
        self.opening = spec.initial_state.build(
            [Shape(cell.parts, D) for cell in cells], encoder, site.inside("initial_state")
        )
        lookups = {CROSS: self.cross, OWN: self.own}
        self.shown = nn.ModuleList(Shown(name) for name, lookup in lookups.items() if lookup is not None)

    def open(self, last: States) -> Carried:
        """Before the first token."""
        states = self.opening(last)
        h = states[0][0]
        return Carried(states, h.new_zeros(h.shape[0], self.fed))

    def table(self, memory: Float[Tensor, "B S M"]) -> StaticKV | None:
        """The source as keys and values, if it is looked at."""
        return None if self.cross is None else StaticKV(*self.cross.table(memory))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S M"],
        last: States,
        cross: View,
        trace: Trace | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What goes to the head at every token of a whole target."""
        own = None if self.own is None else Growing()
        return self.run(x, self.open(last), Looks(self.table(memory), cross, own, None, trace))

    def run(
        self, x: Float[Tensor, "B T D"], carried: Carried, looks: "Looks", lengths: Int[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """The same for the next tokens; `carried` is then what is carried on from the last of `lengths`."""
        h, found, y = (self.one_by_one if self.fed else self.at_once)(x, carried, looks, lengths)
        if self.asking < len(self.cells):
            assert found is not None
            y = self.climb(h, found, carried.states, range(self.asking, len(self.cells)), lengths)
        for shown in self.shown:
            shown(looks)
        return y

    def at_once(
        self, x: Float[Tensor, "B T I"], carried: Carried, looks: "Looks", lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T C"] | None, Float[Tensor, "B T D"]]:
        """The state that asks, what it finds and what comes of both, for all tokens in parallel."""
        h = self.climb(x, None, carried.states, range(self.asking), lengths)
        found = looks(self, h) if self.found else None
        return h, found, self.joined(h, found)

    def one_by_one(
        self,
        x: Float[Tensor, "B T D"],
        carried: Carried,
        looks: "Looks",
        lengths: Int[Tensor, " B"] | None,  # noqa: ARG002  # a decoding reads one token at a time
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T C"] | None, Float[Tensor, "B T D"]]:
        """The same where each token's input holds what the one before it left."""
        steps = []
        for token in x.split(1, 1):
            beside = torch.cat((token, carried.fed[:, None].to(token.dtype)), -1)
            h, found, y = self.at_once(beside, carried, looks, None)
            assert found is not None
            carried.fed = (found if self.input_feeding == "found" else y)[:, 0].to(carried.fed.dtype)
            steps.append((h, found, y))
        h, found, y = (torch.cat(parts, 1) for parts in zip(*steps, strict=True))
        return h, found, y

    def climb(
        self,
        x: Float[Tensor, "B T I"],
        beside: Float[Tensor, "B T C"] | None,
        states: States,
        layers: range,
        lengths: Int[Tensor, " B"] | None,
    ) -> Float[Tensor, "B T D"]:
        """Run some layers; `beside` stands beside the input of each. Their states are replaced."""
        for i in layers:
            cell: Any = self.cells[i]
            y, states[i] = cell(x if beside is None else torch.cat((x, beside), -1), states[i], lengths)
            y = self.dropout(y)
            x = x + y if self.added[i] else y
        return x

    def joined(self, h: Float[Tensor, "B T D"], found: Float[Tensor, "B T C"] | None) -> Float[Tensor, "B T D"]:
        """tanh(W [h; found]): Luong et al. 2015."""
        if self.joint is None or found is None:
            return h
        return self.dropout(self.joint(torch.cat((h, found), -1)).tanh())


class Looks:
    """What a decoder can look at in one pass: the table of its source, and that of its own states, which grows."""

    def __init__(
        self,
        source: StaticKV | None,
        cross: View | None,
        own: "KVCache | Growing | None",
        own_view: View | None,
        trace: Trace | None,
    ) -> None:
        self.source, self.cross = source, cross
        self.own, self.own_view = own, own_view
        self.trace = trace
        self.weighed: dict[str, list[Tensor]] = {CROSS: [], OWN: []}

    def __call__(self, decoder: RecurrentDecoderModule, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T C"]:
        """What these states find."""
        found = []
        if decoder.cross is not None:
            assert self.source is not None
            assert self.cross is not None
            table = self.source.keys, self.source.values
            found.append(look(decoder.cross, h, *table, self.cross, self._weighed(CROSS)))
        if decoder.own is not None:
            found.append(self.back(decoder.own, h))
        return torch.cat(found, -1)

    def back(self, lookup: AttentionScoreModule, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T C"]:
        """What they find in the states so far, of which they are the last."""
        assert self.own is not None
        k, v = self.own.append(*lookup.table(h))
        view, T, S = self.own_view, h.shape[1], k.shape[2]
        if view is None:
            view = View(Mask(causal=True, start=S - T), T, S, h.device)
        return look(lookup, h, k, v, view, self._weighed(OWN))

    def _weighed(self, name: str) -> list[Tensor] | None:
        return None if self.trace is None else self.weighed[name]


class Growing:
    """The states so far of one pass over a text. A cache would be written to while gradients still need it."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def append(
        self, k: Float[Tensor, "B H T K"], v: Float[Tensor, "B H T V"]
    ) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S V"]]:
        """Store what is new; return all so far."""
        self.keys.append(k)
        self.values.append(v)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


class Shown(nn.Module):
    """What was looked at in a pass, as one entry of its trace, however many steps it took."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, looks: Looks) -> None:
        if looks.trace is not None:
            weighed = looks.weighed[self.name]
            S = max(weights.shape[3] for weights in weighed)
            looks.trace.add(self.name, torch.cat([F.pad(w, (0, S - w.shape[3])) for w in weighed], 2))


class RecurrentModel(TwoSided):
    """The module of a recurrent encoder-decoder."""

    def __init__(self, spec: Recurrent, init: Init) -> None:
        super().__init__()
        self.spec = spec
        depths = (spec.encoder.depth, spec.decoder.depth)
        source, target = sides(spec, init, depths, sum(depths), spec.heads, spec.attention_dropout)
        vocab = self.tables_and_inputs(spec, source, target)
        self.encoder = spec.encoder.build(source.inside("encoder"))
        self.decoder = spec.decoder.build(self.encoder.width, self.encoder.shapes, target.inside("decoder"))
        self.head = spec.head.build(vocab, target.inside("head"))

    def encode(self, batch: Batch) -> tuple[Float[Tensor, "B S M"], States]:
        """The source as states: after every token, and of every layer after the last."""
        source = source_of(batch)
        mask = own_mask(batch, batch.source_pos, batch.source_seg)
        lengths = real_lengths(mask)
        return self.encoder(self.embed("source", source, mask, source.shape[1]), lengths)

    def hidden(
        self,
        batch: Batch,
        losses: list[Tensor] | None = None,  # noqa: ARG002  # no part of it has a loss of its own
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
        carried = self.decoder.open(last)
        opened = [RecurrentState(rows, _for_beams(state, beams)) for state in (*carried.states, (carried.fed,))]
        own = None if self.decoder.own is None else KVCache(rows)
        cross = View(padding_mask(batch.source_seg, static), beams, S, memory.device)
        return Decoding(rows, [*opened, self.decoder.table(memory), own], beams, cross=cross)

    def consume(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B D"]:
        """Where every input holds what the step before it left, several tokens are as many readings of one."""
        if not self.decoder.fed or ids.shape[1] == 1:
            return super().consume(ids, decoding, counts)
        decoding.rows.claim(ids.shape[1])
        said: Tensor | None = None
        for t, column in enumerate(ids.split(1, 1)):
            real = None if counts is None else (counts > t).long()
            new = super().consume(column, decoding, real)
            said = new if real is None or said is None else torch.where(real[:, None] > 0, new, said)
        assert said is not None
        return said

    def step(
        self,
        ids: Int[Tensor, "B T"],
        decoding: Decoding,
        counts: Int[Tensor, " B"] | None,
    ) -> Float[Tensor, "B T D"]:
        rows, T = decoding.rows, ids.shape[1]
        *hidden, fed, source, own = decoding.states
        own_view = None if own is None else decoding.own_view(T)
        x = self.embed("target", ids, rows.mask(T), rows.reach(T))
        carried = Carried([layer.parts for layer in hidden], fed.parts[0])
        looks = Looks(source, decoding.cross_view(T), own, own_view, decoding.trace)
        y = self.decoder.run(x, carried, looks, counts if T > 1 else None)
        for layer, state in zip((*hidden, fed), (*carried.states, (carried.fed,)), strict=True):
            layer.write(state)
        return y


def _for_beams(state: tuple[Tensor, ...], beams: int) -> tuple[Tensor, ...]:
    """Every beam of a source begins like the others."""
    return state if beams == 1 else tuple(part.repeat_interleave(beams, 0) for part in state)
