"""The decoder-only translator equals the same decoder on source and target in one sequence."""

from dataclasses import replace

import pytest
import torch

from regard.batch import Batch, translation
from regard.catalogue import edited, from_record
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
from regard.nn.trace import Trace
from regard.testing import tiny
from regard.variants import apply

PAIRS = [([5, 6, 7], [8, 9]), ([4], [5, 6, 7, 8]), ([9, 8, 7, 6, 5], [3])]


def models(input_attention: str) -> tuple[DecoderOnlyTranslatorModel, DecoderOnlyModel]:
    """Return (translator, decoder) with the same weights."""
    spec = replace(tiny.decoder_only(), input_attention=input_attention)
    decoder = build(spec, seed=3).double().eval()
    translator = build(
        DecoderOnlyTranslator(**{name: getattr(spec, name) for name in DecoderOnly.__dataclass_fields__}), seed=4
    )
    translator = translator.double().eval()
    translator.load_state_dict(decoder.state_dict())
    assert isinstance(decoder, DecoderOnlyModel)
    assert isinstance(translator, DecoderOnlyTranslatorModel)
    return translator, decoder


@pytest.mark.parametrize("input_attention", ["causal", "full"])
def test_log_probs_equal_the_decoder_on_source_and_target_in_one_sequence(input_attention: str) -> None:
    model, decoder = models(input_attention)
    batch = translation(PAIRS)
    assert batch.source is not None
    assert batch.source_seg is not None
    assert batch.target_seg is not None
    log_probs = model.log_probs(batch)
    for i in range(len(PAIRS)):
        source, target = batch.source[i][batch.source_seg[i] != 0], batch.target[i][batch.target_seg[i] != 0]
        whole = torch.cat((source, target))[None]
        prefix = (torch.arange(whole.shape[1]) < len(source))[None] if input_attention == "full" else None
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


@pytest.mark.parametrize(("name", "input_attention"), [("decoder_only", "causal"), ("prefix_lm", "full")])
def test_an_encoder_decoder_becomes_one_stack(name: str, input_attention: str) -> None:
    base = tiny.encoder_decoder(depth=3)
    changed = apply(name, base)
    assert isinstance(base, EncoderDecoder)
    assert isinstance(changed, DecoderOnlyTranslator)
    assert (changed.input_attention, changed.decoder.blocks(), changed.tied) == (input_attention, 6, True)
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


@pytest.mark.parametrize("packed", [False, True])
def test_loss_on_all_tokens_is_the_loss_of_the_joined_sequences(packed: bool) -> None:
    """Reference: the same decoder as a language model on every sequence s1 .. sm eos bos t1 .. tn, row by row."""
    translator, decoder = models("causal")
    model = with_loss_on("all", translator)
    loss = model.train().loss(translation(PAIRS, packed=packed))
    expected, count = 0.0, 0
    for source, target in PAIRS:
        whole = [*source, 2, 1, *target]  # eos after the source, bos before the target
        log_probs = decoder.log_probs(Batch(torch.tensor([whole])))[0]
        labels = [*whole[1:], 2]
        expected -= float(log_probs[torch.arange(len(labels)), labels].sum().detach())
        count += len(labels)
    torch.testing.assert_close(float(loss.nll.detach()), expected, rtol=0, atol=1e-9)
    assert loss.tokens == count


def test_evaluation_counts_only_target_tokens_whatever_the_training_loss() -> None:
    translator, _ = models("causal")
    every, batch = with_loss_on("all", translator), translation(PAIRS)
    assert every.eval().loss(batch) == translator.eval().loss(batch)


def test_label_weights_of_the_target_are_kept_in_the_loss_on_all_tokens() -> None:
    model = with_loss_on("all", models("causal")[0]).train()
    batch = translation(PAIRS[:1])
    without_target = replace(batch, weights=torch.zeros(batch.target.shape, dtype=torch.float64))
    log_probs = model.eval().log_probs(Batch(torch.tensor([[4]]), source=torch.tensor([[5, 6, 7, 2]])))
    assert log_probs.shape[1] == 1
    assert model.train().loss(without_target).tokens == len(PAIRS[0][0]) + 1  # three source tokens and eos


def test_full_input_attention_with_a_loss_on_the_source_is_refused() -> None:
    with pytest.raises(SpecError, match="loss_on: with input_attention='full', every source token attends to the next"):
        DecoderOnlyTranslator(input_attention="full", loss_on="all")


@pytest.mark.parametrize("input_attention", ["causal", "full"])
def test_attention_weights_are_zero_exactly_where_the_mask_hides_a_token(input_attention: str) -> None:
    """Mask written out: token j is visible to i if j <= i, or, with full input attention, if j is in the source."""
    model, _ = models(input_attention)
    S, T = 4, 3
    batch = Batch(torch.tensor([[1, 8, 9]]), source=torch.tensor([[5, 6, 7, 2]]))
    trace = Trace()
    model.log_probs(batch, trace)
    weights = trace.weights["decoder.self"]
    assert len(weights) == 2
    visible = [[j <= i or (input_attention == "full" and j < S) for j in range(S + T)] for i in range(S + T)]
    for layer in weights:
        assert ((layer[0] > 0) == torch.tensor(visible)).all()


def with_loss_on(loss_on: str, model: DecoderOnlyTranslatorModel) -> DecoderOnlyTranslatorModel:
    """Return a model with the same weights and another training loss, without dropout."""
    assert isinstance(model.spec, DecoderOnlyTranslator)
    spec = replace(model.spec, loss_on=loss_on, dropout=0.0)
    changed = build(spec, seed=5).double()
    changed.load_state_dict(model.state_dict())
    assert isinstance(changed, DecoderOnlyTranslatorModel)
    return changed


@pytest.mark.parametrize("kind", ["decoder_only", "decoder_only_translator", "joined"])
def test_former_name_of_input_attention_can_still_be_read(kind: str) -> None:
    spec = from_record({"kind": kind, "visibility": "prefix"})
    assert spec.input_attention == "full"
    assert edited(spec, {"visibility": "causal"}).input_attention == "causal"
    assert edited(edited(spec, {"visibility": "causal"}), {"visibility": "prefix"}) == spec
