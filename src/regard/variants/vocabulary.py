"""Rows 23, 24, 27, 28, 32 to 35 of Narang et al. 2021: factorised and adaptive embeddings, other softmax layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, MaskedLM
from regard.nn.vocab.adaptive import AdaptiveSoftmax, AdaptiveTable
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.mixture import MixtureOfSoftmaxes
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Factorised, TableSpec
from regard.tree import swap, walk
from regard.variants.base import Edit, Variant, own_softmax
from regard.variants.sharing import shared


def factorised(m: Any) -> Any:
    """Project embeddings from width d_model / 6 to d_model (Lan et al. 2020). The softmax has its own full matrix."""
    if isinstance(m, EncoderOnly):
        raise SpecError("table", "an encoder-only model has one table for input and output; use factorised_shared")
    return replace(own_softmax(m), table=_narrow(m), output_table=Embeddings())


def factorised_shared(m: Any) -> Any:
    """Use one factorised embedding table for the inputs and the softmax."""
    own = "the softmax matrix is not tied; tie it, or use factorised"
    if isinstance(m, EncoderDecoder) and not m.sharing.input_output:
        raise SpecError("sharing.input_output", own)
    if isinstance(m, DecoderOnly) and not m.tied:
        raise SpecError("tied", own)
    if isinstance(m, EncoderOnly) and isinstance(m.task, MaskedLM) and not m.task.tied:
        raise SpecError("task.tied", own)
    return replace(m, table=_narrow(m))


def _narrow(m: Any) -> TableSpec:
    return Factorised(max(1, m.d_model // 6))


def with_shared_blocks(edit: Edit) -> Edit:
    """Return a function that shares one block among all layers of a stack and applies `edit` to the embeddings."""

    def both(m: Any) -> Any:
        blocks = shared("encoder", "decoder")(m)
        sides = [side for side in ("encoder", "decoder") if hasattr(m, side)]
        return replace(edit(m), **{side: getattr(blocks, side) for side in sides})

    return both


def in_clusters(table: AdaptiveTable) -> Edit:
    """Return a function that uses an adaptive embedding table: clusters of ids, with narrower vectors for rarer ids."""
    return lambda m: replace(m, table=table, **({"output_table": None} if hasattr(m, "output_table") else {}))


def head(kind: type[HeadSpec], make: Callable[[Softmax], HeadSpec]) -> Edit:
    """Return a function that replaces the softmax output layer s by `make(s)`, an output layer of class `kind`."""

    def edit(m: Any) -> Any:
        where = "task.head" if isinstance(m, EncoderOnly) else "head"
        heads = [part for part in walk(m) if isinstance(part, HeadSpec)]
        if not heads:
            raise SpecError(where, "has no softmax over a vocabulary to replace; use a language model")
        for part in heads:
            if isinstance(part, Softmax) and part.bias:
                raise SpecError(f"{where}.bias", f"is true, but {kind.kind!r} has no bias; set it to false")
            if not isinstance(part, Softmax | kind):
                raise SpecError(
                    where, f"is {part.kind!r}, which {kind.kind!r} cannot replace; start from a plain softmax"
                )
        return swap(m, Softmax, make)

    return edit


def adaptive_softmax(divisors: tuple[int, ...]) -> Edit:
    """Return a function that uses adaptive softmax (Grave et al. 2017).

    The vocabulary is divided into one cluster of the most frequent ids and three clusters of rarer ids, called tails.
    The last tail is as large as T5's set of sentinel ids.
    """
    table = AdaptiveTable((2500, 6000, 23500, 128), divisors)
    tails = len(table.parts) - 1
    edit = head(
        AdaptiveSoftmax, lambda plain: AdaptiveSoftmax(tails, plain.scaled, plain.label_smoothing, plain.z_loss)
    )
    return lambda m: edit(in_clusters(table)(m))


def mixture_of_softmaxes(components: int) -> Edit:
    """Return a function that uses a mixture of softmaxes (Yang et al. 2018).

    There is no z-loss, because the z-loss of normalised outputs is 0 (Narang et al. 2021 set one without effect).
    """
    return head(MixtureOfSoftmaxes, lambda plain: MixtureOfSoftmaxes(components, plain.scaled, plain.label_smoothing))


LAN = "Lan et al. 2020"
GRAVE = "Grave et al. 2017"

VARIANTS = {
    "block_sharing_factorised": Variant(
        with_shared_blocks(factorised), "sharing", "one block for all layers of a stack; factorised inputs", LAN
    ),
    "block_sharing_factorised_shared": Variant(
        with_shared_blocks(factorised_shared),
        "sharing",
        "one block for all layers of a stack; one factorised table for inputs and softmax",
        LAN,
    ),
    "factorised": Variant(
        factorised, "vocabulary", "projected embeddings of 1/6 of the model's width; a full softmax matrix", LAN
    ),
    "factorised_shared": Variant(
        factorised_shared, "vocabulary", "one projected table of 1/6 of the model's width for inputs and softmax", LAN
    ),
    "adaptive_input": Variant(
        in_clusters(AdaptiveTable()),
        "vocabulary",
        "narrow vectors for rare ids, tied to a full softmax",
        "Baevski and Auli 2019",
    ),
    "adaptive_softmax": Variant(
        adaptive_softmax((1, 3, 12, 1)),
        "head",
        "softmax in two steps, cluster and id; narrow vectors for rare ids",
        GRAVE,
    ),
    "adaptive_softmax_no_projection": Variant(
        adaptive_softmax((1, 1, 1, 1)), "head", "softmax in two steps, cluster and id; vectors of one width", GRAVE
    ),
    "mixture_of_softmaxes": Variant(
        mixture_of_softmaxes(15), "head", "a weighted sum of 15 softmaxes", "Yang et al. 2018"
    ),
}
