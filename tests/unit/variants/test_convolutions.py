"""Variants with convolutions, evolved blocks and other attention: changed specs, and refused bases."""

from dataclasses import replace
from typing import Any

import pytest

from regard.errors import SpecError
from regard.models.build import build, count
from regard.nn.block import Block
from regard.nn.branches.convolution import DynamicConv, SharedLightConv
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.evolved import EvolvedDecoderConv, EvolvedEncoderConv, GatedLinear
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.parallel import Parallel
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.norm import LayerNorm
from regard.nn.pattern import Window
from regard.nn.position.additive import Injected, Learned
from regard.nn.position.base import AtHeads
from regard.nn.position.bias import T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.residual import PreNorm
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.plain import Plain
from regard.presets import preset
from regard.tree import swap, walk
from regard.variants import apply

BASES = ["narang_base", "t5_base", "transformer_tiny", "gpt2_small", "bert_base"]
ALL = [
    *("dynamic_conv", "dynamic_conv_wu", "evolved", "evolved_so", "light_conv", "light_conv_wu"),
    *("grouped_query", "multi_query", "parallel", "query_key_norm", "sliding_window"),
]


def parts(spec: Any, kind: type) -> list[Any]:
    return [part for part in walk(spec) if isinstance(part, kind)]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ALL)
def test_variants_apply_to_every_base(name: str, base: str) -> None:
    if (name, base) == ("grouped_query", "bert_base"):
        with pytest.raises(SpecError, match="changes nothing here"):  # it does not change encoders
            apply(name, preset(base))
        return
    changed = apply(name, preset(base))
    assert count(changed) > 0
    with pytest.raises(SpecError, match=f"'{name}' changes nothing here"):
        apply(name, changed)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ALL[:2] + ALL[4:6])
def test_convolutions_replace_all_self_attention(name: str, base: str) -> None:
    before, changed = preset(base), apply(name, preset(base))
    assert not parts(changed, SelfAttention)
    assert set(parts(changed, CrossAttention)) == set(parts(before, CrossAttention))
    assert all(stack.position is None for stack in parts(changed, Plain))
    assert changed.input == before.input


@pytest.mark.parametrize(
    ("base", "hidden"), [("narang_base", 512), ("transformer_tiny", 42), ("transformer_big", 4096 // 6)]
)
def test_dynamic_convolutions_reduce_the_hidden_width(base: str, hidden: int) -> None:
    changed = apply("dynamic_conv", preset(base))
    assert {f.d_hidden for f in parts(changed, FeedForward)} == {hidden}
    assert parts(changed, DynamicConv) == [DynamicConv(9)] * 2


def test_kernel_sizes_grow_from_layer_to_layer() -> None:
    """Wu et al. 2019: kernel sizes 3, 7, 15, then 31."""
    changed: Any = apply("light_conv_wu", preset("transformer_base"))
    for stack in (changed.encoder, changed.decoder):
        assert [stack.block_of(n).branches[0].width for n in range(6)] == [3, 7, 15, 31, 31, 31]
    shared: Any = apply("light_conv_wu", apply("block_sharing", preset("transformer_base")))
    assert [block.branches[0] for block in shared.encoder.pattern] == [SharedLightConv(3)]


def test_kernel_sizes_need_separate_layers() -> None:
    universal = apply("universal", preset("narang_base"))
    with pytest.raises(SpecError, match=r"^encoder\.kind: 'universal' has no separate layers for"):
        apply("light_conv_wu", universal)
    assert not parts(apply("light_conv", universal), SelfAttention)


def test_evolved_blocks() -> None:
    changed: Any = apply("evolved", preset("narang_base"))
    norm = LayerNorm(eps=1e-6)
    attention, cross = SelfAttention(scale="none"), CrossAttention(scale="none")
    encoder = (GatedLinear(True), EvolvedEncoderConv(norm), attention, FeedForward(3072, bias=True))
    many = SelfAttention(scale="none", heads=24, d_head=64)
    swish = FeedForward(3072, "swish", bias=True)
    decoder = (Parallel((many, cross)), EvolvedDecoderConv(norm), attention, cross, swish)
    assert changed.encoder == Plain((Block(encoder, PreNorm(norm)),), 6, position=T5Bias())
    assert changed.decoder == Plain(
        (Block(decoder, PreNorm(norm)),), 6, position=T5Bias(), positions=(AtHeads(24, T5Bias()),)
    )


def test_evolved_blocks_as_in_the_paper() -> None:
    """So et al. 2019: three and four for six layers; at most 16 heads, of the model's total width."""
    changed: Any = apply("evolved_so", preset("transformer_base"))
    assert (changed.encoder.depth, changed.decoder.depth) == (3, 4)
    many = changed.decoder.pattern[0].branches[0].branches[0]
    assert (many.heads, many.d_head) == (16, None)
    big: Any = apply("evolved_so", preset("transformer_big"))
    assert big.decoder.pattern[0].branches[0].branches[0] == SelfAttention()  # it already has 16 heads


def test_evolved_decoder_without_an_encoder() -> None:
    changed: Any = apply("evolved", preset("gpt2_small"))
    kinds = [branch.kind for branch in changed.decoder.pattern[0].branches]
    assert kinds == ["self_attention", "evolved_decoder_conv", "self_attention", "feedforward"]
    assert parts(apply("evolved", preset("bert_base")), EvolvedEncoderConv)


@pytest.mark.parametrize("position", ["alibi", "rotary", "shaw", "t5_bias"])
@pytest.mark.parametrize("name", ["evolved", "evolved_so"])
def test_doubled_heads_have_positions(name: str, position: str) -> None:
    build(apply(name, apply(position, preset("transformer_tiny"))), device="meta")
    own = swap(preset("transformer_tiny"), SelfAttention, lambda _: SelfAttention(position=Rotary()))
    build(apply(name, own), device="meta")
    injected = swap(preset("transformer_tiny"), Plain, lambda stack: replace(stack, position=Injected(Learned(32))))
    build(apply(name, injected), device="meta")


def test_evolved_blocks_can_be_shared() -> None:
    for unique, expected in ((1, 1), (4, 2)):
        shared = swap(preset("transformer_tiny"), Plain, lambda stack, n=unique: replace(stack, unique=n))
        assert {stack.unique for stack in parts(apply("evolved", shared), Plain)} == {expected}


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("transformer_small", "an evolved block replaces two layers, so the depth must be even, not 3"),
        ("universal", "evolved blocks need a plain stack of equal blocks, which the encoder is not"),
        (
            "light_conv",
            "evolved blocks need attention and .* layers; the encoder has light_conv, feedforward",
        ),
        ("mixed", "the branches of the encoder have different residual rules"),
    ],
)
def test_bases_without_an_evolved_form_are_refused(base: str, message: str) -> None:
    bases: dict[str, Any] = {
        "transformer_small": lambda: preset("transformer_small"),
        "universal": lambda: apply("universal", preset("narang_base")),
        "light_conv": lambda: apply("light_conv", preset("narang_base")),
        "mixed": lambda: replace(preset("sahai"), encoder=replace(preset("sahai").encoder, depth=2)),  # type: ignore[reportAttributeAccessIssue]
    }
    with pytest.raises(SpecError, match=f"^variants: {message}"):
        apply("evolved", bases[base]())


