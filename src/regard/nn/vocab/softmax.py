"""The softmax head: logits, log-probabilities and loss."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import check_not_negative, check_rate
from regard.nn.core import Site
from regard.nn.precision import widen
from regard.nn.vocab.base import CrossEntropyHead, Head, HeadSpec, Scored
from regard.nn.vocab.tables import Table


@dataclass(frozen=True, slots=True)
class Softmax(HeadSpec):
    """log p = log softmax(h M' + b), with the hidden state h and the vocabulary table M.

    With s = `label_smoothing`, each token's training loss is (1 - s) * nll + s * mean_v(-log p_v) + z_loss * (log Z)^2:
    label smoothing (Szegedy et al. 2016, as defined in torch) and the z-loss of T5, where Z is the denominator of the
    softmax. Evaluation uses neither.
    """

    kind = "softmax"
    scaled: bool = False  # scale h by d_model^-1/2, as in T5, whose tied table has unit variance
    bias: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def check(self) -> None:
        check_rate("label_smoothing", self.label_smoothing)
        check_not_negative("z_loss", self.z_loss)

    def build(self, vocab: int, site: Site) -> Head:
        return SoftmaxModule(self, vocab, site.d_model)


class SoftmaxModule(CrossEntropyHead):
    def __init__(self, spec: Softmax, vocab: int, d_model: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab)) if spec.bias else None
        self.factor = d_model**-0.5 if spec.scaled else 1.0
        self.label_smoothing, self.z_loss = spec.label_smoothing, spec.z_loss

    def logits(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        assert table is not None
        logits = widen(table.logits(h * self.factor))
        return logits if self.bias is None else logits + self.bias

    def log_probs(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        return self.logits(h, table).log_softmax(-1)

    def score(
        self, h: Float[Tensor, "N D"], labels: Int[Tensor, " N"], weights: Float[Tensor, " N"], table: Table | None
    ) -> Scored:
        assert table is not None
        r, matrix = table.readout(h * self.factor)
        return self.cross_entropy(r, matrix, self.bias, labels, weights)
