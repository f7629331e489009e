"""Recordings: their parts are what the model computes, for every family, without padding and within a memory limit."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard import Batch, Trace, build, fast, preset
from regard.errors import DataError, SpecError
from regard.inspection.recording import Recording, record
from regard.models.base import Classifier, ModelSpec
from regard.models.baselines.rnn import RecurrentModel
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.block import Block
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.experts import MixtureOfExperts, Switch
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.noisy_experts import NoisyTopKExperts
from regard.nn.branches.product_key import ProductKeyMemory
from regard.nn.branches.self_attention import SelfAttention, SelfAttentionModule
from regard.nn.branches.synthesizer import Synthesizer
from regard.nn.stacks.funnel import Funnel
from regard.testing import tiny
from regard.tree import swap
from regard.variants import VARIANTS, apply

POST_NORM = {"pre_norm", "t5_bias", "learned", "no_scaling"}  # the base of the table has these already
DEEP = {"layers_24", "layers_18", "layers_8", "layers_6"}
SMALL: dict[str, Any] = {"vocab": tiny.VOCAB, "d_model": 16}
SPECS = dict(tiny.families()) | {
    "decoder_only_translator": DecoderOnlyTranslator(**SMALL, heads=4, decoder=tiny.decoder_only().decoder),
    "lstm_attention": preset("lstm_attention", **SMALL),
    "gnmt": preset("gnmt", **SMALL),
}


def batch_for(spec: ModelSpec, number: int = 3) -> Batch:
    return tiny.collate(spec, tiny.examples(spec, number))


def recorded(spec: ModelSpec, row: int = 0, **options: Any) -> tuple[Any, Batch, Recording]:
    """Return a model, a batch of that one row without padding, and its recording from a batch with padding."""
    model = build(spec).eval()
    rows = tiny.examples(spec, 3)
    return model, tiny.collate(spec, [rows[row]]), record(model, tiny.collate(spec, rows), row=row, **options)


@pytest.mark.parametrize("name", SPECS)
def test_every_family_is_recorded_without_padding(name: str) -> None:
    spec = SPECS[name]
    model, alone, recording = recorded(spec, 1)
    side = "decoder" if hasattr(model, "decoder") else "encoder"
    joined = spec.reads_source and not hasattr(model, "encoder")
    source = alone.source.shape[1] if joined and alone.source is not None else 0
    assert len(recording.tokens[side]) == alone.target.shape[1] + source
    for kind, layers in recording.attention.items():
        for weights in layers:
            assert weights.shape[-2] == len(recording.tokens[kind.partition(".")[0]])
    for sides, states in recording.states.items():
        if name != "bytenet" or sides == "decoder":  # its encoder adds columns after the source
            assert all(x.shape[0] == len(recording.tokens[sides]) for x in states)
        for x, norms in zip(states, recording.norms[sides], strict=True):
            torch.testing.assert_close(norms, x.square().sum(-1).sqrt())
    assert model.training is False
    assert json.loads(json.dumps(recording.to_dict()))["tokens"] == {s: list(t) for s, t in recording.tokens.items()}
    assert len(repr(recording).splitlines()) < 24
    assert max(map(len, repr(recording).splitlines())) <= 80


@pytest.mark.parametrize("name", SPECS)
def test_predictions_are_the_probabilities_of_the_labels(name: str) -> None:
    model, alone, recording = recorded(SPECS[name], 1)
    with torch.no_grad():
        log_probs = model.scores(alone).log_softmax(-1) if isinstance(model, Classifier) else model.log_probs(alone)
    if log_probs.dim() == 2:
        (only,) = recording.predictions
        assert only.position is None
        assert only.rank == 1
        assert [a.probability for a in only.alternatives] == pytest.approx(
            sorted(log_probs[0].exp().tolist(), reverse=True)
        )
        return
    assert alone.labels is not None
    side = "decoder" if hasattr(model, "decoder") else "encoder"
    for t, prediction in enumerate(recording.predictions):
        assert prediction.position == t + len(recording.tokens[side]) - alone.target.shape[1]
        row = log_probs[0, t].exp()
        if not isinstance(model, Classifier):
            assert prediction.id == alone.labels[0, t]
        assert prediction.probability == pytest.approx(row[prediction.id].item(), abs=1e-9)
        assert prediction.rank == 1 + sum(float(p) > float(row[prediction.id]) for p in row)
        best = sorted(range(len(row)), key=lambda i: -float(row[i]))[:5]
        assert [a.id for a in prediction.alternatives] == best
        assert prediction.alternatives[0].probability == pytest.approx(float(row[best[0]]), abs=1e-9)


@pytest.mark.parametrize("name", SPECS)
def test_recording_changes_no_bit_and_leaves_no_hook(name: str) -> None:
    spec = SPECS[name]
    model, batch = build(spec).eval(), batch_for(spec)
    with torch.no_grad():
        before = model(batch)
        record(model, batch)
        assert torch.equal(model(batch), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["encoder_decoder", "decoder_only", "masked_lm", "token_classifier", "bytenet"])
def test_logit_lens_is_the_final_norm_and_head_on_every_layer(name: str) -> None:
    """The last layer is the prediction of the model, and every other layer is computed here by hand."""
    model, _, recording = recorded(SPECS[name], 1)
    side = "decoder" if hasattr(model, "decoder") else "encoder"
    assert [layer.layer for layer in recording.logit_lens] == list(range(len(recording.states[side])))
    assert recording.logit_lens[-1].predictions == recording.predictions
    table: Any = model.tables.get("output") if hasattr(model, "tables") else None
    for layer in recording.logit_lens[:-1]:
        x = recording.states[side][layer.layer]
        with torch.no_grad():
            if name == "masked_lm":
                x = model.norm(
                    torch.nn.functional.gelu(
                        model.encoder.stack.end(x) @ model.transform.weight.T + model.transform.bias
                    )
                )
                logits = x @ model.table().weight.T + model.head.bias
            elif name == "token_classifier":
                logits = model.encoder.stack.end(x) @ model.classes.weight.T + model.classes.bias
            else:
                x = model.norm(x) if name == "bytenet" else model.decoder.end(x)
                logits = x @ table.weight.T
        for t, prediction in enumerate(layer.predictions):
            final = recording.predictions[t]
            assert prediction.id == final.id
            p = logits[t].softmax(-1)
            assert prediction.probability == pytest.approx(p[final.id].item(), rel=1e-6)
            assert prediction.rank == 1 + int((p > p[final.id]).sum())
            assert prediction.alternatives[0].id == int(p.argmax())


def test_logit_lens_leaves_out_layers_of_other_widths_and_says_which() -> None:
    _, _, recording = recorded(tiny.convs2s())
    widths = [x.shape[1] for x in recording.states["decoder"]]
    assert [layer.layer for layer in recording.logit_lens] == [i for i, w in enumerate(widths) if w == widths[-1]]
    names = ["the input of the first layer", "layer 0"]  # layers are counted from 0
    found = [f"leaves out {name}, whose width" in note for name, note in zip(names, recording.notes, strict=True)]
    assert found == [True, True]
    assert recording.logit_lens[-1].predictions == recording.predictions


def test_logit_lens_of_a_recurrent_decoder_with_attention_has_a_note() -> None:
    model, _, recording = recorded(tiny.recurrent())
    assert isinstance(model, RecurrentModel)
    assert any("combines its output with more" in note for note in recording.notes)


@pytest.mark.parametrize("branch", [Switch(4), MixtureOfExperts(4), NoisyTopKExperts(4, 2)])
def test_routing_has_the_experts_of_each_token(branch: Any) -> None:
    """The output of the layer is computed again from the recorded experts and weights."""
    spec = swap(tiny.encoder_decoder(), FeedForward, lambda _: replace(branch, d_hidden=8))
    model, batch = build(spec).eval(), batch_for(spec)
    torch.nn.init.normal_(model.encoder.blocks[0].branches[-1].branch.router)  # type: ignore[reportAttributeAccessIssue]
    layer: Any = model.encoder.blocks[0].branches[-1].branch  # type: ignore[reportAttributeAccessIssue]
    seen: list[Any] = []
    hook = layer.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    recording = record(model, batch, row=1)
    hook.remove()
    routing = recording.routing["encoder.experts"][0]
    T = len(recording.tokens["encoder"])
    assert routing.total == 4
    assert routing.chosen.shape == (T, 1, layer.used)
    assert set(recording.layers["encoder.experts"]) == {0, 1}
    x, y = seen[0][0][0], seen[0][1][0]
    for t in range(T):
        expected = sum(
            w * (layer.activate(layer.up[e] @ x[t]) @ layer.down[e].T)
            for e, w in zip(routing.chosen[t, 0].tolist(), routing.weights[t, 0].tolist(), strict=True)
        )
        torch.testing.assert_close(y[t], expected)


def test_routing_has_the_values_read_from_a_product_key_memory() -> None:
    spec = swap(tiny.decoder_only(), FeedForward, lambda _: ProductKeyMemory(2, 6, 8, 3))
    model, batch = build(spec).eval(), batch_for(spec)
    layer: Any = model.decoder.blocks[1].branches[-1].branch  # type: ignore[reportAttributeAccessIssue]
    seen: list[Any] = []
    hook = layer.register_forward_hook(lambda _, args, out: seen.append(out))
    routing = record(model, batch, row=2).routing["decoder.memory"][1]
    hook.remove()
    assert routing.total == 36
    assert routing.chosen.shape[1:] == (2, 3)
    read = (routing.weights[..., None] * layer.memory[routing.chosen]).sum((1, 2))
    torch.testing.assert_close(seen[0][0], read)
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(routing.weights.shape[:2]))


def test_a_funnel_has_fewer_queries_in_deeper_layers() -> None:
    spec = replace(tiny.encoder_decoder(), encoder=Funnel((Block((SelfAttention(), FeedForward(24))),), (1, 2)))
    _, _, recording = recorded(spec)
    matrix = recording.matrix("encoder.self", layer=2)
    assert matrix.rows == tuple(str(i + 1) for i in range(matrix.weights.shape[0]))
    assert recording.matrix("encoder.self", layer=0).rows == tuple(recording.tokens["encoder"])


def test_synthesizer_weights_are_recorded() -> None:
    spec = swap(tiny.decoder_only(), SelfAttention, lambda _: Synthesizer(max_len=32))
    _, alone, recording = recorded(spec)
    (weights, _) = recording.attention["decoder.self"]
    T = alone.target.shape[1]
    assert weights.shape == (4, T, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, T))
    assert not weights.triu(1).any()


def test_models_without_attention_have_states_and_predictions() -> None:
    _, _, recording = recorded(tiny.bytenet())
    assert recording.attention == {}
    assert set(recording.states) == {"encoder", "decoder"}
    assert recording.predictions
    assert "attention         none" in repr(recording)
    with pytest.raises(SpecError, match="kind: no attention is recorded"):
        recording.draw()


def test_keep_and_layers_select_what_is_stored() -> None:
    spec = tiny.encoder_decoder(3)
    _, _, only = recorded(spec, keep=["decoder.cross", "norms"], layers=[2])
    assert only.layers == {"decoder.cross": [2]}
    assert list(only.attention) == ["decoder.cross"]
    assert (only.states, only.predictions, only.logit_lens) == ({}, (), [])
    assert len(only.norms["decoder"]) == 4
    _, _, whole = recorded(spec)
    assert torch.equal(only.weights("decoder.cross", 2), whole.weights("decoder.cross", 2))
    assert torch.equal(only.weights("decoder.cross"), whole.weights("decoder.cross", 2))
    with pytest.raises(SpecError, match=r"layer: decoder.cross has no recorded layer 0; recorded .*: 2"):
        only.weights("decoder.cross", 0)
    with pytest.raises(SpecError, match=r"head: there is no head 4; this layer has 4"):
        only.weights("decoder.cross", 2, 4)
    with pytest.raises(SpecError, match=r"there is no part 'attentions' of a recording.*attention"):
        recorded(spec, keep=["attentions"])
    with pytest.raises(SpecError, match=r"layers: are counted from 0; -1 is below 0"):
        recorded(spec, layers=[-1])


def test_a_recording_above_the_limit_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 tokens would need 4 x 20,000 x 20,000 weights per layer: they are never computed."""
    from regard.nn.branches import self_attention

    def fail(*_: Any) -> None:
        raise AssertionError("weights were computed")

    monkeypatch.setattr(self_attention, "attention_weights", fail)
    monkeypatch.setattr(self_attention.SelfAttentionModule, "attend", staticmethod(lambda q, k, v, *_, **__: v))
    model = build(tiny.decoder_only()).eval()
    batch = Batch(torch.randint(3, tiny.VOCAB, (1, 20_000)))
    with pytest.raises(DataError, match=r"attention weights of decoder.self, layer 0, for 20,000 tokens .* 11.92 GiB"):
        record(model, batch, keep=["attention"])
    recording = record(model, batch, keep=["predictions", "norms"])
    assert len(recording.predictions) == 20_000
    assert recording.attention == {}
    with pytest.raises(DataError, match="hidden states of the decoder for 20,000 tokens"):
        record(model, batch, keep=["states"], limit=2**20)


