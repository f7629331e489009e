"""Searches yield rows as they finish, and end the rows that are cancelled."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.job import Job, prepare
from regard.decoding.sample import Sample
from regard.decoding.search import FREE, Search
from tests.unit.decoding.known_models import ENDS, random_rows, sources, translator

SEARCHES = [Beam(4, 2), Beam(1), Beam(4, 2, groups=2, diversity=0.5), Beam(3, coverage=0.2), Sample(n_best=3, seed=4)]


def job_of(**options: Any) -> Job:
    model = translator(23, eos=2.0)
    return prepare(model, sources(*random_rows(9, 23, seed=1)), ENDS, Limits(max_len=20), FREE, None, **options)


@pytest.mark.parametrize("search", SEARCHES, ids=repr)
def test_rows_that_finish_early_have_the_hypotheses_of_find(search: Search) -> None:
    job = job_of()
    steps = []
    for finished in search.find_by_row(job):
        assert not torch.is_inference_mode_enabled()
        steps.append(finished)
    found = dict(pair for finished in steps for pair in finished)
    assert [found[row] for row in range(9)] == search.find(job)
    assert sum(map(bool, steps)) > 1  # not all rows at the end
    assert sum(map(len, steps)) == 9


@pytest.mark.parametrize("search", SEARCHES, ids=repr)
def test_cancelled_row_ends_at_the_next_step_and_changes_no_other(search: Search) -> None:
    job = job_of()
    expected = search.find(job)
    longest = max(range(9), key=lambda row: len(expected[row][0].ids))
    cancelled = replace(job, cancelled=lambda row: row == longest)
    steps = list(search.find_by_row(cancelled))
    assert longest in [row for row, _ in steps[0]]
    found = dict(pair for finished in steps for pair in finished)
    for row in set(range(9)) - {longest}:
        assert [each.ids for each in found[row]] == [each.ids for each in expected[row]]
        assert [each.score for each in found[row]] == pytest.approx([each.score for each in expected[row]])
