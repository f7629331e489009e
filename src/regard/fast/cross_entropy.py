"""Cross-entropy and its gradient, computed in one pass over chunks of tokens. The logits (N, V) are never stored."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.nn.label_smoothing import label_smoothed
from regard.nn.vocab.adaptive import AdaptiveSoftmaxModule
from regard.nn.vocab.base import CrossEntropyHead, Scored
from regard.nn.vocab.mixture import MixtureOfSoftmaxesModule
from regard.nn.vocab.softmax import SoftmaxModule
from regard.nn.vocab.tables import Table


def chunk_rows(rows: int, vocab: int, device: torch.device) -> int:
    """Return the number of tokens in a chunk. Its float32 logits take up to about 256 MiB, or 32 MiB on a CPU.

    Blocks of 32 MiB suit a CPU's caches, and malloc reuses them in the next step. Larger blocks are returned to the
    operating system, which clears every page of a new block.
    """
    budget = 2**23 if device.type == "cpu" else 2**26
    chunks = max(1, -(-rows * vocab // budget))
    return -(-rows // chunks)


class CrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy of softmax(r M' + b) and its gradient, computed in one pass over chunks of tokens.

    r are the hidden states, M is the output matrix, and b is its bias. The gradient of a chunk overwrites its logits,
    so nothing is computed twice. There are three matrix products per chunk, as many as with stored logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        r: Float[Tensor, "N R"],
        matrix: Float[Tensor, "V R"],
        bias: Float[Tensor, " V"] | None,
        labels: Int[Tensor, " N"],
        weights: Float[Tensor, " N"],
        label_smoothing: float,
        z: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the objective and the negative log-likelihood, both weighted by `weights` and summed over tokens."""
        N, V = r.shape[0], matrix.shape[0]
        needs_gradient = any(ctx.needs_input_grad[:3])
        wide = torch.float64 if r.dtype == torch.float64 else torch.float32
        objective, nll_sum = (torch.zeros((), dtype=wide, device=r.device) for _ in range(2))
        d_r = torch.empty_like(r) if needs_gradient else None
        # The first chunk allocates the gradient. If there are no tokens, there is no chunk.
        d_matrix = torch.zeros(matrix.shape, dtype=wide, device=r.device) if needs_gradient and not N else None
        d_bias = torch.zeros(V, dtype=wide, device=r.device) if needs_gradient and bias is not None else None
        # Label smoothing needs the mean logit of each token. The product with the mean row of the matrix gives it
        # without a pass over the logits.
        centre = matrix.to(wide).mean(0) if label_smoothing else None
        shift = 0.0 if bias is None or not label_smoothing else bias.to(wide).mean()
        step = max(1, chunk_rows(N, V, r.device))
        # On a CPU all chunks share one buffer. Compilers, and autocast on other devices, require plain products.
        direct = r.device.type == "cpu" and r.dtype == matrix.dtype == wide and not torch.compiler.is_compiling()
        buffer = torch.empty(step, V, dtype=wide) if direct else None
        for at in range(0, N, step):
            rows = slice(at, at + step)
            part = r[rows]
            logits = (part @ matrix.T).to(wide) if buffer is None else torch.mm(part, matrix.T, out=buffer[: len(part)])
            if bias is not None:
                logits += bias
            label, weight = labels[rows, None], weights[rows].to(wide)
            label_logit = logits.gather(-1, label).squeeze(-1)
            mean = None if centre is None else (part * centre).sum(-1) + shift
            # The exponentials overwrite the logits.
            top = logits.amax(-1, keepdim=True)
            exponentials = logits.sub_(top).exp_()
            total = exponentials.sum(-1)
            log_z = total.log() + top.squeeze(-1)
            nll = log_z - label_logit
            loss = nll if mean is None else label_smoothed(nll, mean - log_z, label_smoothing)
            if z:
                loss = loss + z * log_z.square()
            objective, nll_sum = objective + (weight * loss).sum(), nll_sum + (weight * nll).sum()
            if d_r is None:
                continue
            # d loss / d logits = p (1 + 2 z log Z) - (1 - smoothing) [v = label] - smoothing / V
            scale = weight / total
            gradient = exponentials.mul_((scale * (1 + 2 * z * log_z) if z else scale)[:, None])
            gradient.scatter_add_(-1, label, (weight * (label_smoothing - 1))[:, None])
            if d_bias is not None:
                d_bias += gradient.sum(0)
            gradient = gradient.to(r.dtype)
            d_r[rows] = gradient @ matrix
            d_matrix = _add_product(d_matrix, gradient.T, part, wide, direct)
        if centre is not None and d_r is not None and d_matrix is not None:
            # The last term of d loss / d logits is equal in every column, so its products are outer products.
            share = (label_smoothing * weights.to(wide))[:, None]
            d_r -= (share * centre).to(r.dtype)
            d_matrix -= (share * r).sum(0) / V
            d_bias = None if d_bias is None else d_bias - share.sum() / V
        ctx.save_for_backward(d_r, d_matrix, d_bias)
        ctx.matrix_dtype = matrix.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(nll_sum)
        return objective, nll_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        d_objective = d_outputs[0]
        d_r, d_matrix, d_bias = ctx.saved_tensors
        return (
            (d_r * d_objective).to(d_r.dtype),
            (d_matrix * d_objective).to(ctx.matrix_dtype),
            None if d_bias is None else (d_bias * d_objective).to(ctx.bias_dtype),
            None,
            None,
            None,
            None,
        )


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, wide: torch.dtype, direct: bool) -> Tensor:
    """Return total + a @ b, computed in place, or a @ b if `total` is None."""
    if total is None:
        return (a @ b).to(wide)
    return torch.addmm(total, a, b, out=total) if direct else total.add_(a @ b)


