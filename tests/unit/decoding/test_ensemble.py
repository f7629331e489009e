import math

import pytest
import torch

from regard.decoding.beam import Beam
from regard.decoding.ensemble import Ensemble
from regard.decoding.hypothesis import Limits
from regard.decoding.search import find
from regard.errors import DataError, SpecError

from .telling import (
    BOS,
    ENDS,
    Says,
    Telling,
    normalised,
    random_rows,
    random_says,
    read_back,
    simple_beam,
    sources,
    translator,
)


def mixed(*members: Says) -> Says:
    """log of the mean probability, token by token."""

    def says(source: tuple[int, ...], said: tuple[int, ...]) -> list[float]:
        every = zip(*(member(source, said) for member in members), strict=True)
        return [math.log(sum(math.exp(x) for x in values) / len(members)) for values in every]

    return says


def test_one_model_is_an_ensemble_of_one_and_of_itself() -> None:
    model, batch = translator(), sources(*random_rows(6, 23))
    alone = find(model, batch, Beam(3, 3), ENDS, Limits(max_len=6))
    assert find([model], batch, Beam(3, 3), ENDS, Limits(max_len=6)) == alone
    twice = find([model, model], batch, Beam(3, 3), ENDS, Limits(max_len=6))
    for a, b in zip(alone, twice, strict=True):
        assert [one.ids for one in a] == [one.ids for one in b]
        assert [one.score for one in a] == pytest.approx([one.score for one in b], abs=1e-9)


@pytest.mark.parametrize("count", [2, 3])
def test_probabilities_are_averaged_at_every_step(count: int) -> None:
    members = [random_says(7, seed=seed, eos=0.5) for seed in range(count)]
    rows = [(3,), (4, 5), (6,)]
    found = find([Telling(says) for says in members], sources(*rows), Beam(3, 3), ENDS, Limits(max_len=6))
    for row, hypotheses in zip(rows, found, strict=True):
        expected = simple_beam(mixed(*members), row, 7, 3, 6, lambda p, n: normalised("mean", 1.0, p, n))[:3]
        assert [(one.ids, pytest.approx(one.score, abs=1e-9)) for one in hypotheses] == expected


def test_two_real_models_by_the_formula() -> None:
    models, rows = [translator(), translator(seed=11)], random_rows(5, 23)
    found = find(models, sources(*rows), Beam(3), ENDS, Limits(max_len=6))
    for row, (one,) in zip(rows, found, strict=True):
        each = [read_back(model, one.ids, one.ended, source=row) for model in models]
        mean = [math.log((math.exp(a) + math.exp(b)) / 2) for a, b in zip(*each, strict=True)]
        assert one.token_log_probs == pytest.approx(mean, abs=1e-9)


def test_different_vocabularies_are_refused() -> None:
    models = [translator(vocab=23), translator(vocab=24)]
    with pytest.raises(DataError, match=r"^models: an ensemble needs one vocabulary, not vocabularies of \[23, 24\]"):
        find(models, sources((3,)), Beam(2), ENDS, Limits(max_len=3))


def test_no_models_are_refused() -> None:
    with pytest.raises(SpecError, match=r"^models: a search needs at least one model"):
        find([], sources((3,)), Beam(2), ENDS, Limits(max_len=3))


def test_a_single_model_is_not_copied() -> None:
    """The log-probabilities of one model are used as they come: no second (B, V) exists."""
    model = translator()
    ensemble = Ensemble(model)
    ids = torch.full((1, 1), BOS)
    with torch.no_grad():
        alone = model.advance(ids, model.start(sources((3, 4)), 4))
        assert torch.equal(ensemble.advance(ids, ensemble.start(sources((3, 4)), 4)), alone)
