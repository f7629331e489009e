import itertools
from typing import Any

import pytest
import torch

from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints, contains
from regard.decoding.hypothesis import Limits
from regard.decoding.required import Required, allocate
from regard.decoding.sample import Sample
from regard.decoding.search import find
from regard.errors import DataError, SpecError

from .telling import ENDS, Telling, everything, random_rows, random_says, read_back, sources, translator


def shortest(sequences: list[tuple[int, ...]], said: tuple[int, ...], alphabet: range, most: int) -> int:
    """The fewest tokens after `said` with which everything is in the text, by trying all."""
    for n in range(most + 1):
        for more in itertools.product(alphabet, repeat=n):
            if all(contains((*said, *more), sequence) for sequence in sequences):
                return n
    raise AssertionError


@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 2), (2, 3)],
        [(1, 1, 2)],
        [(1, 2, 1), (2, 1, 3), (3,)],
        [(1, 2, 3), (2,)],
        [(2, 1), (3, 2, 1, 1), (1, 3)],
        [(1,), (2,), (3,)],
        [],
    ],
)
def test_distances_are_exact(sequences: list[tuple[int, ...]]) -> None:
    goal = Required(sequences)
    for n in range(4):
        for said in itertools.product(range(1, 5), repeat=n):
            progress = goal.follow(goal.start, said)
            distance = goal.distance(progress)
            assert distance == shortest(sequences, said, range(1, 4), 9), said
            nearer = {t for t in range(1, 5) if goal.distance(goal.step(progress, t)) < distance}
            assert set(goal.useful(progress)) == nearer
            assert bool(nearer) == bool(distance)


def test_banks_are_served_in_turn() -> None:
    """Items are (rank, how much is missing)."""
    items = [(0, 2), (1, 2), (2, 2), (3, 1), (4, 0), (5, 2), (6, 0)]
    assert allocate(items, 3, lambda item: item[1]) == [(0, 2), (3, 1), (4, 0)]
    assert allocate(items, 5, lambda item: item[1]) == [(0, 2), (1, 2), (3, 1), (4, 0), (6, 0)]
    assert allocate(items, 2, lambda item: item[1]) == [(3, 1), (4, 0)]
    assert allocate(items, 9, lambda item: item[1]) == items


@pytest.mark.parametrize(("beams", "eos"), [(2, 6.0), (2, -3.0), (3, 1.0), (8, 6.0)])
def test_outputs_contain_all_required_sequences(beams: int, eos: float) -> None:
    """Even what the model would never say, in as little room as possible and with more."""
    model, rows = translator(eos=eos), random_rows(6, 23)
    rules = [
        TokenConstraints(required=((9, 10), (10, 11))),
        TokenConstraints(),
        TokenConstraints(required=((5,),), prefix=(7, 7)),
        TokenConstraints(required=((3, 3, 3), (4,), (20, 21))),
        TokenConstraints(required=((12, 13, 14, 15, 16),)),
        TokenConstraints(required=((9,), (8,)), banned=((7,),), no_repeat=1),
    ]
    free = find(model, sources(*rows), Beam(beams, 2), ENDS, Limits(max_len=14))
    for limit in (6, 14):
        found = find(model, sources(*rows), Beam(beams, 2), ENDS, Limits(max_len=limit), rules)
        for row, rule, hypotheses in zip(rows, rules, found, strict=True):
            for one in hypotheses:
                for sequence in rule.required:
                    assert contains(one.ids, sequence), (one.ids, sequence)
                again = read_back(model, one.ids, one.ended, source=row)
                assert one.token_log_probs == pytest.approx(again, abs=1e-9)
    assert [one.ids for one in found[1]] == [one.ids for one in free[1]]


def test_the_best_text_that_has_it() -> None:
    """A beam as wide as the tree finds the best of all texts that contain what is required."""
    says, row, required = random_says(6, seed=11), (3,), ((4, 5), (3,))
    (found,) = find(
        Telling(says), sources(row), Beam(200, 6), ENDS, Limits(max_len=4), TokenConstraints(required=required)
    )
    allowed = [
        (sum(log_probs) / len(log_probs), ids)
        for ids, log_probs in everything(says, row, 6, 4)
        if all(contains(ids, sequence) for sequence in required)
    ]
    assert [one.ids for one in found] == [ids for _, ids in sorted(allowed, reverse=True)[:6]]


def test_overlaps_save_room() -> None:
    rules = TokenConstraints(required=((9, 10), (10, 11), (11, 9)))
    (found,) = find(translator(), sources((3,)), Beam(2, 2), ENDS, Limits(max_len=4), rules)
    assert all(contains(one.ids, sequence) for one in found for sequence in rules.required)
    with pytest.raises(DataError, match=r"^rules: row 0 needs 4 tokens .* max_len is 3"):
        find(translator(), sources((3,)), Beam(2), ENDS, Limits(max_len=3), rules)


def test_required_sequences_that_other_constraints_forbid_leave_an_unended_output() -> None:
    """The prefix has used up the only 9 that may be said, so (9 10) cannot be; the search still returns."""
    rules = TokenConstraints(prefix=(9,), required=((9, 10),), banned=((9, 10, 11),), no_repeat=1)
    (found,) = find(translator(eos=4.0), sources((3,)), Beam(3), ENDS, Limits(max_len=6), rules)
    assert contains(found[0].ids, (9, 10))
    never = TokenConstraints(prefix=(9, 8), required=((9, 10),), no_repeat=1)
    (found,) = find(translator(eos=4.0), sources((3,)), Beam(3), ENDS, Limits(max_len=6), never)
    assert not found[0].ended
    assert len(found[0].ids) == 6


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (Beam(1), "beam_size: required words need at least 2 beams"),
        (Beam(4, groups=2, diversity=1.0), "beam_size: required words need one group"),
        (Beam(4, stopping="huggingface"), "beam_size: required words need one group of beams and stopping="),
        (Sample(), "rules.required: required words need a beam search"),
    ],
)
def test_who_cannot_require(search: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        find(translator(), sources((3,)), search, ENDS, Limits(max_len=4), TokenConstraints(required=((5,),)))


def test_a_batch_with_requirements_is_independent_of_its_order() -> None:
    model, rows = translator(), random_rows(9, 23)
    rules = [TokenConstraints(required=((3 + i, 20),)) if i % 3 else TokenConstraints() for i in range(9)]
    together = find(model, sources(*rows), Beam(3, 2), ENDS, Limits(max_len=8), rules)
    for i in torch.randperm(9).tolist():
        (alone,) = find(model, sources(rows[i]), Beam(3, 2), ENDS, Limits(max_len=8), rules[i])
        assert [one.ids for one in alone] == [one.ids for one in together[i]]
