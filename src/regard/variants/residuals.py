"""Rows 14 to 17 of Narang et al. 2021: ReZero and Fixup, whose residual blocks are the identity at initialisation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.feedforward import FeedForward
from regard.nn.fixup import Fixup, FixupInit, FixupLinear
from regard.nn.init import FanIn, T5Init
from regard.nn.linear import Dense
from regard.nn.no_residual import NoResidual
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.residual import Residual
from regard.nn.rezero import ReZero
from regard.nn.rms_norm import RMSNorm
from regard.tree import swap
from regard.variants.base import Edit, Variant


def rejoined(m: Any, to: Callable[[Norm], Residual]) -> Any:
    """Replace the residual connection of every sublayer. `to(norm)` returns the new connection for the old norm."""

    def joined(rule: Residual) -> Residual:
        if isinstance(rule, NoResidual):
            raise SpecError("kind", "is 'no_residual'; choose a base with residual connections")
        return to(getattr(rule, "norm", NoNorm()))

    return swap(m, Residual, joined)


def scaled_attention(m: Any) -> Any:
    """Divide attention scores by sqrt(d_head) in every attention layer that does not scale scores."""

    def scaled(branch: Any) -> Any:
        return replace(branch, scale="sqrt") if getattr(branch, "scale", None) == "none" else branch

    return swap(m, BranchSpec, scaled)


def rezero(norm: Callable[[Norm], Norm]) -> Edit:
    """Return a function that uses ReZero's residual connections, x + alpha * f(norm(x)) with a learned scalar alpha.

    In a model with T5's initialisation, attention scores become scaled, and the initialisation becomes `FanIn`. (T5
    does not scale scores but initialises query weights with smaller values instead.)
    """

    def edit(m: Any) -> Any:
        m = rejoined(m, lambda old: ReZero(norm(old)))
        scaled = scaled_attention(m) if isinstance(m.init, T5Init) else m
        return m if scaled is m else replace(scaled, init=FanIn())

    return edit


def fixup(m: Any) -> Any:
    """Use the residual connections, scalars and initialisation of Fixup (Zhang et al. 2019), and remove all norms."""
    if not isinstance(m.linear, Dense | FixupLinear):
        raise SpecError("linear", f"is {m.linear.kind!r}, but fixup has projections of its own; use dense")
    m = rejoined(scaled_attention(m), lambda _: Fixup())
    m = swap(swap(m, Norm, lambda _: NoNorm()), FeedForward, lambda f: replace(f, bias=None))
    init = m.init if isinstance(m.init, FixupInit) else FixupInit(m.init)
    return replace(m, linear=FixupLinear(m.linear.bias), init=init)


def _layer_norm(norm: Norm) -> Norm:
    return norm if isinstance(norm, LayerNorm) else LayerNorm(eps=getattr(norm, "eps", 1e-6))


def _rms_norm(norm: Norm) -> Norm:
    return RMSNorm(getattr(norm, "eps", 1e-6))


REZERO = "Bachlechner et al. 2021"

VARIANTS = {
    "rezero": Variant(
        rezero(lambda _: NoNorm()),
        "residual",
        "x + alpha f(x), alpha = 0 at the start; no norm around branches",
        REZERO,
    ),
    "rezero_layer_norm": Variant(
        rezero(_layer_norm), "residual", "x + alpha * f(norm(x)), alpha = 0 at the start; layer norm", REZERO
    ),
    "rezero_rms_norm": Variant(
        rezero(_rms_norm), "residual", "x + alpha * f(norm(x)), alpha = 0 at the start; RMS norm", REZERO
    ),
    "fixup": Variant(
        fixup, "residual", "x + s f(x + t): scalars and zeros at the start instead of norms", "Zhang et al. 2019"
    ),
}
