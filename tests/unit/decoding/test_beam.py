import math
from functools import partial
from typing import Any

import pytest
import torch

from regard.decoding.beam import Beam, search
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.job import prepare
from regard.decoding.search import find
from regard.errors import DataError, SpecError
from regard.nn.embedding import Tokens
from regard.nn.position.additive import Learned

from .known_models import (
    BOS,
    ENDS,
    EOS,
    PAD,
    KnownModel,
    Stubborn,
    all_outputs,
    normalised,
    prompts,
    random_log_probs,
    random_rows,
    read_back,
    simple_beam,
    sources,
    translator,
    writer,
)

NORMALS = [("none", 1.0), ("mean", 1.0), ("mean", 0.6), ("mean", 0.0), ("mean", -1.0), ("gnmt", 0.6), ("gnmt", 2.0)]


def same(hypotheses: list[Hypothesis], expected: list[tuple[tuple[int, ...], float]]) -> None:
    """Assert that ids and scores are equal."""
    assert [h.ids for h in hypotheses] == [ids for ids, _ in expected]
    assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-9)


@pytest.mark.parametrize(("normalise", "alpha"), NORMALS)
@pytest.mark.parametrize("least", [0, 2])
def test_a_beam_as_wide_as_the_tree_finds_the_optimum(normalise: Any, alpha: float, least: int) -> None:
    """Also the second best, the third best and so on, among all possible outputs."""
    next_log_probs, rows = random_log_probs(6, seed=3), [(5, 4), (3,)]
    results = find(
        KnownModel(next_log_probs),
        sources(*rows),
        Beam(128, 9, normalise, alpha),
        ENDS,
        Limits(min_len=least, max_len=4),
    )
    for row, hypotheses in zip(rows, results, strict=True):
        scored = [
            (normalised(normalise, alpha, sum(log_probs), len(log_probs)), ids, log_probs)
            for ids, log_probs in all_outputs(next_log_probs, row, 6, 4, least)
        ]
        best = sorted(scored, reverse=True)[:9]
        assert [h.ids for h in hypotheses] == [ids for _, ids, _ in best]
        for hypothesis, (score, _, log_probs) in zip(hypotheses, best, strict=True):
            assert hypothesis.ended
            assert hypothesis.score == pytest.approx(score, abs=1e-9)
            assert hypothesis.log_prob == pytest.approx(sum(log_probs), abs=1e-9)
            assert hypothesis.token_log_probs == pytest.approx(log_probs, abs=1e-9)


@pytest.mark.parametrize(("normalise", "alpha"), NORMALS)
@pytest.mark.parametrize("beams", [2, 3, 5])
@pytest.mark.parametrize("eos", [-1.0, 1.5])
def test_optimal_stopping_returns_the_result_of_a_full_search(
    normalise: Any, alpha: float, beams: int, eos: float
) -> None:
    """ "optimal" finds what a search finds that never stops before the last step."""
    next_log_probs, rows, limit = random_log_probs(7, seed=beams, eos=eos), [(3,), (4, 5), (6, 6, 6)], 9
    score = partial(normalised, normalise, alpha)
    whole = [simple_beam(next_log_probs, row, 7, beams, limit, score) for row in rows]
    for n_best in (1, beams):
        spec = Beam(beams, n_best, normalise, alpha)
        results = find(KnownModel(next_log_probs), sources(*rows), spec, ENDS, Limits(max_len=limit))
        for hypotheses, expected in zip(results, whole, strict=True):
            same(hypotheses, expected[:n_best])


def test_a_negative_power_favours_short_texts_and_still_waits_for_the_next() -> None:
    """The empty output has score log 0.3; the output of one token, log(0.7 * 0.95) * 2, which is better."""
    tiny = 1e-12

    def next_log_probs(source: tuple[int, ...], output: tuple[int, ...]) -> list[float]:
        return [math.log(p) for p in ((tiny, tiny, 0.95, 0.05) if output else (tiny, tiny, 0.3, 0.7))]

    (hypotheses,) = find(KnownModel(next_log_probs), sources((3,)), Beam(2, 1, "mean", -1.0), ENDS, Limits(max_len=9))
    assert hypotheses[0].ids == (3,)
    assert hypotheses[0].score == pytest.approx(2 * math.log(0.7 * 0.95))


