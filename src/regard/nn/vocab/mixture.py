"""A mixture of softmaxes."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.nn.checks import MOST_HEADS, check_count, check_rate
from regard.nn.core import Site
from regard.nn.precision import widen
from regard.nn.vocab.base import Head, HeadSpec, Scored, chunk_rows
from regard.nn.vocab.tables import Table


@dataclass(frozen=True, slots=True)
class MixtureOfSoftmaxes(HeadSpec):
    """log p = logsumexp_k(log pi_k + log softmax(c_k M')), pi = softmax(P h), c_k = tanh(C_k h). Yang et al. 2018.

    A sum of softmaxes is no longer bounded in rank by the width of the model. Smoothing is that of a plain softmax;
    there is no z, because a mixture is normalised whatever its logits.
    """

    kind = "mixture_of_softmaxes"
    components: int = 15
    scaled: bool = False  # h * d_model^-1/2 first
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
        self.label_smoothing, self.row_logits = spec.label_smoothing, vocab * spec.components  # a row's

    def components(self, h: Float[Tensor, "*n D"]) -> tuple[Float[Tensor, "*n K"], Float[Tensor, "*n K D"]]:
        """log pi and c."""
        h = h * self.factor
        contexts = torch.stack([context(h) for context in self.contexts], -2).tanh()
        return widen(self.prior(h)).log_softmax(-1), contexts

    def log_probs(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        assert table is not None
        rows = h.reshape(-1, h.shape[-1])
        found = []
        for some in rows.split(max(1, chunk_rows(rows.shape[0], self.row_logits, h.device))):
            prior, contexts = self.components(some)
            found.append((widen(table.logits(contexts)).log_softmax(-1) + prior[..., None]).logsumexp(-2))
        return torch.cat(found).unflatten(0, h.shape[:-1])

    def score(
        self, h: Float[Tensor, "N D"], labels: Int[Tensor, " N"], weights: Float[Tensor, " N"], table: Table | None
    ) -> Scored:
        assert table is not None
        prior, contexts = self.components(h)
        r, matrix = table.readout(contexts)
        label_smoothing = self.label_smoothing if self.training else 0.0
        grad = torch.is_grad_enabled()  # inside a Function, gradients are always disabled
        return Scored(*MixtureEntropy.apply(r, matrix, prior, labels, weights, label_smoothing, grad))


class MixtureEntropy(torch.autograd.Function):
    """Weighted cross-entropy of a mixture of softmax(r_k M') in chunks of rows, its gradient made in the same pass.

    With t the (smoothed) labels, gamma_kv the share of component k in p(v) and g_k = sum_v t_v gamma_kv, the gradient
    of a token's loss is p_k(v) g_k - t_v gamma_kv for the logits, and -g_k for log pi_k.
    """

    @staticmethod
    def forward(
        ctx: Any,
        r: Float[Tensor, "N K R"],
        matrix: Float[Tensor, "V R"],
        prior: Float[Tensor, "N K"],
        labels: Int[Tensor, " N"],
        weights: Float[Tensor, " N"],
        label_smoothing: float,
        grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """(objective, nll), both summed with `weights`; `prior` is log pi."""
        (N, K, _), V = r.shape, matrix.shape[0]
        learns = grad and any(ctx.needs_input_grad[:3])
        objective, plain = (torch.zeros((), dtype=prior.dtype, device=r.device) for _ in range(2))
        d_r = torch.empty_like(r) if learns else None
        d_matrix = torch.zeros(matrix.shape, dtype=prior.dtype, device=r.device) if learns else None
        d_prior = torch.empty_like(prior) if learns else None
        step = max(1, chunk_rows(N, K * V, r.device))
        for at in range(0, N, step):
            rows = slice(at, at + step)
            some, log_pi, weight = r[rows].flatten(0, 1), prior[rows, :, None], weights[rows, None].to(prior.dtype)
            logits = (some @ matrix.T).to(prior.dtype).unflatten(0, (-1, K))
            # log pi_k p_k(v) takes the place of the logits.
            joint = logits.sub_(logits.logsumexp(-1, keepdim=True) - log_pi)
            label = labels[rows, None, None].expand(-1, K, 1)
            said = joint.gather(-1, label).squeeze(-1)
            nll = -said.logsumexp(-1, keepdim=True)
            log_p = joint.logsumexp(1, keepdim=True) if label_smoothing else None
            loss = nll if log_p is None else (1 - label_smoothing) * nll - label_smoothing * log_p.mean(-1)
            objective, plain = objective + (weight * loss).sum(), plain + (weight * nll).sum()
            if d_r is None or d_matrix is None or d_prior is None:
                continue
            hit = weight * (1 - label_smoothing) * (said + nll).exp()
            share = None if log_p is None else (joint - log_p).exp_().mul_((weight * (label_smoothing / V))[..., None])
            pull = hit if share is None else hit + share.sum(-1)
            gradient = joint.sub_(log_pi).exp_().mul_(pull[..., None])
            if share is not None:
                gradient -= share
            gradient.scatter_add_(-1, label, -hit[..., None])
            gradient = gradient.to(r.dtype).flatten(0, 1)
            d_r[rows] = (gradient @ matrix).unflatten(0, (-1, K))
            d_matrix += gradient.T @ some
            d_prior[rows] = -pull
        ctx.save_for_backward(d_r, d_matrix, d_prior)
        ctx.matrix_dtype = matrix.dtype
        ctx.mark_non_differentiable(plain)
        return objective, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        d_objective = d_outputs[0]
        d_r, d_matrix, d_prior = ctx.saved_tensors
        d_matrix = (d_matrix * d_objective).to(ctx.matrix_dtype)
        return (d_r * d_objective).to(d_r.dtype), d_matrix, d_prior * d_objective, *[None] * 4
