"""Decoding under any pattern, in pieces of any length, equals one pass under the dense mask of the pattern."""

import random
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Batch, build, fast
from regard.batch import pad
from regard.models.base import LanguageModel
from regard.nn.big_bird import CausalBigBird
from regard.nn.pattern import AnyOf, AttentionPattern, Blocks, DilatedWindow, GlobalTokens, Sinks, Window
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi
from regard.nn.position.rotary import Rotary
from regard.testing import tiny

LONGEST = 20
small = st.integers(1, 6)
PLAIN = st.one_of(
    st.builds(Window, small),
    st.builds(DilatedWindow, small, small),
    st.builds(Blocks, small, st.integers(0, 2)),
    st.builds(Sinks, small, small),
    st.builds(GlobalTokens, small),
    st.builds(CausalBigBird, small, st.integers(1, 2), st.integers(0, 2)),
)
PATTERNS = st.lists(PLAIN, min_size=1, max_size=2)  # two are combined


def model_of(pattern: AttentionPattern, position: Position | None) -> LanguageModel:
    spec = tiny.decoder_only()
    spec = replace(spec, decoder=replace(spec.decoder, attention_pattern=pattern, position=position))  # type: ignore[reportArgumentType,reportCallIssue]
    model = build(spec, seed=1).double().eval()
    assert isinstance(model, LanguageModel)
    return model


@settings(max_examples=25, deadline=None)
@given(PATTERNS, st.sampled_from([None, Rotary(), ALiBi()]), st.booleans(), st.booleans(), st.integers(0, 2**20))
def test_decoding_in_pieces_equals_one_pass(
    patterns: list[AttentionPattern], position: Position | None, installed: bool, static: bool, seed: int
) -> None:
    """With rows of different lengths, beams that are reordered, and rows that are dropped between the steps."""
    pattern = AnyOf(tuple(patterns)) if len(patterns) > 1 else patterns[0]
    plain, model, rng = model_of(pattern, position), model_of(pattern, position), random.Random(seed)
    if installed:
        fast.install(model, "cpu")
    beams = rng.randint(1, 2)
    texts: list[list[int]] = [[] for _ in range(2 * beams)]
    with torch.no_grad():
        decoding = model.start(Batch(torch.full((2, 1), 3)), LONGEST, beams=beams, static=static)
        for width in rng.choice([[7, 1, 1, 6, 1, 1], [1] * 9, [3, 5, 2, 4], [12, 1, 5]]):
            ragged = rng.random() < 0.5
            new = [
                [rng.randrange(3, tiny.VOCAB) for _ in range(rng.randint(1, width) if ragged else width)] for _ in texts
            ]
            texts = [text + ids for text, ids in zip(texts, new, strict=True)]
            ids, seg = pad(new, width)
            output = model.advance(ids, decoding, seg if ragged else None)
            together, seg = pad(texts)
            expected = plain.log_probs(Batch(together, target_seg=seg))
            last = torch.tensor([len(text) - 1 for text in texts])
            torch.testing.assert_close(output, expected[torch.arange(len(texts)), last], rtol=0, atol=1e-10)
            parent = [row // beams * beams + rng.randrange(beams) for row in range(len(texts))]
            decoding.reorder(torch.tensor(parent))
            texts = [texts[row] for row in parent]
            if not static and len(texts) > beams and rng.random() < 0.3:
                decoding.keep(torch.tensor([1]))
                texts = texts[beams:]