def test_search_stops_early() -> None:
    next_log_probs = random_log_probs(7, seed=1, eos=3.0)
    model = KnownModel(next_log_probs)
    find(model, sources((3,)), Beam(4, normalise="none"), ENDS, Limits(max_len=50))
    assert len(model.widths) < 12


@pytest.mark.parametrize("n_best", [1, 2, 4])
def test_stopping_first_ends_after_n_best_hypotheses(n_best: int) -> None:
    next_log_probs, rows = random_log_probs(7, seed=5), [(3,), (4, 5), (6,)]
    results = find(
        KnownModel(next_log_probs), sources(*rows), Beam(4, n_best, stopping="first"), ENDS, Limits(max_len=9)
    )
    for row, hypotheses in zip(rows, results, strict=True):
        expected = simple_beam(next_log_probs, row, 7, 4, 9, partial(normalised, "mean", 1.0), enough=n_best)
        same(hypotheses, expected[:n_best])


def test_one_beam_is_greedy() -> None:
    next_log_probs, rows = random_log_probs(9, seed=2), [(3,), (4, 5), (6,), (7, 8)]
    for limit in (1, 3, 12):
        results = find(KnownModel(next_log_probs), sources(*rows), Beam(1), ENDS, Limits(max_len=limit))
        for row, (hypothesis,) in zip(rows, results, strict=True):
            ids: list[int] = []
            while True:
                log_probs = next_log_probs(row, tuple(ids))
                token = max((t for t in range(9) if t not in (PAD, BOS)), key=lambda t: log_probs[t])
                if token == EOS or len(ids) == limit:
                    break
                ids.append(token)
            assert hypothesis.ids == tuple(ids)
            assert hypothesis.ended == (token == EOS)
            assert len(hypothesis.token_log_probs) == len(ids) + hypothesis.ended
            assert hypothesis.score == pytest.approx(hypothesis.log_prob / max(len(hypothesis.token_log_probs), 1))


@pytest.mark.parametrize("stopping", ["optimal", "first", "ctranslate2", "huggingface", "huggingface_never"])
def test_greedy_search_equals_beam_search_with_one_beam(stopping: Any) -> None:
    task = prepare(translator(), sources(*random_rows(16, 23)), ENDS, Limits(max_len=7), TokenConstraints(), None)
    spec = Beam(1, stopping=stopping)
    lean, wide = spec.find(task), search(task, spec)
    for (a,), (b,) in zip(lean, wide, strict=True):
        assert (a.ids, a.ended) == (b.ids, b.ended)
        assert a.score == pytest.approx(b.score, abs=1e-9)
    assert len({h.ended for row in lean for h in row}) == 2


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_log_probs_equal_those_of_one_forward_pass(beams: int) -> None:
    model, rows = translator(), random_rows(5, 23)
    results = find(model, sources(*rows), Beam(beams, beams), ENDS, Limits(max_len=8))
    assert len({h.ids for row in results for h in row}) > 3
    for row, hypotheses in zip(rows, results, strict=True):
        assert len(hypotheses) == beams
        for hypothesis in hypotheses:
            again = read_back(model, hypothesis.ids, hypothesis.ended, source=row)
            assert hypothesis.token_log_probs == pytest.approx(again, abs=1e-9)
            assert hypothesis.log_prob == pytest.approx(sum(again), abs=1e-9)
            assert hypothesis.score == pytest.approx(sum(again) / len(again), abs=1e-9)


@pytest.mark.parametrize("input_attention", ["causal", "full"])
@pytest.mark.parametrize("beams", [1, 3])
def test_prompts_of_different_lengths_are_continued_as_if_alone(input_attention: Any, beams: int) -> None:
    model, rows = writer(input_attention=input_attention), random_rows(6, 23)
    together = find(model, prompts(*rows), Beam(beams, beams), ENDS, Limits(max_len=6))
    for row, hypotheses in zip(rows, together, strict=True):
        (alone,) = find(model, prompts(row), Beam(beams, beams), ENDS, Limits(max_len=6))
        assert [h.ids for h in alone] == [h.ids for h in hypotheses]
        if input_attention == "causal":
            for hypothesis in hypotheses:
                again = read_back(model, hypothesis.ids, hypothesis.ended, prompt=row)
                assert hypothesis.token_log_probs == pytest.approx(again, abs=1e-9)


