"""The interfaces of models: Model, Generator (which decodes step by step), LanguageModel and Classifier."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

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
from regard.nn.trace import Trace
from regard.nn.vocab.base import Head
from regard.nn.vocab.tables import TableSpec
from regard.tree import Spec


class ModelSpec(Spec):
    """The model slot: the specs that each describe a whole model. Every family has the fields annotated here.

    `heads`, `d_head`, `attention_dropout` and `activation_dropout` are fields of the families that have attention.
    """

    __slots__ = ()
    reads_source: ClassVar[bool] = False  # whether it generates a target from a source
    packs: ClassVar[bool] = True  # whether one batch row may hold several texts
    ordered: ClassVar[bool] = False  # whether source order matters whatever the parts are
    vocab: int
    d_model: int
    dropout: float
    table: TableSpec
    input: InputSpec
    linear: Linear
    init: Init

    @abstractmethod
    def build(self, init: Init) -> "Model":
        """Return the model, with weights initialised by `init`."""


class Model(nn.Module):
    """Abstract: a model with a loss."""

    spec: ModelSpec

    __call__: Callable[..., Tensor]

    @abstractmethod
    def forward(self, batch: Batch, trace: Trace | None = None) -> Tensor:
        """Return the logits of tokens or classes, or vectors, for a batch. `trace` records the attention weights."""

    @abstractmethod
    def loss(self, batch: Batch) -> Loss:
        """Return the loss, summed over the labels of a batch."""

    def __repr__(self) -> str:
        return summary(self)


class Generator(Model):
    """Abstract: a model that predicts token by token. Search, sampling and serving use this interface."""

    source_first: ClassVar[bool] = False  # whether the source is part of the target sequence, and of its length
    new_rows = staticmethod(Rows.start)  # regard.fast installs rows whose beams share a cache here
    device_search: Any = None  # regard.fast installs a beam search that stays on the GPU here

    @abstractmethod
    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        """Return a new decoding session that reads at most `max_len` tokens, with `beams` rows per row of the batch.

        With `static`, no tensor shape changes from step to step, as CUDA graphs require. `max_len` counts columns of
        the padded batch, so that every row counts as if it were as long as the longest prompt.
        """

    @abstractmethod
    def advance(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, seg: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """Process new tokens and return log p of the token after the last real one. `seg` is 0 at padding."""


class LanguageModel(Generator):
    """Abstract: a generator with a vocabulary head that reads the last hidden states."""

    tables: Tables
    inputs: Inputs
    head: Head

    def embed(
        self, side: Side, values: Int[Tensor, "B T"] | Float[Tensor, "B T C"], mask: Mask, S: int
    ) -> Float[Tensor, "B T D"]:
        """Return the first hidden states of the source or the target, at the positions that the mask defines."""
        positions = mask.queries(values.shape[1], values.device)
        return self.inputs.embed(side, values, self.tables.get(side), positions, mask.bound(S))

    @abstractmethod
    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        """Return the last hidden states at all positions of the target."""

    @abstractmethod
    def step(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T D"]:
        """Process new tokens and return their last hidden states. The first `counts` per row are real (None: all)."""

    def forward(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        return self.logits(batch, trace)

    def logits(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        """Return unnormalised log-probabilities of every token at every position of the target.

        A head that is not a single softmax (a mixture, an adaptive softmax) returns normalised log-probabilities.
        """
        return self.head.logits(self.hidden(batch, trace=trace), self.tables.get("output"))

    def log_probs(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        """Return log p of every token at every position of the target."""
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
        """Run `step`, update the row lengths, and return the hidden state at the last real token of each row."""
        decoding.rows.claim(ids.shape[1], counts)
        x = self.step(ids, decoding, counts)
        decoding.rows.advance(ids.shape[1], counts)
        return last_real(x, counts)


class Classifier(Model):
    """Abstract: a model that predicts classes."""

    def forward(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B C"] | Float[Tensor, "B T C"]:
        return self.scores(batch, trace=trace)

    @abstractmethod
    def scores(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B C"] | Float[Tensor, "B T C"]:
        """Return unnormalised log-probabilities of the classes."""


def refuse(batch: Batch, *names: str) -> None:
    """Refuse a batch in which a field of `names` is set, because the model would ignore the field."""
    for name in names:
        absent = getattr(batch, name) is None or getattr(batch, name) is False
        require_data(absent, f"{name}: this model would ignore it; leave it out of the batch")


def source_of(batch: Batch) -> Tensor:
    """Return the source of a batch for a model that reads source and target. Refuse fields that it would ignore."""
    if batch.source is None:
        raise DataError("source: this model needs one; give the batch a source or use a decoder-only model")
    refuse(batch, "prefix", "types")
    return batch.source


def check_unpacked(batch: Batch) -> None:
    """Refuse packed rows at the start of a decoding session, which needs one source per row."""
    require_data(not batch.packed, "packed: a decoding session has one source per row; use a padded batch")


def own_mask(
    batch: Batch, pos: Int[Tensor, "B T"] | None, seg: Int[Tensor, "B T"] | None, causal: bool = False
) -> Mask:
    """Return the self-attention mask for the source or the target of a batch."""
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
