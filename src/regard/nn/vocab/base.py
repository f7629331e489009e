"""What all heads share: their slot, what a loss is, and the cross-entropy of logits that never exist at once."""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.nn.core import Site
from regard.nn.vocab.tables import Table, TableSpec
from regard.tree import Spec


class Scored(NamedTuple):
    """A weighted sum over tokens: what is minimised, and the plain negative log-likelihood for the log."""

    objective: Float[Tensor, ""]
    nll: Float[Tensor, ""]


class HeadSpec(Spec):
    """Slot: describes a head."""

    __slots__ = ()
    needs_table: ClassVar[bool] = True  # False: the head brings its own

    def check_table(self, table: TableSpec, tied: bool) -> None:  # most heads read any
        """Refuse a table that this head cannot read; `tied`: it is an input's, too."""

    @abstractmethod
    def build(self, vocab: int, site: Site) -> "Head":
        """The head at the end of this site's stream."""


class Head(nn.Module):
    """Abstract: a normalised distribution over ids."""

    def logits(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        """Unnormalised log-probabilities of every id; of a head that is not one softmax, the normalised ones."""
        return self.log_probs(h, table)

    @abstractmethod
    def log_probs(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        """log p of every id, at least in float32. `table` is None for a head that brings its own."""

    @abstractmethod
    def score(
        self, h: Float[Tensor, "N D"], labels: Int[Tensor, " N"], weights: Float[Tensor, " N"], table: Table | None
    ) -> Scored:
        """The weighted sum of the loss over N tokens. The plain negative log-likelihood when not training."""


def chunk_rows(rows: int, vocab: int, device: torch.device) -> int:
    """How many rows of logits exist at a time: 256 MiB of float32, or 32 MiB on a CPU.

    That much stays near its caches, and is the most that malloc keeps for the next step: what is larger it returns to
    the system, which clears every page of it anew.
    """
    budget = {"cpu": 2**23}.get(device.type, 2**26)
    pieces = max(1, -(-rows * vocab // budget))
    return -(-rows // pieces)


class CrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy of r M' + b in chunks of rows, with its gradient made in the same pass.

    The logits of a chunk are turned into their own gradient in place, so (N, V) never exists and nothing is computed
    twice: three matrix products, as with a stored logits matrix.
    """

    @staticmethod
    def forward(
        ctx: Any,
        r: Float[Tensor, "N R"],
        matrix: Float[Tensor, "V R"],
        bias: Float[Tensor, " V"] | None,
        labels: Int[Tensor, " N"],
        weights: Float[Tensor, " N"],
        loss: tuple[float, float],
        grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """(objective, nll), both summed with `weights`."""
        label_smoothing, z_loss = loss
        N, V = r.shape[0], matrix.shape[0]
        learns = grad and any(ctx.needs_input_grad[:3])
        wide = torch.promote_types(r.dtype, torch.float32)
        objective, plain = (torch.zeros((), dtype=wide, device=r.device) for _ in range(2))
        d_r = torch.empty_like(r) if learns else None
        # Begun by the first product, if there is one.
        d_matrix = torch.zeros(matrix.shape, dtype=wide, device=r.device) if learns and not N else None
        d_bias = torch.zeros(V, dtype=wide, device=r.device) if learns and bias is not None else None
        # Smoothing needs the mean of all logits of a row, which is the logit of the mean row: no pass over the logits.
        centre = matrix.to(wide).mean(0) if label_smoothing else None
        shift = 0.0 if bias is None or not label_smoothing else bias.to(wide).mean()
        step = max(1, chunk_rows(N, V, r.device))
        # On a CPU all chunks use the same memory; elsewhere autocast, and anywhere a compiler, must see plain products.
        direct = r.device.type == "cpu" and r.dtype == matrix.dtype == wide and not torch.compiler.is_compiling()
        room = torch.empty(step, V, dtype=wide) if direct else None
        for at in range(0, N, step):
            rows = slice(at, at + step)
            part = r[rows]
            logits = (part @ matrix.T).to(wide) if room is None else torch.mm(part, matrix.T, out=room[: len(part)])
            if bias is not None:
                logits += bias
            label, weight = labels[rows, None], weights[rows].to(wide)
            said = logits.gather(-1, label).squeeze(-1)
            mean = None if centre is None else (part * centre).sum(-1) + shift
            # The exponentials take the place of the logits: they are made once and nothing is copied.
            top = logits.amax(-1, keepdim=True)
            exponentials = logits.sub_(top).exp_()
            total = exponentials.sum(-1)
            log_z = total.log() + top.squeeze(-1)
            nll = log_z - said
            losses = nll if mean is None else (1 - label_smoothing) * nll + label_smoothing * (log_z - mean)
            losses = losses + z_loss * log_z.square()
            objective, plain = objective + (weight * losses).sum(), plain + (weight * nll).sum()
            if d_r is None:
                continue
            # d loss / d logits = p (1 + 2 z log Z) - (1 - smoothing) [v = label] - smoothing / V
            scale = weight / total
            gradient = exponentials.mul_((scale * (1 + 2 * z_loss * log_z))[:, None])
            gradient.scatter_add_(-1, label, (weight * (label_smoothing - 1))[:, None])
            if d_bias is not None:
                d_bias += gradient.sum(0)
            gradient = gradient.to(r.dtype)
            d_r[rows] = gradient @ matrix
            d_matrix = _plus(d_matrix, gradient.T, part, wide, direct)
        if centre is not None and d_r is not None and d_matrix is not None:
            # The last term of d logits, equal in every column, is a product of two vectors.
            share = (label_smoothing * weights.to(wide))[:, None]
            d_r -= (share * centre).to(r.dtype)
            d_matrix -= (share * r).sum(0) / V
            d_bias = None if d_bias is None else d_bias - share.sum() / V
        ctx.save_for_backward(d_r, d_matrix, d_bias)
        ctx.matrix_dtype = matrix.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(plain)
        return objective, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        d_objective = d_outputs[0]
        d_r, d_matrix, d_bias = ctx.saved_tensors
        return (
            (d_r * d_objective).to(d_r.dtype),
            (d_matrix * d_objective).to(ctx.matrix_dtype),
            None if d_bias is None else (d_bias * d_objective).to(ctx.bias_dtype),
            *[None] * 4,
        )


def _plus(total: Tensor | None, a: Tensor, b: Tensor, wide: torch.dtype, direct: bool) -> Tensor:
    """total + a b, in the place of the total; the first product begins it."""
    if total is None:
        return (a @ b).to(wide)
    return torch.addmm(total, a, b, out=total) if direct else total.add_(a @ b)


def cross_entropy(
    r: Float[Tensor, "N R"],
    matrix: Float[Tensor, "V R"],
    bias: Float[Tensor, " V"] | None,
    labels: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
    loss: tuple[float, float],
) -> Scored:
    """The weighted cross-entropy of r M' + b with `loss` = (smoothing, z)."""
    # Inside a Function, gradients are always disabled: the caller has to pass whether they are needed.
    return Scored(*CrossEntropy.apply(r, matrix, bias, labels, weights, loss, torch.is_grad_enabled()))
