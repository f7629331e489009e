from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from regard.decoding.autoregressive import Path
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.sample import Draw, Sample, uniform
from regard.decoding.search import find
from regard.errors import DataError, SpecError

from .known_models import (
    ENDS,
    EOS,
    KnownModel,
    prompts,
    random_log_probs,
    random_rows,
    read_back,
    sources,
    translator,
    writer,
)


def test_numbers_are_inverted_into_tokens() -> None:
    """The sampled token is the first whose cumulative probability exceeds the random number."""
    log_probs = torch.randn(200, 11).log_softmax(-1)
    log_probs[:, 4] = -torch.inf
    draw, paths = Draw(Sample(seed=5), 3), [Path(i, i, 0) for i in range(200)]
    for (token, log_prob), row, path in zip(draw(log_probs, paths, 2), log_probs, paths, strict=True):  # type: ignore[reportGeneralTypeIssues]
        probs = row.exp() / row.exp().sum()
        assert token == int((probs.cumsum(0) > draw.number(path, 2)).nonzero()[0])
        assert token != 4
        assert log_prob == float(row[token])


@pytest.mark.parametrize("number", [0.0, float(np.nextafter(1.0, 0.0))])
def test_the_lowest_and_highest_uniform_number_draw_possible_tokens(number: float) -> None:
    log_probs = torch.randn(500, 9).log_softmax(-1)
    log_probs[:, [0, 1, 7, 8]] = -torch.inf
    draw, paths = Draw(Sample(), 1), [Path(i, i, 0) for i in range(500)]
    draw.numbers = {(i, 0): np.array([number]) for i in range(500)}
    tokens = {picked[0] for picked in draw(log_probs, paths, 0) if picked is not None}
    assert tokens == {2 if number == 0.0 else 6}


def test_samples_have_the_model_s_distribution() -> None:
    """Chi-square over all outputs of at most two tokens, with 4000 samples: 22 outcomes, 21 degrees of freedom."""
    next_log_probs = random_log_probs(6, seed=1)
    batch = sources(*[(3, 4)] * 40)
    results = find(KnownModel(next_log_probs), batch, Sample(n_best=100, seed=7), ENDS, Limits(max_len=2))
    counts = Counter((h.ids, h.ended) for row in results for h in row)
    usable = [token for token in range(6) if token not in (0, 1)]

    def probs(output: tuple[int, ...]) -> dict[int, float]:
        p = torch.tensor(next_log_probs((3, 4), output))[usable].softmax(0).tolist()
        return dict(zip(usable, p, strict=True))

    expected: dict[tuple[tuple[int, ...], bool], float] = {((), True): probs(())[EOS]}
    for a in (3, 4, 5):
        expected[(a,), True] = probs(())[a] * probs((a,))[EOS]
        for b in (3, 4, 5):
            both = probs(())[a] * probs((a,))[b]
            ends = probs((a, b))[EOS]
            expected[(a, b), True] = both * ends
            expected[(a, b), False] = both * (1 - ends)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert set(counts) <= set(expected)
    chi = sum((counts[text] - 4000 * p) ** 2 / (4000 * p) for text, p in expected.items())
    assert chi < 21 + 2.33 * (2 * 21) ** 0.5  # 22 outcomes; one in a hundred would exceed it


def test_samples_of_a_row_do_not_depend_on_the_batch() -> None:
    model, rows = translator(), random_rows(20, 23)
    search, limits = Sample(temperature=1.5, n_best=3, seed=9), Limits(max_len=7)
    whole = find(model, sources(*rows), search, ENDS, limits)
    order = torch.randperm(20).tolist()
    mixed = find(model, sources(*[rows[i] for i in order]), search, ENDS, limits, rows=order)
    assert [[h.ids for h in mixed[order.index(i)]] for i in range(20)] == [[h.ids for h in row] for row in whole]
    (alone,) = find(model, sources(rows[13]), search, ENDS, limits, rows=[13])
    assert [h.ids for h in alone] == [h.ids for h in whole[13]]
    (other,) = find(model, sources(rows[13]), search, ENDS, limits, rows=[14])
    assert [h.ids for h in other] != [h.ids for h in whole[13]]
    fewer = find(model, sources(*rows), Sample(temperature=1.5, n_best=2, seed=9), ENDS, limits)
    for few, many in zip(fewer, whole, strict=True):
        assert {h.ids for h in few} <= {h.ids for h in many}


