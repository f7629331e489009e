import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch

from regard.batch import Batch, pack, pad, translation
from regard.errors import DataError


def test_pad_fills_on_the_right() -> None:
    ids, seg = pad([[5, 6, 7], [8]])
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert seg.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert pad([[5], []], 2)[1].tolist() == [[1, 0], [0, 0]]


def test_pack_concatenates_sequences() -> None:
    ids, seg, pos = pack([[[5, 6], [7]], [[8, 9, 10]]], 5)
    assert ids.tolist() == [[5, 6, 7, 0, 0], [8, 9, 10, 0, 0]]
    assert seg.tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 0, 0]]
    assert pos.tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 0, 0]]


def test_translation_adds_special_tokens_as_in_training() -> None:
    batch = translation([([5, 6], [7, 8, 9]), ([5], [7])])
    assert batch.target.tolist() == [[1, 7, 8, 9], [1, 7, 0, 0]]
    assert batch.labels is not None
    assert batch.labels.tolist() == [[7, 8, 9, 2], [7, 2, 0, 0]]
    assert batch.target_seg is not None
    assert batch.target_seg.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.source is not None
    assert batch.source.tolist() == [[5, 6, 2], [5, 2, 0]]
    assert batch.source_seg is not None
    assert batch.source_seg.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_translation_with_other_source_end() -> None:
    for end, expected in (((), [[5, 6]]), ((3,), [[5, 6, 3]])):
        batch = translation([([5, 6], [7])], source_end=end)
        assert batch.source is not None
        assert batch.source.tolist() == expected


def test_packed_translation_is_one_row_with_restarting_positions() -> None:
    batch = translation([([5, 6], [7, 8, 9]), ([5], [7])], packed=True)
    assert batch.target.tolist() == [[1, 7, 8, 9, 1, 7]]
    for tensor, expected in (
        (batch.labels, [[7, 8, 9, 2, 7, 2]]),
        (batch.target_seg, [[1, 1, 1, 1, 2, 2]]),
        (batch.target_pos, [[0, 1, 2, 3, 0, 1]]),
        (batch.source, [[5, 6, 2, 5, 2]]),
        (batch.source_seg, [[1, 1, 1, 2, 2]]),
        (batch.source_pos, [[0, 1, 2, 0, 1]]),
    ):
        assert tensor is not None
        assert tensor.tolist() == expected
    assert (batch.packed, batch.segments, batch.longest) == (True, 2, 4)


def rows(*row: int) -> torch.Tensor:
    return torch.tensor([row])


POS = rows(0, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_seg": rows(0, 1, 1)}, "target_seg: padding"),
        ({"target_seg": rows(1, 0, 1)}, "target_seg: padding"),
        ({"source": rows(1, 1), "source_seg": rows(0, 1)}, "source_seg: padding"),
        ({"target_seg": rows(1, 1, 2)}, "target_seg: an unpacked row has one segment"),
        ({"packed": True}, "target_seg: a packed batch needs it"),
        (
            {"packed": True, "segments": 2, "target_seg": rows(1, 1, 2), "target_pos": POS, "source": rows(1, 1)},
            "source_seg: a packed batch needs it",
        ),
        ({"packed": True, "segments": 2, "target_seg": rows(1, 1, 2)}, "target_pos: a packed batch needs it"),
        ({"packed": True, "segments": 3, "target_seg": rows(1, 0, 2), "target_pos": POS}, "target_seg: padding"),
        ({"packed": True, "segments": 3, "target_seg": rows(2, 1, 0), "target_pos": POS}, "target_seg: segments are"),
        ({"packed": True, "target_seg": rows(1, 2, 2), "target_pos": POS}, "up to segments=1"),
        (
            {
                "packed": True,
                "segments": 2,
                "target_seg": rows(1, 2, 2),
                "target_pos": POS,
                "labels": torch.tensor([1]),
            },
            "labels: a packed row holds several texts",
        ),
        ({"target_seg": rows(0, 0, 0)}, "target_seg: row 0 has no token"),
        ({"source_seg": rows(1, 1)}, "source_seg: .* does not match the shape of the ids, None"),
        ({"target_pos": rows(0, 1, 3)}, r"target_pos: positions must lie in 0 \.\. 2"),
        ({"target_pos": rows(0, -1, 1)}, "target_pos: positions must lie"),
        ({"target_pos": rows(0, 1, 7), "longest": 7}, r"target_pos: positions must lie in 0 \.\. 6"),
    ],
)
def test_invalid_segments_and_positions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Batch(rows(4, 5, 6), **arguments)


SHAPES = """
import torch
from regard import Batch, DataError
ids = torch.tensor([[4, 5, 6]])
for arguments in (
    {"target_seg": ids[:, :2]}, {"weights": torch.ones(1)}, {"source": torch.ones(2, 2, dtype=torch.int64)},
    {"labels": ids[:, :2]}, {"target": ids[0]}, {"target": ids.float()}, {"target": ids[:, :0]},
):
    try:
        Batch(**{"target": ids, **arguments})
    except DataError as error:
        print(error)
"""


def test_mismatched_shapes_are_refused() -> None:
    """In a separate process, because the shape checks of the test suite would fail first."""
    messages = subprocess.run(
        [sys.executable, "-c", SHAPES], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert messages == [
        "target_seg: the shape (1, 2) does not match the shape of the ids, (1, 3)",
        "weights: the shape (1,) does not match the shape of the ids, (1, 3)",
        "source: has 2 rows, but the target has 1",
        "labels: (1, 2) is neither one per token nor one per row of target",
        "target: needs rows of whole numbers (B, T), or of vectors (B, T, C), not (3,) of torch.int64",
        "target: needs rows of whole numbers (B, T), or of vectors (B, T, C), not (1, 3) of torch.float32",
        "target: needs rows of whole numbers (B, T), or of vectors (B, T, C), not (1, 0) of torch.int64",
    ]


def test_translation_without_pairs_is_refused() -> None:
    with pytest.raises(DataError, match="pairs: is empty"):
        translation([])


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(DataError, match="source: an empty source"):
        translation([([], [5])])


def test_to_moves_every_tensor() -> None:
    batch = translation([([5, 6], [7, 8, 9]), ([5], [7])], packed=True).to("meta")
    for field in fields(batch):
        value = getattr(batch, field.name)
        assert not isinstance(value, torch.Tensor) or value.is_meta
    assert (batch.packed, batch.segments, batch.longest) == (True, 2, 4)