@pytest.mark.parametrize("spec", [Beam(1), Beam(4, 2), Beam(4, 4, stopping="huggingface")])
def test_a_row_without_positions_ends_and_the_others_continue(spec: Beam) -> None:
    """A prompt of n tokens leaves 12 - n + 1 tokens to generate, whatever else is in the batch."""
    model, rows = writer(room=12, eos=-9.0), [[3, 4], [5] * 10, [6, 7, 8, 9, 10], [3] * 12, [4, 5]]
    together = find(model, prompts(*rows), spec, ENDS, Limits(max_len=40))
    for row, hypotheses in zip(rows, together, strict=True):
        (alone,) = find(model, prompts(row), spec, ENDS, Limits(max_len=40))
        assert [h.ids for h in alone] == [h.ids for h in hypotheses]
        assert {len(h.ids) for h in hypotheses} == {13 - len(row)}
        assert not any(h.ended for h in hypotheses)
        assert hypotheses[0].token_log_probs == pytest.approx(
            read_back(model, hypotheses[0].ids, False, prompt=row), abs=1e-9
        )


@pytest.mark.parametrize("beams", [1, 3])
def test_a_translation_ends_when_no_learned_positions_are_left(beams: int) -> None:
    """bos takes one of the nine positions, and one token can be generated after the last position."""
    model, rows = translator(eos=-9.0, input=Tokens(position=Learned(9))), random_rows(3, 23)
    for row, (hypothesis,) in zip(rows, find(model, sources(*rows), Beam(beams), ENDS), strict=True):
        assert (len(hypothesis.ids), hypothesis.ended) == (9, False)
        assert hypothesis.token_log_probs == pytest.approx(
            read_back(model, hypothesis.ids, False, source=row), abs=1e-9
        )


def test_a_prompt_longer_than_the_positions_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"max_len: a sequence of 13 tokens exceeds the 12 learned positions"):
        find(writer(room=12), prompts([3] * 13), Beam(2), ENDS, Limits(max_len=4))


def test_superfluous_padding_takes_no_positions() -> None:
    model, batch = writer(room=12, eos=-9.0), prompts([3, 4], [5])
    wide = torch.nn.functional.pad
    assert batch.target_seg is not None
    padded = type(batch)(wide(batch.target, (0, 8)), target_seg=wide(batch.target_seg, (0, 8)))
    assert find(model, padded, Beam(2), ENDS, Limits(max_len=40)) == find(
        model, batch, Beam(2), ENDS, Limits(max_len=40)
    )


def test_limits_may_differ_by_row() -> None:
    next_log_probs, rows = random_log_probs(7, eos=-9.0), [(3,), (4, 5), (6,)]
    limits = [Limits(max_len=3), Limits(), Limits(min_len=2, max_len=5)]
    results = find(KnownModel(next_log_probs), sources(*rows), Beam(2), ENDS, limits)
    assert [len(row[0].ids) for row in results] == [3, 24, 5]  # 2 S + 20 by default
    ending = find(KnownModel(random_log_probs(7, eos=9.0)), sources(*rows), Beam(2), ENDS, limits)
    assert [len(row[0].ids) for row in ending] == [0, 0, 2]


@pytest.mark.parametrize("beams", [1, 3])
def test_a_hypothesis_at_the_length_limit_may_still_end_with_eos(beams: int) -> None:
    """Two tokens and eos, with a limit of two: our hypothesis ends; other libraries count eos, so theirs does not."""
    word, end = torch.full((9,), -20.0), torch.full((9,), -20.0)
    word[3], word[EOS], end[EOS] = 0.0, -30.0, 0.0

    def next_log_probs(source: tuple[int, ...], output: tuple[int, ...]) -> list[float]:
        return (word if len(output) < 2 else end).log_softmax(0).tolist()

    limits = [Limits(max_len=2), Limits(max_len=5)]
    for stopping, ended in (("optimal", True), ("first", True), ("huggingface", False), ("ctranslate2", False)):
        spec: Any = Beam(beams, stopping=stopping)  # type: ignore[reportArgumentType]
        results = find(KnownModel(next_log_probs), sources((3,), (3, 3)), spec, ENDS, limits)
        assert [(row[0].ids, row[0].ended) for row in results] == [((3, 3), ended), ((3, 3), True)]


