"""Judge by validation metrics whether a model writes degenerate text: loops, or outputs that do not end."""

from collections.abc import Mapping
from typing import Any

REPEATING, UNFINISHED = "repeating", "unfinished"  # in the metrics: percentages of the validation outputs
MANY = 10.0  # percent that are worth a warning


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    """Return what a user should know about a model with these validation metrics: a sentence, or nothing."""
    repeating, unfinished = metrics.get(REPEATING, 0.0), metrics.get(UNFINISHED, 0.0)
    found = []
    if unfinished > MANY:
        found.append(f"{unfinished:.0f} % of the validation translations reach the length limit without an end")
    if repeating > MANY:
        found.append(f"{repeating:.0f} % {'' if found else 'of the validation translations '}repeat themselves")
    if not found:
        return []
    what = "has not learned to stop" if unfinished > MANY else "writes loops"
    return [f"the model {what}: {' and '.join(found)}; train longer (--time) or on more text"]
