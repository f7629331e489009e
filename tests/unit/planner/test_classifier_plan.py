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
    return planner.plan(LABELS, survey, Buckets(), train, hardware, planner.ModelChoice(**given))


def test_candidates_are_sorted_and_have_the_stated_number_of_weights() -> None:
    convolutions = [candidate for candidate in candidates(LABELS) if of_ngrams(candidate.spec)]
    assert len(convolutions) == 3
    sizes = [candidate.blocks for candidate in convolutions]
    assert sizes == sorted(sizes)
    for candidate in convolutions:
        spec: Any = candidate.spec
        assert any(isinstance(part, NGramConvolution) for part in walk(spec))
        rest = spec.vocab * spec.d_model + 3 * spec.d_model + 2  # embeddings, biases of the filters, output layer
        assert count(spec) - rest == candidate.blocks


@pytest.mark.parametrize(("length", "pool", "word_dropout"), [(10, "max", 0.0), (280, "mean_max", 0.5)])
def test_long_texts_are_pooled_by_mean_and_maximum(length: int, pool: str, word_dropout: float) -> None:
    plan = planned(20_000, length)
    assert (plan.model.task.pool, plan.model.input.word_dropout) == (pool, word_dropout)
    assert ("pooling" in {sentence.split(":")[0] for sentence in plan.why}) == (pool == "mean_max")


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "cuda"])
def test_few_short_texts_get_hundreds_of_steps(hardware: planner.Hardware) -> None:
    """With the larger batches that are usual on a GPU, there would be fewer than two hundred steps."""
    plan = planned(4500, 11, hardware)
    assert plan.batching.tokens == 1024
    assert 10 < plan.train.steps * plan.batching.tokens / (4500 * 11) < 15
    assert plan.train.steps > 500


def test_more_texts_need_fewer_passes() -> None:
    passes = [
        (plan := planned(records, 10, GPU)).train.steps * plan.batching.tokens / (records * 10)
        for records in (500, 5000, 50_000, 500_000)
    ]
    assert passes == pytest.approx([30.0, 12.0, 3.0, 2.0], rel=0.05)


def test_learning_rate_depends_on_the_type_of_the_classifier() -> None:
    """The learning rate of a convolution is three times that of other classifiers."""
    spec: Any = preset("lstm_classifier")
    assert planned(5000, 10).train.optimizer.learning_rate == pytest.approx(0.002)
    assert planned(5000, 10, model=spec).train.optimizer.learning_rate == pytest.approx(
        min(2e-3, 0.128 / spec.d_model), rel=1e-3
    )


@pytest.mark.parametrize(("records", "length", "dropout"), [(4500, 11, 0.3), (60_000, 11, 0.5), (60_000, 280, 0.3)])
def test_many_short_texts_get_more_dropout(records: int, length: int, dropout: float) -> None:
    plan = planned(records, length)
    assert plan.model.dropout == dropout
    assert f"dropout: {dropout}" in plan.why
