"""Rows 2 to 12 of Narang et al. 2021: activation functions and gates for the feed-forward layers."""

from dataclasses import replace
from typing import Any

from regard.nn.activation import Activation
from regard.nn.branches.feedforward import FeedForward
from regard.tree import swap
from regard.variants.base import Edit, Variant

SHAZEER = "Shazeer 2020"


def activation(phi: Activation) -> Edit:
    """Return a function that replaces the activation function of feed-forward layers.

    If the feed-forward layer has a gate, the gate is removed and the hidden width is multiplied by 3/2.
    """

    def edit(m: Any) -> Any:
        def widened(f: FeedForward) -> FeedForward:
            width = f.d_hidden if not f.gated else (f.d_hidden or 4 * m.d_model) * 3 // 2
            return replace(f, activation=phi, gated=False, d_hidden=width)

        return swap(m, FeedForward, widened)

    return edit


def gated(phi: Activation) -> Edit:
    """Return a function that adds a gate (Shazeer 2020), with 2/3 of the hidden width so that the cost stays equal."""

    def edit(m: Any) -> Any:
        def narrowed(f: FeedForward) -> FeedForward:
            return replace(f, activation=phi, gated=True, d_hidden=(f.d_hidden or 4 * m.d_model) * 2 // 3)

        return swap(m, FeedForward, lambda f: replace(f, activation=phi) if f.gated else narrowed(f))

    return edit


VARIANTS = {
    "gelu": Variant(activation("gelu_tanh"), "activation", "GELU, tanh approximation", "Hendrycks and Gimpel 2016"),
    "swish": Variant(activation("swish"), "activation", "x sigmoid(x)", "Ramachandran et al. 2017"),
    "elu": Variant(activation("elu"), "activation", "x, or e^x - 1 below 0", "Clevert et al. 2016"),
    "glu": Variant(gated("sigmoid"), "activation", "sigmoid gate", "Dauphin et al. 2017"),
    "geglu": Variant(gated("gelu_tanh"), "activation", "GELU gate", SHAZEER),
    "reglu": Variant(gated("relu"), "activation", "ReLU gate", SHAZEER),
    "selu": Variant(activation("selu"), "activation", "scaled ELU", "Klambauer et al. 2017"),
    "swiglu": Variant(gated("swish"), "activation", "Swish gate", SHAZEER),
    "liglu": Variant(gated("linear"), "activation", "bilinear: a gate without a non-linearity", SHAZEER),
    "sigmoid": Variant(activation("sigmoid"), "activation", "the logistic function", "Narang et al. 2021"),
    "softplus": Variant(activation("softplus"), "activation", "ln(1 + e^x)", "Dugas et al. 2001"),
}
