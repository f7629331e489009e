from typing import Any

import pytest
import torch

from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, Piece
from regard.decoding.sample import Sample
from regard.decoding.search import Search, find, stream
from regard.errors import SpecError

from .known_models import ENDS, KnownModel, prompts, random_log_probs, random_rows, sources, translator, writer

SEARCHES = [Beam(1), Beam(1, stopping="huggingface"), Sample(temperature=1.3, seed=4)]


def joined(steps: list[list[Piece]], rows: int) -> list[tuple[tuple[int, ...], Hypothesis]]:
    """Return (ids of all pieces, hypothesis of the last piece) for every row."""
    outputs: list[list[int]] = [[] for _ in range(rows)]
    ends: dict[int, Hypothesis] = {}
    for pieces in steps:
        assert len({piece.row for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert piece.row not in ends, "nothing follows the end"
            assert piece.ids or piece.hypothesis, "a piece has tokens or a hypothesis"
            outputs[piece.row] += piece.ids
            if piece.hypothesis is not None:
                ends[piece.row] = piece.hypothesis
    return [(tuple(ids), ends[row]) for row, ids in enumerate(outputs)]


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "theirs", "sample"])
def test_pieces_of_a_stream_join_to_the_hypothesis(search: Search) -> None:
    model, rows = translator(), random_rows(9, 23)
    limits, rules = [Limits(max_len=3 + i % 4) for i in range(9)], TokenConstraints(banned=((8,),))
    steps = list(stream(model, sources(*rows), search, ENDS, limits, rules))
    results = find(model, sources(*rows), search, ENDS, limits, rules)
    for (ids, hypothesis), (expected,) in zip(joined(steps, 9), results, strict=True):
        assert ids == hypothesis.ids == expected.ids
        assert hypothesis == expected
    assert [len(piece.ids) for piece in steps[0]] == [0 if not h.ids else 1 for (h,) in results]


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "theirs", "sample"])
def test_a_streamed_row_has_the_positions_that_it_has_alone(search: Search) -> None:
    """Rows with shorter prompts continue without a gap when the longest prompt has no positions left."""
    model, rows = writer(room=11, eos=-9.0), [[3, 4], [5] * 10, [6] * 5, [7, 8]]
    steps = list(stream(model, prompts(*rows), search, ENDS, Limits(max_len=30)))
    results = find(model, prompts(*rows), search, ENDS, Limits(max_len=30))
    for row, (ids, hypothesis), (expected,) in zip(rows, joined(steps, 4), results, strict=True):
        assert ids == hypothesis.ids == expected.ids
        assert len(ids) == 12 - len(row)


def test_each_piece_takes_one_decoding_step() -> None:
    model = KnownModel(random_log_probs(7, eos=-9.0))
    steps = stream(model, sources((3,)), Beam(1), ENDS, Limits(max_len=5))
    assert not model.widths
    next(steps)
    next(steps)
    assert len(model.widths) == 2


def test_no_mode_leaks_between_the_steps() -> None:
    for _ in stream(translator(), sources((3,)), Beam(1), ENDS, Limits(max_len=3)):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (Beam(2), "beam_size: 2 beams revise earlier tokens"),
        (Beam(1, coverage=0.1), "coverage: is computed at the end of an output"),
        (Sample(n_best=2), "n_best: only one sample per row can be streamed, not 2; set it to 1"),
    ],
)
def test_searches_that_cannot_be_streamed_are_refused_before_the_first_step(search: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        stream(translator(), sources((3,)), search, ENDS, Limits(max_len=3))


def test_a_model_without_a_source_needs_a_limit() -> None:
    with pytest.raises(SpecError, match=r"^max_len: is derived from the length of the source"):
        find(writer(), prompts((3, 4)), Beam(1), ENDS)
