"""Beams that share a KV cache have the same log-probabilities as beams with separate caches."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard import fast
from regard.fast.beam_cache import BeamCache, SharedRows, shared_rows, side_by_side
from regard.models.base import LanguageModel, ModelSpec
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.models.decoding import Decoding
from regard.nn.attention import split_heads
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.pattern import Window
from regard.nn.position.additive import Injected, Learned
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi, DistanceBias, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace
from regard.testing import tiny
from regard.testing.laws import Subject
from regard.tree import swap
from regard.variants import apply

BEAMS = 3
POSITIONS = (T5Bias(8, 16), Rotary(), Shaw(3), Shaw(2, values=False), ALiBi(), DistanceBias(3), Injected(Learned(16)))


def stacked(model: ModelSpec, **changes: object) -> ModelSpec:
    return swap(model, Plain, lambda stack: replace(stack, **changes))


def joined(input_attention: str) -> DecoderOnlyTranslator:
    model = tiny.decoder_only()
    names = ("vocab", "d_model", "heads", "decoder")
    return DecoderOnlyTranslator(**{name: getattr(model, name) for name in names}, input_attention=input_attention)  # type: ignore[reportArgumentType]


def of_each(position: Position) -> dict[str, ModelSpec]:
    models: dict[str, ModelSpec] = {"encoder_decoder": tiny.encoder_decoder(), "prefix_lm": tiny.prefix_lm()}
    specs = {f"{name} {position}": stacked(model, position=position) for name, model in models.items()}
    per_layer = swap(tiny.decoder_only(), SelfAttention, lambda branch: replace(branch, position=position))
    return specs | {f"decoder_only, each layer {position}": per_layer}


SUBJECTS: dict[str, ModelSpec] = {
    "encoder_decoder": tiny.encoder_decoder(),
    "decoder_only": tiny.decoder_only(),
    "prefix_lm": tiny.prefix_lm(),
    "joined": joined("causal"),
    "joined prefix": joined("full"),
    "grouped": swap(tiny.decoder_only(), SelfAttention, lambda branch: replace(branch, kv_heads=2)),
    "multi-query": swap(tiny.encoder_decoder(), SelfAttention, lambda branch: replace(branch, kv_heads=1)),
    "window": stacked(tiny.decoder_only(), attention_pattern=Window(2)),
    "window and shaw": stacked(tiny.encoder_decoder(), attention_pattern=Window(2), position=Shaw(2)),
    "strict": replace(tiny.decoder_only(), decoder=replace(tiny.decoder_only().decoder, strict=True)),  # type: ignore[reportCallIssue]
    **{name: model for position in POSITIONS for name, model in of_each(position).items()},
}


def with_shared_cache(spec: ModelSpec) -> LanguageModel:
    """Return the model with fast modules, in which the beams of a source share a cache."""
    model = Subject(spec).own_model()
    assert isinstance(model, LanguageModel)
    fast.install(model)
    return model


def decode(model: LanguageModel, spec: ModelSpec, static: bool, ragged: bool, drop: bool = False) -> list[Tensor]:
    """Return the log-probabilities after every read, with reordering and (with `drop`) dropping of sources."""
    rng = torch.Generator().manual_seed(7)
    batch, sources = Subject(spec).collate(Subject(spec).examples(3)), 3
    log_probs = []

    def read(T: int, counts: Tensor | None = None) -> None:
        ids = torch.randint(3, tiny.VOCAB, (sources * BEAMS, T), generator=rng)
        seg = None if counts is None else (torch.arange(T) < counts[:, None]).long()
        log_probs.append(model.advance(ids, decoding, seg))

    def reorder() -> None:
        parents = torch.randint(0, BEAMS, (sources, BEAMS), generator=rng)
        decoding.reorder((parents + torch.arange(sources)[:, None] * BEAMS).flatten())

    with torch.no_grad():
        decoding: Decoding = model.start(batch, 14, BEAMS, static)
        read(3, torch.randint(1, 4, (sources * BEAMS,), generator=rng) if ragged else None)
        for T in (1, 2):
            reorder()
            read(T)
        if drop:
            decoding.keep(torch.tensor([2, 0]))
            sources = 2
        reorder()
        reorder()
        read(1)
    return log_probs


def compare(spec: ModelSpec, **options: bool) -> None:
    shared = decode(with_shared_cache(spec), spec, **options)
    separate = decode(Subject(spec).generator(), spec, **options)
    for step, (actual, expected) in enumerate(zip(shared, separate, strict=True)):
        torch.testing.assert_close(
            actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text, n=step: f"read {n}: {text}"
        )


@pytest.mark.parametrize("name", SUBJECTS)
def test_sharing_a_cache_does_not_change_log_probs(name: str) -> None:
    spec = SUBJECTS[name]
    compare(spec, static=False, ragged=False, drop=True)
    compare(spec, static=False, ragged=True)
    compare(spec, static=True, ragged=True)


# Variants with other wirings, nested attention, or additional states; the law of beams covers all rows of the table.
ROWS = (
    "block_sharing evolved evolved_so grouped_query light_conv parallel prefix_lm sliding_window synth_dense "
    "synth_random_plus_alpha transparent universal universal_act vanilla weighted weighted_ahmed"
)


@pytest.mark.parametrize("name", ROWS.split())
def test_sharing_a_cache_does_not_change_variants(name: str) -> None:
    spec = apply(name, tiny.narang())
    compare(spec, static=False, ragged=False, drop=True)


@pytest.mark.parametrize("static", [False, True])
def test_reordering_moves_no_key(static: bool) -> None:
    """Reordering moves no key, and the next step writes to the same storage."""
    model = with_shared_cache(tiny.encoder_decoder())
    batch = Subject(tiny.encoder_decoder()).collate(Subject(tiny.encoder_decoder()).examples(2))
    with torch.no_grad():
        decoding = model.start(batch, 5, BEAMS, static)
        model.advance(torch.full((2 * BEAMS, 1), 5), decoding)
        cache = decoding.states[0][0]
        assert isinstance(cache, BeamCache)
        storage = cache.both.unflatten(0, (2, -1)) if cache.both is not None else cache.keys
        assert storage is not None
        new_slots, before = storage if static else storage.transpose(1, 2), storage.clone()  # (b, slots, ...)
        old_slots = before if static else before.transpose(1, 2)
        decoding.reorder(torch.tensor([1, 1, 0, 5, 3, 4]))
        assert torch.equal(storage, before)
        model.advance(torch.full((2 * BEAMS, 1), 6), decoding)
    assert torch.equal(new_slots[:, :BEAMS], old_slots[:, :BEAMS])
    assert bool((new_slots[:, BEAMS : 2 * BEAMS] != 0).flatten(2).any(2).all())
    assert bool((new_slots[:, 2 * BEAMS :] == 0).all())


def test_side_by_side_copies_only_if_necessary() -> None:
    """Key and value of a token form one row, without a copy if they are adjacent in a fused projection."""
    whole = torch.randn(2, 3, 8 + 6 + 4)
    q, k, v = (split_heads(part, 2) for part in whole.split((8, 6, 4), -1))
    adjacent = side_by_side(k, v)
    assert adjacent.data_ptr() == k.data_ptr()
    assert torch.equal(adjacent, whole[:, :, 8:].flatten(0, 1))
    assert torch.equal(side_by_side(k.clone(), v), adjacent)
    assert torch.equal(side_by_side(q, v), torch.cat((whole[:, :, :8], whole[:, :, 14:]), -1).flatten(0, 1))
    assert torch.equal(side_by_side(v, k), torch.cat((whole[:, :, 14:], whole[:, :, 8:14]), -1).flatten(0, 1))


def test_positions_follow_an_external_counter() -> None:
    read = torch.tensor([[3, 3], [0, 0]])
    rows = shared_rows(2, 2, read.device, 9, static=True)
    rows.follow(read)
    rows.advance(1, None)
    rows.reorder(torch.tensor([1, 0, 2, 2]))
    assert rows.positions(1).tolist() == [[3], [3], [0], [0]]
    read += 1
    assert rows.positions(2).tolist() == [[4, 5], [4, 5], [1, 2], [1, 2]]
    assert isinstance(rows, SharedRows)
    assert rows.ancestry.columns(1).tolist() == [[4], [1]]
    rows.restart(torch.tensor([0, 1]))
    assert read.tolist() == [[0, 0], [1, 1]]


def test_beam_ancestry_by_definition() -> None:
    """Beam 0 continues beam 1, which continues beam 0: slot (column, beam) is visible iff an ancestor wrote it."""
    rows = shared_rows(1, 2, torch.device("cpu"), 4, static=False)
    assert isinstance(rows, SharedRows)
    ancestry = rows.ancestry
    rows.beam_mask(1)
    rows.advance(1, None)
    rows.reorder(torch.tensor([1, 0]))
    mask = rows.beam_mask(1)
    assert mask.on_path is not None
    assert mask.on_path()[0].tolist() == [[False, True, True, False], [True, False, False, True]]
    assert mask.k_pos is not None
    assert mask.k_pos.tolist() == [[0, 0, 1, 1]]
    rows.advance(1, None)
    rows.reorder(torch.tensor([0, 0]))
    visible = ancestry.visible(1, 2)
    assert ancestry.additive(2) is None  # the dtype of the keys is not set
    ancestry.set_dtype(torch.float32)
    additive = ancestry.additive(2)
    assert additive is not None
    assert torch.equal(additive[:, 0] == 0.0, visible)
    assert bool((additive[:, 0][~visible] == -torch.inf).all())
    assert ancestry.at.tolist() == [[1, 0, 2, 2], [1, 0, 2, 2]]  # 2: nothing


@pytest.mark.parametrize("ragged", [False, True])
def test_a_trace_has_the_attention_weights_of_every_beam(ragged: bool) -> None:
    spec = tiny.decoder_only()
    prompt = torch.randint(3, tiny.VOCAB, (BEAMS, 3))
    seg = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]) if ragged else None

    def weights(model: LanguageModel) -> list[Tensor]:
        with torch.no_grad():
            decoding = model.start(Subject(spec).collate(Subject(spec).examples(1)), 6, BEAMS)
            decoding.trace = Trace()
            model.advance(prompt, decoding, seg)
            decoding.reorder(torch.tensor([2, 0, 1]))
            model.advance(prompt[:, :1], decoding)
        return decoding.trace.weights["decoder.self"]

    shared, separate = weights(with_shared_cache(spec)), weights(Subject(spec).generator())
    real = torch.ones_like(prompt) if seg is None else seg
    for actual, expected in zip(shared[:2], separate[:2], strict=True):  # weights at padding are undefined
        torch.testing.assert_close(actual.transpose(1, 2)[real != 0], expected.transpose(1, 2)[real != 0])
    for actual, expected in zip(shared[2:], separate[2:], strict=True):
        torch.testing.assert_close(actual, expected)
