"""Replacement of finished sources in a static decoding session."""

import pytest
import torch

from regard.fast import attention
from regard.fast.refill import refill, refillable
from regard.testing import tiny
from regard.testing.laws import Subject
from tests.unit.fast.test_beam_cache import BEAMS, SUBJECTS, with_shared_cache


@pytest.mark.parametrize("name", ["encoder_decoder", "multi-query", "window and shaw"])
def test_a_new_source_decodes_as_in_a_separate_session(name: str) -> None:
    """The outputs do not depend on the source that it replaces."""
    spec = SUBJECTS[name]
    model, rng = with_shared_cache(spec), torch.Generator().manual_seed(3)
    batch = Subject(spec).collate(Subject(spec).examples(3))
    ids = torch.randint(3, tiny.VOCAB, (6, 3 * BEAMS, 1), generator=rng)
    with torch.no_grad():
        decoding, fresh = (model.start(batch, 8, BEAMS, static=True) for _ in range(2))
        assert refillable([decoding])
        for step in range(3):
            model.advance(ids[step], decoding)
            decoding.reorder(torch.tensor([1, 1, 0, 5, 4, 3, 6, 8, 8]))
        refill(decoding, fresh, torch.tensor([2]), torch.tensor([0]))
        separate = model.start(batch, 8, BEAMS, static=True)
        for step in range(3, 6):
            actual = model.advance(ids[step], decoding)[:BEAMS]
            expected = model.advance(ids[step].roll(2 * BEAMS, 0), separate)[2 * BEAMS :]
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_only_static_sessions_with_plain_masks_are_refillable() -> None:
    spec = SUBJECTS["encoder_decoder"]
    model, batch = with_shared_cache(spec), Subject(spec).collate(Subject(spec).examples(2))
    with torch.no_grad():
        static, growing = (model.start(batch, 8, BEAMS, static=static) for static in (True, False))
    assert refillable([static])
    assert not refillable([static, growing])
    with attention.use("flex"):
        assert not refillable([static])
