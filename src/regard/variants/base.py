"""`Variant`, a named modification of a model spec, and modifications that several groups of variants share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from regard.errors import SpecError
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, MaskedLM
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.vocab.base import HeadSpec
from regard.tree import swap, walk
from regard.variants.table import Row

Edit = Callable[[Any], Any]
Group = Literal[
    "base", "activation", "norm", "residual", "position", "depth", "sharing", "vocabulary", "head", "attention",
    "convolution", "wiring", "experts", "family", "without", "own",
]  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A modification of a model: its function, group, description and paper."""

    edit: Edit
    group: Group
    about: str
    paper: str = ""
    row: Row | None = None  # from `regard.variants.table`
    bends: Mapping[str, str] = field(default_factory=dict)  # law of `regard check` that does not hold -> reason


def swap_attention(m: Any, to: Edit) -> Any:
    """Replace every self-attention and cross-attention layer of the model `m` by `to(layer)`."""
    return swap(swap(m, SelfAttention, to), CrossAttention, to)


def check_attention(m: Any, lacks: str) -> None:
    """Raise an error if a layer other than self-attention mixes tokens, because the variant would not change it."""
    for part in walk(m):
        if isinstance(part, BranchSpec) and part.attends and not isinstance(part, SelfAttention):
            raise SpecError("variants", f"{part.kind!r} has no {lacks}")


def own_softmax(m: Any) -> Any:
    """Untie the softmax matrix from the embeddings, and remove the factor d_model^-1/2 that T5 uses with tying."""
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
