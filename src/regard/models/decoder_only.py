"""Decoder-only models: causal and prefix language models."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import Batch
from regard.errors import DataError
from regard.models.base import LanguageModel, ModelSpec, own_mask, refuse
from regard.models.build import check_sizes, check_vocab, site_of
from regard.models.decoding import Decoding
from regard.models.embedding import Inputs, Tables, check_input
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Tokens
from regard.nn.init import Init, Xavier
from regard.nn.input import InputSpec
from regard.nn.linear import Dense, Linear
from regard.nn.mask import Context, View
from regard.nn.residual import PreNorm
from regard.nn.stacks.base import StackSpec
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, TableSpec


@dataclass(frozen=True, slots=True)
class DecoderOnly(ModelSpec):
    """Decoder-only language model, which predicts each token from the tokens before it.

    With `input_attention="full"`, it is a prefix LM (Liu et al. 2018, Raffel et al. 2020): the input is a prefix, and
    every token of the prefix attends to the whole prefix. In training, `batch.prefix` marks the prefix. In decoding,
    the prefix is the input of the first call of `advance`.
    """

    kind = "decoder_only"
    vocab: int = 32000
    d_model: int = 512
    heads: int = 8
    d_head: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    input_attention: Literal["causal", "full"] = "causal"
    table: TableSpec = Embeddings()
    output_table: TableSpec | None = None  # used if the output has a table of its own; None: like `table`
    tied: bool = True  # whether the input table is also the softmax matrix
    input: InputSpec = Tokens()
    decoder: StackSpec = Plain((Block((SelfAttention(), FeedForward()), PreNorm()),))
    head: HeadSpec = Softmax()
    linear: Linear = Dense()
    init: Init = Xavier()

    def check(self) -> None:
        check_sizes(self)
        check_vocab("vocab", self.vocab)
        check_input(self.input)

    def build(self, init: Init) -> "DecoderOnlyModel":
        return DecoderOnlyModel(self, init)


class DecoderOnlyModel(LanguageModel):
    def __init__(self, spec: DecoderOnly, init: Init) -> None:
        super().__init__()
        self.spec = spec
        depths, branches = (0, spec.decoder.blocks()), spec.decoder.residual_branches()
        site = site_of(spec, init, "decoder", causal=True, depths=depths, branches=branches)
        self.prefixed = spec.input_attention == "full"
        self.one_piece = "every token of a prefix attends to the whole prefix" if self.prefixed else None
        site = replace(site, sees_ahead=self.prefixed)
        uses = {"target": ("target", spec.vocab, spec.input.table_width(spec.d_model))}
        if spec.head.needs_table:
            uses["output"] = ("target" if spec.tied else "output", spec.vocab, spec.d_model)
        self.tables = Tables(spec.table, site, uses, spec.head, spec.output_table, field="tied")
        self.inputs = Inputs(spec.input, {"target": site}, shared=False)
        self.decoder = spec.decoder.build(site.inside("decoder"))
        self.head = spec.head.build(spec.vocab, site.inside("head"))

    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        if (batch.prefix is not None) != self.prefixed:
            ignored = "a causal model would ignore it; set input_attention='full'"
            raise DataError(
                f"prefix: {'is missing in the batch, but a prefix LM needs it' if self.prefixed else ignored}"
            )
        refuse(batch, "source", "types")
        ids, T = batch.target, batch.target.shape[1]
        mask = replace(own_mask(batch, batch.target_pos, batch.target_seg, causal=True), prefix=batch.prefix)
        x = self.embed("target", ids, mask, T)
        return self.decoder(x, Context(View(mask, T, T, ids.device), losses=losses, trace=trace)).x

    def start(
        self, batch: Batch, max_len: int, beams: int = 1, static: bool = False, prefill_chunk: int | None = None
    ) -> Decoding:
        refuse(batch, "source", "types", "packed")
        rows = self.new_rows(batch.target.shape[0], beams, batch.target.device, max_len, static)
        nothing = Context(View(own_mask(batch, None, None, causal=True), 1, 1, batch.target.device))
        return Decoding(rows, self.decoder.start(rows, nothing), beams, prefill_chunk=prefill_chunk)

    def step(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T D"]:
        if self.prefixed and decoding.prefix is None:
            everything = decoding.rows.lengths.new_full((ids.shape[0],), ids.shape[1])
            decoding.prefix = everything if counts is None else counts.clone()
        own = decoding.own_view(ids.shape[1])
        x = self.embed("target", ids, own.mask, own.S)
        return self.decoder(x, Context(own, trace=decoding.trace), decoding.states).x
