from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.batch import Batch, translation
from regard.models.build import build, count
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from regard.nn.embedding import Sinusoidal, Tokens
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.position.additive import Learned
from regard.nn.trace import Trace
from regard.nn.vocab.tables import Sharing

Pair = Callable[..., EncoderDecoder]
Perturbed = Callable[[Any], EncoderDecoderModel]
CPU = torch.device("cpu")
PAIRS = [([3, 4, 5], [6, 7]), ([3, 4], [6, 7, 8, 9])]


def embedded(model: EncoderDecoderModel, side: str, ids: Tensor) -> Tensor:
    """E[id] sqrt(d) + sinusoid."""
    table = model.tables.get(side)
    assert table is not None
    return table(ids) * 8**0.5 + Sinusoidal().table(ids.shape[1], 8)


def test_hidden_states_equal_embeddings_encoder_and_decoder(pair: Pair, perturbed: Perturbed) -> None:
    """The encoder attends to real source tokens, the decoder to its past and to real source tokens."""
    model, batch = perturbed(build(pair())), translation(PAIRS)
    assert batch.source is not None
    assert batch.source_seg is not None
    S, T = 3, 5
    own = Context(View(Mask(k_seg=batch.source_seg), S, S, CPU))
    memory = model.encoder(embedded(model, "source", batch.source), own).x
    cross = View(Mask(k_seg=batch.source_seg), T, S, CPU)
    ctx = Context(View(Mask(causal=True), T, T, CPU), cross, Memory((memory,)))
    h = model.decoder(embedded(model, "target", batch.target), ctx).x
    torch.testing.assert_close(model.hidden(batch), h)
    output = model.tables.get("output")
    assert output is not None
    torch.testing.assert_close(model.log_probs(batch), output.logits(h).log_softmax(-1))


SHARINGS = {
    (True, True): 1,
    (True, False): 2,
    (False, True): 2,
    (False, False): 3,
}


@pytest.mark.parametrize(("which", "tables"), SHARINGS.items())
def test_sharing_decides_how_many_tables_there_are(which: tuple[bool, bool], tables: int, pair: Pair) -> None:
    spec = pair(sharing=Sharing(*which))
    model: Any = build(spec)
    distinct = {id(model.tables.get(use)) for use in ("source", "target", "output")}
    assert len(distinct) == tables
    assert (model.tables.get("source") is model.tables.get("target")) is which[0]
    assert (model.tables.get("target") is model.tables.get("output")) is which[1]
    assert count(spec) - count(pair()) == (tables - 1) * 11 * 8


def test_target_vocabulary_may_differ_from_the_source_vocabulary(pair: Pair) -> None:
    model = build(pair(target_vocab=13, sharing=Sharing(source_target=False)))
    assert isinstance(model, EncoderDecoderModel)
    assert model.log_probs(translation(PAIRS)).shape == (2, 5, 13)


@pytest.mark.parametrize(("shared", "inputs"), [(False, 2), (True, 1)])
def test_source_and_target_may_share_learned_positions(shared: bool, inputs: int, pair: Pair) -> None:
    model = build(pair(input=Tokens(position=Learned(9)), sharing=Sharing(positions=shared)))
    assert sum(p.shape == (9, 8) for p in model.parameters()) == inputs


def test_trace_has_the_attention_weights_of_every_layer(pair: Pair) -> None:
    model, trace = build(pair()), Trace()
    assert isinstance(model, EncoderDecoderModel)
    model.log_probs(translation(PAIRS, source_end=()), trace)
    shapes = {name: [tuple(w.shape) for w in weights] for name, weights in trace.weights.items()}
    assert shapes == {
        "encoder.self": [(2, 2, 3, 3)] * 2,
        "decoder.self": [(2, 2, 5, 5)] * 2,
        "decoder.cross": [(2, 2, 5, 3)] * 2,
    }


def test_decoding_equals_a_forward_pass_over_the_whole_target(pair: Pair, perturbed: Perturbed) -> None:
    """With padded sources, three beams, and a prompt of two tokens followed by single tokens."""
    model, batch, beams = perturbed(build(pair())), translation([PAIRS[1], PAIRS[0]]), 3
    prompt = torch.randint(3, 11, (2 * beams, 5))
    assert batch.source is not None
    assert batch.source_seg is not None
    repeated = Batch(
        prompt, source=batch.source.repeat_interleave(beams, 0), source_seg=batch.source_seg.repeat_interleave(beams, 0)
    )
    whole = model.log_probs(repeated)
    decoding = model.start(batch, 6, beams=beams)
    torch.testing.assert_close(model.advance(prompt[:, :2], decoding), whole[:, 1])
    for t in (2, 3, 4):
        torch.testing.assert_close(model.advance(prompt[:, t : t + 1], decoding), whole[:, t])


def test_cross_attention_view_is_cached_per_number_of_tokens(pair: Pair) -> None:
    model = build(pair())
    assert isinstance(model, EncoderDecoderModel)
    decoding = model.start(translation(PAIRS), 6)
    view = decoding.cross_view(1)
    assert decoding.cross_view(1) is view
    assert view is not None
    view.lowered["x"] = view.shared["x"] = 1
    wider = decoding.cross_view(2)
    assert wider is not view
    assert wider is not None
    assert (wider.T, wider.lowered, wider.shared) == (2, {}, {})
    assert decoding.cross_view(2) is wider


def test_packed_pairs_do_not_attend_to_each_other(pair: Pair, perturbed: Perturbed) -> None:
    model = perturbed(build(pair()))
    apart, together = model.log_probs(translation(PAIRS)), model.log_probs(translation(PAIRS, packed=True))
    torch.testing.assert_close(together[0, :3], apart[0, :3])
    torch.testing.assert_close(together[0, 3:], apart[1])


def test_packed_rows_may_be_longer_than_learned_positions(pair: Pair) -> None:
    """Each segment has at most 5 tokens, and the row has 8."""
    model = build(pair(input=Tokens(position=Learned(5)))).eval()
    torch.testing.assert_close(model.loss(translation(PAIRS, packed=True)).total, model.loss(translation(PAIRS)).total)