def test_a_row_that_does_not_exist_and_packed_rows_are_refused() -> None:
    spec = tiny.decoder_only()
    model, rows = build(spec), tiny.examples(spec, 2)
    with pytest.raises(DataError, match="row: the batch has 2 rows"):
        record(model, tiny.collate(spec, rows), row=2)
    with pytest.raises(DataError, match="packed: a recording is of one text"):
        record(model, tiny.collate(spec, rows, packed=True))
    with pytest.raises(DataError, match="top: must be at least 1"):
        record(model, tiny.collate(spec, rows), top=0)


def test_a_target_without_labels_predicts_its_own_next_tokens() -> None:
    model = build(tiny.decoder_only()).eval()
    recording = record(model, Batch(torch.tensor([[5, 6, 7]])))
    assert [p.id for p in recording.predictions] == [6, 7, None]
    assert recording.predictions[-1].probability is None
    assert len(recording.predictions[-1].alternatives) == 5
    final = recording.predictions[-1].alternatives[0].id
    assert [layer.predictions[-1].id for layer in recording.logit_lens] == [final] * 3


@pytest.mark.parametrize("name", SPECS)
def test_the_fast_form_is_recorded_alike(name: str) -> None:
    spec = SPECS[name]
    model, batch = build(spec).eval(), batch_for(spec)
    plain = record(model, batch)
    fast.install(model)
    quick = record(model, batch)
    for kind, layers in plain.attention.items():
        for mine, its in zip(quick.attention[kind], layers, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)
    for mine, its in zip(quick.predictions, plain.predictions, strict=True):
        assert mine.id == its.id
        assert mine.probability == pytest.approx(its.probability, abs=1e-6)