def test_parallel_branches() -> None:
    """One norm per block remains of three; all other parameters are kept."""
    base: Any = preset("narang_base")
    changed: Any = apply("parallel", base)
    assert changed.decoder.pattern[0] == Block(
        (Parallel(base.decoder.pattern[0].branches),), PreNorm(LayerNorm(eps=1e-6))
    )
    assert count(base) - count(changed) == 12 * (1 + 2) * 1536
    with pytest.raises(SpecError, match=r"^encoder\.pattern\[0\]\.residual: branches with different residual rules"):
        apply("parallel", preset("sahai"))


@pytest.mark.parametrize(("heads", "groups"), [(12, 3), (8, 2), (16, 4), (6, 2), (2, 1), (5, 1)])
def test_grouped_query_has_groups_of_about_four_heads(heads: int, groups: int) -> None:
    base: Any = preset("transformer_tiny", d_model=240, heads=heads)
    changed: Any = apply("grouped_query", base)
    assert changed.encoder == base.encoder
    attentions = [*parts(changed.decoder, SelfAttention), *parts(changed.decoder, CrossAttention)]
    assert [attention.kv_heads for attention in attentions] == [groups, groups]


def test_multi_query_has_one_key_for_all_heads() -> None:
    changed = apply("multi_query", preset("narang_base"))
    attentions = [*parts(changed, SelfAttention), *parts(changed, CrossAttention)]
    assert [attention.kv_heads for attention in attentions] == [1, 1, 1]


@pytest.mark.parametrize("name", ["grouped_query", "multi_query"])
def test_shared_keys_need_several_heads(name: str) -> None:
    with pytest.raises(SpecError, match="changes nothing here"):
        apply(name, preset("transformer_tiny", heads=1))


def test_windows_apply_to_stacks_with_attention() -> None:
    changed: Any = apply("sliding_window", preset("transformer_tiny"))
    assert changed.encoder.attention_pattern == changed.decoder.attention_pattern == Window(256)
    with pytest.raises(SpecError, match="changes nothing here"):
        apply("sliding_window", apply("light_conv", preset("transformer_tiny")))


def test_normalised_queries_and_keys_are_scaled() -> None:
    for base in ("narang_base", "transformer_tiny"):
        changed = apply("query_key_norm", preset(base))
        attentions = [*parts(changed, SelfAttention), *parts(changed, CrossAttention)]
        assert {(attention.query_key_norm, attention.scale) for attention in attentions} == {(RMSNorm(), "sqrt")}
    own = swap(preset("transformer_tiny"), SelfAttention, lambda _: SelfAttention(scale=0.3))
    assert {a.scale for a in parts(apply("query_key_norm", own), SelfAttention)} == {0.3}
