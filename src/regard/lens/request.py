"""Requests of the lens page: what to inspect, with which tokens forced and which attention heads scaled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.errors import SpecError, nearest

MOST_CHARACTERS = 4000
MOST_BEAMS = 12
MOST_NEW = 200  # tokens of a continuation
MOST_FACTOR = 10.0
KEYS = ("model", "text", "target", "beam", "max_len", "forced", "heads")

Heads = Mapping[str, Mapping[tuple[int, int], float]]


@dataclass(frozen=True, slots=True)
class LensRequest:
    """One request of the page.

    `heads` maps a kind of attention, such as "decoder.cross", to {(layer, head): factor}. The weights of a head with
    factor 0 have no effect on the output. `forced` are the first tokens of the output; eos may be the last of them.
    """

    text: str
    target: str | None = None  # read by the decoder instead of the model's own output
    beam: int | None = None  # None: the beam size of the recipe
    max_len: int | None = None  # new tokens of a continuation
    forced: tuple[int, ...] = ()
    heads: Heads = field(default_factory=dict)


def request_from_json(record: Any) -> LensRequest:
    """Return the request for a JSON object with the keys of `LensRequest`. Raise SpecError if a value is wrong."""
    if not isinstance(record, dict):
        raise SpecError("", "the request must be a JSON object with the key 'text'")
    for key in record:
        if key not in KEYS:
            raise SpecError(str(key), f"is not a key of a lens request; {nearest(str(key), KEYS)}")
    text = _text("text", record.get("text"))
    target = None if record.get("target") is None else _text("target", record["target"])
    forced = record.get("forced") or []
    if not isinstance(forced, list) or not all(type(token) is int for token in forced) or len(forced) > MOST_NEW:
        raise SpecError("forced", f"must be a list of at most {MOST_NEW} token ids")
    if forced and target is not None:
        raise SpecError("forced", "has no effect on a given output (target); leave one of the two out")
    beam = _count("beam", record.get("beam"), MOST_BEAMS)
    max_len = _count("max_len", record.get("max_len"), MOST_NEW)
    return LensRequest(text, target, beam, max_len, tuple(forced), _heads(record.get("heads") or {}))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(name, "must be a string")
    if len(value) > MOST_CHARACTERS:
        raise SpecError(name, f"has {len(value):,} characters, but the lens reads at most {MOST_CHARACTERS:,}; cut it")
    return value


def _count(name: str, value: Any, most: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= most:
        raise SpecError(name, f"must be a whole number from 1 to {most}, not {value!r:.40}")
    return value


def _heads(record: Any) -> Heads:
    """Return {kind: {(layer, head): factor}} for the JSON form {kind: [[layer, head, factor], ...]}."""
    expected = 'must have the form {"decoder.cross": [[layer, head, factor], ...]}'
    if not isinstance(record, dict):
        raise SpecError("heads", expected)
    heads: dict[str, dict[tuple[int, int], float]] = {}
    for kind, entries in record.items():
        if not isinstance(entries, list):
            raise SpecError("heads", expected)
        for entry in entries:
            if not isinstance(entry, list) or len(entry) != 3 or not all(type(each) is int for each in entry[:2]):
                raise SpecError("heads", expected)
            layer, head, factor = entry
            if type(factor) not in (int, float) or not 0.0 <= factor <= MOST_FACTOR:
                raise SpecError("heads", f"a factor must be from 0 to {MOST_FACTOR:g}, not {factor!r:.40}")
            heads.setdefault(kind, {})[layer, head] = float(factor)
    return heads
