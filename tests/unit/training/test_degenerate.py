"""Warnings about models whose validation outputs are degenerate."""

import pytest

from regard.training.degenerate import warnings


@pytest.mark.parametrize(
    ("repeating", "unfinished", "expected"),
    [
        (0, 0, None),
        (10, 10, None),
        (
            0,
            34.4,
            "has not learned to stop: 34 % of the validation translations reach the length limit without an end;",
        ),
        (
            62,
            71,
            "has not learned to stop: 71 % of the validation translations reach the length limit without an end and "
            "62 % repeat themselves;",
        ),
        (62, 3, "generates loops: 62 % of the validation translations repeat themselves;"),
        (3, 62, "has not learned to stop: 62 % of the validation translations reach the length limit without an end;"),
    ],
)
def test_many_degenerate_outputs_are_one_sentence(repeating: float, unfinished: float, expected: str | None) -> None:
    messages = warnings({"loss": 1.0, "repeating": repeating, "unfinished": unfinished})
    assert messages == ([] if expected is None else [f"the model {expected} train longer (--time) or on more text"])


def test_no_warning_without_decoded_outputs() -> None:
    assert warnings({"loss": 1.0, "accuracy": 50.0}) == []
    assert warnings({}) == []
