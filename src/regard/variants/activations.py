"""Rows 2 to 12: activation functions and gates for the feed-forward layers."""

from dataclasses import replace
from typing import Any

from regard.nn.activation import Activation
from regard.nn.branches.feedforward import FeedForward
from regard.tree import swap
from regard.variants.base import Edit, Row, Variant

PLAIN = (223_043_328, 223_435_776)
GATED = (223_067_904, 223_460_352)


def activation(phi: Activation) -> Edit:
    """Return an edit that replaces the activation function.

    If the feed-forward layer has a gate, the gate is removed and the hidden width is multiplied by 3/2.
    """

    def edit(m: Any) -> Any:
        def widened(f: FeedForward) -> FeedForward:
            width = f.d_hidden if not f.gated else (f.d_hidden or 4 * m.d_model) * 3 // 2
            return replace(f, activation=phi, gated=False, d_hidden=width)

        return swap(m, FeedForward, widened)

    return edit


def gated(phi: Activation) -> Edit:
    """Return an edit that adds a gate (Shazeer 2020), with 2/3 of the hidden width so that the cost stays equal."""

    def edit(m: Any) -> Any:
        def narrowed(f: FeedForward) -> FeedForward:
            return replace(f, activation=phi, gated=True, d_hidden=(f.d_hidden or 4 * m.d_model) * 2 // 3)

        return swap(m, FeedForward, lambda f: replace(f, activation=phi) if f.gated else narrowed(f))

    return edit


def _plain(number: int, phi: Activation, about: str, paper: str) -> Variant:
    return Variant(activation(phi), "activation", about, paper, Row(number, *PLAIN))


def _gated(number: int, phi: Activation, about: str, paper: str = "Shazeer 2020") -> Variant:
    return Variant(gated(phi), "activation", about, paper, Row(number, *GATED))


VARIANTS = {
    "gelu": _plain(2, "gelu_tanh", "GELU, tanh form", "Hendrycks and Gimpel 2016"),
    "swish": _plain(3, "swish", "x sigmoid(x)", "Ramachandran et al. 2017"),
    "elu": _plain(4, "elu", "x, or e^x - 1 below 0", "Clevert et al. 2016"),
    "glu": _gated(5, "sigmoid", "sigmoid gate", "Dauphin et al. 2017"),
    "geglu": _gated(6, "gelu_tanh", "GELU gate"),
    "reglu": _gated(7, "relu", "ReLU gate"),
    "selu": _plain(8, "selu", "scaled ELU", "Klambauer et al. 2017"),
    "swiglu": _gated(9, "swish", "Swish gate"),
    "liglu": _gated(10, "linear", "bilinear: a gate without a non-linearity"),
    "sigmoid": _plain(11, "sigmoid", "the logistic function", "Narang et al. 2021"),
    "softplus": _plain(12, "softplus", "ln(1 + e^x)", "Dugas et al. 2001"),
}
