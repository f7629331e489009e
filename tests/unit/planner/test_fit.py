"""Models and batches that fit a text: tables, classes, positions, packed rows."""

from typing import Any

import pytest

from regard.catalogue import edited
from regard.data.batching import Buckets, Packing
from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.models.base import ModelSpec
from regard.models.build import build
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import SentenceClassifier
from regard.planner import candidates
from regard.planner import fit as fitting
from regard.presets import preset
from regard.variants import apply


def test_evaluation_is_padded() -> None:
    assert fitting.padded(Packing(700, 70)) == Buckets(700)


# -- a model that fits its data


def fitted(model: ModelSpec, objective: Objective, vocabulary: dict[str, int], **settings: Any) -> Any:
    return edited(model, fitting.fitted(model, objective, vocabulary, settings.pop("longest", 40), **settings))


def test_one_tokenizer_is_one_table() -> None:
    found = fitted(preset("transformer_tiny"), Translation(), {"source": 333, "target": 333})
    assert (found.vocab, found.target_vocab, found.sharing.source_target) == (333, None, True)


@pytest.mark.parametrize(("source", "target"), [(300, 400), (400, 300), (300, 300)])
def test_two_tokenizers_are_two_tables(source: int, target: int) -> None:
    found = fitted(preset("transformer_tiny"), Translation(), {"source": source, "target": target}, joint=False)
    assert (found.vocab, found.target_vocab or found.vocab, found.sharing.source_target) == (source, target, False)
    assert isinstance(found, EncoderDecoder)
    tables: Any = build(found, device="meta")
    assert tables.tables.get("source").weight.shape == (source, 128)
    assert tables.tables.get("target").weight.shape == (target, 128)
    assert tables.tables.get("output") is tables.tables.get("target")


def test_sizes_that_differ_are_two_tables_whatever_is_said() -> None:
    found = fitted(preset("transformer_tiny"), Translation(), {"source": 300, "target": 400})
    assert not found.sharing.source_target


def test_a_classifier_has_as_many_classes_as_labels() -> None:
    objective = Classification(("a", "b", "c"))
    chosen_model = candidates(objective)[0].spec
    found = fitted(chosen_model, objective, {"text": 99})
    assert (found.vocab, found.task.classes) == (99, 3)
    bert = fitted(preset("bert_base"), objective, {"text": 99})
    assert bert.task == SentenceClassifier(3)


def test_learned_positions_are_as_many_as_the_longest_text() -> None:
    assert fitted(preset("gpt2_small"), LanguageModelling(), {"target": 99}, longest=64).input.position.max_len == 64
    assert "input.position.max_len" not in fitting.fitted(
        preset("transformer_tiny"), Translation(), {"source": 9, "target": 9}, 64
    )


def test_rows_are_packed_where_texts_may_share_one() -> None:
    base = preset("transformer_base")
    assert fitting.packs(base, Translation())
    assert fitting.packs(base, LanguageModelling("lines"))
    assert not fitting.packs(base, LanguageModelling())
    assert not fitting.packs(base, Classification())
    assert not fitting.packs(apply("funnel", base), Translation())
    assert not fitting.packs(preset("lstm_lm"), LanguageModelling("lines"))


@pytest.mark.parametrize(("longest", "length"), [(20, 128), (128, 128), (129, 136), (250, 256)])
def test_packed_rows_hold_the_longest_text(longest: int, length: int) -> None:
    assert fitting.packed(Buckets(4096), longest) == Packing(4096, length)
    assert fitting.packed(Buckets(100), longest) == Packing(length, length)
