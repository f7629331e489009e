"""Every variant is exported to CTranslate2 with equal outputs, or refused with the path of the unsupported part."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.decoding.hypothesis import Limits
from regard.errors import DataError, SpecError
from regard.inference import export as exported
from regard.inference.export import export
from regard.models.base import Generator
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Sinusoidal, Tokens
from regard.nn.norm import LayerNorm
from regard.nn.pattern import Window
from regard.nn.position.additive import Learned
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.rms_norm import RMSNorm
from regard.nn.scale_norm import ScaleNorm
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Sharing
from regard.testing import tiny
from regard.tree import swap
from regard.variants import VARIANTS, apply

from .exporting import same, trained

REFUSED = {
    "no_feed_forward": "encoder.pattern[0].branches",
    "no_norm": "encoder.pattern[0].residual.norm",
    "no_residual": "encoder.pattern[0].residual",
    "adaptive_input": "table",
    "adaptive_softmax": "head",
    "adaptive_softmax_no_projection": "head",
    "alibi": "encoder.position",
    "decoder_only": "kind",
    "dynamic_conv": "encoder.pattern[0].branches[0]",
    "dynamic_conv_wu": "encoder.pattern[0].branches[0]",
    "elu": "encoder.pattern[0].branches[1].activation",
    "evolved": "encoder.pattern[0].branches[0]",
    "evolved_so": "encoder.pattern[0].branches[0]",
    "fixup": "linear",
    "funnel": "encoder",
    "light_conv": "encoder.pattern[0].branches[0]",
    "light_conv_wu": "encoder.pattern[0].branches[0]",
    "liglu": "encoder.pattern[0].branches[1].activation",
    "mixture_of_experts": "encoder.pattern[1].branches[1]",
    "mixture_of_softmaxes": "head",
    "parallel": "encoder.pattern[0].branches[0]",
    "prefix_lm": "kind",
    "product_key_memory": "decoder.pattern[0].branches[2]",
    "query_key_norm": "decoder.pattern[0].branches[1].query_key_norm",
    "rezero": "encoder.pattern[0].residual",
    "rezero_layer_norm": "encoder.pattern[0].residual",
    "rezero_rms_norm": "encoder.pattern[0].residual",
    "rms_norm": "encoder.pattern[0].residual.norm",
    "selu": "encoder.pattern[0].branches[1].activation",
    "sliding_window": "encoder.attention_pattern",
    "softplus": "encoder.pattern[0].branches[1].activation",
    "switch": "encoder.pattern[1].branches[1]",
    "synth_dense": "encoder.positions",
    "synth_dense_plus": "encoder.positions",
    "synth_dense_plus_alpha": "encoder.positions",
    "synth_dense_tay": "encoder.pattern[0].branches[0]",
    "synth_factorised": "encoder.positions",
    "synth_random": "encoder.positions",
    "synth_random_plus": "encoder.positions",
    "synth_random_plus_alpha": "encoder.positions",
    "transparent": "bridge",
    "transparent_normed": "bridge",
    "universal": "encoder",
    "universal_act": "encoder",
    "weighted": "encoder.pattern[0].branches[0]",
    "weighted_ahmed": "encoder.pattern[0].branches[0]",
}


# Variants that are exported, but test nothing of the writer that other variants do not test.
ALIKE = {
    "block_sharing_decoder",
    "block_sharing_encoder",
    "block_sharing_factorised",
    "block_sharing_factorised_shared",
}
ALIKE |= {"factorised_shared", "layers_24", "layers_6", "geglu", "reglu", "swiglu", "tied_decoder", "tied_inputs"}
BASE = tiny.narang()


def changed() -> list[str]:
    """Return the variants that apply to the base and change it."""
    names = []
    for name in VARIANTS:
        try:
            names += [name] if apply(name, BASE) != BASE and name not in ALIKE else []
        except SpecError:
            continue
    return names


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare on few and short texts, because every check decodes them twice."""
    monkeypatch.setattr(exported, "TEXTS", 3)
    monkeypatch.setattr(exported, "BEAMS", 3)
    monkeypatch.setattr(exported, "LIMITS", Limits(max_len=8))


def agrees(spec: Any, folder: Path, seed: int = 0) -> None:
    exported_model = export(trained(spec, seed), folder / "out")
    check = exported_model.record["check"]
    assert check["agreed"] == check["texts"] == 3, check
    assert check["largest"] < 1e-4
    assert check["inputs"] == "random ids"


