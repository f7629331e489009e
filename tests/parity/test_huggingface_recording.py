"""Hugging Face's attention weights and hidden states of Marian, GPT-2 and BERT, with copied weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Batch
from regard.inspection.recording import Recording, record
from regard.nn.norm import LayerNorm

from .copying import close
from .test_huggingface import (
    EPS,
    MaskedLM,
    V,
    bert,
    bert_input,
    gpt2,
    hub,
    marian,
    marian_model,
    marian_spec,
    sentences,
)

pytestmark = pytest.mark.usefixtures("exact")


def their_outputs(model: Any, **inputs: Tensor) -> Any:
    model.set_attn_implementation("eager")  # the only implementation that returns weights
    with torch.no_grad():
        return model(**inputs, output_attentions=True, output_hidden_states=True)


def same(ours: Any, theirs: Any, row: int, queries: int, keys: int | None = None) -> None:
    """Assert that recorded tensors equal theirs, without the padding of a row."""
    assert len(ours) == len(theirs) > 0
    for mine, its in zip(ours, theirs, strict=True):
        real = its[row, :queries] if keys is None else its[row, :, :queries, :keys]
        close(mine, real, 1e-9)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_marian(row: int) -> None:
    theirs = marian()
    ours = marian_model(theirs, marian_spec())
    source, source_seg = sentences([9, 4, 1])
    target, target_seg = sentences([5, 8, 3], V - 4, seed=2)
    inputs = {"input_ids": source, "attention_mask": source_seg}
    expected = their_outputs(theirs, **inputs, decoder_input_ids=target, decoder_attention_mask=target_seg)
    recording = record(ours, Batch(target, None, target_seg, source, source_seg), row=row)
    S, T = int(source_seg[row].sum()), int(target_seg[row].sum())
    same(recording.attention["encoder.self"], expected.encoder_attentions, row, S, S)
    same(recording.attention["decoder.self"], expected.decoder_attentions, row, T, T)
    same(recording.attention["decoder.cross"], expected.cross_attentions, row, T, S)
    same(recording.states["encoder"], expected.encoder_hidden_states, row, S)
    same(recording.states["decoder"], expected.decoder_hidden_states, row, T)
    norms = [x.norm(dim=-1) for x in expected.decoder_hidden_states]
    same(recording.norms["decoder"], norms, row, T)

    def head(x: Tensor) -> Tensor:
        return theirs.lm_head(x) + theirs.final_logits_bias

    lens_is_their_head(recording, [x[row, :T] for x in expected.decoder_hidden_states], head)


def lens_is_their_head(recording: Recording, states: Any, head: Any) -> None:
    """Assert that the logit lens is their output head applied to their hidden states."""
    for layer, x in zip(recording.logit_lens, states, strict=True):
        with torch.no_grad():
            probabilities = head(x).softmax(-1)
        for t, prediction in enumerate(layer.predictions):
            assert prediction.probability == pytest.approx(float(probabilities[t, prediction.id]), abs=1e-9)
            assert prediction.alternatives[0].probability == pytest.approx(float(probabilities[t].max()), abs=1e-9)


def test_gpt2() -> None:
    theirs, ours = gpt2()
    ids, _ = sentences([12])
    expected = their_outputs(theirs, input_ids=ids)
    recording = record(ours, Batch(ids))
    same(recording.attention["decoder.self"], expected.attentions, 0, 12, 12)
    same(recording.states["decoder"], expected.hidden_states, 0, 12)
    normed = [theirs.transformer.ln_f(x) for x in expected.hidden_states[:-1]]  # theirs has the norm in the last only
    lens_is_their_head(recording, [x[0] for x in (*normed, expected.hidden_states[-1])], theirs.lm_head)


def test_bert() -> None:
    theirs, ours = bert(hub.BertForMaskedLM, MaskedLM(norm=LayerNorm(eps=EPS)))
    batch, inputs = bert_input()
    expected = their_outputs(theirs, **inputs)
    for row, T in enumerate((12, 5, 1, 20)):
        recording = record(ours, batch, row=row)  # type: ignore[reportArgumentType]
        same(recording.attention["encoder.self"], expected.attentions, row, T, T)
        same(recording.states["encoder"], expected.hidden_states, row, T)
        lens_is_their_head(recording, [x[row, :T] for x in expected.hidden_states], theirs.cls)
