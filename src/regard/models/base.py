"""Base classes of models: `Model`, `Generator` (decodes token by token), `LanguageModel` and `Classifier`."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.batch import Batch, check_padding, readable, require_data
from regard.errors import DataError
from regard.models.decoding import Decoding, last_real
from regard.models.embedding import Inputs, Side, Tables
from regard.models.loss import Loss, token_loss
from regard.models.summary import summary
from regard.nn.cache import Rows
from regard.nn.init import Init
from regard.nn.input import InputSpec
from regard.nn.linear import Linear
from regard.nn.mask import Mask
from regard.nn.position.base import query_positions
from regard.nn.trace import Trace
from regard.nn.vocab.base import Head
from regard.nn.vocab.tables import TableSpec
from regard.tree import Spec


class ModelSpec(Spec):
    """Base class of model specs. A model spec describes a whole model and has the fields annotated here.

    Some families also have `heads`, `d_head`, `attention_dropout` or `activation_dropout`.
    """

    __slots__ = ()
    reads_source: ClassVar[bool] = False  # whether the model generates a target from a source
    packs: ClassVar[bool] = True  # whether one batch row may hold several texts
    ordered: ClassVar[bool] = False  # whether the source order matters even without positions
    vocab: int
    d_model: int
    dropout: float
    table: TableSpec
    input: InputSpec
    linear: Linear
    init: Init

    @abstractmethod
    def build(self, init: Init) -> "Model":
        """Return the model that this spec describes, with weights initialised by `init`."""


class Model(nn.Module):
    """Abstract base class of models. A model is built from a spec and has a loss."""

    spec: ModelSpec
    predicts_source: bool = False  # whether the training loss has a label for every source token, too

    __call__: Callable[..., Tensor]

    @abstractmethod
    def forward(self, batch: Batch, trace: Trace | None = None) -> Tensor:
        """Return logits (of tokens or classes) or vectors for a batch. `trace` records the attention weights."""

    @abstractmethod
    def loss(self, batch: Batch) -> Loss:
        """Return the loss of a batch, summed over its labels."""

    def __repr__(self) -> str:
        return summary(self)


class Generator(Model):
    """Abstract base class of models that generate token by token. Search, sampling and serving use this interface."""

    source_first: ClassVar[bool] = False  # whether the target sequence begins with the source
    new_rows = staticmethod(Rows.start)  # regard.fast replaces this: beams then share a cache
    # Why a long input cannot be processed in pieces; None if it can. Then `start` has a parameter `prefill_chunk`.
    one_piece: str | None = "only a decoder-only model can"
    device_search: Any = None  # set by regard.fast: a beam search that runs on the GPU

    @abstractmethod
    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        """Return a new decoding session, which reads at most `max_len` tokens and has `beams` beams per batch row.

        Padding counts towards `max_len`, so every prompt counts as much as the longest prompt in the batch.
        With `static`, no tensor shape changes from step to step, as CUDA graphs require.
        """

    @abstractmethod
    def advance(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, seg: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """Process the new tokens `ids` and return log-probabilities of each row's next token. `seg` is 0 at padding."""


