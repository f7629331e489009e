"""Variants: each changes one part, keeps the rest and builds. A variant without effect is refused."""

from typing import Any

import pytest

from regard.batch import translation
from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.models.build import build, count
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Sinusoidal
from regard.nn.position.additive import Learned
from regard.nn.position.rotary import Rotary
from regard.nn.stacks.plain import Plain
from regard.presets import PRESETS, preset
from regard.tree import diff, swap, walk
from regard.variants import VARIANTS, apply

# A post-norm model with sinusoids at its input already has these.
NOT_SMALL = {"post_norm", "sandwich", "sinusoidal"}
# A decoder alone shares no tables with a source and has no encoder; GPT-2 is pre-norm with GELU.
NOT_GPT2 = {
    *("funnel", "tied_decoder", "tied_inputs", "untied", "block_sharing_encoder", "pre_norm", "gelu"),
    *("decoder_only", "prefix_lm", "transparent", "transparent_normed"),
}
# Depth variants can be applied again, and vanilla changes nothing.
REPEATABLE = {"layers_24", "layers_18", "layers_8", "layers_6", "vanilla"}
GATED = {"geglu", "glu", "liglu", "reglu", "swiglu"}
ACTIVATIONS = {
    **{"elu": "elu", "gelu": "gelu_tanh", "selu": "selu", "sigmoid": "sigmoid", "softplus": "softplus"},
    **{"swish": "swish", "geglu": "gelu_tanh", "glu": "sigmoid", "liglu": "linear", "reglu": "relu", "swiglu": "swish"},
}
SIZES: dict[str, Any] = {"vocab": 20, "d_model": 24, "heads": 6, "d_head": 4, "decoder.depth": 6}


def parts(spec: ModelSpec, kind: type) -> list[Any]:
    return [part for part in walk(spec) if isinstance(part, kind)]


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - NOT_SMALL))
def test_every_variant_changes_a_transformer(name: str) -> None:
    base = preset("transformer_small", **SIZES, **{"encoder.depth": 6})
    changed = apply(name, base)
    assert bool(diff(base, changed)) == (name != "vanilla")
    model = build(changed, seed=1)
    loss = model.loss(translation([([5, 6, 7], [8, 9]), ([4], [5])]))
    assert loss.total.isfinite()
    if name not in REPEATABLE:
        with pytest.raises(SpecError, match=f"variants: '{name}' changes nothing here"):
            apply(name, changed)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - NOT_GPT2))
def test_every_variant_of_a_decoder_builds(name: str) -> None:
    base = preset("gpt2_small", **SIZES)
    assert count(apply(name, base)) > 0


@pytest.mark.parametrize("name", sorted(NOT_SMALL | NOT_GPT2))
def test_a_variant_without_effect_is_refused(name: str) -> None:
    base = "transformer_small" if name in NOT_SMALL else "gpt2_small"
    with pytest.raises(SpecError, match=r"changes nothing here|only an? |needs a model with an encoder|only a model"):
        apply(name, preset(base))


@pytest.mark.parametrize(
    ("name", "base"),
    [
        *((name, "transformer_small") for name in sorted(GATED)),
        *(("swiglu", base) for base in ("transformer_tiny", "gpt2_small", "t5_base", "bert_base")),
    ],
)
def test_a_gate_keeps_the_number_of_parameters(name: str, base: str) -> None:
    spec = preset(base)
    changed = apply(name, spec)
    assert abs(count(changed) / count(spec) - 1) < 0.01
    assert {(f.gated, f.activation) for f in parts(changed, FeedForward)} == {(True, ACTIVATIONS[name])}
    # A second gate variant does not narrow the layer again.
    other = "glu" if name != "glu" else "swiglu"
    assert count(apply(other, changed)) == count(changed)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS.keys() - GATED))
def test_an_activation_changes_nothing_else(name: str) -> None:
    spec = preset("transformer_small")
    changed = apply(name, spec)
    assert {(f.gated, f.activation) for f in parts(changed, FeedForward)} == {(False, ACTIVATIONS[name])}
    assert count(changed) == count(spec)
    assert swap(changed, FeedForward, lambda _: FeedForward()) == swap(spec, FeedForward, lambda _: FeedForward())


@pytest.mark.parametrize("name", ["alibi", "rotary", "shaw", "t5_bias"])
@pytest.mark.parametrize("base", ["transformer_small", "gpt2_small"])
def test_positions_move_into_attention(name: str, base: str) -> None:
    changed: Any = apply(name, preset(base))
    assert changed.input.position is None
    kinds = {type(stack.position).kind for stack in parts(changed, Plain)}
    assert kinds == {name}
    assert all(attention.position is None for attention in parts(changed, SelfAttention))


