"""What is not said is chosen from the corpus, with a reason for each choice.

The numbers are those of published recipes for corpora of that size: Wu et al. 2021 for Multi30k, nanoGPT for a small
text, Vaswani et al. 2017 for millions of sentences.
"""

from dataclasses import dataclass, replace
from typing import Any

from regard.data.batching import Batching, Buckets, Packing
from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.data.prepare import Survey
from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.models.bytenet import ByteNet
from regard.models.convs2s import ConvS2S
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, SentenceClassifier
from regard.models.joined import Joined
from regard.models.recurrent import Recurrent
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.synthesizer import Synthesizer
from regard.nn.init import GPT2Init
from regard.nn.input import Tokens
from regard.nn.position.additive import Learned
from regard.nn.residual import PreNorm
from regard.nn.stacks.base import StackSpec
from regard.nn.stacks.plain import Plain
from regard.presets import preset
from regard.training.optim import AdamW, Muon
from regard.training.schedule import Cosine, InverseSqrt
from regard.training.spec import TrainSpec
from regard.tree import get_at, leaves, replace_at, walk
from regard.variants import apply


@dataclass(frozen=True)
class Size:
    """A model and a budget that suit a corpus of up to `labels` tokens to be said."""

    labels: float
    name: str
    spec: ModelSpec
    tokens: int  # a batch
    rate: float
    epochs: int
    warmup: int
    least: int  # steps


def translation_sizes() -> list[Size]:
    """Encoder-decoders; narrow and much dropped out where the text is short."""
    # Pre-norm: at these rates post-norm models of this size often learn the target language alone (docs/results.md).
    tiny = apply("pre_norm", preset("transformer_tiny"))
    shallow = replace_at(replace_at(tiny, "encoder.depth", 2), "decoder.depth", 2)
    small = apply("pre_norm", preset("transformer_small", dropout=0.3))
    return [
        Size(30e3, "transformer_tiny with 2 + 2 layers, pre-norm", shallow, 1024, 3e-3, 60, 500, 1000),
        Size(2e6, "transformer_tiny, pre-norm", tiny, 4096, 5e-3, 70, 2000, 2000),
        Size(20e6, "transformer_small, pre-norm, dropout 0.3", small, 8192, 2e-3, 30, 4000, 8000),
        Size(1e9, "transformer_base", preset("transformer_base"), 16384, 7e-4, 10, 4000, 30000),
        Size(float("inf"), "transformer_big", preset("transformer_big"), 32768, 5e-4, 4, 4000, 100000),
    ]


def language_model_sizes() -> list[Size]:
    """Decoders as GPT-2's."""
    return [
        Size(300e3, "4 layers, d 128", _gpt(4, 128, 4, 0.2), 4096, 2e-3, 40, 100, 1000),
        Size(20e6, "6 layers, d 384", _gpt(6, 384, 6, 0.2), 16384, 1e-3, 80, 100, 2000),
        Size(1e9, "12 layers, d 768", _gpt(12, 768, 12, 0.1), 65536, 6e-4, 4, 2000, 10000),
        Size(float("inf"), "12 layers, d 768, no dropout", _gpt(12, 768, 12, 0.0), 131072, 6e-4, 1, 2000, 50000),
    ]


def classification_sizes() -> list[Size]:
    """Encoders that average over the text. Counted in tokens that are read."""
    return [
        Size(1e6, "2 layers, d 128", _classifier(2, 128, 4), 4096, 1e-3, 12, 200, 500),
        Size(50e6, "4 layers, d 256", _classifier(4, 256, 8), 8192, 5e-4, 6, 500, 2000),
        Size(float("inf"), "6 layers, d 512", _classifier(6, 512, 8), 16384, 3e-4, 3, 1000, 5000),
    ]


def _gpt(depth: int, d_model: int, heads: int, dropout: float) -> ModelSpec:
    block = Block((SelfAttention(), FeedForward(activation="gelu")), PreNorm())
    return DecoderOnly(
        d_model=d_model,
        heads=heads,
        dropout=dropout,
        attention_dropout=dropout,
        input=Tokens(scaled=False, position=Learned(1024)),
        decoder=Plain((block,), depth),
        init=GPT2Init(),
    )


