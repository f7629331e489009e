"""Vocabulary variants of base models of several sizes and types."""

from dataclasses import replace
from typing import Any

import pytest

from regard.batch import translation
from regard.errors import SpecError
from regard.models.build import build, count
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.adaptive import AdaptiveSoftmax, AdaptiveTable
from regard.nn.vocab.mixture import MixtureOfSoftmaxes
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings, Factorised, Sharing
from regard.presets import preset
from regard.testing import tiny
from regard.tree import diff, swap
from regard.variants import apply
from regard.variants.vocabulary import VARIANTS


def changed(name: str, base: Any) -> Any:
    return apply(name, base)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_cannot_be_applied_twice(name: str) -> None:
    base = preset("transformer_tiny")
    once = apply(name, base)
    with pytest.raises(SpecError, match="changes nothing here"):
        apply(name, once)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_vocabulary_size_can_be_set_later(name: str) -> None:
    """`regard train` sets the vocabulary sizes after the variant is applied, for one vocabulary or two."""
    spec: Any = apply(name, preset("transformer_tiny", vocab=32000))
    for vocab, target in ((9, None), (300, 150), (10_000, 9)):
        resized = spec if target is None else replace(spec, sharing=replace(spec.sharing, source_target=False))
        model = build(replace(resized, vocab=vocab, target_vocab=target), seed=1)
        loss = model.loss(translation([([5, 6, 7], [8, 4]), ([4], [5])]))
        assert loss.total.isfinite()


def test_factorised_inputs_have_a_full_softmax() -> None:
    spec = changed("factorised", preset("narang_base"))
    assert (spec.table, spec.output_table) == (Factorised(128), Embeddings())
    assert not spec.sharing.input_output
    assert spec.sharing.source_target
    assert spec.head == Softmax(scaled=False, z_loss=1e-4)


def test_factorised_shared_changes_only_the_table() -> None:
    base = preset("narang_base")
    assert diff(base, apply("factorised_shared", base)) == [("table", Embeddings(), Factorised(128))]
    assert changed("factorised_shared", preset("transformer_tiny", d_model=4, heads=1)).table == Factorised(1)


def test_shared_blocks_equal_block_sharing() -> None:
    base: Any = preset("narang_base")
    blocks: Any = apply("block_sharing", base)
    assert apply("block_sharing_factorised", base) == apply("factorised", blocks)
    combined: Any = apply("block_sharing_factorised_shared", base)
    assert combined == replace(changed("factorised_shared", base), encoder=blocks.encoder, decoder=blocks.decoder)


def test_loss_settings_of_the_head_are_kept() -> None:
    base = swap(tiny.encoder_decoder(), Softmax, lambda _: Softmax(True, False, 0.2, 0.3))
    assert changed("adaptive_softmax", base).head == AdaptiveSoftmax(3, True, 0.2, 0.3)
    assert changed("mixture_of_softmaxes", base).head == MixtureOfSoftmaxes(15, True, 0.2)


def test_head_and_table_variants_replace_each_other() -> None:
    base: Any = tiny.encoder_decoder()
    narrow = apply("adaptive_softmax", base)
    assert apply("adaptive_softmax_no_projection", narrow) == apply("adaptive_softmax_no_projection", base)
    assert isinstance(changed("adaptive_input", changed("factorised", base)).table, AdaptiveTable)
    assert changed("adaptive_input", changed("factorised", base)).output_table is None
    assert count(apply("mixture_of_softmaxes", apply("adaptive_input", base))) > 0


@pytest.mark.parametrize(
    ("name", "base", "path"),
    [
        ("factorised", tiny.encoder_only(), "table"),
        (
            "factorised_shared",
            replace(tiny.encoder_decoder(), sharing=Sharing(input_output=False)),
            "sharing.input_output",
        ),
        ("factorised_shared", replace(tiny.decoder_only(), tied=False), "tied"),
        ("block_sharing_factorised_shared", apply("untied", tiny.encoder_decoder()), "sharing.input_output"),
        ("adaptive_softmax", tiny.encoder_only(), "task.head.bias"),
        ("adaptive_softmax", tiny.families()["sentence_classifier"], "task.head"),
        ("mixture_of_softmaxes", replace(tiny.decoder_only(), head=Softmax(bias=True)), "head.bias"),
        ("mixture_of_softmaxes", apply("adaptive_softmax", tiny.encoder_decoder()), "head"),
        ("adaptive_softmax", apply("mixture_of_softmaxes", tiny.encoder_decoder()), "head"),
    ],
)
def test_an_error_names_what_the_base_lacks(name: str, base: Any, path: str) -> None:
    with pytest.raises(SpecError) as raised:
        apply(name, base)
    assert raised.value.path == path


def test_an_untied_masked_lm_is_refused() -> None:
    base: Any = tiny.encoder_only()
    with pytest.raises(SpecError) as raised:
        apply("factorised_shared", replace(base, task=replace(base.task, tied=False)))
    assert raised.value.path == "task.tied"


def test_only_plain_stacks_share_blocks() -> None:
    other: Any = apply("funnel", preset("narang_base"))
    assert not isinstance(other.encoder, Plain)
    with pytest.raises(SpecError) as raised:
        apply("block_sharing_factorised", other)
    assert "the encoder must be a plain stack to share its layers, not 'funnel'" in str(raised.value)