@pytest.mark.parametrize("name", changed())
def test_variants(name: str, tmp_path: Path) -> None:
    """The base has pre-norm, T5's position biases, unscaled attention and a scaled head."""
    spec = apply(name, BASE)
    if name not in REFUSED:
        agrees(spec, tmp_path)
        return
    sentence = rf"^{re.escape(REFUSED[name])}: CTranslate2 cannot express .*; use the native engine$"
    with pytest.raises(SpecError, match=sentence):
        export(trained(spec), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_every_refusal_is_of_a_variant() -> None:
    assert REFUSED.keys() <= set(changed())


def of(part: Any, model: Any = None) -> Any:
    """Return a small post-norm encoder-decoder, or `model`, in which `part` replaces all parts of the same type."""
    return swap(model or tiny.encoder_decoder(), type(part), lambda _: part)


def stacked(position: Any, model: Any) -> Any:
    bare = swap(model, Tokens, lambda tokens: replace(tokens, position=None))
    return swap(bare, Plain, lambda stack: replace(stack, position=position))


SPECS = {
    "post_norm": tiny.encoder_decoder(),
    "halves": of(Tokens(position=Sinusoidal(layout="halves", offset=1), norm=LayerNorm())),
    "appended": replace(
        of(Tokens(position=Learned(40), join="concat", position_width=6)), sharing=Sharing(input_output=False)
    ),
    "apart": replace(tiny.encoder_decoder(), sharing=Sharing(False, False), head=Softmax(bias=True)),
    "gains": of(PostNorm(LayerNorm(gain="scalar", bias=False, eps=1e-3))),
    "no_output": of(SelfAttention(output=False, bias=False)),
    "rms": swap(of(PreNorm(RMSNorm(1e-5)), tiny.encoder_decoder()), PostNorm, lambda _: PreNorm(RMSNorm(1e-5))),
    "normed_queries": of(SelfAttention(query_key_norm=LayerNorm())),
    "shaw_per_layer": swap(
        of(Tokens(position=None)), SelfAttention, lambda each: replace(each, position=Shaw(3, values=False))
    ),
    "rotary": stacked(Rotary(500.0), tiny.encoder_decoder()),
    "heads": swap(of(SelfAttention(heads=2, kv_heads=1)), CrossAttention, lambda each: replace(each, heads=2)),
    "lm": tiny.decoder_only(),
    "lm_alibi": stacked(ALiBi(), replace(tiny.decoder_only(), heads=4)),
    "lm_learned": of(Tokens(position=Learned(30)), tiny.decoder_only()),
}


@pytest.mark.parametrize("name", SPECS)
def test_settings(name: str, tmp_path: Path) -> None:
    agrees(SPECS[name], tmp_path, seed=1)


def test_refusals_name_the_place(tmp_path: Path) -> None:
    decoder: Any = tiny.encoder_decoder().decoder
    blocks = (decoder.pattern[0], replace(decoder.pattern[0], residual=PreNorm()))
    refused = {
        "encoder.pattern[0].residual.norm: CTranslate2 cannot express 'scale_norm'": of(PostNorm(ScaleNorm())),
        "decoder.pattern[1].residual: CTranslate2 cannot express 'pre_norm' beside 'post_norm'": replace(
            tiny.encoder_decoder(), decoder=replace(decoder, pattern=blocks)
        ),
        "input.position: CTranslate2 cannot express 'sinusoidal' beside 'rotary'": swap(
            tiny.encoder_decoder(), Plain, lambda stack: replace(stack, position=Rotary())
        ),
        "encoder.pattern[0].branches[0].attention_pattern: CTranslate2 cannot express 'window'": of(
            SelfAttention(attention_pattern=Window(4))
        ),
        "encoder.pattern[0].branches[0].tied: CTranslate2 cannot express 'key_value': a tied": of(
            SelfAttention(tied="key_value")
        ),
        "encoder.pattern[0].branches[0].d_value: CTranslate2 cannot express values of width 8": of(
            SelfAttention(d_value=8)
        ),
        "encoder.pattern[0].branches[0].position: CTranslate2 cannot express 't5_bias' of a layer's own": swap(
            of(Tokens(position=None)), SelfAttention, lambda each: replace(each, position=T5Bias())
        ),
        "input.norm: CTranslate2 cannot express 'rms_norm' beside 'layer_norm'": of(Tokens(norm=RMSNorm())),
        "input.norm: CTranslate2 cannot express norms of eps 0.01": of(Tokens(norm=LayerNorm(eps=1e-2))),
        "decoder.position.slopes: CTranslate2 cannot express slopes other": stacked(
            ALiBi((0.5, 0.25, 0.125, 0.0625)), replace(tiny.decoder_only(), heads=4)
        ),
        "input_attention: CTranslate2 cannot express 'full' input attention": tiny.prefix_lm(),
        "kind: CTranslate2 cannot express a model of kind 'encoder_only'": tiny.encoder_only(),
    }
    for sentence, spec in refused.items():
        with pytest.raises(SpecError, match=f"^{re.escape(sentence)}"):
            export(trained(spec), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stored", ["float16", "int8"])
def test_quantising_leaves_the_model_as_it_was(stored: str, tmp_path: Path) -> None:
    ours = trained(tiny.encoder_decoder())
    before = {name: weight.clone() for name, weight in ours.model.state_dict().items()}
    check = export(ours, tmp_path / "out", stored).record["check"]
    assert same(ours, before)
    assert 1e-5 < check["largest"] < {"float16": 0.05, "int8": 1.5}[stored]


def test_an_export_that_differs_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trained(tiny.encoder_decoder())
    assert isinstance(ours.model, Generator)
    true = exported.written

    def wrong(*args: Any) -> Any:
        theirs = true(*args)
        theirs.decoder.layer[1].ffn.linear_1.weight.array *= 1.05
        return theirs

    monkeypatch.setattr(exported, "written", wrong)
    with pytest.raises(DataError, match=r"^the exported model differs from the original: .* nothing was written$"):
        export(ours, tmp_path / "out")
    assert not list(tmp_path.iterdir())
