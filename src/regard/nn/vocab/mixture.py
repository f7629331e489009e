"""A mixture of softmaxes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.checks import MOST_HEADS, check_count, check_rate
from regard.nn.core import Site
from regard.nn.label_smoothing import label_smoothed
from regard.nn.precision import widen
from regard.nn.vocab.base import Head, HeadSpec, Scored
from regard.nn.vocab.tables import Table


@dataclass(frozen=True, slots=True)
class MixtureOfSoftmaxes(HeadSpec):
    """log p = logsumexp_k(log pi_k + log softmax(c_k M')), pi = softmax(P h), c_k = tanh(C_k h). Yang et al. 2018.

    h is the hidden state, and M is the vocabulary table. The matrix of log-probabilities of many tokens can have a rank
    above d_model. Label smoothing is as in `Softmax`. There is no z-loss, because each softmax has its own normaliser.
    """

    kind = "mixture_of_softmaxes"
    components: int = 15
    scaled: bool = False  # scale h by d_model^-1/2
    label_smoothing: float = 0.0

    def check(self) -> None:
        check_count("components", self.components, MOST_HEADS)
        check_rate("label_smoothing", self.label_smoothing)

    def build(self, vocab: int, site: Site) -> Head:
        return MixtureOfSoftmaxesModule(self, vocab, site)


class MixtureOfSoftmaxesModule(Head):
    def __init__(self, spec: MixtureOfSoftmaxes, vocab: int, site: Site) -> None:
        super().__init__()
        self.prior = site.linear(site.d_model, {"other": spec.components}, bias=False)
        self.contexts = nn.ModuleList(
            site.linear(site.d_model, {"other": site.d_model}, bias=False) for _ in range(spec.components)
        )
        self.factor = site.d_model**-0.5 if spec.scaled else 1.0
        self.label_smoothing, self.vocab = spec.label_smoothing, vocab

    def components(self, h: Float[Tensor, "*n D"]) -> tuple[Float[Tensor, "*n K"], Float[Tensor, "*n K D"]]:
        """Return log pi_k and the vector c_k of every component k."""
        h = h * self.factor
        contexts = torch.stack([context(h) for context in self.contexts], -2).tanh()
        return widen(self.prior(h)).log_softmax(-1), contexts

    def log_probs(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        assert table is not None
        prior, contexts = self.components(h)
        return (widen(table.logits(contexts)).log_softmax(-1) + prior[..., None]).logsumexp(-2)

    def score(
        self, h: Float[Tensor, "N D"], labels: Int[Tensor, " N"], weights: Float[Tensor, " N"], table: Table | None
    ) -> Scored:
        log_p = self.log_probs(h, table)
        loss = nll = F.nll_loss(log_p, labels, reduction="none")
        if self.training:
            loss = label_smoothed(nll, log_p.mean(-1), self.label_smoothing)
        weights = weights.type_as(log_p)
        return Scored((weights * loss).sum(), (weights * nll).sum().detach())
