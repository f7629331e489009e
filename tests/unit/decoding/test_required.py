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

from .known_models import ENDS, KnownModel, all_outputs, random_log_probs, random_rows, read_back, sources, translator


def shortest(sequences: list[tuple[int, ...]], output: tuple[int, ...], alphabet: range, most: int) -> int:
    """Return the fewest tokens after `output` with which it contains all sequences, by trying all."""
    for n in range(most + 1):
        for more in itertools.product(alphabet, repeat=n):
            if all(contains((*output, *more), sequence) for sequence in sequences):
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
        for output in itertools.product(range(1, 5), repeat=n):
            progress = goal.follow(goal.start, output)
            distance = goal.distance(progress)
            assert distance == shortest(sequences, output, range(1, 4), 9), output
            nearer = {t for t in range(1, 5) if goal.distance(goal.step(progress, t)) < distance}
            assert set(goal.useful(progress)) == nearer
            assert bool(nearer) == bool(distance)


def test_banks_take_turns() -> None:
    """Items are (rank, number of missing tokens)."""
    items = [(0, 2), (1, 2), (2, 2), (3, 1), (4, 0), (5, 2), (6, 0)]
    assert allocate(items, 3, lambda item: item[1]) == [(0, 2), (3, 1), (4, 0)]
    assert allocate(items, 5, lambda item: item[1]) == [(0, 2), (1, 2), (3, 1), (4, 0), (6, 0)]
    assert allocate(items, 2, lambda item: item[1]) == [(3, 1), (4, 0)]
    assert allocate(items, 9, lambda item: item[1]) == items


@pytest.mark.parametrize(("beams", "eos"), [(2, 6.0), (2, -3.0), (3, 1.0), (8, 6.0)])
def test_outputs_contain_all_required_sequences(beams: int, eos: float) -> None:
    """Also very unlikely sequences, with the smallest possible and with a larger length limit."""
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
        results = find(model, sources(*rows), Beam(beams, 2), ENDS, Limits(max_len=limit), rules)
        for row, rule, hypotheses in zip(rows, rules, results, strict=True):
            for hypothesis in hypotheses:
                for sequence in rule.required:
                    assert contains(hypothesis.ids, sequence), (hypothesis.ids, sequence)
                again = read_back(model, hypothesis.ids, hypothesis.ended, source=row)
                assert hypothesis.token_log_probs == pytest.approx(again, abs=1e-9)
    assert [h.ids for h in results[1]] == [h.ids for h in free[1]]


def test_the_best_output_with_all_required_sequences_by_enumeration() -> None:
    """A beam as wide as the tree finds the best of all outputs that contain the required sequences."""
    next_log_probs, row, required = random_log_probs(6, seed=11), (3,), ((4, 5), (3,))
    (hypotheses,) = find(
        KnownModel(next_log_probs),
        sources(row),
        Beam(200, 6),
        ENDS,
        Limits(max_len=4),
        TokenConstraints(required=required),
    )
    allowed = [
        (sum(log_probs) / len(log_probs), ids)
        for ids, log_probs in all_outputs(next_log_probs, row, 6, 4)
        if all(contains(ids, sequence) for sequence in required)
    ]
    assert [h.ids for h in hypotheses] == [ids for _, ids in sorted(allowed, reverse=True)[:6]]


def test_overlapping_sequences_need_fewer_tokens() -> None:
    rules = TokenConstraints(required=((9, 10), (10, 11), (11, 9)))
    (hypotheses,) = find(translator(), sources((3,)), Beam(2, 2), ENDS, Limits(max_len=4), rules)
    assert all(contains(h.ids, sequence) for h in hypotheses for sequence in rules.required)
    with pytest.raises(DataError, match=r"^rules: row 0 needs 4 tokens .* max_len is 3"):
        find(translator(), sources((3,)), Beam(2), ENDS, Limits(max_len=3), rules)


def test_required_sequences_that_other_constraints_forbid_leave_an_unended_output() -> None:
    """The prefix contains the only 9 that is allowed, so (9 10) is impossible; the search still returns."""
    rules = TokenConstraints(prefix=(9,), required=((9, 10),), banned=((9, 10, 11),), no_repeat=1)
    (hypotheses,) = find(translator(eos=4.0), sources((3,)), Beam(3), ENDS, Limits(max_len=6), rules)
    assert contains(hypotheses[0].ids, (9, 10))
    never = TokenConstraints(prefix=(9, 8), required=((9, 10),), no_repeat=1)
    (hypotheses,) = find(translator(eos=4.0), sources((3,)), Beam(3), ENDS, Limits(max_len=6), never)
    assert not hypotheses[0].ended
    assert len(hypotheses[0].ids) == 6


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (Beam(1), "beam_size: required words need at least 2 beams"),
        (Beam(4, groups=2, diversity=1.0), "beam_size: required words need one group"),
        (Beam(4, stopping="huggingface"), "beam_size: required words need one group of beams and stopping="),
        (Sample(), "rules.required: required words need a beam search"),
    ],
)
def test_searches_without_support_for_required_words_are_refused(search: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        find(translator(), sources((3,)), search, ENDS, Limits(max_len=4), TokenConstraints(required=((5,),)))


def test_a_batch_with_requirements_is_independent_of_its_order() -> None:
    model, rows = translator(), random_rows(9, 23)
    rules = [TokenConstraints(required=((3 + i, 20),)) if i % 3 else TokenConstraints() for i in range(9)]
    together = find(model, sources(*rows), Beam(3, 2), ENDS, Limits(max_len=8), rules)
    for i in torch.randperm(9).tolist():
        (alone,) = find(model, sources(rows[i]), Beam(3, 2), ENDS, Limits(max_len=8), rules[i])
        assert [h.ids for h in alone] == [h.ids for h in together[i]]