@pytest.mark.parametrize(("name", "position"), [("sinusoidal", Sinusoidal()), ("learned", Learned(512))])
def test_positions_move_to_the_input(name: str, position: Any) -> None:
    own = swap(preset("t5_base"), SelfAttention, lambda a: SelfAttention(position=Rotary()))
    for base in (preset("t5_base"), own):
        changed: Any = apply(name, base)
        assert changed.input.position == position
        assert all(stack.position is None for stack in parts(changed, Plain))
        assert all(attention.position is None for attention in parts(changed, SelfAttention))


@pytest.mark.parametrize(
    ("name", "encoder", "decoder"),
    [
        ("block_sharing", 1, 1),
        ("block_sharing_encoder", 1, None),
        ("block_sharing_decoder", None, 1),
    ],
)
def test_block_sharing_shares_the_blocks_of_its_stacks(name: str, encoder: int | None, decoder: int | None) -> None:
    changed = apply(name, preset("transformer_small"))
    assert isinstance(changed, EncoderDecoder)
    assert isinstance(changed.encoder, Plain)
    assert isinstance(changed.decoder, Plain)
    assert (changed.encoder.unique, changed.decoder.unique) == (encoder, decoder)
    assert (changed.sharing.source_target, changed.sharing.input_output) == (True, False)


def test_a_decoder_can_share_its_blocks() -> None:
    for name in ("block_sharing", "block_sharing_decoder"):
        changed = apply(name, preset("gpt2_small"))
        assert isinstance(changed, DecoderOnly)
        assert isinstance(changed.decoder, Plain)
        assert (changed.decoder.unique, changed.tied) == (1, False)


@pytest.mark.parametrize(
    ("name", "source_target", "input_output", "tables"),
    [("tied_decoder", False, True, 2), ("tied_inputs", True, False, 2), ("untied", False, False, 3)],
)
def test_vocabulary_tables_are_shared(name: str, source_target: bool, input_output: bool, tables: int) -> None:
    base = preset("transformer_small", vocab=1000, **{"sharing.positions": True})
    changed = apply(name, base)
    assert isinstance(changed, EncoderDecoder)
    assert (changed.sharing.source_target, changed.sharing.input_output) == (source_target, input_output)
    assert changed.sharing.positions  # other settings are kept
    assert count(changed) - count(base) == (tables - 1) * 1000 * 256


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("pre_norm", {"pre_norm"}), ("rms_norm_full", {"rms_norm"}), ("rms_norm", {"partial_rms_norm"})],
)
def test_norms_are_replaced_everywhere(name: str, kinds: set[str]) -> None:
    changed = apply(name, preset("transformer_small"))
    norms = {type(part).kind for part in walk(changed)} & {
        *("pre_norm", "post_norm", "sandwich"),
        *(("rms_norm", "partial_rms_norm", "layer_norm") if name != "pre_norm" else ()),
    }
    assert norms == kinds | ({"post_norm"} if name != "pre_norm" else set())


def test_pre_norm_and_post_norm_are_inverse() -> None:
    base = preset("transformer_small")
    assert apply("post_norm", apply("pre_norm", base)) == base


def test_an_unknown_variant_suggests_the_nearest_name() -> None:
    with pytest.raises(SpecError, match=r"variants: unknown variant 'swigul'; did you mean 'swiglu'\?"):
        apply("swigul", preset("transformer_small"))


@pytest.mark.parametrize("base", ["convs2s", "bytenet_small"])
def test_variants_refuse_a_model_without_blocks(base: str) -> None:
    """A partial change would be wrong: positions would be removed and none added."""
    for name in VARIANTS.keys() - {"vanilla"}:
        with pytest.raises(SpecError, match="stacks of blocks"):
            apply(name, preset(base))
    assert apply("vanilla", preset(base)) == preset(base)


def test_every_variant_has_a_description() -> None:
    assert all(variant.about for variant in VARIANTS.values())
    assert list(VARIANTS) == sorted(VARIANTS)


WITH_FEED_FORWARD = [
    name for name in sorted(PRESETS) if any(isinstance(part, FeedForward) for part in walk(preset(name)))
]


@pytest.mark.parametrize("base", WITH_FEED_FORWARD)
def test_every_preset_with_feed_forwards_has_variants(base: str) -> None:
    spec = preset(base)
    assert apply("geglu", spec) != spec
