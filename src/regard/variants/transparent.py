"""Row 36 of Narang et al. 2021: transparent attention, where the decoder attends to mixtures of all encoder layers."""

from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.bridge import Bridge, Transparent, TransparentNormed
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.residual import Residual
from regard.tree import walk
from regard.variants.base import Variant


def bridged(m: Any, bridge: Bridge) -> EncoderDecoder:
    """Return the model with another bridge (the connection from the encoder to the decoder)."""
    if not isinstance(m, EncoderDecoder):
        raise SpecError("", "only an encoder-decoder has a bridge between encoder and decoder")
    return replace(m, bridge=bridge)


def _norm(m: Any) -> Norm:
    """Return the first norm in the model's residual connections, or LayerNorm if there is none."""
    rules = [part for part in walk(m) if isinstance(part, Residual)]
    norms = [part for rule in rules for part in walk(rule) if isinstance(part, Norm) and part != NoNorm()]
    return norms[0] if norms else LayerNorm()


BAPNA = "Bapna et al. 2018"

VARIANTS = {
    "transparent": Variant(
        lambda m: bridged(m, Transparent()),
        "wiring",
        "each decoder block attends to its own mixture of the encoder's layers",
        BAPNA,
    ),
    "transparent_normed": Variant(
        lambda m: bridged(m, TransparentNormed(_norm(m))),
        "wiring",
        "as transparent, with every encoder layer normalised before the mixture",
        BAPNA,
    ),
}
