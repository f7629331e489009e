"""The choice of a tokenizer for a classifier."""

import pytest

from regard.data.choices import choose_tokenizer
from regard.data.objectives import Classification, Record
from regard.data.tokenizer import BPE, Words

TOKENIZED = ["What is the capital of the country , please ?", "Who was the first president of the country ?"]
RAW = ["What is the capital, please?", 'I (really) liked it. The end was "good"!']
UNSPACED = [f"我喜欢第{n}部电影。" for n in range(40)]


def labelled(texts: list[str], times: int = 20) -> list[Record]:
    return [("LABEL", text) for text in texts * times]


@pytest.mark.parametrize(
    ("texts", "expected", "reason"),
    [
        (TOKENIZED, Words, "the text separates them from punctuation"),
        (RAW, BPE, "punctuation is attached to 38% of the words"),
        (TOKENIZED * 40 + RAW[:1], Words, "the text separates them from punctuation"),
    ],
    ids=["tokenized", "raw", "few attached"],
)
def test_classifier_reads_words_of_tokenized_text(texts: list[str], expected: type, reason: str) -> None:
    choice = choose_tokenizer(Classification(("LABEL",)), labelled(texts))
    assert type(choice.tokenizer) is expected
    assert choice.why.endswith(f"because {reason}")


def test_classifier_reads_subwords_where_words_are_rare() -> None:
    choice = choose_tokenizer(Classification(("LABEL",)), labelled(UNSPACED, 1))
    assert isinstance(choice.tokenizer, BPE)
    assert choice.why.endswith("because only 0% of the words occur at least twice")


def test_tokenizer_choice_ignores_the_label() -> None:
    records = [("good, really.", text) for text in TOKENIZED]
    assert isinstance(choose_tokenizer(Classification(("good, really.",)), records * 20).tokenizer, Words)


def test_empty_text_gets_byte_pair_encoding() -> None:
    assert isinstance(choose_tokenizer(Classification(()), []).tokenizer, BPE)
