"""TF-IDF and logistic regression, against the formula and on text whose classes are known."""

import random

import numpy as np
import pytest

from regard.evaluation import bag_of_words
from regard.evaluation.bag_of_words import BagOfWords, words

RNG = random.Random(1)


def test_words_are_lower_case_and_scripts_without_spaces_are_split_into_characters() -> None:
    assert words("What's the 2nd-best Émigré, Ωmega_1?") == ["what", "s", "the", "2nd", "best", "émigré", "ωmega_1"]
    assert words("我爱Python 3") == ["我", "爱", "python", "3"]


def test_features_are_tf_idf_of_unit_length() -> None:
    texts = ["a b a", "b c", "...", "b"]
    bag = BagOfWords(texts, np.asarray([0, 1, 0, 1]), 2)
    rows, columns, values = bag._features(*bag._grams([words("a b a d a")]), 1)
    idf = {"a": 1 + np.log(5 / 2), "b": 1 + np.log(5 / 4), "a b": 1 + np.log(5 / 2), "b a": 1 + np.log(5 / 2)}
    expected = np.asarray([3 * idf["a"], idf["b"], idf["a b"], idf["b a"]])  # d is unknown, and so are its pairs
    assert sorted(values) == pytest.approx(sorted(expected / np.sqrt((expected**2).sum())))
    assert list(rows) == [0] * 4
    assert len({*columns.tolist()}) == 4


def test_the_weights_minimise_the_penalised_cross_entropy() -> None:
    texts = [" ".join(RNG.choices("abcdefg", k=RNG.randint(1, 6))) for _ in range(50)]
    labels = np.asarray([RNG.randrange(3) for _ in texts])
    bag = BagOfWords(texts, labels, 3)
    rows, columns, values = bag._features(*bag._grams([words(text) for text in texts]), len(texts))
    x = np.zeros((len(texts), len(bag._keys)))
    x[rows, columns] = values
    weights = bag._weights.double().numpy()
    scores = np.exp(x @ weights[:-1] + weights[-1])
    error = scores / scores.sum(1, keepdims=True) - np.eye(3)[labels]
    assert np.abs(x.T @ error + bag_of_words.PENALTY * weights[:-1]).max() < 0.02
    assert np.abs(error.sum(0)).max() < 0.02
    assert np.abs(weights).max() > 1


def sentence(label: int) -> str:
    """Return a sentence whose class depends on the order of two words."""
    pair = ["not", "good"] if label else ["good", "not"]
    filler = RNG.choices(["film", "actor", "plot", "scene"], k=4)
    return " ".join([*filler[:2], *pair, *filler[2:]])


def test_bigrams_are_learned() -> None:
    labels = np.asarray([RNG.randrange(2) for _ in range(200)])
    texts = [sentence(label) for label in labels]
    assert (BagOfWords(texts[:150], labels[:150], 2).predict(texts[150:]) == labels[150:]).all()


def test_texts_without_words_get_the_most_frequent_class() -> None:
    labels = np.asarray([2, 2, 0, 2])
    assert list(BagOfWords(["!", "?", ",", ""], labels, 3).predict(["...", "a word"])) == [2, 2]
    assert BagOfWords(["a", "a", "b", "a"], labels, 3).predict(["unseen"])[0] == 2


def test_the_rarest_features_are_left_out_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["x y", "x z", "x y"]
    monkeypatch.setattr(bag_of_words, "WEIGHTS", 3 * 2)
    bag = BagOfWords(texts, np.asarray([0, 1, 0]), 2)
    assert len(bag._keys) == 3  # x, y, and x y
    assert list(bag.predict(["z"])) == [0]
