from typing import Any

import pytest

from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints, contains
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.sample import Sample
from regard.decoding.search import Search, find
from regard.errors import DataError, SpecError

from .known_models import (
    BOS,
    ENDS,
    EOS,
    PAD,
    KnownModel,
    all_outputs,
    random_log_probs,
    random_rows,
    read_back,
    sources,
    translator,
)

SEARCHES = [Beam(1), Beam(3, 3), Beam(4, 4, groups=2, diversity=0.5), Sample(n_best=3)]
ROWS = random_rows(6, 23)


def ngrams(ids: tuple[int, ...], n: int) -> list[tuple[int, ...]]:
    return [ids[i : i + n] for i in range(len(ids) - n + 1)]


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: search.kind)
def test_constraints_hold_in_every_search(search: Search) -> None:
    """Every row has its own constraints, which do not apply to other rows."""
    rules = [
        TokenConstraints(),
        TokenConstraints(prefix=(7, 20, 7)),
        TokenConstraints(banned=((8,), (7, 15), (15, 7, 15))),
        TokenConstraints(no_repeat=1),
        TokenConstraints(prefix=(9, 9), no_repeat=2, banned=((4,),)),
        TokenConstraints(no_repeat=3),
    ]
    model = translator()
    for least in (0, 6):
        results = find(model, sources(*ROWS), search, ENDS, Limits(least, 9), rules)
        free = find(model, sources(*ROWS), search, ENDS, Limits(least, 9))
        assert [h.ids for h in results[0]] == [h.ids for h in free[0]]
        changed = [[h.ids for h in a] != [h.ids for h in b] for a, b in zip(results, free, strict=True)]
        assert sum(changed) >= 3
        for row, rule, hypotheses in zip(ROWS, rules, results, strict=True):
            for hypothesis in hypotheses:
                assert hypothesis.ids[: len(rule.prefix)] == rule.prefix
                assert least <= len(hypothesis.ids) <= 9
                assert not {PAD, BOS, EOS} & set(hypothesis.ids)
                assert not any(contains(hypothesis.ids, banned) for banned in rule.banned)
                if rule.no_repeat:
                    after = ngrams(hypothesis.ids, rule.no_repeat)
                    assert len(set(after)) >= len(after) - max(len(rule.prefix) - rule.no_repeat, 0)
                # Whatever the rules, the probabilities are the model's own.
                again = read_back(model, hypothesis.ids, hypothesis.ended, source=row)
                assert hypothesis.token_log_probs == pytest.approx(again, abs=1e-9)


def test_the_best_outputs_under_constraints_by_enumeration() -> None:
    """A beam as wide as the tree finds all outputs that satisfy the constraints, best first."""
    next_log_probs, row = random_log_probs(6, seed=8), (3, 4)
    rules = TokenConstraints(prefix=(4,), banned=((5, 3), (4, 4)), no_repeat=2)
    (hypotheses,) = find(KnownModel(next_log_probs), sources(row), Beam(150, 5), ENDS, Limits(2, 4), rules)
    allowed = [
        (sum(log_probs) / len(log_probs), ids)
        for ids, log_probs in all_outputs(next_log_probs, row, 6, 4, 2)
        if ids[0] == 4
        and not any(contains(ids, banned) for banned in rules.banned)
        and len(set(ngrams(ids, 2))) == len(ngrams(ids, 2))
    ]
    assert [h.ids for h in hypotheses] == [ids for _, ids in sorted(allowed, reverse=True)[:5]]


def test_one_set_of_rules_for_all_rows() -> None:
    model, rules = translator(), TokenConstraints(banned=((7,), (15,), (8, 6)))
    together = find(model, sources(*ROWS), Beam(3), ENDS, Limits(max_len=9), rules)
    for row, hypotheses in zip(ROWS, together, strict=True):
        (alone,) = find(model, sources(row), Beam(3), ENDS, Limits(max_len=9), [rules])
        assert [h.ids for h in alone] == [h.ids for h in hypotheses]
        assert not {7, 15} & {token for h in hypotheses for token in h.ids}