def test_finished_sources_are_dropped_from_the_batch() -> None:
    rows, calm, quick = random_rows(24, 9, seed=4), random_log_probs(9, eos=-1.0), random_log_probs(9, eos=6.0)

    def next_log_probs(source: tuple[int, ...], output: tuple[int, ...]) -> list[float]:
        return (quick if len(source) < 6 else calm)(source, output)

    for spec in (Beam(3, 2), Beam(1)):
        dropping, carrying = KnownModel(next_log_probs), KnownModel(next_log_probs, Stubborn)
        a = find(dropping, sources(*rows), spec, ENDS, Limits(max_len=12))
        b = find(carrying, sources(*rows), spec, ENDS, Limits(max_len=12))
        assert a == b
        assert len(set(carrying.widths)) == 1
        assert dropping.widths == sorted(dropping.widths, reverse=True)
        assert dropping.widths[-1] < dropping.widths[0] / 2


@pytest.mark.parametrize("vocab", [9, 1500])  # ranked directly, and by blocks
def test_ties_go_to_the_lowest_ids(vocab: int) -> None:
    """All tokens within a hundredth of a step of each other, the higher ids a little likelier."""
    flat = torch.linspace(0.0, 1e-7, vocab).log_softmax(0).tolist()
    model = KnownModel(lambda source, output: flat)
    for beams in (1, 2, 4):
        (hypotheses,) = find(model, sources((3,)), Beam(beams, beams, "none"), ENDS, Limits(min_len=3, max_len=3))
        assert hypotheses[0].ids == (3, 3, 3)
        if beams == 4:
            assert [h.ids for h in hypotheses] == [(3, 3, 3), (4, 3, 3), (5, 3, 3), (6, 3, 3)]


def test_scores_that_differ_by_more_than_a_tie_are_ranked() -> None:
    log_probs = torch.tensor([0.0, 0, 0, 1.0, 1.0 + 3e-5]).log_softmax(0).tolist()
    (hypotheses,) = find(
        KnownModel(lambda *_: log_probs), sources((3,)), Beam(2, 2), ENDS, Limits(min_len=1, max_len=1)
    )
    assert [h.ids for h in hypotheses] == [(4,), (3,)]


def test_nan_is_refused() -> None:
    model = KnownModel(lambda *_: [math.nan] * 7)
    for beams in (1, 3):
        with pytest.raises(DataError, match=r"^models: a log-probability is NaN"):
            find(model, sources((3,)), Beam(beams), ENDS, Limits(max_len=3))


def test_bos_and_eos_may_have_the_same_id() -> None:
    ends = type(ENDS)(EOS, EOS, EOS)
    (hypotheses,) = find(KnownModel(random_log_probs(6, eos=5.0)), prompts((3, 4)), Beam(2), ends, Limits(max_len=3))
    assert hypotheses[0].ended
    assert hypotheses[0].ids == ()


def test_no_more_hypotheses_are_returned_than_exist() -> None:
    """A vocabulary of one word: three texts of up to two words, and no more."""
    (hypotheses,) = find(KnownModel(random_log_probs(4)), sources((3,)), Beam(5, 5), ENDS, Limits(max_len=2))
    assert sorted(h.ids for h in hypotheses) == [(), (3,), (3, 3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam_size": 0}, "beam_size: must be at least 1, not 0"),
        ({"n_best": 0}, "n_best: must be at least 1, not 0"),
        ({"n_best": 6}, "n_best: 6 hypotheses need at least as many beams, not 5"),
        ({"groups": 2, "diversity": 1.0}, "groups: 2 groups do not divide 5 beams"),
        ({"groups": 5}, "diversity: must be above 0 with 5 groups"),
        ({"diversity": 0.5}, "diversity: has no effect with one group of beams"),
        ({"normalise": "none", "alpha": 0.5}, "alpha: has no effect with normalise='none'"),
        ({"coverage": -0.1}, "coverage: must be at least 0"),
        ({"alpha": math.inf}, "alpha: needs a finite number"),
        ({"stopping": "ctranslate2", "normalise": "gnmt"}, "normalise: 'ctranslate2' divides only by a power"),
        ({"stopping": "huggingface", "groups": 5, "diversity": 1.0}, "groups: 'huggingface' does not support groups"),
        (
            {"stopping": "huggingface_never", "coverage": 0.1},
            "coverage: 'huggingface_never' does not support this penalty",
        ),
        ({"stopping": "ctranslate2", "coverage": 0.1}, "coverage: 'ctranslate2' does not support this penalty"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Beam(**settings)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^models\[1\]: is in training mode"):
        find([translator(), translator().train()], sources((3,)), Beam(), ENDS)
