"""The models from which the planner chooses. Every type of task has a list of models, the smallest first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from regard.data.objectives import ModelType, Objective
from regard.models.base import ModelSpec
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, SentenceClassifier
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.ngram_convolution import NGramConvolution
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Tokens
from regard.nn.init import GPT2Init
from regard.nn.no_residual import NoResidual
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.softmax import Softmax
from regard.tree import swap, walk
from regard.variants import apply

LONG = 64  # number of tokens from which a text counts as long: an article rather than a sentence


@dataclass(frozen=True)
class Candidate:
    """A model that the planner may choose. The dropout rate is set later, from the number of passes over the text."""

    name: str
    spec: ModelSpec
    width: int  # d_model
    blocks: int  # number of parameters without embedding tables and output layer
    tokens: int  # maximum number of tokens per batch


def candidates(objective: Objective) -> list[Candidate]:
    """Return the candidate models for an objective (task), the smallest first."""
    return list(_of_type(objective.model))


@cache
def _of_type(model: ModelType) -> tuple[Candidate, ...]:
    known = {"sequence_to_sequence": _translators, "language_model": _language_models, "classifier": _classifiers}
    return tuple(known[model]())


def _translators() -> Iterator[Candidate]:
    """Yield encoder-decoders with pre-norm and rotary positions.

    With rotary positions, a model learns to align source and target in fewer steps (docs/decisions/014-planner.md).
    Pre-norm is used because at these learning rates, a post-norm model often learns to ignore the source.
    """
    for depth, width, heads, hidden, tokens in (
        (2, 128, 4, 256, 4096),
        (4, 128, 4, 256, 4096),
        (3, 256, 4, 1024, 8192),
        (6, 384, 6, 1536, 16384),
        (6, 512, 8, 2048, 16384),
        (6, 1024, 16, 4096, 32768),
    ):
        encoder = Block((SelfAttention(), FeedForward(hidden)), PreNorm())
        decoder = Block((SelfAttention(), CrossAttention(), FeedForward(hidden)), PreNorm())
        model = EncoderDecoder(
            d_model=width,
            heads=heads,
            dropout=0.1,
            head=Softmax(label_smoothing=0.1),
            encoder=Plain((encoder,), depth),
            decoder=Plain((decoder,), depth),
        )
        name, blocks = f"Transformer, {depth} + {depth} layers, d_model {width}", 12 * width**2 + 4 * width * hidden
        yield Candidate(name, apply("rotary", model), width, depth * blocks, tokens)


def _language_models() -> Iterator[Candidate]:
    """Yield decoder-only models like GPT-2, but with rotary positions."""
    block = Block((SelfAttention(), FeedForward(activation="gelu")), PreNorm())
    for depth, width, heads, tokens in (
        (4, 128, 4, 4096),
        (4, 256, 4, 8192),
        (6, 384, 6, 16384),
        (8, 512, 8, 32768),
        (12, 768, 12, 65536),
    ):
        model = DecoderOnly(
            d_model=width,
            heads=heads,
            dropout=0.1,
            attention_dropout=0.1,
            input=Tokens(scaled=False),
            decoder=Plain((block,), depth),
            init=GPT2Init(),
        )
        name = f"decoder, {depth} layers, d_model {width}"
        yield Candidate(name, apply("rotary", model), width, 12 * depth * width**2, tokens)


def _classifiers() -> Iterator[Candidate]:
    """Yield convolutions over n-grams with max pooling over the text (Kim 2014), then Transformers.

    Each channel of a convolution detects an n-gram. With a few thousand labelled texts, convolutions are better than
    attention, which memorises the labels. Transformers are used if the user modifies a part that convolutions lack.
    """
    ngrams = Block((NGramConvolution((3, 4, 5), output=False),), NoResidual())
    for width, tokens in ((192, 8192), (384, 16384), (768, 32768)):
        model = EncoderOnly(
            task=SentenceClassifier(2, pool="max", pooler=False),
            d_model=width,
            heads=1,
            dropout=0.3,
            input=Tokens(scaled=False, position=None),
            encoder=Plain((ngrams,), 1),
        )
        yield Candidate(f"n-gram convolution, d_model {width}", model, width, 4 * width**2, tokens)
    attention = Block((SelfAttention(), FeedForward(activation="gelu")), PreNorm())
    for depth, width, heads, tokens in ((2, 128, 4, 4096), (4, 256, 8, 8192), (6, 512, 8, 16384)):
        model = EncoderOnly(
            task=SentenceClassifier(2, pool="mean", pooler=False),
            d_model=width,
            heads=heads,
            dropout=0.3,
            encoder=Plain((attention,), depth),
        )
        yield Candidate(f"encoder, {depth} layers, d_model {width}", model, width, 12 * depth * width**2, tokens)


@cache
def of_ngrams(spec: ModelSpec) -> bool:
    """Return whether all layers of a model are convolutions over n-grams."""
    branches = [part for part in walk(spec) if isinstance(part, BranchSpec)]
    return bool(branches) and all(isinstance(branch, NGramConvolution) for branch in branches)


def for_length(spec: ModelSpec, length: int) -> ModelSpec:
    """Add mean pooling and word dropout to a classifier of long texts. Other models are returned unchanged.

    `length` is the number of tokens per text. In a long text, many words indicate the class. Mean pooling counts these
    words, and word dropout removes only some of them. With 4,000 film reviews, accuracy improved by several points.
    """
    if length <= LONG or not isinstance(spec, EncoderOnly) or not isinstance(spec.task, SentenceClassifier):
        return spec
    task, tokens = replace(spec.task, pool="mean_max"), swap(spec.input, Tokens, lambda x: replace(x, word_dropout=0.5))
    return replace(spec, task=task, input=tokens)


def with_dropout(spec: ModelSpec, dropout: float) -> ModelSpec:
    """Return a model with dropout rate `dropout`. An attention dropout rate above 0 becomes half of `dropout`."""
    attention = round(dropout / 2, 3) if getattr(spec, "attention_dropout", 0.0) else 0.0
    return replace(spec, dropout=dropout, attention_dropout=attention)  # type: ignore[reportCallIssue]
