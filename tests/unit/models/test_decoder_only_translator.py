"""The decoder-only translator equals the same decoder on source and target in one sequence."""

from dataclasses import replace

import pytest
import torch

from regard.batch import Batch, translation
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.search import find
from regard.errors import DataError, SpecError
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly, DecoderOnlyModel
from regard.models.decoder_only_translator import DecoderOnlyTranslator, DecoderOnlyTranslatorModel, joined
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.embedding import Tokens
from regard.nn.position.additive import Learned
from regard.testing import tiny
from regard.variants import apply

PAIRS = [([5, 6, 7], [8, 9]), ([4], [5, 6, 7, 8]), ([9, 8, 7, 6, 5], [3])]


def models(visibility: str) -> tuple[DecoderOnlyTranslatorModel, DecoderOnlyModel]:
    """Return (translator, decoder) with the same weights."""
    spec = replace(tiny.decoder_only(), visibility=visibility)
    decoder = build(spec, seed=3).double().eval()
    translator = build(
        DecoderOnlyTranslator(**{name: getattr(spec, name) for name in DecoderOnly.__dataclass_fields__}), seed=4
    )
    translator = translator.double().eval()
    translator.load_state_dict(decoder.state_dict())
    assert isinstance(decoder, DecoderOnlyModel)
    assert isinstance(translator, DecoderOnlyTranslatorModel)
    return translator, decoder


@pytest.mark.parametrize("visibility", ["causal", "prefix"])
def test_log_probs_equal_the_decoder_on_source_and_target_in_one_sequence(visibility: str) -> None:
    model, decoder = models(visibility)
    batch = translation(PAIRS)
    assert batch.source is not None
    assert batch.source_seg is not None
    assert batch.target_seg is not None
    log_probs = model.log_probs(batch)
    for i in range(len(PAIRS)):
        source, target = batch.source[i][batch.source_seg[i] != 0], batch.target[i][batch.target_seg[i] != 0]
        whole = torch.cat((source, target))[None]
        prefix = (torch.arange(whole.shape[1]) < len(source))[None] if visibility == "prefix" else None
        expected = decoder.log_probs(Batch(whole, prefix=prefix))[0, len(source) :]
        torch.testing.assert_close(log_probs[i, : len(target)], expected, rtol=0, atol=1e-12)


def test_each_target_follows_its_source_in_packed_rows() -> None:
    source = torch.tensor([[11, 12, 21, 22, 23, 0]])
    target = torch.tensor([[13, 24, 25, 0]])
    batch = Batch(
        target,
        target_seg=torch.tensor([[1, 2, 2, 0]]),
        source=source,
        source_seg=torch.tensor([[1, 1, 2, 2, 2, 0]]),
        target_pos=torch.tensor([[0, 0, 1, 0]]),
        source_pos=torch.tensor([[0, 1, 0, 1, 2, 0]]),
        packed=True,
        segments=2,
        longest=3,
    )
    order, whole = joined(batch, source)
    assert whole.target[0, :8].tolist() == [11, 12, 13, 21, 22, 23, 24, 25]
    assert whole.target_seg is not None
    assert whole.target_pos is not None
    assert whole.target_seg[0].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 0, 0]
    assert whole.target_pos[0, :8].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert order[0, :8].tolist() == [0, 1, 6, 2, 3, 4, 7, 8]


def test_only_target_tokens_have_a_loss() -> None:
    model, _ = models("causal")
    loss = model.loss(translation(PAIRS))
    assert loss.tokens == sum(len(target) + 1 for _, target in PAIRS)


def test_missing_sources_and_packed_decoding_are_refused() -> None:
    model, _ = models("causal")
    with pytest.raises(DataError, match="source: this model needs one"):
        model.log_probs(Batch(torch.tensor([[3, 4]])))
    packed = tiny.collate(tiny.encoder_decoder(), tiny.examples(tiny.encoder_decoder(), 2), packed=True)
    with pytest.raises(DataError, match="packed: a decoding session has one source per row"):
        model.start(packed, 4)


@pytest.mark.parametrize(("name", "visibility"), [("decoder_only", "causal"), ("prefix_lm", "prefix")])
def test_an_encoder_decoder_becomes_one_stack(name: str, visibility: str) -> None:
    base = tiny.encoder_decoder(depth=3)
    changed = apply(name, base)
    assert isinstance(base, EncoderDecoder)
    assert isinstance(changed, DecoderOnlyTranslator)
    assert (changed.visibility, changed.decoder.blocks(), changed.tied) == (visibility, 6, True)
    with pytest.raises(SpecError, match="only an encoder-decoder can be joined into one stack"):
        apply(name, tiny.decoder_only())


@pytest.mark.parametrize("beams", [1, 3])
def test_output_limit_does_not_depend_on_other_rows_of_the_batch(beams: int) -> None:
    """A long source uses most of the learned positions, but does not limit the output for a short source."""
    spec = replace(tiny.decoder_only(), input=Tokens(position=Learned(24)))
    model = build(
        DecoderOnlyTranslator(**{name: getattr(spec, name) for name in DecoderOnly.__dataclass_fields__}), seed=4
    ).eval()
    assert isinstance(model, DecoderOnlyTranslatorModel)
    short, long = [5, 6, 7], [3 + n % 20 for n in range(18)]
    ends, limits, search = SpecialTokens(bos=1, eos=2, pad=0), Limits(min_len=20, max_len=40), Beam(beam_size=beams)
    alone = find(model, translation([(short, [8])]), search, ends, limits)[0]
    batched = find(model, translation([(short, [8]), (long, [8])]), search, ends, limits)[0]
    assert alone[0].ids == batched[0].ids
    assert len(alone[0].ids) > 24 - len(long)
