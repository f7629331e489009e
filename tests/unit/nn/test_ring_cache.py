"""Decoding with a ring cache equals decoding with all keys under the mask of the same pattern."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard import Batch, build
from regard.models.base import LanguageModel
from regard.nn.cache import KVCache, Rows
from regard.nn.mask import Mask, View
from regard.nn.pattern import AnyOf, AttentionPattern, Blocks, DilatedWindow, GlobalTokens, Sinks, Window
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.ring_cache import RingCache, kv_cache
from regard.nn.terms import Terms
from regard.nn.trace import Trace
from regard.testing import tiny

PATTERNS = {
    "window": Window(4),
    "dilated window": DilatedWindow(3, 2),
    "blocks": Blocks(3, 1),
    "sinks": Sinks(3, 2),
    "window and global tokens": AnyOf((Window(3), GlobalTokens(1))),
}
LENGTH = 14


def model_of(pattern: AttentionPattern, position: Position | None = None) -> LanguageModel:
    torch.manual_seed(0)
    spec = tiny.decoder_only()
    spec = replace(spec, decoder=replace(spec.decoder, attention_pattern=pattern, position=position))  # type: ignore[reportArgumentType,reportCallIssue]
    model = build(spec).double().eval()
    assert isinstance(model, LanguageModel)
    return model


def rings(states: Sequence[tuple[object, ...]]) -> list[RingCache]:
    return [state for states_of_block in states for state in states_of_block if isinstance(state, RingCache)]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("cuts", [[1] * LENGTH, [7, *[1] * 7], [2, 3, 5, 4], [LENGTH]])
@pytest.mark.parametrize("name", PATTERNS)
def test_steps_of_any_length_equal_one_pass(name: str, cuts: list[int], static: bool) -> None:
    model = model_of(PATTERNS[name])
    ids = torch.randint(3, tiny.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.log_probs(Batch(ids))
        decoding, at = model.start(Batch(ids), LENGTH, static=static), 0
        assert len(rings(decoding.states)) == 2
        for T in cuts:
            output = model.advance(ids[:, at : at + T], decoding)
            at += T
            torch.testing.assert_close(output, expected[:, at - 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", [Rotary(), ALiBi(), T5Bias(8, 16)])
def test_rows_of_different_lengths_continue_with_positions(position: Position) -> None:
    model = model_of(Sinks(3, 2), position)
    ids = torch.randint(3, tiny.VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([7, 1, 4])
    seg = (torch.arange(7) < lengths[:, None]).long()
    with torch.no_grad():
        expected = model.log_probs(Batch(ids))
        decoding = model.start(Batch(ids), LENGTH)
        output = model.advance(ids[:, :7] * seg, decoding, seg)
        for step in range(7):
            for b, length in enumerate(lengths):
                torch.testing.assert_close(output[b], expected[b, length - 1 + step], rtol=0, atol=1e-12)
            output = model.advance(ids[torch.arange(3), lengths + step][:, None], decoding)


def test_memory_does_not_grow_with_the_number_of_tokens() -> None:
    model = model_of(Window(4))
    sizes = []
    for max_len in (10, 1000):
        decoding = model.start(Batch(torch.tensor([[3]])), max_len)
        with torch.no_grad():
            for _ in range(10):
                model.advance(torch.tensor([[3]]), decoding)
        sizes.append([cache.keys.numel() for cache in rings(decoding.states) if cache.keys is not None])
    assert sizes[0] == sizes[1] == [4 * 16, 4 * 16]


def test_reordered_rows_continue_their_parents() -> None:
    model = model_of(Window(3))
    ids = torch.randint(3, tiny.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        decoding = model.start(Batch(ids[:1, :1]), LENGTH, beams=2)
        model.advance(ids[:, :6], decoding)
        decoding.reorder(torch.tensor([1, 1]))
        output = model.advance(ids[:, 6:7], decoding)
        rows = torch.stack((torch.cat((ids[1, :6], ids[0, 6:7])), ids[1, :7]))
        torch.testing.assert_close(output, model.log_probs(Batch(rows))[:, -1], rtol=0, atol=1e-12)


def view_of(pattern: AttentionPattern | None, terms: Terms | None = None) -> View:
    return View(Mask(causal=True, attention_pattern=pattern), 1, 1, torch.device("cpu"), terms)


def test_a_ring_is_used_only_where_it_is_smaller() -> None:
    rows = Rows(torch.zeros(1, dtype=torch.int64), 20)
    cache = kv_cache(rows, view_of(Sinks(5, 3)))
    assert isinstance(cache, RingCache)
    assert (cache.first, cache.size) == (3, 5)
    for pattern in (None, Window(20), Sinks(15, 5)):
        assert isinstance(kv_cache(rows, view_of(pattern)), KVCache)
    shaw = model_of(Window(3), Shaw(2)).start(Batch(torch.tensor([[3]])), 20)
    assert not rings(shaw.states)


def test_recorded_attention_weights_are_in_the_order_of_positions() -> None:
    model = model_of(Window(3))
    ids = torch.randint(3, tiny.VOCAB, (1, 8), generator=torch.Generator().manual_seed(1))
    whole, steps = Trace(), Trace()
    with torch.no_grad():
        model.log_probs(Batch(ids), trace=whole)
        decoding = model.start(Batch(ids), 12)
        decoding.trace = steps
        for t in range(8):
            model.advance(ids[:, t : t + 1], decoding)
    last: list[Tensor] = steps.weights["decoder.self"][-2:]
    for recorded, expected in zip(last, whole.weights["decoder.self"], strict=True):
        torch.testing.assert_close(recorded, expected[:, :, -1:], rtol=0, atol=1e-12)
