"""The demo learns: the main job of the package at its smallest."""

import pytest

from regard import demo


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (307, "three hundred and seven"),
        (5000, "five thousand"),
        (5020, "five thousand and twenty"),
        (99346, "ninety nine thousand three hundred and forty six"),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert " ".join(demo.in_words(number)) == words


def test_the_demo_learns_to_write_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(steps=300, seed=1)
    said = capsys.readouterr().out
    right = int(said.split("has never seen: ")[1].split()[0])
    assert right >= 190
    assert "Where the decoder looked" in said