def test_another_seed_draws_other_samples() -> None:
    model, batch = translator(), sources(*random_rows(5, 23))
    texts = [
        [row[0].ids for row in find(model, batch, Sample(seed=seed), ENDS, Limits(max_len=7))] for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


def test_numbers_are_uniform_and_independent() -> None:
    numbers = np.stack([uniform(3, row, sample, 50) for row in range(20) for sample in range(5)])
    assert len(np.unique(numbers)) == numbers.size
    assert abs(numbers.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(numbers)[np.triu_indices(100, 1)].mean()) < 0.01
    assert np.array_equal(uniform(3, 4, 1, 9), uniform(3, 4, 1, 50)[:9])


def test_samples_are_ranked_by_their_log_probability() -> None:
    model, rows = translator(), random_rows(4, 23)
    results = find(model, sources(*rows), Sample(temperature=2.0, top_k=5, n_best=4), ENDS, Limits(max_len=6))
    for row, samples in zip(rows, results, strict=True):
        assert len(samples) == 4
        assert [h.score for h in samples] == sorted((h.score for h in samples), reverse=True)
        for hypothesis in samples:
            again = read_back(model, hypothesis.ids, hypothesis.ended, source=row)
            assert hypothesis.token_log_probs == pytest.approx(again, abs=1e-9)
            assert hypothesis.score == hypothesis.log_prob == pytest.approx(sum(again), abs=1e-9)


def test_sampling_at_a_low_temperature_is_greedy() -> None:
    model, batch = translator(), sources(*random_rows(6, 23))
    cold = find(model, batch, Sample(temperature=1e-4), ENDS, Limits(max_len=6))
    greedy = find(model, batch, Beam(1), ENDS, Limits(max_len=6))
    assert [row[0].ids for row in cold] == [row[0].ids for row in greedy]


def test_prompts_of_unequal_length_have_the_positions_they_have_alone() -> None:
    model, rows = writer(room=10, eos=-9.0), [[3, 4], [5] * 9, [6] * 5]
    together = find(model, prompts(*rows), Sample(n_best=2), ENDS, Limits(max_len=30))
    for i, row in enumerate(rows):
        (alone,) = find(model, prompts(row), Sample(n_best=2), ENDS, Limits(max_len=30), rows=[i])
        assert [h.ids for h in alone] == [h.ids for h in together[i]]
        assert {len(h.ids) for h in alone} == {11 - len(row)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature: must be above 0, not 0.0; for the most probable tokens, use beam size 1"),
        ({"top_k": -1}, "top_k: must be at least 0"),
        ({"top_p": 0.0}, r"top_p: must lie in \(0, 1\]"),
        ({"min_p": 1.5}, r"min_p: must lie in \[0, 1\]"),
        ({"n_best": 0}, "n_best: must be at least 1"),
        ({"seed": -1}, "seed: must lie between"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Sample(**settings)


def test_nan_is_refused() -> None:
    model = KnownModel(lambda *_: [0.1, 0.2, float("nan"), 0.4, 0.5])
    with pytest.raises(DataError, match=r"^models: a log-probability is NaN"):
        find(model, sources((3,)), Sample(), ENDS, Limits(max_len=3))


def test_negative_row_numbers_are_refused() -> None:
    with pytest.raises(DataError, match=r"^rows: a row number must be at least 0, not -1"):
        find(translator(), sources((3,)), Sample(), ENDS, Limits(max_len=3), rows=[-1])
