import math

import pytest
import torch

from regard.decoding.beam import Beam
from regard.decoding.ensemble import Ensemble
from regard.decoding.hypothesis import Limits
from regard.decoding.search import find
from regard.errors import DataError, SpecError

from .known_models import (
    BOS,
    ENDS,
    KnownModel,
    NextLogProbs,
    normalised,
    random_log_probs,
    random_rows,
    read_back,
    simple_beam,
    sources,
    translator,
)


def mixed(*members: NextLogProbs) -> NextLogProbs:
    """Return the log of the mean probability of each token."""

    def next_log_probs(source: tuple[int, ...], output: tuple[int, ...]) -> list[float]:
        every = zip(*(member(source, output) for member in members), strict=True)
        return [math.log(sum(math.exp(x) for x in values) / len(members)) for values in every]

    return next_log_probs


def test_one_model_is_an_ensemble_of_one_and_of_itself() -> None:
    model, batch = translator(), sources(*random_rows(6, 23))
    alone = find(model, batch, Beam(3, 3), ENDS, Limits(max_len=6))
    assert find([model], batch, Beam(3, 3), ENDS, Limits(max_len=6)) == alone
    twice = find([model, model], batch, Beam(3, 3), ENDS, Limits(max_len=6))
    for a, b in zip(alone, twice, strict=True):
        assert [h.ids for h in a] == [h.ids for h in b]
        assert [h.score for h in a] == pytest.approx([h.score for h in b], abs=1e-9)


@pytest.mark.parametrize("count", [2, 3])
def test_probabilities_are_averaged_at_every_step(count: int) -> None:
    members = [random_log_probs(7, seed=seed, eos=0.5) for seed in range(count)]
    rows = [(3,), (4, 5), (6,)]
    results = find(
        [KnownModel(next_log_probs) for next_log_probs in members], sources(*rows), Beam(3, 3), ENDS, Limits(max_len=6)
    )
    for row, hypotheses in zip(rows, results, strict=True):
        expected = simple_beam(mixed(*members), row, 7, 3, 6, lambda p, n: normalised("mean", 1.0, p, n))[:3]
        assert [(h.ids, pytest.approx(h.score, abs=1e-9)) for h in hypotheses] == expected


def test_two_real_models_follow_the_formula() -> None:
    models, rows = [translator(), translator(seed=11)], random_rows(5, 23)
    results = find(models, sources(*rows), Beam(3), ENDS, Limits(max_len=6))
    for row, (hypothesis,) in zip(rows, results, strict=True):
        each = [read_back(model, hypothesis.ids, hypothesis.ended, source=row) for model in models]
        mean = [math.log((math.exp(a) + math.exp(b)) / 2) for a, b in zip(*each, strict=True)]
        assert hypothesis.token_log_probs == pytest.approx(mean, abs=1e-9)


def test_different_vocabularies_are_refused() -> None:
    models = [translator(vocab=23), translator(vocab=24)]
    with pytest.raises(DataError, match=r"^models: an ensemble needs one vocabulary, not vocabularies of \[23, 24\]"):
        find(models, sources((3,)), Beam(2), ENDS, Limits(max_len=3))


def test_no_models_are_refused() -> None:
    with pytest.raises(SpecError, match=r"^models: a search needs at least one model"):
        find([], sources((3,)), Beam(2), ENDS, Limits(max_len=3))


def test_a_single_model_is_not_copied() -> None:
    """The log-probabilities of a single model are returned without a copy."""
    model = translator()
    ensemble = Ensemble(model)
    ids = torch.full((1, 1), BOS)
    with torch.no_grad():
        alone = model.advance(ids, model.start(sources((3, 4)), 4))
        assert torch.equal(ensemble.advance(ids, ensemble.start(sources((3, 4)), 4)), alone)
