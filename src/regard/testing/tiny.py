"""Tiny models that contain a given part, and small random batches for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from regard.batch import Batch, pack, pad
from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.models.baselines.attention_score import AttentionScore, GeneralScore
from regard.models.baselines.bytenet import ByteNet
from regard.models.baselines.convs2s import ConvS2S
from regard.models.baselines.rnn import InitialState, Recurrent, RecurrentDecoder, RecurrentEncoder
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, MaskedLM, SentenceClassifier, Task, TokenClassifier
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.bridge import Bridge
from regard.nn.embedding import Tokens
from regard.nn.init import Init
from regard.nn.input import InputSpec
from regard.nn.linear import Linear
from regard.nn.norm import Norm
from regard.nn.pattern import AttentionPattern
from regard.nn.position.additive import Injected
from regard.nn.position.base import Additive, Position
from regard.nn.position.bias import DistanceBias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.recurrent import Cell, Start
from regard.nn.residual import PostNorm, PreNorm, Residual
from regard.nn.stacks.base import StackSpec
from regard.nn.stacks.plain import Plain
from regard.nn.vectors import BySide
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.tables import Sharing, TableSpec
from regard.presets import narang_base
from regard.tree import Spec, swap, walk

VOCAB = 29
CLASSES = 3


def encoder_decoder(depth: int = 2) -> EncoderDecoder:
    """Return a tiny post-norm encoder-decoder."""
    return EncoderDecoder(
        vocab=VOCAB,
        d_model=16,
        heads=4,
        encoder=Plain((Block((SelfAttention(), FeedForward(24))),), depth),
        decoder=Plain((Block((SelfAttention(), CrossAttention(), FeedForward(24))),), depth),
    )


def narang(depth: int = 2, d_model: int = 16, heads: int = 4) -> EncoderDecoder:
    """Return a tiny version of the baseline of Narang et al. 2021."""
    spec = narang_base()
    spec = swap(spec, Plain, lambda stack: replace(stack, depth=depth))
    spec = swap(spec, FeedForward, lambda branch: replace(branch, d_hidden=24))
    return replace(spec, vocab=VOCAB, d_model=d_model, heads=heads)


def decoder_only(depth: int = 2) -> DecoderOnly:
    """Return a tiny pre-norm causal language model."""
    block = Block((SelfAttention(), FeedForward(24)), PreNorm())
    return DecoderOnly(vocab=VOCAB, d_model=16, heads=4, decoder=Plain((block,), depth))


def prefix_lm() -> DecoderOnly:
    """Return a tiny prefix language model."""
    return replace(decoder_only(), input_attention="full")


def encoder_only(task: Task | None = None) -> EncoderOnly:
    """Return a tiny encoder for `task`, or for masked language modelling if `task` is None."""
    block = Block((SelfAttention(), FeedForward(24)), PostNorm())
    return EncoderOnly(task=task or MaskedLM(), vocab=VOCAB, d_model=16, heads=4, encoder=Plain((block,), 2))


def recurrent(decoder: RecurrentDecoder | None = None, heads: int = 2) -> Recurrent:
    """Return a tiny recurrent encoder-decoder, by default with attention."""
    encoder, decoder = RecurrentEncoder(d_hidden=8), decoder or RecurrentDecoder(attention=GeneralScore())
    return Recurrent(vocab=VOCAB, d_model=16, heads=heads, encoder=encoder, decoder=decoder)


def convs2s() -> ConvS2S:
    """Return a tiny ConvS2S with layers of different widths and kernel sizes."""
    return ConvS2S(vocab=VOCAB, d_model=12, d_out=10, encoder=((8, 3), (10, 4)), decoder=((8, 3), (10, 1), (10, 2)))


def bytenet() -> ByteNet:
    """Return a tiny ByteNet."""
    return ByteNet(vocab=VOCAB, d_model=16, encoder_blocks=2, decoder_blocks=3, dilations=(1, 2))


@cache
def families() -> Mapping[str, ModelSpec]:
    """Return one tiny model of every type (encoder-decoder, decoder-only, recurrent, ...) by name."""
    return {
        "encoder_decoder": encoder_decoder(),
        "decoder_only": decoder_only(),
        "convs2s": convs2s(),
        "bytenet": bytenet(),
        "prefix_lm": prefix_lm(),
        "recurrent": recurrent(),
        "masked_lm": encoder_only(),
        "sentence_classifier": encoder_only(SentenceClassifier(CLASSES)),
        "token_classifier": encoder_only(TokenClassifier(CLASSES)),
    }


def around(part: Spec) -> dict[str, ModelSpec]:  # noqa: PLR0911  # one return for each type of part
    """Return tiny models that contain `part`, by name. Building some of the models may raise SpecError."""
    if isinstance(part, ModelSpec):
        return {part.kind: part}
    if isinstance(part, Task):
        return {"encoder_only": encoder_only(part)}
    if isinstance(part, Sharing | Bridge):
        field = "sharing" if isinstance(part, Sharing) else "bridge"
        return {"encoder_decoder": replace(encoder_decoder(), **{field: part})}
    if isinstance(part, Cell | Start):
        field = "cell" if isinstance(part, Cell) else "start"
        return around(replace(Recurrence(), **{field: part}))
    if isinstance(part, AttentionScore | InitialState):
        field = "attention" if isinstance(part, AttentionScore) else "initial_state"
        return {"recurrent": recurrent(replace(RecurrentDecoder(attention=GeneralScore()), **{field: part}))}
    if isinstance(part, RecurrentEncoder | RecurrentDecoder):
        field = "encoder" if isinstance(part, RecurrentEncoder) else "decoder"
        return {"recurrent": replace(recurrent(), **{field: part})}
    models = {name: families()[name] for name in ("encoder_decoder", "decoder_only", "masked_lm")}
    if isinstance(part, AttentionPattern):
        models["prefix_lm"] = families()["prefix_lm"]
        names = [name for name, model in models.items() if _sides(model, part)]
        return {name: _with(models[name], part) for name in names if not part.keeps_prefix or name == "prefix_lm"}
    if isinstance(part, BySide):
        return {"encoder_decoder": _with(models["encoder_decoder"], part)}
    if isinstance(part, InputSpec) and part.vector_channels:
        models = {name: families()[name] for name in ("sentence_classifier", "token_classifier")}
        return around(BySide(part)) | {name: _with(model, part) for name, model in models.items()}
    if isinstance(part, BranchSpec):
        return {name: _with_branch(model, part) for name, model in models.items()}
    if isinstance(part, StackSpec | Block):  # in an encoder-decoder, the decoder would lose its cross-attention
        del models["encoder_decoder"]
    return {name: _with(model, part) for name, model in models.items()}


def positioned(part: Spec) -> dict[tuple[str, str], ModelSpec]:
    """Return tiny models to test whether a layer `part` uses positions. Keys are (position scheme or "none", name).

    An attention layer replaces self-attention in models without positions ("none"), and in models with each position
    scheme. Layers that have a position scheme of their own, or are not attention layers, are tested only in models
    without positions. For parts other than layers, return no models.
    """
    if not isinstance(part, BranchSpec) or isinstance(part, CrossAttention):
        return {}
    models = {name: _bare(families()[name]) for name in ("decoder_only", "masked_lm")}
    if not part.attends:
        return {("none", name): _with_branch(model, part) for name, model in models.items()}
    models = {name: swap(model, SelfAttention, lambda _: part) for name, model in models.items()}
    alone = {("none", name): model for name, model in models.items()}
    if any(isinstance(inner, Position) for inner in walk(part)):
        return alone
    schemes = (Rotary(), Injected(), DistanceBias(3), Shaw(3))
    return alone | {(s.kind, name): _with(model, s) for s in schemes for name, model in models.items()}


def _with_branch(model: ModelSpec, part: BranchSpec) -> ModelSpec:
    """Replace each layer of `part`'s type by `part`. If the type is new, add `part` before each feed-forward layer."""
    if isinstance(part, SelfAttention | CrossAttention | FeedForward):
        swapped = swap(model, type(part), lambda _: part)
        if swapped is model:
            raise SpecError("", f"{part.kind!r} does not occur in {model.kind!r}")
        return swapped

    def added(block: Block) -> Block:
        return replace(block, branches=(*block.branches[:-1], part, block.branches[-1]))

    return swap(model, Block, added)


