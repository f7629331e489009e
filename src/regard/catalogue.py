"""The registry of specs: it lists, for each base class, the specs that JSON and recipes can name by their kind.

To add a spec, add it to `SLOTS` under its base class (its slot). Python code can also use specs that are not listed.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, overload

from regard import tree
from regard.models.base import ModelSpec
from regard.models.baselines.attention_score import AdditiveScore, AttentionScore, BilinearScore, DotScore, GeneralScore
from regard.models.baselines.bytenet import ByteNet
from regard.models.baselines.convs2s import ConvS2S
from regard.models.baselines.rnn import (
    ConstantState,
    EncoderState,
    InitialState,
    Recurrent,
    RecurrentDecoder,
    RecurrentEncoder,
)
from regard.models.baselines.weight_norm import NormedEmbeddings, WeightNorm
from regard.models.decoder_only import DecoderOnly
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, MaskedLM, Pooled, SentenceClassifier, Task, TokenClassifier
from regard.nn.big_bird import BigBird, CausalBigBird
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.convolution import DynamicConv, LightConv, SharedDynamicConv, SharedLightConv
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.evolved import EvolvedDecoderConv, EvolvedEncoderConv, GatedLinear
from regard.nn.branches.experts import MixtureOfExperts, Switch
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import GatedDelta
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.ngram_convolution import NGramConvolution
from regard.nn.branches.parallel import Parallel
from regard.nn.branches.parameter_free_attention import ParameterFreeAttention
from regard.nn.branches.product_key import ProductKeyMemory
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.synthesizer import (
    DenseScores,
    FactorisedScores,
    RandomScores,
    Scores,
    Synthesizer,
    TwoLayerScores,
)
from regard.nn.branches.weighted import Weighted, WeightedSimplex
from regard.nn.bridge import Bridge, Last, Transparent, TransparentNormed
from regard.nn.deep_norm import DeepNorm
from regard.nn.embedding import Sinusoidal, Tokens
from regard.nn.fixup import Fixup, FixupInit, FixupLinear
from regard.nn.gated_residual import GatedRecurrent
from regard.nn.init import (
    ConvS2SInit,
    DeepNormInit,
    FanIn,
    GPT2Init,
    Init,
    Normal,
    T5Init,
    Uniform,
    Uninitialized,
    Xavier,
)
from regard.nn.input import InputSpec
from regard.nn.linear import Dense, Linear
from regard.nn.no_residual import NoResidual
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.pattern import (
    AnyOf,
    AttentionPattern,
    Blocks,
    DilatedWindow,
    GlobalTokens,
    KeepPrefix,
    Sinks,
    Window,
)
from regard.nn.position.additive import Injected, Learned
from regard.nn.position.base import Additive, AtHeads, Position
from regard.nn.position.bias import ALiBi, DistanceBias, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.recurrent import GRU, LSTM, Cell, Elman, LearnedStart, Start, ZeroStart
from regard.nn.residual import PostNorm, PreNorm, Residual
from regard.nn.rezero import ReZero
from regard.nn.rms_norm import PartialRMSNorm, RMSNorm
from regard.nn.sandwich import Sandwich
from regard.nn.scale_norm import ScaleNorm
from regard.nn.stacks.base import StackSpec
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.nn.stacks.universal import Universal, UniversalACT
from regard.nn.vectors import BySide, Vectors
from regard.nn.vocab.adaptive import AdaptiveSoftmax, AdaptiveTable
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.mixture import MixtureOfSoftmaxes
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Factorised, Sharing, TableSpec
from regard.tree import Spec

S = TypeVar("S", bound=Spec)

SLOTS: dict[type[Spec], tuple[type[Spec], ...]] = {
    ModelSpec: (ByteNet, ConvS2S, DecoderOnly, DecoderOnlyTranslator, EncoderDecoder, EncoderOnly, Recurrent),
    Task: (MaskedLM, Pooled, SentenceClassifier, TokenClassifier),
    TableSpec: (AdaptiveTable, Embeddings, Factorised, NormedEmbeddings),
    Sharing: (Sharing,),
    InputSpec: (BySide, Tokens, Vectors),
    Additive: (Learned, Sinusoidal),
    StackSpec: (Funnel, Plain, Universal, UniversalACT),
    Block: (Block,),
    BranchSpec: (
        CompressedAttention,
        CrossAttention,
        DynamicConv,
        EvolvedDecoderConv,
        EvolvedEncoderConv,
        FeedForward,
        GatedDelta,
        GatedLinear,
        LightConv,
        Linformer,
        MixtureOfExperts,
        NGramConvolution,
        Parallel,
        ParameterFreeAttention,
        ProductKeyMemory,
        Recurrence,
        SelfAttention,
        SharedDynamicConv,
        SharedLightConv,
        Switch,
        Synthesizer,
        Weighted,
        WeightedSimplex,
    ),
    Cell: (Elman, GRU, LSTM),
    Start: (LearnedStart, ZeroStart),
    RecurrentEncoder: (RecurrentEncoder,),
    RecurrentDecoder: (RecurrentDecoder,),
    InitialState: (ConstantState, EncoderState),
    AttentionScore: (AdditiveScore, BilinearScore, DotScore, GeneralScore),
    Scores: (DenseScores, FactorisedScores, RandomScores, TwoLayerScores),
    Residual: (DeepNorm, Fixup, GatedRecurrent, NoResidual, PostNorm, PreNorm, ReZero, Sandwich),
    Norm: (LayerNorm, NoNorm, PartialRMSNorm, RMSNorm, ScaleNorm),
    Position: (ALiBi, DistanceBias, Injected, Rotary, Shaw, T5Bias),
    AtHeads: (AtHeads,),
    AttentionPattern: (AnyOf, BigBird, Blocks, CausalBigBird, DilatedWindow, GlobalTokens, KeepPrefix, Sinks, Window),
    Bridge: (Last, Transparent, TransparentNormed),
    HeadSpec: (AdaptiveSoftmax, MixtureOfSoftmaxes, Softmax),
    Linear: (Dense, FixupLinear, WeightNorm),
    Init: (ConvS2SInit, DeepNormInit, FanIn, FixupInit, GPT2Init, Normal, T5Init, Uniform, Uninitialized, Xavier),
}

PARTS: dict[str, type[Spec]] = {part.kind: part for parts in SLOTS.values() for part in parts}


@overload
def from_record(record: Mapping[str, Any], /, *, trust_code: bool = False) -> Any: ...
@overload
def from_record(expected: type[S], record: Mapping[str, Any], /, *, trust_code: bool = False) -> S: ...
def from_record(*args: Any, trust_code: bool = False) -> Any:
    """Convert a JSON object to a spec: `from_record(record)`, or `from_record(Norm, record)` to require a `Norm` spec.

    Raises SpecError for an unknown key or kind and for a wrong type; the message has the path and the nearest name.
    Without `trust_code`, a kind `"module:Class"` raises SpecError too, because it would import code.
    """
    expected, record = args if len(args) == 2 else (Spec, args[0])
    return tree.read(record, expected, "", PARTS, trust_code)


def to_record(spec: Spec) -> dict[str, Any]:
    """Convert a spec to a JSON object. A spec that is not in the catalogue has the kind `module:Class`."""
    return tree.to_record(spec, PARTS)


def edited(spec: S, changes: Mapping[str, Any], trust_code: bool = False) -> S:
    """Return a copy of `spec` with `changes` (path -> value). A spec may be given as a JSON object or as its kind."""
    return tree.edit(spec, changes, PARTS, trust_code)