def test_encoder_and_decoder_of_an_encoder_decoder_have_their_own_tokens() -> None:
    model, alone, recording = recorded(tiny.encoder_decoder())
    assert isinstance(model, EncoderDecoderModel)
    assert alone.source is not None
    assert recording.ids == {"encoder": alone.source[0].tolist(), "decoder": alone.target[0].tolist()}
    assert recording.tokens["encoder"] == [str(i) for i in recording.ids["encoder"]]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_row_of_the_table_is_recorded(name: str) -> None:
    base = tiny.encoder_decoder() if name in POST_NORM else tiny.narang()
    spec = apply(name, tiny.narang(depth=6, d_model=24, heads=6) if name in DEEP else base)
    _, alone, recording = recorded(spec, 1)
    assert len(recording.predictions) == alone.target.shape[1]
    assert len(recording.logit_lens) == len(recording.states["decoder"])
    assert recording.logit_lens[-1].predictions == recording.predictions
    assert recording.notes == []
    for kind, layers in recording.attention.items():
        for layer, weights in zip(recording.layers[kind], layers, strict=True):
            assert torch.equal(recording.weights(kind, layer), weights.mean(0))
            assert recording.matrix(kind, layer, words=True).weights.shape[1] == weights.shape[2]


class PoliteModule(SelfAttentionModule):
    """Self-attention that adds its weights to a trace without a call of `wants`, as parts of users may do."""

    def forward(self, x: torch.Tensor, ctx: Any, state: Any = None) -> torch.Tensor:
        if ctx.trace is not None:
            uniform = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1]) / x.shape[1]
            ctx.trace.add(self.name, uniform)
        return super().forward(x, replace(ctx, trace=None), state)


