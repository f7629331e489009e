"""The likelihood of a stream that is read in overlapping windows, against its definition."""

import numpy as np
import pytest
import torch

from regard.batch import Batch
from regard.data.batching import Windows
from regard.data.objectives import LanguageModelling
from regard.data.token_store import Column, Table
from regard.evaluation.loss import likelihood, stream_likelihood
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.nn.stacks.plain import Plain

LENGTH = 8
MODEL = build(DecoderOnly(vocab=20, d_model=16, heads=2, decoder=Plain(DecoderOnly().decoder.pattern, 1))).eval()  # type: ignore[attr-defined]


def text(tokens: int) -> Column:
    ids = np.random.default_rng(tokens).integers(3, 20, tokens).astype(np.uint32)
    return Column(ids, np.array([0, tokens]))


def by_definition(ids: list[int], stride: int) -> float:
    """Return the negative log-likelihood with each token in the first window that contains it, window by window."""
    total, counted = 0.0, 0
    start = 0
    while counted < len(ids) - 1:
        end = min(start + LENGTH, len(ids) - 1)
        window = torch.tensor([ids[start : end + 1]])
        log_probs = MODEL.log_probs(Batch(window[:, :-1]))[0]  # type: ignore[operator]
        for place in range(counted, end):
            total -= float(log_probs[place - start, ids[place + 1]])
        counted, start = end, start + stride
    return total


@pytest.mark.parametrize("stride", [1, 3, 4, 8])
@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 17, 50])
@torch.no_grad()
def test_every_token_is_counted_once_in_the_first_window_that_holds_it(tokens: int, stride: int) -> None:
    column = text(tokens)
    for rows in (1, 3):
        actual = stream_likelihood(MODEL, column, LanguageModelling(), LENGTH, stride, rows)
        assert actual.tokens == tokens - 1
        assert actual.nll == pytest.approx(by_definition([int(i) for i in np.asarray(column.ids)], stride), rel=1e-5)


def test_windows_that_do_not_overlap_are_those_of_validation() -> None:
    column = text(50)
    expected = likelihood(MODEL, Table({"target": column}), LanguageModelling(), Windows(16, LENGTH))
    actual = stream_likelihood(MODEL, column, LanguageModelling(), LENGTH, LENGTH, 2)
    assert actual.nll == pytest.approx(expected.nll, rel=1e-6)
    assert actual.tokens == expected.tokens
