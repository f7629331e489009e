"""Dropping sources during decoding: the remaining sources continue as if decoded alone."""

import pytest
import torch

from regard.batch import Batch
from regard.errors import DataError
from regard.models.base import LanguageModel
from regard.models.decoding import Decoding
from regard.nn.cache import Droppable, KVCache, Rows, StaticKV

from .known_models import BOS, Stubborn, prompts, random_rows, sources, translator, writer

ROWS = random_rows(5, 23, seed=2)
KEPT = [3, 0, 4]


def decode(
    model: LanguageModel, batch: Batch, read: list[torch.Tensor], beams: int, kept: list[int] | None
) -> torch.Tensor:
    """Return the log-probabilities of the last of three steps, with reordered beams; after the second, keep `kept`."""
    B = batch.target.shape[0]
    seg = None if batch.source is not None or batch.target_seg is None else batch.target_seg.repeat_interleave(beams, 0)
    with torch.no_grad():
        decoding = model.start(batch, 20, beams)
        first = (
            torch.full((B * beams, 1), BOS) if batch.source is not None else batch.target.repeat_interleave(beams, 0)
        )
        model.advance(first, decoding, seg)
        model.advance(read[0][: B * beams], decoding)
        decoding.reorder((torch.arange(B)[:, None] * beams + torch.arange(beams).flip(0)).flatten())
        if kept is not None:
            decoding.keep(torch.tensor(kept))
            B = len(kept)
        model.advance(read[1][: B * beams], decoding)
        decoding.reorder((torch.arange(B)[:, None] * beams + torch.arange(beams).roll(1)).flatten())
        return model.advance(read[2][: B * beams], decoding)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ["translator", "writer", "prefix"])
def test_kept_rows_continue_as_if_decoded_alone(kind: str, beams: int) -> None:
    model = translator() if kind == "translator" else writer(input_attention="full" if kind == "prefix" else "causal")
    make = sources if kind == "translator" else prompts
    read = [torch.randint(3, 23, (5 * beams, 1)) for _ in range(3)]
    rows = (torch.tensor(KEPT)[:, None] * beams + torch.arange(beams)).flatten()
    together = decode(model, make(*ROWS), read, beams, KEPT)
    alone = decode(model, make(*(ROWS[i] for i in KEPT)), [read[0][rows], *read[1:]], beams, None)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_a_memory_per_block_is_kept_too() -> None:
    batch = sources(*ROWS)
    decoding = translator().start(batch, 4, 2)
    assert decoding.memory is not None
    decoding.memory = type(decoding.memory)((decoding.memory.x[0], 2 * decoding.memory.x[0]), decoding.memory.seg)
    whole, seg = decoding.memory.x, decoding.memory.seg
    decoding.keep(torch.tensor([2, 1]))
    for x, before in zip(decoding.memory.x, whole, strict=True):
        assert torch.equal(x, before[[2, 1]])
    assert seg is not None
    assert decoding.memory.seg is not None
    assert torch.equal(decoding.memory.seg, seg[[2, 1]])


@pytest.mark.parametrize("uniform", [True, False])
def test_a_cache_keeps_rows(uniform: bool) -> None:
    rows = Rows(torch.zeros(4, dtype=torch.int64), 6, uniform=uniform)
    cache, k, more = KVCache(rows), torch.randn(4, 2, 3, 5), torch.randn(2, 2, 1, 5)
    cache.keep(torch.tensor([3, 1]), torch.tensor([1]))  # nothing read yet
    cache.append(k, 2 * k, rows.view(3))
    rows.advance(3, torch.tensor([3, 2, 3, 1]))
    cache.keep(torch.tensor([3, 1]), torch.tensor([1]))
    rows.keep(torch.tensor([3, 1]))
    assert rows.lengths.tolist() == [1, 2]
    keys, values, _ = cache.append(more, 2 * more, rows.view(1))
    for row, (source, length) in enumerate(((3, 1), (1, 2))):
        assert torch.equal(keys[row, :, :length], k[source, :, :length])
        assert torch.equal(keys[row, :, length], more[row, :, 0])
    assert torch.equal(values, 2 * keys)
    assert isinstance(cache, Droppable)


def test_a_memory_keeps_sources() -> None:
    memory = StaticKV(torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5))
    keys, values = memory.keys, memory.values
    memory.keep(torch.tensor([4, 5, 0, 1]), torch.tensor([2, 0]))
    assert torch.equal(memory.keys, keys[[2, 0]])
    assert torch.equal(memory.values, values[[2, 0]])
    assert isinstance(memory, Droppable)


def test_states_that_cannot_drop_rows_report_it() -> None:
    rows = Rows(torch.zeros(4, dtype=torch.int64), 6)
    stuck = Decoding(rows, [(KVCache(rows), None), Stubborn(4)], 2)
    assert not stuck.droppable()
    with pytest.raises(DataError, match=r"^sources: Stubborn cannot drop rows"):
        stuck.keep(torch.tensor([1]))
    assert rows.lengths.shape == (4,)
    static = translator().start(sources(*ROWS), 4, static=True)
    assert not static.droppable()
    with pytest.raises(DataError, match=r"^sources: a static decoding session cannot drop sources"):
        static.keep(torch.tensor([1]))
    assert translator().start(sources(*ROWS), 4).droppable()