class LanguageModel(Generator):
    """Abstract base class of generators with token embeddings and a vocabulary head, such as a softmax layer."""

    tables: Tables
    inputs: Inputs
    head: Head

    def embed(
        self, side: Side, values: Int[Tensor, "B T"] | Float[Tensor, "B T C"], mask: Mask, S: int
    ) -> Float[Tensor, "B T D"]:
        """Embed the source or the target, as input of the first layer. `mask` defines the positions."""
        positions = query_positions(mask, values.shape[1], values.device)
        return self.inputs.embed(side, values, self.tables.get(side), positions, mask.bound(S))

    @abstractmethod
    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        """Return the hidden states after the last layer, at all positions of the target."""

    @abstractmethod
    def step(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T D"]:
        """Return the last layer's output for new tokens `ids`. The first `counts` of a row (default: all) are real."""

    def forward(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        return self.logits(batch, trace)

    def logits(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        """Return the logits of all vocabulary tokens at every position of the target.

        A head that is not a single softmax (a mixture, an adaptive softmax) returns log-probabilities instead.
        """
        return self.head.logits(self.hidden(batch, trace=trace), self.tables.get("output"))

    def log_probs(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        """Return the log-probabilities of all vocabulary tokens at every position of the target."""
        return self.head.log_probs(self.hidden(batch, trace=trace), self.tables.get("output"))

    def loss(self, batch: Batch) -> Loss:
        losses: list[Tensor] | None = [] if self.training else None
        h = self.hidden(batch, losses)
        return token_loss(self.head, self.tables.get("output"), h, batch, losses)

    def advance(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, seg: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        rows = decoding.rows.lengths.shape[0]
        valid = ids.dim() == 2 and ids.shape[0] == rows and ids.shape[1] > 0
        require_data(
            valid, f"ids: this decoding session reads {rows} rows of one or more tokens, not {tuple(ids.shape)}"
        )
        counts = None
        if seg is not None:
            require_data(
                seg.shape == ids.shape,
                f"seg: the shape {tuple(seg.shape)} does not match the shape of the ids, {tuple(ids.shape)}",
            )
            check_padding("seg", seg)
            counts = (seg != 0).sum(1)
            if readable(counts) and bool((counts == 0).any()):
                raise DataError(f"seg: row {int((counts == 0).nonzero()[0])} has no token; at least one is needed")
        return self.head.log_probs(self.consume(ids, decoding, counts), self.tables.get("output"))

    def consume(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B D"]:
        """Process new tokens, update the row lengths, and return the hidden state at each row's last real token."""
        T = ids.shape[1]
        decoding.rows.claim(T, counts)
        chunk = decoding.prefill_chunk or T
        if chunk < T:
            return self._consume_in_pieces(ids, decoding, counts, chunk)
        x = self.step(ids, decoding, counts)
        decoding.rows.advance(T, counts)
        return last_real(x, counts)

    def _consume_in_pieces(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None, chunk: int
    ) -> Float[Tensor, "B D"]:
        """Return the result of `consume`, computed on pieces of at most `chunk` tokens, which needs less memory."""
        last: Tensor | None = None
        for first, piece in zip(range(0, ids.shape[1], chunk), ids.split(chunk, 1), strict=True):
            real = None if counts is None else (counts - first).clamp(0, piece.shape[1])
            x = self.consume(piece, decoding, real)
            # A row that ended in an earlier piece keeps the hidden state of its last token.
            last = x if last is None or real is None else torch.where(real[:, None] > 0, x, last)
        assert last is not None
        return last


class Classifier(Model):
    """Abstract base class of models that predict classes."""

    def forward(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B C"] | Float[Tensor, "B T C"]:
        return self.scores(batch, trace=trace)

    @abstractmethod
    def scores(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B C"] | Float[Tensor, "B T C"]:
        """Return the logits of the classes."""


def refuse(batch: Batch, *names: str) -> None:
    """Raise an error if a batch has one of the fields `names`, because the model would ignore the field."""
    for name in names:
        absent = getattr(batch, name) is None or getattr(batch, name) is False
        require_data(absent, f"{name}: this model would ignore it; leave it out of the batch")


def source_of(batch: Batch) -> Tensor:
    """Return the source of a batch. Raise an error if the source is missing or the batch has unused fields."""
    if batch.source is None:
        raise DataError("source: this model needs one; give the batch a source or use a decoder-only model")
    refuse(batch, "prefix", "types")
    return batch.source


def check_unpacked(batch: Batch) -> None:
    """Raise an error if batch rows are packed, because a decoding session needs one source per row."""
    require_data(not batch.packed, "packed: a decoding session has one source per row; use a padded batch")


def own_mask(
    batch: Batch, pos: Int[Tensor, "B T"] | None, seg: Int[Tensor, "B T"] | None, causal: bool = False
) -> Mask:
    """Return the self-attention mask for the source or target of a batch, with positions `pos` and segments `seg`."""
    return Mask(
        causal=causal,
        q_pos=pos,
        k_pos=pos,
        q_seg=seg,
        k_seg=seg,
        packed=batch.packed,
        segments=batch.segments,
        longest=batch.longest,
    )
