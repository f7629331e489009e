"""The optimizer Muon with batched matrix products. A step can be captured as a CUDA graph."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic x (a + b x^2 + c x^4), whose slope at 0 is steep
ITERATIONS = 5
EPS = 1e-7
RMS = 0.2  # root mean square of AdamW's updates, roughly
# Number of elements in one batched product. For small matrices, a batched product takes half the time of single
# products, but more time if it exceeds the cache.
BATCHED = 2**17
BATCHED_CUDA = 2**25  # on a GPU, memory is the limit


class BatchedMuon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): orthogonalised momentum for matrices, with weight decay.

        B = lerp(B, G, 1 - momentum)
        W = (1 - lr * decay) * W - lr * c * orth(lerp(G, B, momentum))

    W are the weights, G is their gradient, B is the momentum buffer, lr is the learning rate, decay is the weight
    decay, and orth sets all singular values to about 1. With c = 0.2 * sqrt(max(rows, columns)), updates are as large
    as AdamW's (Liu et al. 2025). The formula and the optimizer state are those of torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw", so either optimizer can resume from a checkpoint of the other. There are three
    differences. Small matrices of one shape are multiplied in one batched product. Newton-Schulz runs in bfloat16 only
    on CUDA, and otherwise in the dtype of the weights, because bfloat16 is slow on most CPUs and crashes some. `lr` may
    be a tensor, which a captured step reads every time.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        # As in torch's fused optimizers: if `found_inf` is 1 rather than 0, a step changes neither weights nor state.
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "Muon needs one evaluation of the loss, which is before the step"
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape, parameter.dtype].append(parameter)
            for parameters in by_shape.values():
                largest = BATCHED_CUDA if parameters[0].is_cuda else BATCHED
                count = max(1, largest // parameters[0].numel())
                for first in range(0, len(parameters), count):
                    self._update(parameters[first : first + count], group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters that all have the same shape."""
        momentum, learning_rate, weight = group["momentum"], group["lr"], 1 - group["momentum"]
        found_inf: Tensor | None = getattr(self, "found_inf", None)  # torch.amp.GradScaler removes the attribute
        if found_inf is not None:
            done = (1 - found_inf).to(parameters[0].dtype)
            learning_rate, weight = learning_rate * done, weight * done
        rows, columns = parameters[0].shape[-2:]
        momenta = []
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            if found_inf is not None:
                gradient = torch.where(found_inf > 0, 0.0, gradient)
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = state["momentum_buffer"]
            buffer.lerp_(gradient, weight)
            momenta.append(torch.lerp(gradient, buffer, momentum))  # Nesterov
        x = torch.stack(momenta)
        matrices = x.view(-1, rows, columns)
        wide = matrices if rows <= columns else matrices.mT.contiguous()
        updates = orthogonalised(wide).to(x.dtype) * (learning_rate * RMS * max(rows, columns) ** 0.5)
        updates = updates if rows <= columns else updates.mT
        for parameter, update in zip(parameters, updates.reshape(x.shape), strict=True):
            parameter.mul_(1 - learning_rate * group["weight_decay"]).sub_(update)


def orthogonalised(x: Float[Tensor, "N m n"]) -> Float[Tensor, "N m n"]:
    """Approximate U V' for each matrix with singular value decomposition U S V' and m <= n, by Newton-Schulz iteration.

    The iteration moves the singular values into [0.7, 1.2].
    """
    a, b, c = COEFFICIENTS
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=EPS)  # no singular value is above 1
    if x.is_cuda and torch.cuda.is_bf16_supported(including_emulation=False):
        x = x.bfloat16()
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x
