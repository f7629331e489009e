"""Rows compose: any two build, train and decode together, or are refused by a sentence that names both."""

import os
import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from regard.batch import translation
from regard.errors import SpecError
from regard.models.base import Generator, ModelSpec, build, count
from regard.nn.branches.feedforward import FeedForward
from regard.nn.stacks.plain import Plain
from regard.presets import preset
from regard.tree import swap
from regard.variants import VARIANTS, combine

PAIRS = [([5, 6, 7, 8], [8, 9, 4]), ([4, 6], [5, 6, 7]), ([9, 8, 7], [3, 3])]
ROWS = [name for name, variant in VARIANTS.items() if variant.row is not None and name != "vanilla"]


def base() -> ModelSpec:
    """The base of the table at a size that all rows divide."""
    spec: Any = preset("narang_base")
    spec = swap(spec, Plain, lambda stack: replace(stack, depth=6))
    spec = swap(spec, FeedForward, lambda branch: replace(branch, d_hidden=24))
    return replace(spec, vocab=20, d_model=24, heads=6, d_head=4)


def outcomes(pairs: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """Pairs of rows that go together, and those that do not with what is said."""
    fit: list[tuple[str, str]] = []
    refused: list[tuple[str, str, str]] = []
    for pair in pairs:
        try:
            count(combine(pair, base()))
            fit.append(pair)
        except SpecError as error:
            refused.append((*pair, str(error)))
    return fit, refused


ALL = [pair for one, other in combinations(ROWS, 2) for pair in ((one, other), (other, one))]
# All 2,550 ordered pairs take a minute and a half: REGARD_PAIRS=2550.
FIT, REFUSED = outcomes(random.Random(4).sample(ALL, int(os.environ.get("REGARD_PAIRS", "60"))))


@pytest.mark.parametrize("pair", FIT[:20], ids=" + ".join)
def test_two_rows_train_and_decode_together(pair: tuple[str, str]) -> None:
    model = build(combine(pair, base()), seed=1)
    assert isinstance(model, Generator)
    batch = translation(PAIRS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        loss = model.loss(batch)
        (loss.total / loss.tokens + loss.aux).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.total.item())
    assert losses[-1] < losses[0]
    model.eval()
    with torch.no_grad():
        decoding = model.start(batch, 4)
        said = model.advance(batch.target[:, :1], decoding)
        torch.testing.assert_close(said, model.log_probs(batch)[:, 0], rtol=0, atol=1e-4)  # type: ignore[operator]
        for _ in range(3):
            said = model.advance(said.argmax(-1, keepdim=True), decoding)
        assert said.isfinite().all()


def test_what_does_not_go_together_is_refused_by_name() -> None:
    assert REFUSED
    for one, other, sentence in REFUSED:
        assert repr(one) in sentence, sentence
        assert repr(other) in sentence, sentence


def test_most_pairs_go_together() -> None:
    assert len(FIT) > max(19, len(REFUSED))


def test_what_is_undone_is_refused() -> None:
    with pytest.raises(SpecError, match="'swiglu' leaves nothing of 'gelu'; choose one of the two"):
        combine(("gelu", "swiglu"), base())
    with pytest.raises(SpecError, match="'sinusoidal' leaves nothing of 'rotary'"):
        combine(("rotary", "swiglu", "sinusoidal"), base())
