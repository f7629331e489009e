"""The encoder-decoder of Vaswani et al. 2017, and variants of it."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import Batch
from regard.models.base import check_unpacked
from regard.models.build import check_sizes
from regard.models.decoding import Decoding, padding_mask
from regard.models.sequence_to_sequence import TwoSided, TwoSidedSpec, check_sides, sides
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.bridge import Bridge, Last
from regard.nn.checks import require
from regard.nn.embedding import Tokens
from regard.nn.init import Init, Xavier
from regard.nn.input import InputSpec
from regard.nn.linear import Dense, Linear
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.stacks.base import StackSpec
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Sharing, TableSpec


@dataclass(frozen=True, slots=True)
class EncoderDecoder(TwoSidedSpec):
    """Encoder-decoder: the encoder reads the whole source, and the decoder generates the target token by token."""

    kind = "encoder_decoder"
    vocab: int = 32000
    target_vocab: int | None = None  # None: equal to `vocab`
    d_model: int = 512
    heads: int = 8
    d_head: int | None = None  # None: d_model / heads
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    table: TableSpec = Embeddings()
    output_table: TableSpec | None = None  # used if the output has a table of its own; None: like `table`
    sharing: Sharing = Sharing()
    input: InputSpec = Tokens()
    encoder: StackSpec = Plain((Block((SelfAttention(), FeedForward())),))
    bridge: Bridge = Last()
    decoder: StackSpec = Plain((Block((SelfAttention(), CrossAttention(), FeedForward())),))
    head: HeadSpec = Softmax()
    linear: Linear = Dense()
    init: Init = Xavier()

    def check(self) -> None:
        check_sizes(self)
        check_sides(self)
        require(
            not (self.bridge.needs_layers and self.encoder.shortens),
            "bridge",
            f"{self.bridge.kind!r} needs layers of equal length, which {self.encoder.kind!r} does not have; use 'last'",
        )

    def build(self, init: Init) -> "EncoderDecoderModel":
        return EncoderDecoderModel(self, init)


class EncoderDecoderModel(TwoSided):
    def __init__(self, spec: EncoderDecoder, init: Init) -> None:
        super().__init__()
        self.spec = spec
        depths = (spec.encoder.blocks(), spec.decoder.blocks())
        branches = spec.encoder.residual_branches() + spec.decoder.residual_branches()
        source, target = sides(spec, init, depths, branches)
        vocab = self.tables_and_inputs(spec, source, target)
        self.encoder = spec.encoder.build(source.inside("encoder"))
        self.bridge = spec.bridge.build(depths[0] + 1, depths[1], source.inside("bridge"))
        self.decoder = spec.decoder.build(target.inside("decoder"))
        self.head = spec.head.build(vocab, target.inside("head"))
        self.keep_layers = spec.bridge.needs_layers

    def encode(self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None) -> Memory:
        """Return the memory that the decoder attends to: the encoder's output, transformed by the bridge."""
        x, view = self.read_source(batch)
        return self.bridge(self.encoder(x, Context(view, losses=losses, trace=trace), keep=self.keep_layers))

    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        return self.decoder(*self.read_target(batch, self.encode(batch, losses, trace), losses, trace)).x

    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        check_unpacked(batch)
        return self.decode_from(self.encode(batch), max_len, beams, static)

    def decode_from(self, memory: Memory, max_len: int, beams: int, static: bool) -> Decoding:
        """Return a new decoding session for the encoded sources in `memory`."""
        sources, S, _ = memory.x[0].shape
        rows = self.new_rows(sources, beams, memory.x[0].device, max_len, static)
        cross = View(padding_mask(memory.seg, static), beams, S, memory.x[0].device)
        ctx = Context(View(Mask(causal=True), 1, 1, cross.device), cross, memory)
        return Decoding(rows, self.decoder.start(rows, ctx), beams, memory, cross)

    def step(
        self,
        ids: Int[Tensor, "B T"],
        decoding: Decoding,
        counts: Int[Tensor, " B"] | None,  # noqa: ARG002
    ) -> Float[Tensor, "B T D"]:
        return self.decoder(*self.read_next(ids, decoding), decoding.states).x
