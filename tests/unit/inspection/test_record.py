"""Attention weights and hidden states of one forward pass."""

from dataclasses import replace

import pytest
import torch

from regard import Batch, build, preset
from regard.batch import pad
from regard.inspection.record import attention, hidden_states
from regard.models.base import ModelSpec
from regard.models.baselines.rnn import Recurrent
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.mask import Mask
from regard.nn.stacks.funnel import Funnel
from regard.testing import tiny
from regard.tree import walk

SPECS = dict(tiny.families()) | {
    "lstm_attention": preset("lstm_attention", vocab=tiny.VOCAB, d_model=16),
    "gnmt": preset("gnmt", vocab=tiny.VOCAB, d_model=16),
}


def batch_for(spec: ModelSpec) -> Batch:
    return tiny.collate(spec, tiny.examples(spec, 3))


@pytest.mark.parametrize("name", SPECS)
def test_hidden_states_of_every_layer_of_every_family(name: str) -> None:
    spec = SPECS[name]
    model, batch = build(spec), batch_for(spec)
    states = hidden_states(model, batch)
    assert states
    for layers in states.values():
        assert len(layers) >= 2
        assert all(layer.dim() == 3 and layer.shape[0] == batch.target.shape[0] for layer in layers)
        assert len({layer.shape[1] for layer in layers}) == 1
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hidden_states_are_the_values_between_the_blocks() -> None:
    spec = tiny.encoder_decoder(3)
    model, batch = build(spec).eval(), batch_for(spec)
    assert isinstance(model, EncoderDecoderModel)
    states = hidden_states(model, batch)
    assert {side: len(layers) for side, layers in states.items()} == {"encoder": 4, "decoder": 4}
    assert torch.equal(states["decoder"][-1], model.hidden(batch))
    assert torch.equal(states["encoder"][-1], model.encode(batch).x[0])
    ids = batch.target
    embedded = model.embed("target", ids, Mask(), ids.shape[1])
    assert torch.equal(states["decoder"][0], embedded)


def test_hidden_states_of_a_funnel_shorten() -> None:
    spec = replace(tiny.encoder_decoder(), encoder=Funnel((Block((SelfAttention(), FeedForward(24))),), (1, 2)))
    states = hidden_states(build(spec), batch_for(spec))["encoder"]
    lengths = [layer.shape[1] for layer in states]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0]


@pytest.mark.parametrize("name", SPECS)
def test_attention_rows_sum_to_one(name: str) -> None:
    spec = SPECS[name]
    batch = batch_for(spec)
    weights = attention(build(spec), batch)
    attends = not any(isinstance(part, Recurrence) for part in walk(spec)) and name not in ("bytenet", "recurrent")
    assert bool(weights) == attends or isinstance(spec, Recurrent)
    for layers in weights.values():
        for layer in layers:
            assert layer.shape[0] == batch.target.shape[0]
            sums = layer.sum(-1)
            assert torch.allclose(sums, torch.where(sums == 0.0, 0.0, torch.ones_like(sums)), atol=1e-5)


def test_cross_attention_is_over_the_source() -> None:
    spec = tiny.encoder_decoder(2)
    ids, seg = pad([[5, 6, 7], [8]])
    source, source_seg = pad([[5, 6, 7, 8], [9, 10]])
    batch = Batch(ids, target_seg=seg, source=source, source_seg=source_seg)
    cross = attention(build(spec), batch)["decoder.cross"]
    assert [tuple(layer.shape) for layer in cross] == [(2, 4, 3, 4)] * 2
    assert not cross[0][1, ..., 2:].any()