def _classifier(depth: int, d_model: int, heads: int) -> ModelSpec:
    block = Block((SelfAttention(), FeedForward(activation="gelu")), PreNorm())
    return EncoderOnly(
        task=SentenceClassifier(2, pool="mean", pooler=False),
        d_model=d_model,
        heads=heads,
        dropout=0.3,
        encoder=Plain((block,), depth),
    )


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and why."""

    model: ModelSpec
    batching: Batching
    train: TrainSpec
    why: list[str]


GENTLE = 0.2  # of the usual rate, for a model that has learned something already
FEWEST = 100  # batches of an epoch that a large model leaves of a small text


@dataclass(frozen=True)
class Given:
    """What is known of a model that is not chosen here."""

    width: int | None = None  # its d_model
    trained: bool = False  # it goes on from another run


def choose(
    objective: Objective,
    survey: Survey,
    batching: Batching,
    train: TrainSpec,
    on_cpu: bool,
    given: Given = Given(),
) -> Chosen:
    """Model, batches and training for a corpus; what is given is left as it is."""
    labels = survey.ids[objective.measured[-1]]
    known = sizes_for(objective)
    size = next(size for size in known if labels <= size.labels)
    why = [f"model: {size.name}, for {labels:,} tokens to learn from"]
    if given.width is not None:
        like = of_width(known, given.width)
        room = 0 if on_cpu else int(labels / FEWEST) // 1024 * 1024
        size = replace(
            size,
            rate=like.rate * (GENTLE if given.trained else 1.0),
            tokens=max(size.tokens, min(like.tokens, room)),
        )
    elif on_cpu and size.tokens > 4096:
        why.append("warning: a model of this size wants a GPU; --preset transformer_tiny trains on a CPU")
    tokens = getattr(batching, "tokens", None) or max(size.tokens, getattr(batching, "length", 0))
    if getattr(batching, "tokens", None) is None:
        batching = replace(batching, tokens=tokens)  # type: ignore[reportCallIssue]  # every batching has it
        why.append(f"batches: {tokens:,} tokens")
    epoch = max(1, round(labels / tokens / train.accumulate))
    train = _resolve(train, size, epoch, why)
    return Chosen(size.spec, batching, train, why)


def sizes_for(objective: Objective) -> list[Size]:
    """The sizes that a model for an objective is chosen from, the smallest first."""
    sizes = {
        Translation: translation_sizes,
        LanguageModelling: language_model_sizes,
        Classification: classification_sizes,
    }
    return sizes[type(objective)]()


def of_width(sizes: list[Size], width: int) -> Size:
    """The size whose rate and batches suit a model of this width: wider ones want lower rates and larger batches."""
    fitting = [size for size in sizes if width >= size.spec.d_model]  # type: ignore[reportAttributeAccessIssue]
    return fitting[-1] if fitting else max(sizes, key=lambda size: size.rate)


def _resolve(train: TrainSpec, size: Size, epoch: int, why: list[str]) -> TrainSpec:
    changes: dict[str, Any] = {}
    steps = train.steps
    if steps is None:
        steps = changes["steps"] = max(size.least, min(100_000, round(size.epochs * epoch)))
        why.append(f"steps: {steps:,}, about {steps / epoch:.0f} times through the text")
    if train.optimizer.rate is None:
        changes["optimizer"] = replace(train.optimizer, rate=size.rate)  # type: ignore[reportCallIssue]
        why.append(f"rate: {size.rate:g} at its highest")
    optimizer = changes.get("optimizer", train.optimizer)
    if isinstance(optimizer, Muon) and optimizer.rest.rate is None:
        changes["optimizer"] = replace(optimizer, rest=replace(optimizer.rest, rate=optimizer.rate))
    if getattr(train.schedule, "warmup", 0) is None:
        warmup = min(size.warmup, max(1, steps // 4))
        changes["schedule"] = replace(train.schedule, warmup=warmup)  # type: ignore[reportCallIssue]
        why.append(f"warm-up: {warmup:,} steps")
    if train.validate_every is None:
        changes["validate_every"] = max(1, min(steps, max(steps // 40, epoch)))
        why.append(f"validation: every {changes['validate_every']:,} steps")
    if train.patience is None:
        changes["patience"] = 10
        why.append("early stop: after 10 validations without improvement")
    return replace(train, **changes)


def for_objective(objective: Objective) -> TrainSpec:
    """The training that is usual for an objective, before its numbers are chosen."""
    if isinstance(objective, Translation):
        return TrainSpec(schedule=InverseSqrt(), average=5)
    optimizer = AdamW(betas=(0.9, 0.99), eps=1e-8, decay=0.1)
    return TrainSpec(optimizer=optimizer, schedule=Cosine(floor=0.1))


def packs(model: ModelSpec, objective: Objective) -> bool:
    """Whether several texts may stand in one row: not if each has a label, nor if a part shortens or mixes rows."""
    if isinstance(objective, Classification) or objective.stream:
        return False
    parts = list(walk(model))
    shortened = any(isinstance(part, StackSpec) and part.shortens for part in parts)
    return not shortened and all(part.packs for part in parts if isinstance(part, BranchSpec | ModelSpec))


def packed(batching: Batching, longest: int) -> Packing:
    """The same budget in rows of one shape, wide enough for the longest example and a good fit of several."""
    tokens, length = getattr(batching, "tokens", None) or 0, max(128, -(-longest // 8) * 8)
    return Packing(max(tokens, length), length)


def padded(batching: Batching) -> Batching:
    """The same budget without packing, for evaluation: a row is a record."""
    return Buckets(getattr(batching, "tokens", None))


def fitted(
    model: ModelSpec, objective: Objective, vocabulary: dict[str, int], longest: int, joint: bool = True
) -> dict[str, Any]:
    """Edits that make a model fit its tokenizers, its labels and its longest text; path -> value.

    `joint` says whether source and target have one tokenizer: pieces of two share no table, even if they are as many.
    """
    source, target = vocabulary.get("source"), vocabulary.get("target")
    changes: dict[str, Any] = {"vocab": next(iter(vocabulary.values()))}
    if isinstance(model, Joined) and not joint:
        raise SpecError("kind", "a joined model reads source and target with one tokenizer; leave data.joint at true")
    if isinstance(model, EncoderDecoder | ConvS2S | ByteNet | Recurrent) and (source != target or not joint):
        changes["target_vocab"] = target
        changes["sharing.source_target"] = False
    if isinstance(model, EncoderOnly) and isinstance(objective, Classification):
        classes = len(objective.labels)
        if isinstance(model.task, SentenceClassifier):
            changes["task.classes"] = classes
        else:
            changes["task"] = {"kind": "sentence_classifier", "classes": classes}
    position = getattr(getattr(model, "input", None), "position", None)
    if isinstance(position, Learned):
        changes["input.position.max_len"] = 2 * longest if isinstance(model, Joined) else longest
    longest = 2 * longest if isinstance(model, Joined) else longest
    for path, value in leaves(model):
        holder = path.removesuffix(".max_len")
        if holder != path and isinstance(get_at(model, holder), Synthesizer) and value < longest:
            changes[path] = longest
    return changes
