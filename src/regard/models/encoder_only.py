"""Encoder-only models (Devlin et al. 2019): masked language models, and classifiers of sentences and tokens."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.batch import Batch
from regard.errors import DataError, SpecError
from regard.models.base import Classifier, Model, ModelSpec, own_mask, refuse
from regard.models.build import check_sizes, check_vocab, site_of
from regard.models.decoding import last_real
from regard.models.embedding import Inputs, Tables
from regard.models.loss import Loss, label_weights, real_rows, token_loss
from regard.nn.activation import ACTIVATIONS, Activation
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.checks import check_rate
from regard.nn.core import Site
from regard.nn.embedding import Tokens
from regard.nn.init import Init, Xavier
from regard.nn.input import InputSpec
from regard.nn.label_smoothing import label_smoothed
from regard.nn.linear import Dense, Linear
from regard.nn.mask import Context, View
from regard.nn.norm import LayerNorm, Norm
from regard.nn.precision import widen
from regard.nn.stacks.base import StackOut, StackSpec
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Table, TableSpec
from regard.tree import Spec

Pooling = Literal["first", "mean", "last", "ends", "max", "mean_max"]


class Task(Spec):
    """Base class of tasks: what an encoder-only model predicts, such as masked tokens or classes."""

    __slots__ = ()

    @abstractmethod
    def build(self, spec: "EncoderOnly", encoder: "EncoderBody", site: Site) -> Model:
        """Return the model for this task: the encoder with an output head."""


@dataclass(frozen=True, slots=True)
class EncoderOnly(ModelSpec):
    """Bidirectional Transformer encoder with a head for a `task`. Every token attends to all tokens of its text."""

    kind = "encoder_only"
    task: Task
    vocab: int = 32000
    d_model: int = 512
    heads: int = 8
    d_head: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    table: TableSpec = Embeddings()
    input: InputSpec = Tokens()
    encoder: StackSpec = Plain((Block((SelfAttention(), FeedForward())),))
    linear: Linear = Dense()
    init: Init = Xavier()

    def check(self) -> None:
        check_sizes(self)
        check_vocab("vocab", self.vocab)

    def build(self, init: Init) -> Model:
        depths, branches = (self.encoder.blocks(), 0), self.encoder.residual_branches()
        site = site_of(self, init, "encoder", causal=False, depths=depths, branches=branches)
        return self.task.build(self, EncoderBody(self, site), site.inside("task"))


class EncoderBody(nn.Module):
    """Encoder without a head, which maps token ids, or vectors, to the output of the last layer."""

    def __init__(self, spec: EncoderOnly, site: Site) -> None:
        super().__init__()
        reads_vectors = spec.input.vector_channels > 0
        width = 0 if reads_vectors else spec.input.table_width(spec.d_model)
        self.tables = Tables(spec.table, site, {} if reads_vectors else {"source": ("source", spec.vocab, width)})
        self.inputs = Inputs(spec.input, {"source": site}, shared=False)
        self.stack = spec.encoder.build(site.inside("encoder"))
        self.width = width

    def forward(self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None) -> StackOut:
        values, T, device = batch.target, batch.target.shape[1], batch.target.device
        refuse(batch, "source", "prefix")
        mask = own_mask(batch, batch.target_pos, batch.target_seg)
        positions = mask.positions(T, T, device)[0]
        x = self.inputs.embed("source", values, self.tables.get("source"), positions, mask.bound(T), batch.types)
        return self.stack(x, Context(View(mask, T, T, device), losses=losses, trace=trace))


@dataclass(frozen=True, slots=True)
class MaskedLM(Task):
    """Masked language modelling (Devlin et al. 2019), with a dense layer, activation and norm before the head."""

    kind = "masked_lm"
    activation: Activation = "gelu"
    norm: Norm = LayerNorm(eps=1e-12)
    head: HeadSpec = Softmax(bias=True)
    tied: bool = True

    def build(self, spec: "EncoderOnly", encoder: EncoderBody, site: Site) -> Model:
        check_length(spec)
        return MaskedLMModel(self, spec, encoder, site)


class MaskedLMModel(Model):
    """Module of `MaskedLM`. For the loss, `batch.weights` must be 1 at masked tokens and 0 elsewhere."""

    def __init__(self, task: MaskedLM, spec: EncoderOnly, encoder: EncoderBody, site: Site) -> None:
        super().__init__()
        self.spec, self.encoder = spec, encoder
        self.transform = site.linear(spec.d_model, {"other": spec.d_model})
        self.activate = ACTIVATIONS[task.activation]
        self.norm = task.norm.build(site.inside("norm"))
        if not encoder.width:
            raise site.error("kind", "'masked_lm' predicts the tokens that it reads, but this input reads vectors")
        try:
            task.head.check_table(spec.table, task.tied)
        except SpecError as error:
            raise error.inside(site.path) from None
        self.head = task.head.build(spec.vocab, site.inside("head"))
        if task.tied and encoder.width != spec.d_model:
            raise site.error("tied", f"the input table is {encoder.width} wide and the output {spec.d_model}")
        self.own = None if task.tied else spec.table.build(spec.vocab, spec.d_model, site.inside("table"))

    def table(self) -> Table | None:
        """Return the embedding table from which the head computes logits, or None if the head needs no table."""
        return self.own if self.own is not None else self.encoder.tables.get("source")

    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        """Return the hidden state of every token: the encoder's output after the dense layer, activation and norm."""
        return self.norm(self.activate(self.transform(self.encoder(batch, losses, trace).x)))

    def forward(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        return self.head.logits(self.hidden(batch, trace=trace), self.table())

    def log_probs(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        """Return the log-probabilities of all vocabulary tokens at every position."""
        return self.head.log_probs(self.hidden(batch, trace=trace), self.table())

    def loss(self, batch: Batch) -> Loss:
        losses: list[Tensor] | None = [] if self.training else None
        return token_loss(self.head, self.table(), self.hidden(batch, losses), batch, losses)


@dataclass(frozen=True, slots=True)
class Pooled(Task):
    """One vector per text, tanh(x W + b) with the first token's vector x, as in BERT's pooler. The task has no loss."""

    kind = "pooled"

    def build(self, spec: "EncoderOnly", encoder: EncoderBody, site: Site) -> Model:
        return PooledModel(spec, encoder, Pool("first", True, site), site)


@dataclass(frozen=True, slots=True)
class SentenceClassifier(Task):
    """Classifier of whole texts, which predicts one class from one pooled vector x.

    `pool` selects x. "first" is the vector of the first token. "last" is the vector of the last token (for a recurrent
    encoder). "ends" concatenates both (for a bidirectional recurrent encoder). "mean" is the mean over tokens. "max" is
    the maximum of each channel (Collobert et al. 2011). "mean_max" concatenates both (Howard and Ruder 2018). With
    `pooler`, tanh(x W + b) replaces x, as in BERT.

    With label smoothing s (Szegedy et al. 2016, as in torch) and class probabilities p_c, the training loss of a text
    is (1 - s) * nll + s * mean_c(-log p_c).
    """

    kind = "sentence_classifier"
    classes: int
    pool: Pooling = "first"
    pooler: bool = True
    label_smoothing: float = 0.0

    def check(self) -> None:
        check_classes(self.classes)
        check_rate("label_smoothing", self.label_smoothing)

    def build(self, spec: "EncoderOnly", encoder: EncoderBody, site: Site) -> Model:
        return SentenceClassifierModel(self, spec, encoder, site)


@dataclass(frozen=True, slots=True)
class TokenClassifier(Task):
    """Classifier of tokens, which predicts one class per token, as in part-of-speech tagging."""

    kind = "token_classifier"
    classes: int

    def check(self) -> None:
        check_classes(self.classes)

    def build(self, spec: "EncoderOnly", encoder: EncoderBody, site: Site) -> Model:
        check_length(spec)
        return TokenClassifierModel(self, spec, encoder, site)


def check_length(spec: EncoderOnly) -> None:
    """Raise SpecError if the encoder shortens the sequence, because the task needs one vector per token."""
    if spec.encoder.shortens:
        problem = f"{spec.encoder.kind!r} leaves fewer vectors than tokens"
        raise SpecError("encoder", f"{problem}; use the task 'sentence_classifier' or the encoder 'plain'")


def check_classes(classes: int) -> None:
    """Raise SpecError if `classes` is below 2."""
    if classes < 2:
        raise SpecError("classes", f"must be at least 2, not {classes}")


def first(out: StackOut) -> Float[Tensor, "B D"]:
    """Return the encoder's output at the first token of each batch row."""
    return out.x[:, 0]


def last(out: StackOut) -> Float[Tensor, "B D"]:
    """Return the encoder's output at the last token of each batch row, ignoring padding."""
    return last_real(out.x, None if out.seg is None else (out.seg != 0).sum(1))


def mean(out: StackOut) -> Float[Tensor, "B D"]:
    """Return the mean of the encoder's output over the tokens of each batch row, ignoring padding."""
    if out.seg is None:
        return out.x.mean(1)
    real = (out.seg != 0).to(out.x.dtype)[:, :, None]
    return (out.x * real).sum(1) / real.sum(1).clamp(min=1)


def maximum(out: StackOut) -> Float[Tensor, "B D"]:
    """Return the maximum of each channel over the tokens of a batch row, ignoring padding (0 if all is padding)."""
    if out.seg is None:
        return out.x.amax(1)
    padding = (out.seg == 0)[:, :, None]
    return out.x.masked_fill(padding, -torch.inf).amax(1).masked_fill(padding.all(1), 0.0)


POOLS: dict[Pooling, tuple[Callable[[StackOut], Tensor], ...]] = {
    "first": (first,),
    "mean": (mean,),
    "last": (last,),
    "ends": (first, last),
    "max": (maximum,),
    "mean_max": (mean, maximum),
}


class Pool(nn.Module):
    """Module that pools the encoder's output to one vector per batch row, as set by `pooling`."""

    def __init__(self, pooling: Pooling, projected: bool, site: Site) -> None:
        super().__init__()
        self.pools = POOLS[pooling]
        width = len(self.pools) * site.d_model
        self.pooler = site.linear(width, {"other": site.d_model}) if projected else None
        self.width = site.d_model if projected else width

    def forward(self, out: StackOut, batch: Batch) -> Float[Tensor, "B W"]:
        if batch.packed:
            raise DataError("packed: a packed row holds several texts but would get one class; use padded batches")
        x = torch.cat([pool(out) for pool in self.pools], -1)
        return x if self.pooler is None else self.pooler(x).tanh()


class PooledModel(Model):
    def __init__(self, spec: EncoderOnly, encoder: EncoderBody, pool: Pool, site: Site) -> None:
        super().__init__()
        self.spec, self.encoder, self.pool, self.site = spec, encoder, pool, site

    def forward(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B D"]:
        return self.pool(self.encoder(batch, trace=trace), batch)

    def loss(self, batch: Batch) -> Loss:  # noqa: ARG002
        remedy = "choose masked_lm, sentence_classifier or token_classifier to train"
        raise self.site.error("kind", f"'pooled' predicts nothing; {remedy}")


class SentenceClassifierModel(Classifier):
    def __init__(self, task: SentenceClassifier, spec: EncoderOnly, encoder: EncoderBody, site: Site) -> None:
        super().__init__()
        self.spec, self.encoder, self.dropout = spec, encoder, nn.Dropout(site.dropout)
        self.pool = Pool(task.pool, task.pooler, site)
        self.classes = site.linear(self.pool.width, {"head": task.classes}, bias=True)
        self.label_smoothing = task.label_smoothing

    def scores(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B C"]:
        pooled = self.pool(self.encoder(batch, losses, trace), batch)
        return self.classes(self.dropout(pooled))

    def loss(self, batch: Batch) -> Loss:
        if batch.labels is None or batch.labels.dim() != 1:
            raise DataError("labels: sentence classification needs one label per row")
        refuse(batch, "weights")
        losses: list[Tensor] | None = [] if self.training else None
        log_probs = widen(self.scores(batch, losses)).log_softmax(-1)
        nll = F.nll_loss(log_probs, batch.labels, reduction="sum")
        s = self.label_smoothing if self.training else 0.0
        total = label_smoothed(nll, log_probs.mean(-1).sum(), s)
        return classified(total, nll, nll.new_full((), float(batch.labels.shape[0])), losses)


class TokenClassifierModel(Classifier):
    def __init__(self, task: TokenClassifier, spec: EncoderOnly, encoder: EncoderBody, site: Site) -> None:
        super().__init__()
        self.spec, self.encoder, self.dropout = spec, encoder, nn.Dropout(site.dropout)
        self.classes = site.linear(spec.d_model, {"head": task.classes}, bias=True)

    def scores(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T C"]:
        return self.classes(self.dropout(self.encoder(batch, losses, trace).x))

    def loss(self, batch: Batch) -> Loss:
        if batch.labels is None or batch.labels.shape != batch.target.shape[:2]:
            raise DataError("labels: token classification needs one label per token")
        losses: list[Tensor] | None = [] if self.training else None
        scores, labels, weights = real_rows(self.scores(batch, losses), batch.labels, label_weights(batch))
        total = (F.cross_entropy(widen(scores), labels, reduction="none") * weights).sum()
        return classified(total, total, weights.sum(), losses)


def classified(total: Tensor, nll: Tensor, tokens: Tensor, losses: list[Tensor] | None) -> Loss:
    """Return the `Loss` of a classifier. The auxiliary losses of its modules, `losses`, are summed."""
    return Loss(total, tokens, sum(losses or (), total.new_zeros(())), nll.detach())
