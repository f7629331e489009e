"""Objectives: batches against batches built by hand; length limits; losses of padded and packed batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import batch as batches
from regard.batch import Batch, pack, pad
from regard.data.objectives import Classification, Item, LanguageModelling, Objective, Packed, Record, Translation
from regard.data.token_store import Table
from regard.data.tokenizer import Bytes, train
from regard.errors import DataError
from regard.models.build import build
from regard.presets import preset

BYTES = train(Bytes(), [])
BOS, EOS = 1, 2
PAIRS: list[tuple[list[int], list[int]]] = [
    ([5, 6, 7, EOS], [8, 9]),
    ([4, EOS], [5, 6, 7, 8]),
    ([10, 11, 12, 13, 14, EOS], [9]),
    ([3, 4, EOS], [11, 12, 13]),
]
FIELDS = ("target", "labels", "target_seg", "source", "source_seg", "target_pos", "source_pos", "weights", "types")


def same(actual: Batch, expected: Batch) -> None:
    for name in FIELDS:
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == torch.int64, name
            assert a.tolist() == b.tolist(), name
    for name in ("packed", "segments", "longest", "prefix"):
        assert getattr(actual, name) == getattr(expected, name), name


def translation_table(pairs: Sequence[tuple[list[int], list[int]]] = PAIRS) -> Table:
    return Table.of(source=[s for s, _ in pairs], target=[[BOS, *t, EOS] for _, t in pairs])


def rows(*numbers: Sequence[int]) -> list[np.ndarray]:
    return [np.asarray(row) for row in numbers]


def item(objective: Objective, table: Table, lines: list[np.ndarray], width: int | None = None, spare: int = 0) -> Item:
    if width is None:
        return objective.item(table.columns, lines)
    examples = np.concatenate(lines)
    longest = max(int(table[n].lengths[examples].max()) - objective.unread.get(n, 0) for n in objective.measured)
    most = max(len(line) for line in lines)
    return objective.item(table.columns, lines, Packed(len(lines) + spare, width, longest, most))


def test_padded_translation_equals_batch_translation() -> None:
    result = item(Translation(), translation_table(), rows([2], [0], [3]))
    same(result.batch, batches.translation([PAIRS[n] for n in (2, 0, 3)], source_end=()))
    assert result.labels == 2 + 3 + 4
    assert result.places == 3 * (6 + 4)
    assert result.padding == result.places - (6 + 4 + 3) - (2 + 3 + 4)


def test_packed_translation_equals_batch_translation() -> None:
    order = [1, 3, 0, 2]
    result = item(Translation(), translation_table(), rows(order), width=15)
    expected = batches.translation([PAIRS[n] for n in order], packed=True, source_end=())
    assert expected.source is not None
    assert expected.source.shape == (1, 15)
    assert expected.target.shape == (1, 14)  # the tested batch has padding at the end
    for name in FIELDS:
        a, b = getattr(result.batch, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if b is not None:
            assert a[:, : b.shape[1]].tolist() == b.tolist(), name
            assert not a[:, b.shape[1] :].any(), name
    assert (result.batch.packed, result.batch.segments, result.batch.longest) == (True, 4, expected.longest)
    assert (result.labels, result.places, result.padding) == (14, 30, 1)


def test_packed_rows_of_several_translations() -> None:
    lines = rows([1, 0], [3], [2])
    result = item(Translation(), translation_table(), lines, width=12)
    sources = [[PAIRS[n][0] for n in row] for row in lines]
    read = [[[BOS, *PAIRS[n][1]] for n in row] for row in lines]
    labels = [[[*PAIRS[n][1], EOS] for n in row] for row in lines]
    source, source_seg, source_pos = pack(sources, 12)
    target, target_seg, target_pos = pack(read, 12)
    expected = Batch(
        target,
        pack(labels, 12)[0],
        target_seg,
        source,
        source_seg,
        target_pos=target_pos,
        source_pos=source_pos,
        packed=True,
        segments=2,
        longest=6,
    )
    same(result.batch, expected)
    assert (result.labels, result.places, result.padding) == (14, 72, 72 - 15 - 14)


def test_last_packed_batch_is_filled_up_with_padding() -> None:
    full = item(Translation(), translation_table(), rows([1, 0], [3]), width=12)
    filled = item(Translation(), translation_table(), rows([1, 0], [3]), width=12, spare=2)
    assert (filled.labels, filled.places, filled.padding) == (full.labels, 96, full.padding + 48)
    for name in FIELDS:
        a, b = getattr(filled.batch, name), getattr(full.batch, name)
        if b is not None:
            assert a.shape == (4, 12), name
            assert a[:2].tolist() == b.tolist(), name
            assert not a[2:].any(), name
    model = build(preset("transformer_tiny", vocab=30), seed=1).double().eval()
    losses = [model.loss(batch.batch) for batch in (full, filled)]
    torch.testing.assert_close(losses[0].total, losses[1].total)


def test_labels_are_the_next_token() -> None:
    for width in (None, 20):
        batch = item(Translation(), translation_table(), rows([0], [1]), width).batch
        assert batch.labels is not None
        assert batch.target_seg is not None
        for row, (_, target) in zip(range(2), PAIRS, strict=False):
            n = len(target) + 1
            assert batch.target[row, :n].tolist() == [BOS, *target]
            assert batch.labels[row, :n].tolist() == [*target, EOS]
            assert batch.labels[row, : n - 1].tolist() == batch.target[row, 1:n].tolist()
            assert batch.target_seg[row].sum() == n


LINES = [[BOS, 5, 6, 7, EOS], [BOS, 9, EOS], [BOS, EOS]]


def test_language_model_reads_and_predicts_its_lines() -> None:
    result = item(LanguageModelling("lines"), Table.of(target=LINES), rows([2], [0], [1]))
    read, seg = pad([LINES[n][:-1] for n in (2, 0, 1)])
    same(result.batch, Batch(read, pad([LINES[n][1:] for n in (2, 0, 1)])[0], seg))
    assert (result.labels, result.places, result.padding) == (7, 12, 5)


def test_rows_without_padding_have_no_segments() -> None:
    result = item(LanguageModelling(), Table.of(target=[[4, 5, 6], [7, 8, 9]]), rows([0], [1]))
    assert result.batch.target_seg is None
    assert (result.labels, result.places, result.padding) == (4, 4, 0)


def test_packed_lines_of_a_language_model() -> None:
    result = item(LanguageModelling("lines"), Table.of(target=LINES), rows([0, 1], [2]), width=7)
    ids, seg, pos = pack([[LINES[0][:-1], LINES[1][:-1]], [LINES[2][:-1]]], 7)
    labels = pack([[LINES[0][1:], LINES[1][1:]], [LINES[2][1:]]], 7)[0]
    same(result.batch, Batch(ids, labels, seg, target_pos=pos, packed=True, segments=2, longest=4))
    assert (result.labels, result.places, result.padding) == (7, 14, 7)


def test_classification_has_one_label_per_row() -> None:
    table = Table.of(text=[[BOS, 5, 6], [BOS, 7], [BOS, 8, 9, 10]], label=[[2], [0], [1]])
    result = item(Classification(("a", "b", "c")), table, rows([1], [2]))
    ids, seg = pad([[BOS, 7], [BOS, 8, 9, 10]])
    same(result.batch, Batch(ids, torch.tensor([0, 1]), seg))
    assert (result.labels, result.places, result.padding) == (2, 8, 2)
    with pytest.raises(DataError, match="packed row holds several texts"):
        item(Classification(("a", "b", "c")), table, rows([1, 2]), width=9)


def test_ids_on_disk_may_have_any_unsigned_type() -> None:
    wide = Table.of(target=[[70000, 5, 2**31]])
    batch = item(LanguageModelling(), wide, rows([0])).batch
    assert batch.labels is not None
    assert batch.target.tolist() == [[70000, 5]]
    assert batch.labels.tolist() == [[5, 2**31]]


def test_pinning_a_batch_pins_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    batch = batches.translation(PAIRS, packed=True)
    same(batch.pinned(), batch)
    tensors = [getattr(batch, name) for name in FIELDS if getattr(batch, name) is not None]
    assert {id(tensor) for tensor in pinned} == {id(tensor) for tensor in tensors}


# -- the loss does not depend on the layout of the examples


def tiny(name: str, **changes: Any) -> Any:
    sizes = {"vocab": 20, "d_model": 16, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
    return build(preset(name, **sizes, **changes), seed=1)


def losses(model: Any, items: Sequence[Item]) -> tuple[float, float]:
    totals = [model.loss(each.batch) for each in items]
    assert [float(loss.tokens) for loss in totals] == [each.labels for each in items]
    return sum(float(loss.total.detach()) for loss in totals), sum(float(loss.nll.detach()) for loss in totals)


def test_translation_loss_is_equal_alone_padded_and_packed() -> None:
    model = tiny("transformer_small", **{"encoder.depth": 1, "decoder.depth": 1})
    table, objective = translation_table(), Translation()
    alone = losses(model, [item(objective, table, rows([n])) for n in range(4)])
    padded = losses(model, [item(objective, table, rows([0], [1], [2], [3]))])
    packed = losses(model, [item(objective, table, rows([2, 0, 1], [3]), width=16)])
    assert padded == pytest.approx(alone, abs=1e-6)
    assert packed == pytest.approx(alone, abs=1e-6)


def test_line_loss_is_equal_alone_padded_and_packed() -> None:
    depth: dict[str, Any] = {"decoder.depth": 1, "decoder.pattern[0].branches[1].d_hidden": 32}
    model = tiny("gpt2_small", **depth)
    table, objective = Table.of(target=LINES), LanguageModelling("lines")
    alone = losses(model, [item(objective, table, rows([n])) for n in range(3)])
    padded = losses(model, [item(objective, table, rows([0], [1], [2]))])
    packed = losses(model, [item(objective, table, rows([1, 0, 2]), width=10)])
    assert padded == pytest.approx(alone, abs=1e-6)
    assert packed == pytest.approx(alone, abs=1e-6)


# -- from text to columns


def encoded(text: str) -> list[int]:
    return BYTES.encode(text)


def lists(table: Table) -> dict[str, list[list[int]]]:
    return {name: [column[row].tolist() for row in range(table.rows)] for name, column in table.columns.items()}


def test_columns_of_a_translation() -> None:
    records: list[Record] = [("ab", "c"), ("d", "ef")]
    assert lists(Translation().table(records, {"source": BYTES, "target": BYTES})) == {
        "source": [[*encoded("ab"), EOS], [*encoded("d"), EOS]],
        "target": [[BOS, *encoded("c"), EOS], [BOS, *encoded("ef"), EOS]],
    }


def test_columns_of_a_language_model() -> None:
    records: list[Record] = [("ab",), ("",)]
    assert lists(LanguageModelling().table(records, {"target": BYTES})) == {"target": [encoded("ab\n"), encoded("\n")]}
    assert lists(LanguageModelling("lines").table(records, {"target": BYTES})) == {
        "target": [[BOS, *encoded("ab"), EOS], [BOS, EOS]]
    }


def test_columns_of_a_classification() -> None:
    objective = Classification(("no", "yes"))
    assert lists(objective.table([("yes", "ab"), ("no", "c")], {"text": BYTES})) == {
        "text": [[BOS, *encoded("ab")], [BOS, *encoded("c")]],
        "label": [[1], [0]],
    }
    with pytest.raises(DataError, match="label 'maybe' does not occur in the training text; known labels: no, yes"):
        objective.table([("yes", "ab"), ("maybe", "c")], {"text": BYTES})


# -- length limits


def test_too_long_translation_is_left_out() -> None:
    sizes = [(4, 4, True), (5, 4, False), (4, 5, False), (1, 1, True)]
    table = Table.of(
        source=[[*range(10, 10 + source), EOS] for source, _, _ in sizes],
        target=[[BOS, *range(20, 20 + target), EOS] for _, target, _ in sizes],
    )
    limited = Translation().limit(table, 4)
    assert limited.kept.tolist() == [kept for _, _, kept in sizes]
    assert limited.cut == 0
    assert lists(limited.table) == lists(table.take(np.asarray([0, 3])))


@pytest.mark.parametrize("max_len", [1, 2, 3, 5])
def test_parts_of_a_long_line_predict_every_label_once(max_len: int) -> None:
    sequences = [[BOS, *range(10, 10 + length), EOS] for length in range(14)]
    for chosen in ([line] for line in sequences):
        limited = LanguageModelling("lines").limit(Table.of(target=chosen), max_len)
        pieces, ids = lists(limited.table)["target"], chosen[0]
        assert (len(pieces) == 1) == (len(ids) - 2 <= max_len)
        assert limited.cut == (len(pieces) > 1)
        assert [token for piece in pieces for token in piece[1:]] == ids[1:]
        assert [token for piece in pieces for token in piece[:-1]] == ids[:-1]
        assert all(2 <= len(piece) <= max_len + 2 for piece in pieces)
    together = LanguageModelling("lines").limit(Table.of(target=sequences), max_len)
    one_by_one = [LanguageModelling("lines").limit(Table.of(target=[line]), max_len) for line in sequences]
    assert lists(together.table)["target"] == [row for limited in one_by_one for row in lists(limited.table)["target"]]
    assert together.cut == sum(limited.cut for limited in one_by_one)
    assert together.kept.tolist() == [True] * 14


def test_stream_is_never_truncated() -> None:
    table = Table.of(target=[list(range(10, 40)), [5]])
    limited = LanguageModelling().limit(table, 4)
    assert (lists(limited.table), limited.kept.tolist(), limited.cut) == (lists(table), [True, True], 0)


def test_long_text_is_truncated_for_classification() -> None:
    table = Table.of(text=[[BOS, 10, 11, 12, 13], [BOS, 9]], label=[[1], [0]])
    limited = Classification().limit(table, 4)
    assert (lists(limited.table), limited.kept.tolist(), limited.cut) == (lists(table), [True, True], 0)
    limited = Classification().limit(table, 3)
    assert lists(limited.table) == {"text": [[BOS, 10, 11, 12], [BOS, 9]], "label": [[1], [0]]}
    assert (limited.kept.tolist(), limited.cut) == ([True, True], 1)
