"""Packed and padded rows contain all tokens, and have the loss of the separate sequences."""

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.batch import Batch, pack, pad, translation
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Tokens
from regard.nn.position.additive import Learned
from regard.nn.position.bias import T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain

pieces = st.lists(st.integers(3, 10), min_size=1, max_size=5)


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.lists(st.integers(3, 99), max_size=5), max_size=4), min_size=1, max_size=3), st.integers(0, 3)
)
def test_packed_rows_can_be_unpacked(rows: list[list[list[int]]], extra: int) -> None:
    width = max(sum(map(len, row)) for row in rows) + extra
    if width == 0:
        return
    ids, seg, pos = pack(rows, width)
    assert ids.shape == seg.shape == pos.shape == (len(rows), width)
    for row, i, s, p in zip(rows, ids, seg, pos, strict=True):
        for n, piece in enumerate(row, start=1):
            assert i[s == n].tolist() == piece
            assert p[s == n].tolist() == list(range(len(piece)))
        used = sum(map(len, row))
        assert s[:used].tolist() == sorted(s[:used].tolist())
        assert not s[used:].any()
        assert not i[used:].any()


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(3, 99), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(0, 3))
def test_padded_rows_can_be_unpadded(rows: list[list[int]], extra: int) -> None:
    ids, seg = pad(rows, max(map(len, rows)) + extra)
    assert [i[s == 1].tolist() for i, s in zip(ids, seg, strict=True)] == rows
    Batch(ids, target_seg=seg)  # and a batch takes it


@cache
def _shaken(spec: DecoderOnly | EncoderDecoder) -> torch.nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    model, rng = build(spec).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=rng))
    torch.set_default_dtype(before)
    return model


def _decoder(stack: Plain, tokens: Tokens) -> DecoderOnly:
    return DecoderOnly(vocab=11, d_model=8, heads=2, dropout=0.0, input=tokens, decoder=stack)


BLOCK = Block((SelfAttention(), FeedForward(8)), PreNorm())
PAIR = Block((SelfAttention(), CrossAttention(), FeedForward(8)), PreNorm())
# Positions are within the segment, so that none is beyond 5 although a row may be longer.
LANGUAGE_MODELS = [
    _decoder(Plain((BLOCK,), 2), Tokens(position=Learned(5))),
    _decoder(Plain((BLOCK,), 2, position=T5Bias(8, 9)), Tokens(position=None)),
    _decoder(Plain((BLOCK,), 2, position=Rotary()), Tokens(position=None)),
]
TRANSLATOR = EncoderDecoder(
    vocab=11, d_model=8, heads=2, dropout=0.0, encoder=Plain((BLOCK,), 1), decoder=Plain((PAIR,), 1)
)


@settings(max_examples=25)
@given(st.lists(pieces, min_size=1, max_size=4), st.sampled_from(range(len(LANGUAGE_MODELS))), st.integers(0, 2))
def test_loss_of_a_packed_row_is_the_sum_of_its_sequences(texts: list[list[int]], index: int, extra: int) -> None:
    model = _shaken(LANGUAGE_MODELS[index])
    ids, seg, pos = pack([texts], sum(map(len, texts)) + extra)
    labels = (ids * 7 + 3) % 11
    longest = max(map(len, texts))
    batch = Batch(ids, labels, seg, target_pos=pos, packed=True, segments=len(texts), longest=longest)
    packed = model.loss(batch)  # type: ignore[reportCallIssue]
    parts = [model.loss(Batch(t, (t * 7 + 3) % 11)) for t in (torch.tensor([text]) for text in texts)]  # type: ignore[reportCallIssue]
    torch.testing.assert_close(packed.total, sum(part.total for part in parts), rtol=0, atol=1e-9)
    assert packed.tokens.item() == sum(map(len, texts))


@settings(max_examples=25)
@given(st.lists(st.tuples(pieces, pieces), min_size=1, max_size=4))
def test_loss_of_packed_pairs_equals_their_separate_losses(pairs: list[tuple[list[int], list[int]]]) -> None:
    translator = _shaken(TRANSLATOR)
    packed = translator.loss(translation(pairs, packed=True))  # type: ignore[reportCallIssue]
    padded = translator.loss(translation(pairs))  # type: ignore[reportCallIssue]
    separate = [translator.loss(translation([pair])).total for pair in pairs]  # type: ignore[reportCallIssue]
    torch.testing.assert_close(packed.total, sum(separate), rtol=0, atol=1e-9)
    torch.testing.assert_close(padded.total, sum(separate), rtol=0, atol=1e-9)
    assert packed.tokens.item() == padded.tokens.item() == sum(len(target) + 1 for _, target in pairs)
