"""The plan of a classifier: n-gram convolutions, pooled and trained according to the number and length of the texts."""

from typing import Any

import pytest

from regard import planner
from regard.data.batching import Buckets
from regard.data.objectives import Classification
from regard.data.prepare import Survey
from regard.models.build import count
from regard.nn.branches.ngram_convolution import NGramConvolution
from regard.planner.candidates import candidates, of_ngrams
from regard.planner.speed import nominal
from regard.presets import preset
from regard.recipe.recipe import default_train
from regard.tree import walk

LABELS = Classification(("a", "b"))
CPU, GPU = nominal("cpu"), nominal("cuda", 80e9)


def planned(records: int, length: int, hardware: planner.Hardware = CPU, **given: Any) -> Any:
    survey = Survey(records=records, kept=records, ids={"text": records * length, "label": records})
    train = default_train(LABELS)
    return planner.plan(LABELS, survey, Buckets(), train, hardware, planner.Given(**given))


def test_candidates_are_in_order_and_count_their_weights() -> None:
    found = [candidate for candidate in candidates(LABELS) if of_ngrams(candidate.spec)]
    assert len(found) == 3
    assert [candidate.blocks for candidate in found] == sorted(candidate.blocks for candidate in found)
    for candidate in found:
        spec: Any = candidate.spec
        assert any(isinstance(part, NGramConvolution) for part in walk(spec))
        rest = spec.vocab * spec.d_model + 3 * spec.d_model + 2  # embeddings, biases of the filters, output layer
        assert count(spec) - rest == candidate.blocks


@pytest.mark.parametrize(("length", "pool", "word_dropout"), [(10, "max", 0.0), (280, "mean_max", 0.5)])
def test_long_texts_are_pooled_by_mean_and_maximum(length: int, pool: str, word_dropout: float) -> None:
    found = planned(20_000, length)
    assert (found.model.task.pool, found.model.input.word_dropout) == (pool, word_dropout)
    assert ("pooling" in {sentence.split(":")[0] for sentence in found.why}) == (pool == "mean_max")


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "cuda"])
def test_few_short_texts_get_hundreds_of_steps(hardware: planner.Hardware) -> None:
    """With larger batches a GPU would leave fewer than two hundred."""
    found = planned(4500, 11, hardware)
    assert found.batching.tokens == 1024
    assert 10 < found.train.steps * found.batching.tokens / (4500 * 11) < 15
    assert found.train.steps > 500


def test_more_texts_need_fewer_passes() -> None:
    passes = [
        (plan := planned(records, 10, GPU)).train.steps * plan.batching.tokens / (records * 10)
        for records in (500, 5000, 50_000, 500_000)
    ]
    assert passes == pytest.approx([30.0, 12.0, 3.0, 2.0], rel=0.05)


def test_given_transformer_keeps_its_learning_rate() -> None:
    """Convolutions take three times the learning rate of attention."""
    spec: Any = preset("lstm_classifier")
    assert planned(5000, 10).train.optimizer.learning_rate == pytest.approx(0.002)
    assert planned(5000, 10, model=spec).train.optimizer.learning_rate == pytest.approx(
        min(2e-3, 0.128 / spec.d_model), rel=1e-3
    )


@pytest.mark.parametrize(("records", "length", "dropout"), [(4500, 11, 0.3), (60_000, 11, 0.5), (60_000, 280, 0.3)])
def test_many_short_texts_get_more_dropout(records: int, length: int, dropout: float) -> None:
    found = planned(records, length)
    assert found.model.dropout == dropout
    assert f"dropout: {dropout}" in found.why
