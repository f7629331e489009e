from typing import Any

import pytest

from regard.errors import SpecError
from regard.lens.request import LensRequest, request_from_json


def test_a_request_is_read_from_json() -> None:
    heads = {"decoder.cross": [[1, 0, 0], [0, 3, 0.5]]}
    record = {"model": "a", "text": "one", "beam": 4, "max_len": 9, "forced": [5, 6], "heads": heads}
    expected = LensRequest("one", None, 4, 9, (5, 6), {"decoder.cross": {(1, 0): 0.0, (0, 3): 0.5}})
    assert request_from_json(record) == expected
    assert request_from_json({"text": "one"}) == LensRequest("one")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "must be a JSON object"),
        ({}, "text: must be a string"),
        ({"text": 3}, "text: must be a string"),
        ({"text": "x" * 5000}, "5,000 characters"),
        ({"text": "one", "beams": 3}, "beams: is not a key"),
        ({"text": "one", "beam": 0}, "beam: must be a whole number from 1 to 12"),
        ({"text": "one", "beam": True}, "beam: must be a whole number"),
        ({"text": "one", "max_len": 10**9}, "max_len"),
        ({"text": "one", "forced": ["a"]}, "forced: must be a list"),
        ({"text": "one", "forced": [1] * 500}, "forced: must be a list of at most 200"),
        ({"text": "one", "heads": [1]}, "heads: must have the form"),
        ({"text": "one", "heads": {"decoder.cross": [[0, 1]]}}, "heads: must have the form"),
        ({"text": "one", "heads": {"decoder.cross": [[0, True, 1]]}}, "heads: must have the form"),
        ({"text": "one", "heads": {"decoder.cross": [[0, 1, 11]]}}, "a factor must be from 0 to 10"),
        ({"text": "one", "heads": {"decoder.cross": [[0, 1, float("nan")]]}}, "a factor must be from 0 to 10"),
        ({"text": "one", "target": 1}, "target: must be a string"),
        ({"text": "one", "target": "eins", "forced": [5]}, "forced: has no effect on a given output"),
    ],
)
def test_a_wrong_value_is_one_sentence(record: Any, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        request_from_json(record)
    assert message in str(raised.value)