class FusedCrossEntropy(CrossEntropyHead):
    """Abstract base class of vocabulary heads that compute cross-entropy in chunks of tokens."""

    def cross_entropy(
        self,
        r: Float[Tensor, "N R"],
        matrix: Float[Tensor, "V R"],
        bias: Float[Tensor, " V"] | None,
        labels: Int[Tensor, " N"],
        weights: Float[Tensor, " N"],
    ) -> Scored:
        if not torch.is_grad_enabled():  # a Function cannot detect this, and would compute all gradients
            r, matrix, bias = r.detach(), matrix.detach(), None if bias is None else bias.detach()
        loss = (self.label_smoothing, self.z_loss) if self.training else (0.0, 0.0)
        return Scored(*CrossEntropy.apply(r, matrix, bias, labels, weights, *loss))


class FusedSoftmax(FusedCrossEntropy, SoftmaxModule):
    """Softmax head that computes cross-entropy in chunks of tokens."""


class FusedAdaptiveSoftmax(FusedCrossEntropy, AdaptiveSoftmaxModule):
    """Adaptive softmax that computes cross-entropy in chunks. On a CPU, each tail cluster reads only its own tokens."""

    def members(
        self,
        inside: Bool[Tensor, " N"],
        h: Float[Tensor, "N D"],
        labels: Int[Tensor, " N"],
        weights: Float[Tensor, " N"],
    ) -> tuple[Float[Tensor, "n D"], Int[Tensor, " n"], Float[Tensor, " n"]]:
        # A CUDA graph needs fixed shapes, and the host would wait for the number of tokens.
        if h.device.type != "cpu" or torch.compiler.is_compiling():
            return super().members(inside, h, labels, weights)
        rows = inside.nonzero().squeeze(-1)
        return h[rows], labels[rows], weights[rows]


