# ruff: noqa: RUF001  # marks of other scripts look like those of ASCII

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.serving.sentences import fitted, join, pieces, split


def sentences(text: str) -> list[str]:
    return [part.text for part in split(text) if part.translated]


def always(_: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Mr. Smith met Dr. J. Jones. They talked.", ["Mr. Smith met Dr. J. Jones.", "They talked."]),
        ("It costs 3.50 euros. Really.", ["It costs 3.50 euros.", "Really."]),
        ("Am 3. Oktober 1990. Danach kam z.B. Anna.", ["Am 3. Oktober 1990.", "Danach kam z.B. Anna."]),
        ("He said “Stop.” Then he left.", ["He said “Stop.”", "Then he left."]),
        ("first line\nsecond line\r\n\r\nthird", ["first line", "second line", "third"]),
        ("你好。你好吗？很好", ["你好。", "你好吗？", "很好"]),
        ("wait ... and see", ["wait ... and see"]),
        ("see example.com for more. thanks", ["see example.com for more. thanks"]),
        ("It was I. You know.", ["It was I.", "You know."]),
        ("  \n ", []),
    ],
)
def test_text_is_split_into_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@given(st.text(st.sampled_from("aB1.!?。 \n\t,“”'(é。") | st.characters(exclude_categories=["Cs"]), max_size=60))
def test_parts_together_are_the_text(text: str) -> None:
    assert "".join(part.text for part in split(text)) == text
    assert "".join(part.text for part in pieces(text, lambda sentence: len(sentence) < 5)) == text
    assert not any(part.text.isspace() for part in split(text) if part.translated)


def test_translations_keep_the_white_space_of_the_text() -> None:
    parts = pieces("  One. Two.\n\n\tThree. ", always)
    assert join(parts, {"One.": "Eins.", "Two.": "Zwei.", "Three.": "Drei."}) == "  Eins. Zwei.\n\n\tDrei. "


def test_translations_from_a_script_without_spaces_are_separated_by_spaces() -> None:
    parts = pieces("你好。再见。", always)
    assert join(parts, {"你好。": "Hello.", "再见。": "Goodbye."}) == "Hello. Goodbye."
    assert join(parts, {"你好。": "你好。", "再见。": "再见。"}) == "你好。再见。"


def test_long_sentence_is_divided_after_a_comma_near_its_middle() -> None:
    sentence = "one two three, four five six seven"
    assert fitted(sentence, lambda text: len(text) < 25) == ["one two three, ", "four five six seven"]
    assert fitted("abcdefgh", lambda text: len(text) <= 2) == ["ab", "cd", "ef", "gh"]
    assert all(len(piece.split()) <= 3 for piece in fitted("a b c d e f g h", lambda text: len(text.split()) <= 3))


@pytest.mark.parametrize("text", ["!" * 50_000, "?" * 25_000 + ")" * 25_000, "1. " * 10_000])
def test_time_does_not_grow_with_the_square_of_the_marks(text: str) -> None:
    begin = time.process_time()
    assert "".join(part.text for part in split(text)) == text
    assert time.process_time() - begin < 2
