"""The models that a planner chooses from, for every objective the smallest first."""

from dataclasses import dataclass, replace

from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.models.base import ModelSpec
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, SentenceClassifier
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.init import GPT2Init
from regard.nn.input import Tokens
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.heads import Softmax
from regard.variants import apply


@dataclass(frozen=True)
class Candidate:
    """A model that may be chosen; its dropout is chosen with the number of passes through the text."""

    name: str
    spec: ModelSpec
    width: int  # d_model
    blocks: int  # parameters without the tables of the vocabulary and the output layer
    tokens: int  # the largest batch


def candidates(objective: Objective) -> list[Candidate]:
    """The models for an objective, the smallest first."""
    known = {Translation: _translators, LanguageModelling: _language_models, Classification: _classifiers}
    return known[type(objective)]()


def _translators() -> list[Candidate]:
    """Encoder-decoders with rotary positions, with which short training aligns sooner (docs/decisions/014-planner.md).

    Pre-norm: at these learning rates post-norm often learns the target language alone.
    """
    shapes = [  # layers, d_model, heads, hidden, largest batch
        (2, 128, 4, 256, 4096),
        (4, 128, 4, 256, 4096),
        (3, 256, 4, 1024, 8192),
        (6, 384, 6, 1536, 16384),
        (6, 512, 8, 2048, 16384),
        (6, 1024, 16, 4096, 32768),
    ]
    return [
        Candidate(
            f"Transformer, {depth} + {depth} layers, d_model {width}",
            _translator(depth, width, heads, hidden),
            width,
            depth * (12 * width**2 + 4 * width * hidden),
            tokens,
        )
        for depth, width, heads, hidden, tokens in shapes
    ]


def _translator(depth: int, width: int, heads: int, hidden: int) -> ModelSpec:
    encoder = Block((SelfAttention(), FeedForward(hidden)), PreNorm())
    decoder = Block((SelfAttention(), CrossAttention(), FeedForward(hidden)), PreNorm())
    model = EncoderDecoder(
        d_model=width,
        heads=heads,
        dropout=0.1,
        head=Softmax(smoothing=0.1),
        encoder=Plain((encoder,), depth),
        decoder=Plain((decoder,), depth),
    )
    return apply("rotary", model)


def _language_models() -> list[Candidate]:
    """Decoders as GPT-2's, with rotary positions."""
    shapes = [(4, 128, 4, 4096), (4, 256, 4, 8192), (6, 384, 6, 16384), (8, 512, 8, 32768), (12, 768, 12, 65536)]
    return [
        Candidate(
            f"decoder, {depth} layers, d_model {width}", _gpt(depth, width, heads), width, 12 * depth * width**2, tokens
        )
        for depth, width, heads, tokens in shapes
    ]


def _gpt(depth: int, width: int, heads: int) -> ModelSpec:
    block = Block((SelfAttention(), FeedForward(activation="gelu")), PreNorm())
    model = DecoderOnly(
        d_model=width,
        heads=heads,
        dropout=0.1,
        attention_dropout=0.1,
        input=Tokens(scaled=False),
        decoder=Plain((block,), depth),
        init=GPT2Init(),
    )
    return apply("rotary", model)


def _classifiers() -> list[Candidate]:
    """Encoders that pool over the text."""
    shapes = [(1, 128, 4, 4096), (2, 128, 4, 4096), (2, 256, 8, 8192), (4, 256, 8, 8192), (6, 512, 8, 16384)]
    return [
        Candidate(
            f"encoder, {depth} layer{'s' if depth > 1 else ''}, d_model {width}",
            _classifier(depth, width, heads),
            width,
            12 * depth * width**2,
            tokens,
        )
        for depth, width, heads, tokens in shapes
    ]


def _classifier(depth: int, width: int, heads: int) -> EncoderOnly:
    block = Block((SelfAttention(), FeedForward(activation="gelu")), PreNorm())
    return EncoderOnly(
        task=SentenceClassifier(2, pool="mean", pooler=False),
        d_model=width,
        heads=heads,
        dropout=0.3,
        encoder=Plain((block,), depth),
    )


def dropped(spec: ModelSpec, dropout: float) -> ModelSpec:
    """The model with this dropout; attention weights are dropped half as often, where they are at all."""
    attention = round(dropout / 2, 3) if getattr(spec, "attention_dropout", 0.0) else 0.0
    return replace(spec, dropout=dropout, attention_dropout=attention)  # type: ignore[reportCallIssue]
