"""Encoding word by word gives the ids of encoding whole texts, for any white space."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from regard.data import words
from regard.data.tokenizer import BPE, Bytes, Characters, Words, train
from regard.errors import DataError

SPACES = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
# Sequences of white space that are tokens, so that splitting one of them would be detected.
CORPUS = [
    "the cat  sat   on    the\tmat; the cat's\n\n1987 \u00a0 hat \u3000\u3000 ",
    " \u00a0 \u00a0 a \t\t b \u2003 \u2003 c\u200b \n \n  d   \n",
    "ros\u00e9 \u4f60\u597d </s> <s>",
] * 4
TOKENIZERS = [train(spec, CORPUS) for spec in (BPE(), Bytes(), Characters(), Words())]

white = st.sampled_from([" ", " ", "  ", "   ", "\n", "\t", *SPACES])
black = st.sampled_from(["cat", "the", "1987", "'s", ";", "\u00e9", "\u200b", "\u180e", "</s>", "a"])
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
texts = st.lists(st.one_of(white, black, anything), max_size=12).map("".join)


@settings(max_examples=200)
@given(batch=st.lists(texts, max_size=4))
def test_encoding_by_word_equals_encoding_the_text(batch: list[str]) -> None:
    for tokenizer in TOKENIZERS:
        column = tokenizer.encode_column(batch)
        assert [column[row].tolist() for row in range(len(column))] == tokenizer.encode_batch(batch)


def test_white_space_of_the_tokenizer_is_white_space_in_python() -> None:
    characters = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    black_only = "".join(character for character in characters if not character.isspace())
    pieces = pre_tokenizers.Split(Regex(r"\s"), "isolated").pre_tokenize_str(black_only)
    assert [piece for piece, _ in pieces] == [black_only]


def test_words_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        encoded.extend(texts)
        return [[len(text)] * len(text) for text in texts]

    memory = words.WordMemory(encode)
    column = memory.column(["a bc a", "", "bc  a\n"])
    assert encoded == ["a", " bc", " a", "bc", "  a", "\n"]
    assert [column[row].tolist() for row in range(3)] == [[1, 3, 3, 3, 2, 2], [], [2, 2, 3, 3, 3, 1]]
    column = memory.column(["bc bc a"])
    assert column[0].tolist() == [2, 2, 3, 3, 3, 2, 2]
    assert len(encoded) == 6
    monkeypatch.setattr(words, "MAX_WORDS", 5)  # the cache is cleared
    assert memory.column(["bc bc a"])[0].tolist() == [2, 2, 3, 3, 3, 2, 2]
    assert encoded[6:] == ["bc", " bc", " a"]


def test_lone_surrogate_is_reported_with_its_text() -> None:
    for tokenizer in TOKENIZERS:
        with pytest.raises(DataError, match="text 2 has half a character"):
            tokenizer.encode_column(["a b c", "d e f", "g \ud800 h"])
        assert tokenizer.encode_column(["d e"])[0].tolist() == tokenizer.encode("d e")  # and nothing is forgotten
