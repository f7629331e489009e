"""Rows 23, 24, 27, 28 and 32 to 35: the vocabulary as a product, in clusters, and other softmaxes over it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.errors import SpecError
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, MaskedLM
from regard.nn.vocab.adaptive import AdaptiveSoftmax, AdaptiveTable
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.heads import Softmax
from regard.nn.vocab.mixture import MixtureOfSoftmaxes
from regard.nn.vocab.tables import Embeddings, Factorised, TableSpec
from regard.tree import swap, walk
from regard.variants.base import Edit, Row, Variant, own_softmax
from regard.variants.sharing import shared


def factorised(m: Any) -> Any:
    """Lan et al. 2020: inputs 1/6 as wide as the model, projected; the softmax has a full matrix of its own."""
    if isinstance(m, EncoderOnly):
        raise SpecError("table", "an encoder alone has one kind of table for all its uses; use factorised_shared")
    return replace(own_softmax(m), table=_narrow(m), output_table=Embeddings())


def factorised_shared(m: Any) -> Any:
    """The factorised table is the softmax matrix, too."""
    own = "the softmax has a matrix of its own; share it, or use factorised"
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
    """One block for all layers of a stack, and the vocabulary as `edit` has it."""

    def both(m: Any) -> Any:
        blocks = shared("encoder", "decoder")(m)
        sides = [side for side in ("encoder", "decoder") if hasattr(m, side)]
        return replace(edit(m), **{side: getattr(blocks, side) for side in sides})

    return both


def in_clusters(table: AdaptiveTable) -> Edit:
    """Every vocabulary table in clusters, those of rare ids narrow."""
    return lambda m: replace(m, table=table, **({"output_table": None} if hasattr(m, "output_table") else {}))


def head(kind: type[HeadSpec], make: Callable[[Softmax], HeadSpec]) -> Edit:
    """A head of this kind in the place of the plain softmax."""

    def edit(m: Any) -> Any:
        where = "task.head" if isinstance(m, EncoderOnly) else "head"
        heads = [part for part in walk(m) if isinstance(part, HeadSpec)]
        if not heads:
            raise SpecError(where, "there is no softmax over a vocabulary to replace; use a language model")
        for part in heads:
            if isinstance(part, Softmax) and part.bias:
                raise SpecError(f"{where}.bias", f"{kind.kind!r} has none; set it to false first")
            if not isinstance(part, Softmax | kind):
                raise SpecError(where, f"{part.kind!r} stands where {kind.kind!r} would; start from a plain softmax")
        return swap(m, Softmax, make)

    return edit


def adaptive_softmax(divisors: tuple[int, ...]) -> Edit:
    """Grave et al. 2017: the most frequent ids and three tails, of which the last is as large as T5's sentinels."""
    table = AdaptiveTable((2500, 6000, 23500, 128), divisors)
    tails = len(table.parts) - 1
    in_two_steps = head(
        AdaptiveSoftmax, lambda plain: AdaptiveSoftmax(tails, plain.scaled, plain.label_smoothing, plain.z_loss)
    )
    return lambda m: in_two_steps(in_clusters(table)(m))


def mixture_of_softmaxes(components: int) -> Edit:
    """Yang et al. 2018. What is normalised already has no z: Narang et al. left it on, and it was 0."""
    return head(MixtureOfSoftmaxes, lambda plain: MixtureOfSoftmaxes(components, plain.scaled, plain.label_smoothing))


LAN = "Lan et al. 2020"
GRAVE = "Grave et al. 2017"

VARIANTS = {
    "block_sharing_factorised": Variant(
        with_shared_blocks(factorised),
        "sharing",
        "one block for all layers of a stack; factorised inputs",
        LAN,
        Row(23, 45_419_264, 45_811_712),
    ),
    "block_sharing_factorised_shared": Variant(
        with_shared_blocks(factorised_shared),
        "sharing",
        "one block for all layers of a stack; one factorised table for inputs and softmax",
        LAN,
        Row(24, 20_744_960, 21_137_408),
    ),
    "factorised": Variant(
        factorised,
        "vocabulary",
        "inputs 1/6 as wide as the model, projected; a full softmax matrix of its own",
        LAN,
        Row(27, 227_254_016, 227_646_464),
    ),
    "factorised_shared": Variant(
        factorised_shared,
        "vocabulary",
        "one table for inputs and softmax, 1/6 as wide as the model, projected",
        LAN,
        Row(28, 202_579_712, 202_972_160),
    ),
    "adaptive_input": Variant(
        in_clusters(AdaptiveTable()),
        "vocabulary",
        "narrow vectors for rare ids, which are the matrix of a full softmax, too",
        "Baevski and Auli 2019",
        Row(32, 203_582_976, 203_975_424),
    ),
    "adaptive_softmax": Variant(
        adaptive_softmax((1, 3, 12, 1)),
        "head",
        "narrow vectors for rare ids, said in two steps: the cluster, then the id",
        GRAVE,
        Row(33, 203_675_392, 204_067_840),
    ),
    "adaptive_softmax_no_projection": Variant(
        adaptive_softmax((1, 1, 1, 1)),
        "head",
        "vectors of one width, said in two steps: the cluster, then the id",
        GRAVE,
        Row(34, 223_045_632, 223_438_080),
    ),
    "mixture_of_softmaxes": Variant(
        mixture_of_softmaxes(15),
        "head",
        "a weighted sum of 15 softmaxes",
        "Yang et al. 2018",
        Row(35, 231_902_208, 232_294_656),
    ),
}