def test_a_layer_may_add_weights_without_asking() -> None:
    model: Any = build(tiny.decoder_only(3)).eval()
    for block in model.decoder.blocks:
        block.branches[0].branch.__class__ = PoliteModule
    batch = Batch(torch.tensor([[5, 6, 7]]))
    recording = record(model, batch, layers=[1, 2])
    assert recording.layers["decoder.self"] == [1, 2]
    assert recording.weights("decoder.self", 2).tolist() == torch.full((3, 3), 1 / 3).tolist()
    with pytest.raises(DataError, match=r"attention weights of decoder\.self, layer 0,"):
        record(model, batch, keep=["attention"], limit=10)


def test_recorded_steps_of_decoding_equal_one_pass() -> None:
    """The encoder-decoder by hand; the law `inspection` does the same for every part."""
    spec = tiny.encoder_decoder(2)
    model, batch = build(spec).eval(), tiny.collate(spec, tiny.examples(spec, 1))
    assert isinstance(model, EncoderDecoderModel)
    whole = record(model, batch)
    with torch.no_grad():
        decoding = model.start(batch, batch.target.shape[1])
        for t in range(batch.target.shape[1]):
            decoding.trace = Trace()
            model.advance(batch.target[:, t : t + 1], decoding)
            for kind, layers in decoding.trace.weights.items():
                for layer, weights in enumerate(layers):
                    expected = whole.attention[kind][layer][:, t : t + 1, : weights.shape[3]]
                    torch.testing.assert_close(weights[0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        tiny.encoder_decoder(),
        tiny.convs2s(),
        tiny.prefix_lm(),
        tiny.recurrent(),
        tiny.encoder_only(),
        *(apply(name, tiny.narang()) for name in ("alibi", "shaw", "rotary", "sliding_window", "synth_dense")),
        tiny.narang(),
        tiny.around(Linformer())["masked_lm"],
        *tiny.around(CompressedAttention()).values(),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_selected_queries_have_the_same_weights(spec: ModelSpec, fused: bool) -> None:
    model, batch = build(spec).eval(), batch_for(spec)
    if fused:
        fast.install(model)
    whole = record(model, batch, row=1)
    some = record(model, batch, row=1, keep=["attention"], queries=slice(-3, -1))
    assert some.attention.keys() == whole.attention.keys()
    for kind, layers in whole.attention.items():
        T = layers[0].shape[1]
        assert some.queries[kind] == (T - 3, T - 1)
        for mine, its in zip(some.attention[kind], layers, strict=True):
            torch.testing.assert_close(mine, its[:, T - 3 : T - 1])
        whole_rows, columns = whole.axes.labels(kind, layers[0], False)
        assert some.axes.labels(kind, some.attention[kind][0], False) == (whole_rows[T - 3 : T - 1], columns)
        assert some.to_words().matrix(kind).weights.shape[0] == 2
    with pytest.raises(SpecError, match="queries: none of the"):
        record(model, batch, queries=slice(90, 99))
    with pytest.raises(SpecError, match="queries: needs a range of neighbouring tokens"):
        record(model, batch, queries=slice(0, 4, 2))


def test_the_last_tokens_of_a_long_text_are_recorded_within_the_limit() -> None:
    model = build(tiny.decoder_only(1)).eval()
    fast.install(model)
    batch = Batch(torch.randint(3, tiny.VOCAB, (1, 8_000)))
    recording = record(model, batch, keep=["attention"], queries=slice(-5, None), limit=2**22)
    assert recording.attention["decoder.self"][0].shape == (4, 5, 8_000)
    torch.testing.assert_close(recording.attention["decoder.self"][0].sum(-1), torch.ones(4, 5))


def test_queries_of_a_funnel_are_refused_because_layers_differ() -> None:
    spec = replace(tiny.encoder_decoder(), encoder=Funnel((Block((SelfAttention(), FeedForward(24))),), (1, 2)))
    with pytest.raises(SpecError, match=r"queries: the layers of encoder\.self have different numbers of queries"):
        recorded(spec, queries=slice(-2, None))
