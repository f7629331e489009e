"""Word alignment: the error rate of a hand example, words of subwords, and symmetrisation."""

import pytest
import torch

from regard.data.tokenizer import BPE, Bytes, Tokenizer, train
from regard.errors import DataError
from regard.inspection.alignment import (
    GoldAlignment,
    alignment_error_rate,
    attention_links,
    between_words,
    diagonal_links,
    grow_diagonal,
    intersection,
    parse_gold,
    pharaoh,
    union,
    word_indices,
)


def test_alignment_error_rate_of_a_hand_example() -> None:
    """Two sentences: |A| = 5, |S| = 4, |A & S| = 2, |A & P| = 4, so the error rate is 1 - 6 / 9."""
    gold = [parse_gold("1-1 2-2 3p3", 1), parse_gold("1-1 2-1 2p2", 2)]
    links = [{(0, 0), (2, 2), (1, 0)}, {(0, 0), (1, 1)}]
    score = alignment_error_rate(links, gold)
    assert score.error_rate == pytest.approx(1 - 6 / 9)
    assert score.precision == pytest.approx(4 / 5)
    assert score.recall == pytest.approx(2 / 4)


def test_a_perfect_alignment_has_no_error() -> None:
    gold = parse_gold("1-1 2-3 2p2", 1)
    assert gold == GoldAlignment(frozenset({(0, 0), (1, 2)}), frozenset({(0, 0), (1, 2), (1, 1)}))
    for links in (gold.sure, gold.possible):
        assert alignment_error_rate([links], [gold]).error_rate == 0.0
    with pytest.raises(DataError, match="no link"):
        alignment_error_rate([[]], [parse_gold("", 1)])


@pytest.mark.parametrize("line", ["1:2", "0-1", "1-0", "a-b", "1-", "1x2"])
def test_an_invalid_reference_link_gives_a_sentence(line: str) -> None:
    with pytest.raises(DataError, match=r"line 7: .* is not a reference link; write i-j"):
        parse_gold(f"1-1 {line}", 7)


def test_links_are_written_in_pharaoh_format_from_zero() -> None:
    assert pharaoh({(10, 0), (2, 1), (0, 0)}) == "0-0 2-1 10-0"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train(BPE(vocab=275), ["a house by the sea", "the houses by the seaside, 10.5 km"] * 20)


TEXTS = ["a house by the sea", "houses", "the seaside , 10.5 km .", "zebra's über 3-fold"]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_belong_to_the_words_between_spaces(text: str, bpe: Tokenizer) -> None:
    for tokenizer in (bpe, train(Bytes(), [])):
        ids = tokenizer.encode(text)
        words = word_indices(tokenizer, ids)
        assert sorted(set(words)) == list(range(len(text.split())))
        for n, word in enumerate(text.split()):
            own = [token_id for token_id, index in zip(ids, words, strict=True) if index == n]
            assert tokenizer.decode(own).strip() == word


def test_attention_between_words_sums_keys_and_averages_queries() -> None:
    weights = torch.rand(3, 4)
    found = between_words(weights, [0, 0, 1], [0, 1, 1, 2])
    for w, rows in enumerate(([0, 1], [2])):
        for v, columns in enumerate(([0], [1, 2], [3])):
            expected = sum(float(weights[i, j]) for i in rows for j in columns) / len(rows)
            assert float(found[w, v]) == pytest.approx(expected)


def test_links_are_read_when_a_word_is_predicted_or_when_it_is_read() -> None:
    weights = torch.zeros(4, 3)  # bos and three target tokens; two source tokens and eos
    for row, column in enumerate((0, 1, 2, 1)):
        weights[row, column] = 1.0
    weights[2, 1] = 0.1
    assert attention_links(weights, [0, 1, 1], [0, 1]) == {(0, 0), (1, 1)}
    weights[3] = torch.tensor([0.9, 0.0, 0.1])
    assert attention_links(weights, [0, 1, 2], [0, 1], "input") == {(1, 0), (1, 1), (0, 2)}
    assert attention_links(weights, [], [0, 1]) == frozenset()


def test_diagonal_links_keep_the_relative_position() -> None:
    assert diagonal_links(3, 3) == {(0, 0), (1, 1), (2, 2)}
    assert diagonal_links(2, 4) == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert diagonal_links(4, 1) == {(2, 0)}
    assert diagonal_links(0, 2) == frozenset()


def test_symmetrisation_of_two_alignments() -> None:
    forward, backward = {(0, 0), (1, 1), (2, 3)}, {(0, 0), (1, 2), (2, 2), (4, 4)}
    assert intersection(forward, backward) == {(0, 0)}
    assert union(forward, backward) == forward | backward
    # (1, 1) is beside (0, 0); (1, 2) beside (1, 1), with a new target word; then (2, 2) and (2, 3), but not (4, 4).
    assert grow_diagonal(forward, backward) == {(0, 0), (1, 1), (1, 2), (2, 2), (2, 3)}
    assert grow_diagonal({(0, 0), (0, 1)}, {(0, 0)}) == {(0, 0), (0, 1)}
    assert grow_diagonal({(0, 0), (1, 1), (1, 0)}, {(0, 0), (1, 1)}) == {(0, 0), (1, 1)}
