"""Detect degenerate model outputs from validation metrics: repetition loops, and outputs that do not end."""

from collections.abc import Mapping
from typing import Any

REPEATING, UNFINISHED = "repeating", "unfinished"  # names of metrics: percentages of the validation outputs
MANY = 10.0  # percentage above which there is a warning


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    """Return a list with a warning if validation metrics indicate degenerate outputs, else an empty list."""
    repeating, unfinished = metrics.get(REPEATING, 0.0), metrics.get(UNFINISHED, 0.0)
    symptoms = []
    if unfinished > MANY:
        symptoms.append(f"{unfinished:.0f} % of the validation translations reach the length limit without an end")
    if repeating > MANY:
        symptoms.append(f"{repeating:.0f} % {'' if symptoms else 'of the validation translations '}repeat themselves")
    if not symptoms:
        return []
    what = "has not learned to stop" if unfinished > MANY else "generates loops"
    return [f"the model {what}: {' and '.join(symptoms)}; train longer (--time) or on more text"]
