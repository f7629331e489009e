"""Every law is checked for every part, in every model family that has a place for the part."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from regard.catalogue import PARTS
from regard.models.base import ModelSpec
from regard.models.baselines.attention_score import AdditiveScore, BilinearScore, DotScore, GeneralScore
from regard.models.baselines.bytenet import ByteNet
from regard.models.baselines.convs2s import ConvS2S
from regard.models.baselines.rnn import ConstantState, Recurrent, RecurrentDecoder, RecurrentEncoder
from regard.models.baselines.weight_norm import WeightNorm
from regard.models.encoder_only import EncoderOnly, MaskedLM, SentenceClassifier, TokenClassifier
from regard.nn.activation import ACTIVATIONS
from regard.nn.big_bird import BigBird, CausalBigBird
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.experts import MixtureOfExperts
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import GatedDelta
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.ngram_convolution import NGramConvolution
from regard.nn.branches.parameter_free_attention import ParameterFreeAttention
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.bridge import Bridge, Last
from regard.nn.deep_norm import DeepNorm
from regard.nn.embedding import Sinusoidal, Tokens
from regard.nn.fixup import Fixup, FixupInit, FixupLinear
from regard.nn.gated_residual import GatedRecurrent
from regard.nn.init import ConvS2SInit, DeepNormInit, FanIn, GPT2Init, Init, Normal, T5Init, Uninitialized, Xavier
from regard.nn.input import InputSpec
from regard.nn.linear import Dense, Linear
from regard.nn.no_residual import NoResidual
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.pattern import AnyOf, Blocks, DilatedWindow, GlobalTokens, KeepPrefix, Sinks, Window
from regard.nn.position.additive import Injected, Learned
from regard.nn.position.bias import ALiBi, DistanceBias, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.recurrent import GRU, Elman, LearnedStart
from regard.nn.residual import PostNorm, PreNorm, Residual
from regard.nn.rezero import ReZero
from regard.nn.rms_norm import PartialRMSNorm, RMSNorm
from regard.nn.sandwich import Sandwich
from regard.nn.scale_norm import ScaleNorm
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.nn.stacks.universal import Universal, UniversalACT
from regard.nn.vectors import BySide, Vectors
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Sharing, TableSpec
from regard.presets import PRESETS
from regard.testing import LAWS, around, examine, tiny
from regard.tree import Spec, swap, to_record, walk
from regard.variants import VARIANTS

from .conftest import broken, unchecked

SIDES = ("encoder", "decoder")
BLOCK = Block((SelfAttention(), FeedForward(24)))

PARTS_UNDER_LAW: dict[str, Spec] = {
    **{f"feedforward {name}": FeedForward(24, name) for name in ACTIVATIONS},
    **{f"feedforward {name} gated": FeedForward(24, name, gated=True) for name in ("swish", "linear", "sigmoid")},
    "feedforward without bias": FeedForward(24, bias=False),
    "self_attention grouped": SelfAttention(kv_heads=2),
    "self_attention multi-query": SelfAttention(kv_heads=1),
    "self_attention wide": SelfAttention(heads=3, d_head=6, d_value=2),
    "self_attention without output": SelfAttention(output=False),
    "self_attention unscaled": SelfAttention(scale="none"),
    "self_attention scaled by 0.3": SelfAttention(scale=0.3),
    "self_attention query-key norm": SelfAttention(query_key_norm=RMSNorm()),
    "self_attention without bias": SelfAttention(bias=False),
    "self_attention tied query and key": SelfAttention(tied="query_key"),
    "self_attention tied key and value": SelfAttention(kv_heads=2, tied="key_value"),
    "parameter_free_attention": ParameterFreeAttention(4, "sqrt"),
    **{
        f"self_attention own {position.kind}": SelfAttention(position=position)
        for position in (T5Bias(8, 16), Rotary(), Shaw(3), ALiBi(), DistanceBias(3), Injected())
    },
    "compressed_attention": CompressedAttention(),
    "cross_attention grouped": CrossAttention(kv_heads=2),
    "cross_attention wide": CrossAttention(heads=3, d_head=6, d_value=2),
    "cross_attention query-key norm": CrossAttention(query_key_norm=RMSNorm(), scale="none"),
    "gated_delta": GatedDelta(4, key_heads=2, d_head=3, d_value=5, kernel_size=2, bias=False),
    "ngram_convolution": NGramConvolution((2, 3), filters=5),
    "layer_norm scalar": LayerNorm(gain="scalar"),
    "layer_norm bare outside": LayerNorm(gain="none", root="outside"),
    "layer_norm without bias": LayerNorm(bias=False),
    "rms_norm": RMSNorm(),
    "partial_rms_norm": PartialRMSNorm(0.3),
    "scale_norm": ScaleNorm(),
    "no_norm": NoNorm(),
    "pre_norm": PreNorm(),
    "post_norm": PostNorm(),
    "sandwich": Sandwich(),
    "deep_norm": DeepNorm(),
    "no_residual": NoResidual(LayerNorm()),
    "rezero": ReZero(),
    "rezero normed": ReZero(RMSNorm()),
    "fixup": Fixup(),
    "fixup_linear": FixupLinear(),
    "gated_recurrent": GatedRecurrent(),
    "universal": Universal(BLOCK, 1, 2, 1, position=ALiBi()),
    "universal_act": UniversalACT(BLOCK, 1, 3, 0, epsilon=0.3),
    "rules per branch": Block((SelfAttention(), FeedForward(24)), (PostNorm(), NoResidual())),
    **{
        position.kind: position
        for position in (T5Bias(8, 16), Rotary(), Shaw(3), ALiBi(), DistanceBias(3), Injected(), Injected(Learned(32)))
    },
    "shaw keys only": Shaw(3, values=False),
    "sinusoidal as fairseq": Sinusoidal(denominator="span", layout="halves", offset=2),
    "sinusoidal from 1": Sinusoidal(start=1),
    "learned": Learned(32),
    "tokens concatenated": Tokens(join="concat", position_width=4, scaled=False),
    "tokens with norm": Tokens(norm=LayerNorm()),
    "tokens with word dropout": Tokens(word_dropout=0.3),
    "vectors": Vectors(5, norm=LayerNorm()),
    "by_side": BySide(Tokens(scaled=False), Tokens(norm=LayerNorm())),
    "window": Window(2),
    "dilated_window": DilatedWindow(2, 2),
    "blocks": Blocks(2),
    "blocks with neighbours": Blocks(2, 1),
    "global_tokens": GlobalTokens(2),
    "sinks": Sinks(2, 1),
    "big_bird": BigBird(1, 1, 1),
    "causal_big_bird": CausalBigBird(1, 1, 1),
    "any_of": AnyOf((Window(2), GlobalTokens(1))),
    "keep_prefix": KeepPrefix(Window(2)),
    "shared blocks": Plain((BLOCK,), depth=3, unique=1),
    "pattern of two": Plain((BLOCK, Block((FeedForward(8), SelfAttention(kv_heads=1)), PreNorm())), depth=4, unique=2),
    "stack with shared shaw": Plain((BLOCK,), depth=2, position=Shaw(2), attention_pattern=Window(3)),
    "embeddings": Embeddings(),
    "softmax with bias": Softmax(bias=True, scaled=True, label_smoothing=0.1, z_loss=1e-4),
    "dense without bias": Dense(bias=False),
    "weight_norm": WeightNorm(),
    "last": Last(),
    **{
        init.kind: init
        for init in (ConvS2SInit(), DeepNormInit(), FanIn(), FixupInit(), GPT2Init(), Normal(), T5Init(), Xavier())
    },
    "nothing shared": Sharing(source_target=False, input_output=False),
    "inputs shared": Sharing(input_output=False, positions=True),
    "target and output shared": Sharing(source_target=False),
}


# Parts that do not depend on the model around them (element-wise functions, initial weights) are examined in one
# family, which has both an encoder and a decoder.
ONE_FAMILY = {
    *(f"feedforward {name}" for name in ACTIVATIONS if name not in ("relu", "gelu")),
    *(name for name, part in PARTS_UNDER_LAW.items() if isinstance(part, Init)),
    "self_attention unscaled",
    "self_attention scaled by 0.3",
    "self_attention without bias",
    "self_attention tied query and key",
    "self_attention tied key and value",
    "feedforward without bias",
    "dense without bias",
    "embeddings",
    "sinusoidal from 1",
}


# Parts that are separated from the attention kernels by projections: the kernels treat all models with them alike.
BEHIND_PROJECTIONS = (Norm, Residual, InputSpec, TableSpec, HeadSpec, Linear, Init, Bridge, Sharing, FeedForward)


def _untied(model: ModelSpec) -> ModelSpec:
    """Untie input and output tables: concatenated positions make the input table narrower than the output table."""
    model = swap(model, Sharing, lambda sharing: replace(sharing, input_output=False))
    model = swap(model, MaskedLM, lambda task: replace(task, tied=False))
    return replace(model, tied=False) if hasattr(model, "tied") else model  # type: ignore[reportCallIssue]


def _small(name: str) -> ModelSpec:
    """Return a preset with smaller sizes and everything else unchanged."""
    spec = PRESETS[name]()
    spec = swap(spec, Plain, lambda stack: replace(stack, depth=max(2, len(stack.pattern))))
    spec = swap(spec, Blocks, lambda _: Blocks(4))
    spec = swap(spec, MixtureOfExperts, lambda _: MixtureOfExperts(3, 8))
    spec = swap(spec, RecurrentEncoder, lambda side: replace(side, depth=min(side.depth, 3), d_hidden=16))
    spec = swap(spec, RecurrentDecoder, lambda side: replace(side, depth=min(side.depth, 3)))
    if isinstance(spec, Recurrent):
        return replace(spec, vocab=tiny.VOCAB, d_model=16)
    spec = swap(spec, FeedForward, lambda branch: replace(branch, d_hidden=24))
    spec = swap(spec, Learned, lambda _: Learned(32))
    if isinstance(spec, EncoderOnly):
        spec = replace(spec, task=SentenceClassifier(tiny.CLASSES))
    if isinstance(spec, ConvS2S):
        spec = replace(spec, d_out=None, encoder=spec.encoder[:1] + spec.encoder[-1:], decoder=spec.decoder[-2:])
        layers = {side: tuple((width // 64, kernel) for width, kernel in getattr(spec, side)) for side in SIDES}
        return replace(spec, vocab=tiny.VOCAB, d_model=16, **layers)
    if isinstance(spec, ByteNet):
        return replace(spec, vocab=tiny.VOCAB, d_model=16, encoder_blocks=3, decoder_blocks=3)
    return replace(spec, vocab=tiny.VOCAB, d_model=16, heads=4)  # type: ignore[reportCallIssue]


def _subjects() -> dict[str, ModelSpec]:
    subjects = dict(tiny.families())
    subjects["mean pool"] = tiny.encoder_only(SentenceClassifier(tiny.CLASSES, pool="mean", pooler=False))
    mean_max = SentenceClassifier(tiny.CLASSES, pool="mean_max", pooler=False, label_smoothing=0.1)
    subjects["mean and max pool, smoothed"] = tiny.encoder_only(mean_max)
    layers = (Recurrence(Elman("relu"), start=LearnedStart()), Recurrence(GRU(), d_hidden=6, output=True))
    recurrent = Plain(tuple(Block((layer,), NoResidual()) for layer in layers), 2)
    subjects["recurrent lm"] = replace(tiny.decoder_only(), decoder=recurrent)
    kim = Plain((Block((NGramConvolution((2, 3, 4), output=False),), NoResidual()),), 1)
    max_pool = SentenceClassifier(tiny.CLASSES, pool="max", pooler=False)
    subjects["n-gram classifier"] = replace(tiny.encoder_only(max_pool), encoder=kim)
    bidirectional_lstm = Plain((Block((Recurrence(bidirectional=True),), NoResidual()),), 1)
    ends = SentenceClassifier(tiny.CLASSES, pool="ends")
    subjects["bidirectional"] = replace(tiny.encoder_only(ends), encoder=bidirectional_lstm)
    without_feeding = RecurrentDecoder(attention=DotScore(), self_attention=AdditiveScore())
    fed = RecurrentDecoder(GRU(), 2, attention=BilinearScore(), self_attention=GeneralScore(), input_feeding="context")
    learned = ConstantState(LearnedStart())
    bottom = replace(fed, depth=3, residual_from=3, self_attention=DotScore(), query="bottom", initial_state=learned)
    for name, decoder in {"self-attention": without_feeding, "fed": fed, "fed bottom": bottom}.items():
        subjects[f"recurrent, {name}"] = tiny.recurrent(decoder)
    subjects["untied masked lm"] = tiny.encoder_only(MaskedLM(tied=False))
    subjects["prefix LM with T5 bias"] = swap(
        tiny.prefix_lm(), Plain, lambda stack: replace(stack, position=T5Bias(8, 16))
    )
    inclusive = CompressedAttention(2, "mean", "null", inclusive=True, kv_heads=2)
    subjects["inclusive compressed prefix LM"] = swap(tiny.prefix_lm(), SelfAttention, lambda _: inclusive)
    for name in ("encoder_decoder", "decoder_only"):
        model = getattr(tiny, name)()
        subjects[f"strict {name}"] = replace(model, decoder=replace(model.decoder, strict=True))
    subjects["two vocabularies"] = replace(
        tiny.encoder_decoder(), vocab=tiny.VOCAB + 5, target_vocab=tiny.VOCAB, sharing=Sharing(source_target=False)
    )
    subjects["dense convs2s, shared"] = replace(
        tiny.convs2s(), d_out=None, sharing=Sharing(), output_table=None, linear=Dense(), init=Xavier()
    )
    subjects["wide bytenet"] = replace(tiny.bytenet(), kernel=5, dilations=(3,), stretch=2.5, extra=1)
    subjects["funnel"] = replace(tiny.encoder_decoder(), encoder=Funnel((BLOCK,), (1, 1, 1), T5Bias(8, 16)))
    for sharing in ("none", "heads", "key_value", "layers"):  # in encoders only: a Linformer cannot be causal
        model: Any = tiny.families()["encoder_decoder" if sharing == "layers" else "masked_lm"]
        block = Block((Linformer(max_len=16, rank=3, sharing=sharing), FeedForward(24)))
        subjects[f"linformer sharing {sharing}"] = replace(model, encoder=Plain((block,), 2))
    for name, part in PARTS_UNDER_LAW.items():
        if isinstance(part, CrossAttention):
            subjects[f"{name}: encoder_decoder"] = swap(tiny.encoder_decoder(), CrossAttention, lambda _, p=part: p)
            continue
        for family, model in around(part).items():
            if name in ONE_FAMILY and family != "encoder_decoder":
                continue
            subjects[f"{name}: {family}"] = _untied(model) if name == "tokens concatenated" else model
    for name in PRESETS:
        subjects[f"preset {name}"] = _small(name)
    return subjects


SUBJECTS = _subjects()
SLOW = {"compile"}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_laws(subject: str) -> None:
    """One test per subject, which is built once for all laws."""
    name, _, family = subject.partition(": ")
    behind_projections = family and isinstance(PARTS_UNDER_LAW[name], BEHIND_PROJECTIONS)
    # In the two other families, a part gets the same shapes as in the encoder or decoder of an encoder-decoder.
    same_shapes = family and family != "encoder_decoder" and f"{name}: encoder_decoder" in SUBJECTS
    skipped = SLOW | ({"kernels"} if behind_projections else set())
    assert broken(subject, SUBJECTS[subject], (law for law in LAWS if law not in skipped), shapes=not same_shapes) == []


@pytest.mark.parametrize("name", [name for name, part in PARTS_UNDER_LAW.items() if isinstance(part, BranchSpec)])
def test_branches_use_positions_and_declare_whether_order_matters(name: str) -> None:
    with unchecked():
        verdicts = {
            f"{family} with {scheme}": examine(family, model, ["positions"])[0]
            for (scheme, family), model in tiny.positioned(PARTS_UNDER_LAW[name]).items()
        }
    assert verdicts or isinstance(PARTS_UNDER_LAW[name], CrossAttention)
    assert {model: verdict.detail for model, verdict in verdicts.items() if verdict.outcome == "broken"} == {}


def test_every_catalogued_part_is_examined() -> None:
    """Parts are examined in this file, or as part of a variant in test_table."""
    kinds = {part.kind for subject in SUBJECTS.values() for part in walk(subject)}
    deep = tiny.narang(depth=6, d_model=24, heads=6)
    for variant in VARIANTS.values():
        kinds |= {part.kind for part in walk(variant.edit(deep))}
    # An uninitialized model has no values to compare, and a pooled model has no outputs without a task.
    assert set(PARTS) - kinds == {Uninitialized.kind, "pooled"}


def test_laws_apply_where_they_should() -> None:
    with unchecked():
        verdicts = examine("encoder_decoder", tiny.encoder_decoder(), [law for law in LAWS if law not in SLOW])
        tagger = examine("tagger", tiny.encoder_only(TokenClassifier(3)), ["causality", "steps", "padding", "packing"])
    assert {verdict.outcome for verdict in verdicts} == {"kept"}
    assert [verdict.outcome for verdict in tagger] == ["not applicable", "not applicable", "kept", "kept"]


COMPILED = [
    "encoder_decoder",
    "prefix_lm",
    "convs2s",
    "token_classifier",
    "preset t5_base",
    "rotary: decoder_only",
    "self_attention own shaw: encoder_decoder",
    "compressed_attention: encoder_decoder",
    "shared blocks: decoder_only",
    "gated_delta: decoder_only",
    "linformer sharing layers",
]


def _shallow(stack: Plain) -> Plain:
    """Reduce a stack to one block, which is enough to compile, unless its blocks differ or share weights."""
    return replace(stack, depth=1) if stack.unique is None and len(stack.pattern) == 1 else stack


def test_compile() -> None:
    """Run in a subprocess, because the shape checks of the test suite must not be compiled."""
    program = (
        "import json, sys\n"
        "from regard import from_record\n"
        "from regard.testing import examine\n"
        "for name, record in json.load(sys.stdin).items():\n"
        "    for verdict in examine(name, from_record(record), ['compile']):\n"
        "        print(name, verdict.outcome, verdict.detail)\n"
    )
    records = {name: to_record(swap(SUBJECTS[name], Plain, _shallow)) for name in COMPILED}
    process = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(records), capture_output=True, text=True, check=False
    )
    assert process.stdout.splitlines() == [f"{name} kept " for name in COMPILED], process.stdout + process.stderr


def test_an_unknown_kind_of_branch_is_added_to_a_block() -> None:
    """`around` adds such a branch to a block instead of replacing another branch."""
    model = around(_Extra())["encoder_decoder"]
    assert [len(part.branches) for part in walk(model) if isinstance(part, Block)] == [3, 4]


class _Extra(BranchSpec):
    __slots__ = ()
    kind = "extra"
