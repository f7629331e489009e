"""Fit models and batches to a text: embedding tables, number of classes, positions, packing."""

from typing import Any

import pytest

from regard import swap
from regard.catalogue import edited
from regard.data.batching import Buckets, Packing
from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.models.base import ModelSpec
from regard.models.build import build
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import SentenceClassifier
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.self_attention import SelfAttention
from regard.planner import candidates
from regard.planner import fit as fitting
from regard.presets import preset
from regard.tree import walk
from regard.variants import apply


def test_evaluation_is_padded() -> None:
    assert fitting.padded(Packing(700, 70)) == Buckets(700)


# -- fit a model


def fitted(model: ModelSpec, objective: Objective, vocabulary: dict[str, int], **settings: Any) -> Any:
    return edited(model, fitting.fitted(model, objective, vocabulary, settings.pop("longest", 40), **settings))


def test_one_tokenizer_gives_one_embedding_table() -> None:
    model = fitted(preset("transformer_tiny"), Translation(), {"source": 333, "target": 333})
    assert (model.vocab, model.target_vocab, model.sharing.source_target) == (333, None, True)


@pytest.mark.parametrize(("source", "target"), [(300, 400), (400, 300), (300, 300)])
def test_two_tokenizers_give_two_embedding_tables(source: int, target: int) -> None:
    model = fitted(preset("transformer_tiny"), Translation(), {"source": source, "target": target}, joint=False)
    assert (model.vocab, model.target_vocab or model.vocab, model.sharing.source_target) == (source, target, False)
    assert isinstance(model, EncoderDecoder)
    built: Any = build(model, device="meta")
    assert built.tables.get("source").weight.shape == (source, 128)
    assert built.tables.get("target").weight.shape == (target, 128)
    assert built.tables.get("output") is built.tables.get("target")


def test_vocabularies_of_different_sizes_give_two_embedding_tables() -> None:
    model = fitted(preset("transformer_tiny"), Translation(), {"source": 300, "target": 400})
    assert not model.sharing.source_target


def test_a_classifier_has_as_many_classes_as_labels() -> None:
    objective = Classification(("a", "b", "c"))
    candidate = candidates(objective)[0].spec
    model = fitted(candidate, objective, {"text": 99})
    assert (model.vocab, model.task.classes) == (99, 3)
    bert = fitted(preset("bert_base"), objective, {"text": 99})
    assert bert.task == SentenceClassifier(3)


def test_learned_positions_are_as_many_as_the_longest_text() -> None:
    assert fitted(preset("gpt2_small"), LanguageModelling(), {"target": 99}, longest=64).input.position.max_len == 64
    assert "input.position.max_len" not in fitting.fitted(
        preset("transformer_tiny"), Translation(), {"source": 9, "target": 9}, 64
    )


def test_a_linformer_has_weights_for_the_longest_text() -> None:
    model = swap(preset("bert_base"), SelfAttention, lambda _: Linformer(max_len=512))
    longest = {spec.max_len for spec in walk(model) if isinstance(spec, Linformer)}
    assert longest == {512}
    fit = fitted(model, Classification(("a", "b")), {"text": 99}, longest=4002)
    assert {spec.max_len for spec in walk(fit) if isinstance(spec, Linformer)} == {4002}
    assert not any(path.endswith("branches[0].max_len") for path in fitting.fitted(model, Classification(), {}, 500))


def test_rows_are_packed_if_the_task_and_the_model_allow_it() -> None:
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