def _with(model: ModelSpec, part: Spec) -> ModelSpec:
    if isinstance(part, Position):
        return swap(_bare(model), Plain, lambda stack: replace(stack, position=part))
    if isinstance(part, AttentionPattern):
        return _with_pattern(model, part)
    if isinstance(part, Additive):
        return swap(model, Tokens, lambda tokens: replace(tokens, position=part))
    for slot in (Norm, Residual, Block, StackSpec, InputSpec, TableSpec, HeadSpec, Linear, Init):
        if isinstance(part, slot):
            return swap(model, slot, lambda _: part)
    problem = f"{type(part).__name__} fits no slot"
    raise SpecError("", f"{problem}; derive its class from a class in regard.catalogue.SLOTS")


def _with_pattern(model: ModelSpec, part: AttentionPattern) -> ModelSpec:
    """Return the model with the attention pattern in every stack that allows it."""
    changed: dict[str, Any] = {
        side: replace(getattr(model, side), attention_pattern=part) for side in _sides(model, part)
    }
    return replace(model, **changed)  # type: ignore[reportArgumentType]


def _sides(model: ModelSpec, part: AttentionPattern) -> list[str]:
    """Return the stacks of the model, "encoder" or "decoder", in which the attention pattern can be used."""
    sides = {"encoder": False, "decoder": True}  # causal?
    return [
        side
        for side, causal in sides.items()
        if getattr(model, side, None) is not None and part.refusal(causal, prefixed_by(model)) is None
    ]


def _bare(model: ModelSpec) -> ModelSpec:
    """Return the model without position vectors at the input."""
    return swap(model, Tokens, lambda tokens: replace(tokens, position=None))


