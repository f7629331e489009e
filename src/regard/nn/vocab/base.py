"""Base classes of output heads, and the cross-entropy with label smoothing and z-loss that most heads use."""

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.core import Site
from regard.nn.label_smoothing import label_smoothed
from regard.nn.precision import widen
from regard.nn.vocab.tables import Table, TableSpec
from regard.tree import Spec


class Scored(NamedTuple):
    """The training objective and the negative log-likelihood (nll), as weighted sums over tokens."""

    objective: Float[Tensor, ""]
    nll: Float[Tensor, ""]


class HeadSpec(Spec):
    """Abstract base class of specs for output heads, which predict ids from hidden states."""

    __slots__ = ()
    needs_table: ClassVar[bool] = True  # whether the head uses a vocabulary table as its output matrix

    def check_table(self, table: TableSpec, tied: bool) -> None:  # most heads accept every table
        """Raise a `SpecError` if the head cannot use `table`. If `tied`, `table` is also an input embedding table."""

    @abstractmethod
    def build(self, vocab: int, site: Site) -> "Head":
        """Build the head for a vocabulary of `vocab` ids."""


class Head(nn.Module):
    """Abstract base class of output heads, which map hidden states to probability distributions over ids."""

    def logits(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        """Return the logit of every id, or its log-probability if the head is not a single softmax."""
        return self.log_probs(h, table)

    @abstractmethod
    def log_probs(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        """Return log p of every id, in at least float32. `table` is None for a head with its own output matrix."""

    @abstractmethod
    def score(
        self, h: Float[Tensor, "N D"], labels: Int[Tensor, " N"], weights: Float[Tensor, " N"], table: Table | None
    ) -> Scored:
        """Return the weighted sums, over N tokens, of the training objective and of the negative log-likelihood.

        In evaluation, the objective is the negative log-likelihood.
        """


class CrossEntropyHead(Head):
    """Abstract base class of heads trained by cross-entropy with label smoothing and z-loss."""

    label_smoothing: float
    z_loss: float

    def cross_entropy(
        self,
        r: Float[Tensor, "N R"],
        matrix: Float[Tensor, "V R"],
        bias: Float[Tensor, " V"] | None,
        labels: Int[Tensor, " N"],
        weights: Float[Tensor, " N"],
    ) -> Scored:
        """Return the weighted sum over N tokens of the cross-entropy of softmax(r M' + b), where M is `matrix`.

        In training, the objective includes label smoothing and z_loss * (log Z)^2 per token, with Z = sum exp(logits).
        """
        logits = widen(r @ matrix.T)
        if bias is not None:
            logits = logits + bias
        log_probs = logits.log_softmax(-1)
        loss = nll = F.nll_loss(log_probs, labels, reduction="none")
        if self.training:
            loss = label_smoothed(nll, log_probs.mean(-1), self.label_smoothing)
            loss = loss + self.z_loss * logits.logsumexp(-1).square()
        weights = weights.type_as(logits)
        return Scored((weights * loss).sum(), (weights * nll).sum().detach())
