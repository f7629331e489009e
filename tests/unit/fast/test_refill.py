"""Replace finished sources of a static decoding."""

import pytest
import torch

from regard.fast import attention
from regard.fast.refill import refill, refillable
from regard.testing import tiny
from regard.testing.laws import Subject
from tests.unit.fast.test_beam_cache import BEAMS, SUBJECTS, sharing


@pytest.mark.parametrize("name", ["encoder_decoder", "multi-query", "window and shaw"])
def test_a_new_source_decodes_as_in_a_decoding_of_its_own(name: str) -> None:
    """Whatever it replaces, at any step."""
    spec = SUBJECTS[name]
    model, rng = sharing(spec), torch.Generator().manual_seed(3)
    batch = Subject(spec).collate(Subject(spec).examples(3))
    ids = torch.randint(3, tiny.VOCAB, (6, 3 * BEAMS, 1), generator=rng)
    with torch.no_grad():
        decoding, fresh = (model.start(batch, 8, BEAMS, static=True) for _ in range(2))
        assert refillable([decoding])
        for step in range(3):
            model.advance(ids[step], decoding)
            decoding.reorder(torch.tensor([1, 1, 0, 5, 4, 3, 6, 8, 8]))
        refill(decoding, fresh, torch.tensor([2]), torch.tensor([0]))
        alone = model.start(batch, 8, BEAMS, static=True)
        for step in range(3, 6):
            mine = model.advance(ids[step], decoding)[:BEAMS]
            theirs = model.advance(ids[step].roll(2 * BEAMS, 0), alone)[2 * BEAMS :]
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_only_static_decodings_with_plain_masks_are_refillable() -> None:
    spec = SUBJECTS["encoder_decoder"]
    model, batch = sharing(spec), Subject(spec).collate(Subject(spec).examples(2))
    with torch.no_grad():
        static, growing = (model.start(batch, 8, BEAMS, static=static) for static in (True, False))
    assert refillable([static])
    assert not refillable([static, growing])
    with attention.use("flex"):
        assert not refillable([static])
