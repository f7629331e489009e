"""Base classes of models that generate a target from a source."""

from dataclasses import replace
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import Batch
from regard.models.base import LanguageModel, ModelSpec, own_mask, source_of
from regard.models.build import check_vocab, site_of
from regard.models.decoding import Decoding
from regard.models.embedding import Inputs, Tables, check_input
from regard.nn.core import Site
from regard.nn.init import Init
from regard.nn.mask import Context, View
from regard.nn.memory import Memory
from regard.nn.trace import Trace
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.tables import Sharing, TableSpec


class TwoSidedSpec(ModelSpec):
    """Base class of specs of models that generate a target from a source. Every such spec has these fields."""

    __slots__ = ()
    reads_source: ClassVar[bool] = True
    target_vocab: int | None
    output_table: TableSpec | None
    sharing: Sharing
    head: HeadSpec


def check_sides(spec: TwoSidedSpec) -> None:
    """Check the vocabulary sizes, and check that the decoder reads neither vectors nor several token types."""
    check_vocab("vocab", spec.vocab)
    check_vocab("target_vocab", spec.target_vocab)
    check_input(spec.input)


def sides(spec: TwoSidedSpec, init: Init, depths: tuple[int, int], branches: int) -> tuple[Site, Site]:
    """Return two `Site`s (sizes, dropout rates and initialisation): one for the encoder, one for the decoder."""
    source = site_of(spec, init, "encoder", causal=False, depths=depths, branches=branches)
    return source, replace(source, side="decoder", causal=True, depth=depths[1])


class TwoSided(LanguageModel):
    """Abstract base class of models that generate a target from a source."""

    def tables_and_inputs(self, spec: TwoSidedSpec, source: Site, target: Site, d_out: int | None = None) -> int:
        """Build the embedding tables and input modules of source and target. Return the target vocabulary size.

        `d_out` is the width of the decoder's output, which the head reads. The default is `spec.d_model`.
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

    def read_source(self, batch: Batch) -> tuple[Float[Tensor, "B S D"], View]:
        """Return the embeddings and the `View` of the source. The `View` contains the encoder's self-attention mask."""
        source = source_of(batch)
        S, mask = source.shape[1], own_mask(batch, batch.source_pos, batch.source_seg)
        return self.embed("source", source, mask, S), View(mask, S, S, source.device)

    def read_target(
        self, batch: Batch, memory: Memory, losses: list[Tensor] | None, trace: Trace | None
    ) -> tuple[Float[Tensor, "B T D"], Context]:
        """Return the embeddings and the `Context` of a whole target. The context has the masks and `memory`."""
        target, T, S = batch.target, batch.target.shape[1], memory.x[0].shape[1]
        own = own_mask(batch, batch.target_pos, batch.target_seg, causal=True)
        cross = replace(own, causal=False, q_pos=None, k_pos=None, k_seg=memory.seg)
        views = View(own, T, T, target.device), View(cross, T, S, target.device)
        return self.embed("target", target, own, T), Context(*views, memory, losses, trace)

    def read_next(self, ids: Int[Tensor, "B T"], decoding: Decoding) -> tuple[Float[Tensor, "B T D"], Context]:
        """Return the embeddings and the `Context` of new tokens. The context has the masks and the memory."""
        own = decoding.own_view(ids.shape[1])
        context = Context(own, decoding.cross_view(own.T), decoding.memory, trace=decoding.trace)
        return self.embed("target", ids, own.mask, own.S), context
