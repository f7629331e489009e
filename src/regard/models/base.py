"""The interfaces of models: Model, Generator (decodes step by step), LanguageModel, Classifier."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.batch import Batch, check_padding, readable, require_data
from regard.errors import DataError
from regard.models.decoding import Decoding, last_real
from regard.models.embedding import Tables
from regard.models.loss import Loss, token_loss
from regard.models.summary import summary
from regard.nn.cache import Rows
from regard.nn.init import Init
from regard.nn.mask import Mask
from regard.nn.trace import Trace
from regard.nn.vocab.base import Head
from regard.tree import Spec


class ModelSpec(Spec):
    """Slot: describes a whole model."""

    __slots__ = ()
    reads_source: ClassVar[bool] = False  # whether it generates a target from a source
    packs: ClassVar[bool] = True  # whether several texts may stand in one row
    ordered: ClassVar[bool] = False  # whether it depends on the order of its source whatever its parts are
    init: Init  # every family has this field: how its weights are drawn

    @abstractmethod
    def build(self, init: Init) -> "Model":
        """The model, its weights drawn by `init`."""


class Model(nn.Module):
    """Abstract: a model with a loss."""

    spec: ModelSpec

    __call__: Callable[..., Tensor]

    @abstractmethod
    def forward(self, batch: Batch, trace: Trace | None = None) -> Tensor:
        """The prediction for a batch: logits of tokens or classes, or vectors. `trace` records attention weights."""

    @abstractmethod
    def loss(self, batch: Batch) -> Loss:
        """The summed loss of a batch."""

    def __repr__(self) -> str:
        return summary(self)


class Generator(Model):
    """Abstract: a model that predicts one token after another: the interface of search, sampling and serving."""

    source_first: ClassVar[bool] = False  # the source is the beginning of the sequence, and counts towards its length
    new_rows = staticmethod(Rows.start)  # regard.fast installs rows whose beams share a cache here
    device_search: Any = None  # regard.fast installs a beam search that stays on the GPU here

    @abstractmethod
    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        """Begin a decoding of at most `max_len` read tokens, with `beams` rows for each row of the batch.

        `static` keeps every shape the same from step to step, for CUDA graphs. The length is counted in columns: all
        rows count as long as the longest prompt.
        """

    @abstractmethod
    def advance(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, seg: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """Process new tokens (segment 0 is padding) and return log p of the token after the last real one."""


class LanguageModel(Generator):
    """Abstract: a generator whose last hidden states go through a head over a vocabulary table."""

    tables: "Tables"
    head: Head

    @abstractmethod
    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        """The last hidden states of the whole target."""

    @abstractmethod
    def step(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T D"]:
        """Process new tokens, `counts` of them real in each row (None: all); return their last hidden states."""

    def forward(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        """The logits of a batch, as `logits`."""
        return self.logits(batch, trace)

    def logits(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        """Unnormalised log-probabilities of every token at every position of the target.

        A head that is not one softmax (a mixture, an adaptive one) returns its normalised log-probabilities.
        """
        return self.head.logits(self.hidden(batch, trace=trace), self.tables.get("output"))

    def log_probs(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        """log p of every token at every position of the target."""
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
        require_data(valid, f"ids: this decoding reads {rows} rows of one or more tokens, not {tuple(ids.shape)}")
        counts = None
        if seg is not None:
            require_data(seg.shape == ids.shape, f"seg: {tuple(seg.shape)} does not fit ids of {tuple(ids.shape)}")
            check_padding("seg", seg)
            counts = (seg != 0).sum(1)
            if readable(counts) and bool((counts == 0).any()):
                raise DataError(f"seg: row {int((counts == 0).nonzero()[0])} reads no token")
        return self.head.log_probs(self.consume(ids, decoding, counts), self.tables.get("output"))

    def consume(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B D"]:
        """`step`, with the lengths of the rows updated; return the hidden state at the last real token."""
        decoding.rows.claim(ids.shape[1], counts)
        x = self.step(ids, decoding, counts)
        decoding.rows.advance(ids.shape[1], counts)
        return last_real(x, counts)


class Classifier(Model):
    """Abstract: a model that predicts classes."""

    def forward(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B C"] | Float[Tensor, "B T C"]:
        """The logits of the classes, as `scores`."""
        return self.scores(batch, trace=trace)

    @abstractmethod
    def scores(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B C"] | Float[Tensor, "B T C"]:
        """Unnormalised log-probabilities of the classes."""


def refuse(batch: Batch, *names: str) -> None:
    """Refuse fields of a batch that the model would ignore."""
    for name in names:
        ignored = getattr(batch, name)
        require_data(
            ignored is None or ignored is False, f"{name}: this model would ignore it; leave it out of the batch"
        )


def source_of(batch: Batch) -> Tensor:
    """The source of a batch for a model that reads source and target; refuses fields that the model would ignore."""
    if batch.source is None:
        raise DataError("source: this model needs one; give the batch a source or use a decoder-only model")
    refuse(batch, "prefix", "types")
    return batch.source


def check_unpacked(batch: Batch) -> None:
    """Refuse packed rows at the start of a decoding, which has one source per row."""
    require_data(not batch.packed, "packed: a decoding has one source per row; give it a padded batch")


def own_mask(
    batch: Batch, pos: Int[Tensor, "B T"] | None, seg: Int[Tensor, "B T"] | None, causal: bool = False
) -> Mask:
    """The self-attention mask of one side of a batch."""
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
