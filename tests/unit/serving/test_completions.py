import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.decoding.hypothesis import Hypothesis, Piece
from regard.serving.completions import Choice


def decode(ids: list[int]) -> str:
    """Decode ids that are the bytes of UTF-8."""
    return bytes(ids).decode("utf-8", "replace")


def generated(text: str, *stop: str, ended: bool = True) -> tuple[Choice, list[str]]:
    """Add the bytes of a text one at a time, and return the choice and the pieces of text."""
    choice = Choice(0, stop, decode)
    ids = list(text.encode())
    whole = Hypothesis(tuple(ids), 0.0, 0.0, tuple([-1.0] * (len(ids) + ended)), ended)
    pieces = [choice.add(Piece(0, (i,))) for i in ids]
    return choice, [*pieces, choice.add(Piece(0, (), whole))]


def test_pieces_contain_whole_characters() -> None:
    choice, pieces = generated("aé😀b")
    assert [piece for piece in pieces if piece] == ["a", "é", "😀", "b"]
    assert (choice.text, choice.finish_reason) == ("aé😀b", "stop")
    assert generated("ab", ended=False)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [("one two three", ["two"], "one "), ("aab", ["ab"], "a"), ("abc", ["x", "c", "b"], "a"), ("ab", ["abc"], "ab")],
)
def test_text_ends_before_a_stop_text(text: str, stop: list[str], expected: str) -> None:
    choice, pieces = generated(text, *stop, ended=False)
    assert "".join(pieces) == choice.text == expected
    assert choice.finish_reason == ("stop" if expected != text else "length")


@given(st.text("abé", max_size=12), st.lists(st.text("abé", min_size=1, max_size=3), max_size=3))
def test_streamed_text_is_the_text_before_the_first_stop_text(text: str, stop: list[str]) -> None:
    _, pieces = generated(text, *stop)
    # Generation ends at the character with which the first stop text is complete.
    ends = [text.find(each) + len(each) for each in stop if each in text]
    begin = min((text[: min(ends)].find(each) for each in stop if each in text[: min(ends)]), default=0) if ends else 0
    assert "".join(pieces) == (text[:begin] if ends else text)


def test_log_probabilities_belong_to_the_tokens_of_the_text() -> None:
    choice, _ = generated("one two", " two")
    choice.hypothesis = Hypothesis(tuple(b"one two"), 0.0, 0.0, tuple(-float(i) for i in range(7)), False)
    found = choice.logprobs(offset=5)
    assert found["tokens"] == ["o", "n", "e"]
    assert found["token_logprobs"] == [0.0, -1.0, -2.0]
    assert found["text_offset"] == [5, 6, 7]