class FusedMixture(MixtureOfSoftmaxesModule):
    """Mixture of softmaxes that computes probabilities and loss in chunks of tokens."""

    def log_probs(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        rows = h.reshape(-1, h.shape[-1])
        chunk = max(1, chunk_rows(rows.shape[0], self.vocab * len(self.contexts), h.device))
        return torch.cat([super(FusedMixture, self).log_probs(part, table) for part in rows.split(chunk)]).unflatten(
            0, h.shape[:-1]
        )

    def score(
        self, h: Float[Tensor, "N D"], labels: Int[Tensor, " N"], weights: Float[Tensor, " N"], table: Table | None
    ) -> Scored:
        assert table is not None
        prior, contexts = self.components(h)
        r, matrix = table.readout(contexts)
        if not torch.is_grad_enabled():  # as in FusedCrossEntropy
            r, matrix, prior = r.detach(), matrix.detach(), prior.detach()
        smoothing = self.label_smoothing if self.training else 0.0
        return Scored(*MixtureEntropy.apply(r, matrix, prior, labels, weights, smoothing))


class MixtureEntropy(torch.autograd.Function):
    """Weighted cross-entropy of a mixture p = sum_k pi_k p_k with p_k = softmax(r_k M'), in chunks of tokens.

    The gradient is computed in the same pass. Let t_v be the probability of vocabulary token v in the (smoothed) label
    distribution. Let gamma_kv = pi_k * p_k(v) / p(v) and g_k = sum_v t_v * gamma_kv. Then

        d loss / d logit_kv = p_k(v) * g_k - t_v * gamma_kv,
        d loss / d log pi_k = -g_k.
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
    ) -> tuple[Tensor, Tensor]:
        """Return objective and negative log-likelihood, weighted and summed over tokens. `prior` is log pi."""
        (N, K, _), V = r.shape, matrix.shape[0]
        needs_gradient = any(ctx.needs_input_grad[:3])
        objective, nll_sum = (torch.zeros((), dtype=prior.dtype, device=r.device) for _ in range(2))
        d_r = torch.empty_like(r) if needs_gradient else None
        d_matrix = torch.zeros(matrix.shape, dtype=prior.dtype, device=r.device) if needs_gradient else None
        d_prior = torch.empty_like(prior) if needs_gradient else None
        step = max(1, chunk_rows(N, K * V, r.device))
        for at in range(0, N, step):
            rows = slice(at, at + step)
            part, log_pi, weight = r[rows].flatten(0, 1), prior[rows, :, None], weights[rows, None].to(prior.dtype)
            logits = (part @ matrix.T).to(prior.dtype).unflatten(0, (-1, K))
            # log(pi_k * p_k(v)) overwrites the logits.
            joint = logits.sub_(logits.logsumexp(-1, keepdim=True) - log_pi)
            label = labels[rows, None, None].expand(-1, K, 1)
            label_joint = joint.gather(-1, label).squeeze(-1)
            nll = -label_joint.logsumexp(-1, keepdim=True)
            log_p = joint.logsumexp(1, keepdim=True) if label_smoothing else None
            loss = nll if log_p is None else label_smoothed(nll, log_p.mean(-1), label_smoothing)
            objective, nll_sum = objective + (weight * loss).sum(), nll_sum + (weight * nll).sum()
            if d_r is None or d_matrix is None or d_prior is None:
                continue
            hit = weight * (1 - label_smoothing) * (label_joint + nll).exp()
            share = None if log_p is None else (joint - log_p).exp_().mul_((weight * (label_smoothing / V))[..., None])
            pull = hit if share is None else hit + share.sum(-1)
            gradient = joint.sub_(log_pi).exp_().mul_(pull[..., None])
            if share is not None:
                gradient -= share
            gradient.scatter_add_(-1, label, -hit[..., None])
            gradient = gradient.to(r.dtype).flatten(0, 1)
            d_r[rows] = (gradient @ matrix).unflatten(0, (-1, K))
            d_matrix += gradient.T @ part
            d_prior[rows] = -pull
        ctx.save_for_backward(d_r, d_matrix, d_prior)
        ctx.matrix_dtype = matrix.dtype
        ctx.mark_non_differentiable(nll_sum)
        return objective, nll_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        d_objective = d_outputs[0]
        d_r, d_matrix, d_prior = ctx.saved_tensors
        d_matrix = (d_matrix * d_objective).to(ctx.matrix_dtype)
        return (d_r * d_objective).to(d_r.dtype), d_matrix, d_prior * d_objective, None, None, None