def streams(spec: ModelSpec) -> dict[str, tuple[Spec, ...]]:
    """Return the parts of the model whose output can depend on token order, keyed by input: "source" or "target"."""
    if spec.ordered:
        return {"source": (spec,)} if spec.reads_source else {}
    sides: dict[str, tuple[Spec, ...]] = {}
    encoder, decoder = getattr(spec, "encoder", None), getattr(spec, "decoder", None)
    if isinstance(encoder, Spec):
        sides["source" if spec.reads_source else "target"] = (spec.input, encoder)
    if isinstance(decoder, Spec):
        sides["target"] = (spec.input, decoder)
    return sides


def order(parts: Sequence[Spec], causal: bool) -> tuple[str | None, bool]:
    """Return the `kind` of a part for which token order matters, or None, and `may`: whether token order may matter.

    With a causal mask, order always matters, so only parts that use positions count for `kind`. `may` is True for
    layers that depend on order, and for attention patterns, which may mask nothing in a short row.
    """
    inside = [inner for part in parts for inner in walk(part)]
    ordered = [inner for inner in inside if isinstance(inner, BranchSpec | StackSpec | ModelSpec) and inner.ordered]
    positions = [inner for inner in inside if isinstance(inner, Position | Additive)]
    declared = positions if causal else [*positions, *ordered]
    must = next((inner.kind for inner in declared), None)
    return must, bool(ordered) or any(isinstance(inner, AttentionPattern) for inner in inside)


@dataclass(frozen=True, slots=True)
class Example:
    """A training example for any type of model; a model ignores the fields that it does not use."""

    source: tuple[int, ...]
    target: tuple[int, ...]  # input of the decoder
    labels: tuple[int, ...]  # the expected outputs of the decoder
    weights: tuple[float, ...]  # loss weights of the labels
    prefix: int  # number of target tokens to which every token attends
    row_label: int  # class of the whole text


def examples(spec: ModelSpec, count: int, seed: int = 0) -> list[Example]:
    """Return `count` random examples of different lengths."""
    rng = torch.Generator().manual_seed(seed)

    def draw(length: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, high, (length,), generator=rng).tolist())

    rows, task = [], getattr(spec, "task", None)
    classes = task.classes if isinstance(task, SentenceClassifier) else 2
    for i in range(count):
        length = 4 + (5 * i + seed) % 4
        labels = draw(length, VOCAB)
        if isinstance(task, TokenClassifier):
            labels = tuple(label % task.classes for label in labels)
        weights = tuple(float(w) for w in torch.randint(0, 2, (length - 1,), generator=rng).tolist())
        rows.append(Example(draw(3 + (3 * i) % 4, VOCAB), draw(length, VOCAB), labels, (1.0, *weights), 2, i % classes))
    return rows


def prefixed_by(spec: ModelSpec) -> bool:
    """Return whether the model is a prefix language model, whose batches mark a prefix that every token attends to."""
    return isinstance(spec, DecoderOnly) and spec.input_attention == "full" and not spec.reads_source


def collate(
    spec: ModelSpec, rows: Sequence[Example], *, packed: bool = False, extra: int = 0, device: str = "cpu"
) -> Batch:
    """Return a batch of examples: one packed row, or one row per example. `extra` columns of padding are added."""
    task = getattr(spec, "task", None)

    def arrange(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the ids, the segment numbers, and the positions (or None)."""
        if packed:
            return pack([sequences], sum(map(len, sequences)) + extra)
        return (*pad(sequences, max(map(len, sequences)) + extra), None)

    target, target_seg, target_pos = arrange([row.target for row in rows])
    source, source_seg, source_pos = arrange([row.source for row in rows])
    reads = spec.reads_source
    prefix = arrange([[1] * row.prefix + [0] * (len(row.target) - row.prefix) for row in rows])[0]
    weights = arrange([[int(weight) for weight in row.weights] for row in rows])[0]
    labels = arrange([row.labels for row in rows])[0]
    batch = Batch(
        _values(spec, "target", target),
        torch.tensor([row.row_label for row in rows]) if isinstance(task, SentenceClassifier) else labels,
        target_seg,
        _values(spec, "source", source) if reads else None,
        source_seg if reads else None,
        weights=weights.to(torch.get_default_dtype()) if isinstance(task, MaskedLM) else None,
        target_pos=target_pos,
        source_pos=source_pos if reads else None,
        prefix=prefix.bool() if prefixed_by(spec) else None,
        packed=packed,
        segments=len(rows) if packed else 1,
        longest=max(max(len(row.target), len(row.source)) for row in rows) if packed else None,
    )
    return batch.to(device)


def _values(spec: ModelSpec, side: Literal["source", "target"], ids: Tensor) -> Tensor:
    """Return the model's input on one side: the ids, or a fixed vector for each id if the model reads vectors."""
    channels = spec.input.of(side).vector_channels
    return torch.randn(VOCAB, channels, generator=torch.Generator().manual_seed(3))[ids] if channels else ids
