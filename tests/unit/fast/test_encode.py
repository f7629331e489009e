"""Encoding of sources in groups of similar length."""

from dataclasses import replace

import pytest
import torch

from regard import fast
from regard.batch import Batch, pad
from regard.fast import encode
from regard.fast.encode import LengthGroupedEncoder
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.bridge import Transparent
from regard.testing import tiny
from regard.testing.laws import Subject


@pytest.mark.parametrize("bridge", ["last", "transparent"])
def test_sources_of_similar_length_are_encoded_together(bridge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups have little padding, and the memory of every source is the same."""
    spec = tiny.encoder_decoder()
    model = Subject(spec if bridge == "last" else replace(spec, bridge=Transparent())).own_model()
    assert isinstance(model, EncoderDecoderModel)
    rows = [list(range(3, 3 + length)) for length in (9, 2, 5, 1, 9, 3, 7, 2, 4, 1)]
    ids, seg = pad(rows)
    batch, widths = Batch(ids[:, :1], source=ids, source_seg=seg), []
    expected = model.encode(batch)
    monkeypatch.setattr(encode, "TOGETHER", 3)
    fast.install(model)
    assert isinstance(model, LengthGroupedEncoder)
    encode_batch = model.encode
    monkeypatch.setattr(model, "encode", lambda part: widths.append(part.source.shape) or encode_batch(part))
    grouped = model.encode_by_length(batch)
    assert widths == [(3, 2), (3, 4), (3, 9), (1, 9)]
    assert grouped.seg is not None
    assert torch.equal(grouped.seg, seg)
    for actual, padded in zip(grouped.x, expected.x, strict=True):
        torch.testing.assert_close(actual[seg != 0], padded[seg != 0], rtol=1e-9, atol=1e-9)
    widths.clear()
    model.encode_by_length(Batch(ids[:4, :1], source=ids[:4].clamp(min=3), source_seg=torch.ones_like(ids[:4])))
    assert widths == [(4, 9)]
