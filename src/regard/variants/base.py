"""`Variant`, a named function from model spec to model spec, and the edits that several groups of variants use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, MaskedLM
from regard.nn.vocab.base import HeadSpec
from regard.tree import swap

Edit = Callable[[Any], Any]
Group = Literal[
    "base",
    "activation",
    "norm",
    "residual",
    "position",
    "depth",
    "sharing",
    "vocabulary",
    "head",
    "attention",
    "convolution",
    "wiring",
    "experts",
    "family",
    "without",
    "own",
]


@dataclass(frozen=True)
class Row:
    """A table row in Narang et al. 2021: its number and the exact parameter counts of the published runs."""

    number: int
    parameters: int  # with the base narang_base
    learned: int  # with learned positions instead of the bucketed bias


@dataclass(frozen=True)
class Variant:
    """A modification of a model: its function, group, description and paper."""

    edit: Edit
    group: Group
    about: str
    paper: str = ""
    row: Row | None = None
    bends: Mapping[str, str] = field(default_factory=dict)  # law of `regard check` that does not hold -> reason


def own_softmax(m: Any) -> Any:
    """Untie the softmax matrix from the embeddings, and remove the factor d_model^-1/2 that T5 uses if it is tied."""
    if isinstance(m, EncoderDecoder):
        m = replace(m, sharing=replace(m.sharing, input_output=False))
    elif isinstance(m, DecoderOnly):
        m = replace(m, tied=False)
    elif isinstance(m, EncoderOnly) and isinstance(m.task, MaskedLM):
        m = replace(m, task=replace(m.task, tied=False))
    return unscaled(m)


def unscaled(m: Any) -> Any:
    """Remove the factor d_model^-1/2 before the softmax matrix."""

    def plain(head: Any) -> Any:
        return replace(head, scaled=False) if getattr(head, "scaled", False) else head

    return swap(m, HeadSpec, plain)
