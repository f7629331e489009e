"""The sites, vocabulary tables and inputs of models with a source and a target."""

from dataclasses import replace
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from regard.models.base import LanguageModel
from regard.models.embedding import Inputs, Side, Tables
from regard.nn.core import Site
from regard.nn.init import Init
from regard.nn.input import InputSpec
from regard.nn.linear import Linear
from regard.nn.mask import Mask
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.tables import Sharing, TableSpec


@runtime_checkable
class TwoSidedSpec(Protocol):
    """The fields that describe the source and the target in a model spec."""

    @property
    def vocab(self) -> int: ...
    @property
    def target_vocab(self) -> int | None: ...
    @property
    def d_model(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def table(self) -> TableSpec: ...
    @property
    def output_table(self) -> TableSpec | None: ...
    @property
    def sharing(self) -> Sharing: ...
    @property
    def input(self) -> InputSpec: ...
    @property
    def head(self) -> HeadSpec: ...
    @property
    def linear(self) -> Linear: ...


def sides(
    spec: TwoSidedSpec,
    init: Init,
    depths: tuple[int, int],
    branches: int,
    heads: int = 1,
    attention_dropout: float = 0.0,
) -> tuple[Site, Site]:
    """Return the sites of the encoder and the decoder for a recurrent or convolutional model."""
    d_head = spec.d_model // heads
    source = Site(
        d_model=spec.d_model,
        heads=heads,
        d_head=d_head,
        d_value=d_head,
        side="encoder",
        causal=False,
        layer=0,
        depth=depths[0],
        encoder_depth=depths[0],
        decoder_depth=depths[1],
        branches=branches,
        dropout=spec.dropout,
        attention_dropout=attention_dropout,
        activation_dropout=0.0,
        linear_=spec.linear,
        init_=init,
    )
    return source, replace(source, side="decoder", causal=True, depth=depths[1])


class TwoSided(LanguageModel):
    """Abstract: a model that generates a target from a source."""

    def tables_and_inputs(self, spec: TwoSidedSpec, source: Site, target: Site, d_out: int | None = None) -> int:
        """Build the tables and inputs of source and target, and return the target vocabulary size.

        `d_out` is the width of the hidden states that the head reads; None: `spec.d_model`.
        """
        vocab, reads_vectors = spec.target_vocab or spec.vocab, spec.input.of("source").vector_channels > 0
        owner = "source" if spec.sharing.source_target and not reads_vectors else "target"
        uses = {"target": (owner, vocab, spec.input.of("target").table_width(spec.d_model))}
        if not reads_vectors:
            uses = {"source": ("source", spec.vocab, spec.input.of("source").table_width(spec.d_model)), **uses}
        if spec.head.needs_table:
            uses["output"] = (owner if spec.sharing.input_output else "output", vocab, d_out or spec.d_model)
        self.tables = Tables(spec.table, source, uses, spec.head, spec.output_table)
        self.inputs = Inputs(spec.input, {"source": source, "target": target}, shared=spec.sharing.positions)
        return vocab

    def embed(
        self, side: Side, values: Int[Tensor, "B T"] | Float[Tensor, "B T C"], mask: Mask, S: int
    ) -> Float[Tensor, "B T D"]:
        """Return the first hidden states of the source or the target, at the positions that the mask defines."""
        positions = mask.queries(values.shape[1], values.device)
        return self.inputs.embed(side, values, self.tables.get(side), positions, mask.bound(S))
