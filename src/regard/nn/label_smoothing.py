"""Label smoothing."""

from jaxtyping import Float
from torch import Tensor


def label_smoothed(
    nll: Float[Tensor, "*n"], mean_log_prob: Float[Tensor, "*n"], smoothing: float
) -> Float[Tensor, "*n"]:
    """Return the cross-entropy with label smoothing s: (1 - s) * nll - s * mean_v(log p_v) (Szegedy et al. 2016).

    `nll` is -log p of the label, and `mean_log_prob` is the mean of log p over all V classes. As in torch, the label's
    target probability is 1 - s + s / V, and that of every other class is s / V.
    """
    return (1 - smoothing) * nll - smoothing * mean_log_prob
