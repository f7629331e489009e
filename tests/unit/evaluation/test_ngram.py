"""The Kneser-Ney n-gram model, against sums, numbers by hand and a second implementation with dictionaries."""

import math
from collections import Counter

import numpy as np
import pytest

from regard.data.token_store import Column
from regard.evaluation.ngram import KneserNey, discounts

Rows = list[list[int]]
PAD = -1


def text(seed: int, rows: int, vocabulary: int) -> Rows:
    """Return rows in which each token depends on the two tokens before it."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(rows):
        row = [0, 1]
        for _ in range(int(rng.integers(0, 12))):
            row.append(int((3 * row[-1] + row[-2] + rng.integers(0, 3) ** 2) % vocabulary))
        result.append(row)
    return result


def by_definition(rows: Rows, vocabulary: int, order: int, context: tuple[int, ...], token: int) -> float:
    """Return p(token | context) by the formula."""
    grams = [
        tuple(padded[place - order + 1 : place + 1])
        for row in rows
        for padded in [[PAD] * (order - 1) + row]
        for place in range(order, len(padded))
    ]
    counts = Counter(grams)
    levels = {order: counts}
    for n in range(order - 1, 0, -1):
        levels[n] = Counter(gram[1:] for gram in levels[n + 1])  # different n-grams, each once
    p = 1 / vocabulary
    for n in range(1, order + 1):
        history = context[len(context) - n + 1 :]
        discount = discounts(np.asarray(list(levels[n].values())))
        following = {gram[-1]: count for gram, count in levels[n].items() if gram[:-1] == history}
        if following:
            total = sum(following.values())
            own = following.get(token, 0)
            left = sum(discount[min(count, 3)] for count in following.values())
            p = (own - discount[min(own, 3)] + left * p) / total
    return p


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_are_those_of_the_formula(order: int) -> None:
    rows, vocabulary = text(1, 60, 7), 9
    model = KneserNey(Column.of(rows), vocabulary, order)
    other = [[0, 1, 3, 5, 8, 8, 2], [0, 6], *text(2, 4, 7)]
    expected = [
        by_definition(rows, vocabulary, order, tuple([PAD] * (order - 1) + row[:place]), row[place])
        for row in other
        for place in range(1, len(row))
    ]
    assert model.log_probs(Column.of(other)) == pytest.approx(np.log(expected), abs=1e-12)


def test_a_bigram_model_by_hand() -> None:
    # Bigrams: 01 twice, 02, 12, 21; different tokens before 1: {0, 2}, before 2: {0, 1}; discounts are the fallback.
    model = KneserNey(Column.of([[0, 1, 2], [0, 1], [0, 2, 1]]), 4, 2)
    unigram = (2 - 1.0) / 4 + (1.0 + 1.0) / 4 / 4
    after_zero = (2 - 1.0) / 3 + (1.0 + 0.5) / 3 * unigram
    after_one = 0.5 / 1 * (2 * 1.0 / 4 / 4)  # token 3 is not in the text
    assert np.exp(model.log_probs(Column.of([[0, 1, 3]]))) == pytest.approx([after_zero, after_one])


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("context", [[0], [0, 1], [0, 1, 2, 3], [0, 7, 7, 7], [5, 5, 0, 1]])
def test_probabilities_sum_to_one(order: int, context: list[int]) -> None:
    vocabulary = 8
    model = KneserNey(Column.of(text(3, 80, 7)), vocabulary, order)
    rows = Column.of([[*context, token] for token in range(vocabulary)])
    last = model.log_probs(rows).reshape(vocabulary, -1)[:, -1]
    assert np.exp(last).sum() == pytest.approx(1, abs=1e-12)
    assert np.isfinite(last).all()


def test_every_token_but_the_first_of_a_row_is_predicted() -> None:
    rows = [[0, 1, 2], [3], [], [1, 1]]
    model = KneserNey(Column.of(rows), 4, 3)
    assert len(model.log_probs(Column.of(rows))) == 3
    # Rows are apart: what stands before a row changes nothing.
    assert model.log_probs(Column.of([[2, 2, 2], [0, 1]]))[-1] == model.log_probs(Column.of([[0, 1]]))[-1]


def test_discounts_are_those_of_chen_and_goodman() -> None:
    counts = np.repeat([1, 2, 3, 4, 9], [100, 40, 20, 12, 5])
    y = 100 / 180
    assert discounts(counts) == pytest.approx([0, 1 - 2 * y * 0.4, 2 - 3 * y * 0.5, 3 - 4 * y * 0.6])
    for regular in ([], [1, 1], [5, 5], [*[1] * 10, 2, *[3] * 10, 4]):
        assert list(discounts(np.asarray(regular))) == [0, 0.5, 1, 1.5]


def test_a_longer_context_helps_where_the_text_has_one() -> None:
    rows, held_out = Column.of(text(4, 400, 7)), Column.of(text(5, 50, 7))
    losses = [-KneserNey(rows, 7, order).log_probs(held_out).mean() for order in (1, 2, 3)]
    assert losses[0] > losses[1] + 0.1 > losses[2] + 0.2
    assert losses[2] < math.log(3)  # three continuations of each pair