def test_a_row_with_all_tokens_banned_is_cut_without_eos() -> None:
    """Three tokens that may occur once each, and a minimum length of five."""
    for search in (Beam(1), Beam(2, 2), Sample()):
        (hypotheses,) = find(
            KnownModel(random_log_probs(6)), sources((3,)), search, ENDS, Limits(5, 9), TokenConstraints(no_repeat=1)
        )
        assert {tuple(sorted(h.ids)) for h in hypotheses} == {(3, 4, 5)}
        assert not any(h.ended for h in hypotheses)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"banned": ((),)}, "banned: a sequence has no ids"),
        ({"required": ((3,), ())}, "required: a sequence has no ids"),
        ({"no_repeat": -1}, "no_repeat: must be at least 0"),
        ({"prefix": (3, 4, 5), "banned": ((4, 5),)}, r"prefix: \[3, 4, 5\] contains \[4, 5\], which is banned"),
        ({"required": ((3, 4),), "banned": ((4,),)}, r"required: \[3, 4\] contains \[4\], which is banned"),
        ({"required": ((3, 4, 3, 4),), "no_repeat": 2}, "required: .* repeats an n-gram, which no_repeat=2 bans"),
        ({"required": tuple((i,) for i in range(3, 14))}, "required: at most 10 sequences"),
    ],
)
def test_contradicting_constraints_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TokenConstraints(**settings)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (TokenConstraints(prefix=(3, EOS)), r"^prefix: \[3, 2\] contains 2, the id of bos, eos or padding"),
        (TokenConstraints(required=((BOS,),)), r"^required: \[1\] contains 1"),
        (TokenConstraints(banned=((3, PAD),)), r"^banned: \[3, 0\] contains 0"),
        (TokenConstraints(banned=((EOS,),)), r"^banned: a row that cannot generate 2 never ends"),
        (
            TokenConstraints(banned=((23,),)),
            r"^rules: id 23, of a constraint or a special token, is not in the vocabulary of 23 tokens",
        ),
        (TokenConstraints(prefix=(3,) * 5), r"^rules: row 0 needs 5 tokens .* max_len is 4; raise it"),
        ([TokenConstraints()] * 2, r"^rules: 2 values for a batch of 1 rows"),
    ],
)
def test_constraints_that_no_row_can_keep_are_refused(rules: Any, message: str) -> None:
    with pytest.raises((SpecError, DataError), match=message):
        find(translator(), sources((3,)), Beam(2), ENDS, Limits(max_len=4), rules)


def test_special_tokens_may_be_banned() -> None:
    batch = sources((3,))
    plain = find(translator(), batch, Beam(2), ENDS, Limits(max_len=4))
    assert (
        find(translator(), batch, Beam(2), ENDS, Limits(max_len=4), TokenConstraints(banned=((PAD,), (BOS,)))) == plain
    )


def test_a_derived_limit_leaves_room_for_the_rules() -> None:
    (hypotheses,) = find(translator(), sources((3,)), Beam(2), ENDS, Limits(), TokenConstraints(prefix=(5,) * 30))
    assert hypotheses[0].ids[:30] == (5,) * 30
    (hypotheses,) = find(translator(), sources((3,)), Beam(2), ENDS, Limits(min_len=40))
    assert len(hypotheses[0].ids) == 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Limits(min_len=-1), "min_len: must be at least 0"),
        (lambda: Limits(max_len=0), "max_len: must be at least 1"),
        (lambda: Limits(5, 4), r"max_len: must be at least 1 and min_len \(5\), not 4"),
        (lambda: SpecialTokens(1, -2, 0), "eos: must be at least 0"),
    ],
)
def test_invalid_limits_and_special_tokens_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
