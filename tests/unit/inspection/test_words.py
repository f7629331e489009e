"""Words of tokenized texts, and attention between words."""

import pytest
import torch

from regard.data.tokenizer import BPE, Tokenizer
from regard.inspection.words import by_words, joined, word_indices

TEXT = ["the houses don't stand, 2026!", "l'homme said: “no”", "我们喜欢猫。", "naïve café ünïcode\nnext line"] * 30


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BPE(300).learn(TEXT)


def words(tokenizer: Tokenizer, text: str, *, bos: bool = False) -> list[str]:
    ids = [*([tokenizer.bos] if bos else []), *tokenizer.encode(text)]
    return joined(tokenizer.tokens(ids), word_indices(tokenizer, ids))


@pytest.mark.parametrize("text", ["the houses stand", "unseen wordings xyz", "a naïve café"])
def test_subwords_of_a_word_are_grouped(tokenizer: Tokenizer, text: str) -> None:
    assert len(words(tokenizer, text)) == len(text.split())


def test_punctuation_is_a_word_of_its_own_but_an_apostrophe_is_not(tokenizer: Tokenizer) -> None:
    assert words(tokenizer, "houses, don't stand!") == ["houses", ",", "don't", "stand", "!"]
    assert words(tokenizer, "l'homme: no.") == ["l'homme", ":", "no", "."]


def test_digits_of_a_number_are_grouped_with_the_space_before_them(tokenizer: Tokenizer) -> None:
    assert words(tokenizer, "in 2026 the") == ["in", "2026", "the"]


def test_control_tokens_are_words(tokenizer: Tokenizer) -> None:
    assert words(tokenizer, "the houses", bos=True) == ["<s>", "the", "houses"]


def test_a_line_feed_ends_a_word(tokenizer: Tokenizer) -> None:
    assert words(tokenizer, "line\nnext") == ["line", "\\n", "next"]


def test_tokens_of_scripts_without_spaces_stay_apart(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("我们喜欢猫。")
    tokens = tokenizer.tokens(ids)
    indices = word_indices(tokenizer, ids)
    whole = [i for i, token in enumerate(tokens) if not token.startswith("\\x")]
    assert len({indices[i] for i in whole}) == len(whole)
    assert indices == sorted(indices)
    unseen = "狗跳过"  # three characters in bytes, each a word
    ids = tokenizer.encode(unseen)
    assert word_indices(tokenizer, ids)[-1] + 1 == len(unseen)


def test_no_tokens_have_no_words(tokenizer: Tokenizer) -> None:
    assert word_indices(tokenizer, []) == []
    assert joined([], []) == []


def test_attention_by_words_is_a_sum_over_keys_and_a_mean_over_queries() -> None:
    weights = torch.rand(2, 5, 4).softmax(-1)
    rows, columns = [0, 0, 1, 2, 2], [0, 1, 1, 2]
    grouped = by_words(weights, rows, columns)
    assert grouped.shape == (2, 3, 3)
    for h in range(2):
        for i in range(3):
            for j in range(3):
                queries = [t for t, word in enumerate(rows) if word == i]
                keys = [s for s, word in enumerate(columns) if word == j]
                expected = sum(float(weights[h, t, s]) for t in queries for s in keys) / len(queries)
                assert float(grouped[h, i, j]) == pytest.approx(expected)
    torch.testing.assert_close(grouped.sum(-1), torch.ones(2, 3))
    torch.testing.assert_close(by_words(weights, None, columns).sum(-1), torch.ones(2, 5))
