"""The recurrent encoder-decoder against loops over the papers' formulas, token by token."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.batch import Batch
from regard.data.objectives import Translation
from regard.errors import DataError, SpecError
from regard.models.baselines.attention_score import AdditiveScore, BilinearScore, DotScore, GeneralScore
from regard.models.baselines.rnn import ConstantState, EncoderState, Recurrent, RecurrentDecoder, RecurrentEncoder
from regard.models.build import build, count
from regard.models.cost import cost
from regard.nn.embedding import Tokens
from regard.nn.recurrent import GRU, LSTM, Elman, LearnedStart
from regard.nn.trace import Trace
from regard.nn.vocab.tables import Sharing
from regard.planner.fit import fitted, packs
from regard.presets import preset
from regard.testing import tiny
from tests.learning import Learned, reversing, wrong_tokens

V, D, H = 13, 8, 2
SOURCE = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 0, 0, 0]])
SOURCE_SEG = (SOURCE != 0).long()
TARGET = torch.tensor([[1, 4, 5, 6], [1, 9, 8, 7]])


def perturbed(spec: Recurrent) -> Any:
    """Return a model in float64 with random weights, so that initial zeros hide no fault."""
    model = build(spec).double().eval()
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=rng, dtype=torch.float64))
    return model


def cell(module: Any, x: Tensor, state: list[Tensor]) -> list[Tensor]:
    """Return the state of a cell after one token, by the formulas."""
    gates = module.input.weight @ x + module.input.bias
    recurrent = module.hidden.weight @ state[0]
    n = len(state[0])
    if len(gates) == n:
        return [torch.tanh(gates + recurrent)]
    if len(state) == 1:
        recurrent = recurrent + module.hidden.bias
        r, z = torch.sigmoid(gates[: 2 * n] + recurrent[: 2 * n]).split(n)
        return [(1 - z) * torch.tanh(gates[2 * n :] + r * recurrent[2 * n :]) + z * state[0]]
    i, f, g, o = (gates + recurrent).split(n)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(c), c]


def zeros(module: Any) -> list[Tensor]:
    return [torch.zeros(module.d_hidden, dtype=torch.float64) for _ in range(module.parts)]


def read(model: Any, x: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Run the encoder on inputs x. Return (outputs, final state of every layer)."""
    last = []
    for layer, added in zip(model.encoder.layers, model.encoder.added, strict=True):
        outputs, ends = [], []
        for direction, module in zip(layer.directions, layer.cells, strict=True):
            state, hidden = zeros(module), {}
            order = range(len(x)) if direction == "forwards" else reversed(range(len(x)))
            for t in order:
                state = cell(module, x[t], state)
                hidden[t] = state[0]
            outputs.append([hidden[t] for t in range(len(x))])
            ends.append(state)
        out = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
        x = [new + old for new, old in zip(out, x, strict=True)] if added else out
        last.append([torch.cat(parts) for parts in zip(*ends, strict=True)])
    return x, last


def context_vector(module: Any, spec: Any, h: Tensor, memory: list[Tensor]) -> Tensor:
    """Return the context vector, head by head: scores, softmax, weighted sum."""
    contexts = []
    for head in range(H):
        scores, values = [], []
        for m in memory:
            n = len(m) // H
            part = slice(head * n, (head + 1) * n)
            if isinstance(spec, AdditiveScore):
                a = module.score.shape[1]
                inner = slice(head * a, (head + 1) * a)
                v, inside = module.score[head], module.query.weight @ h + module.key.weight @ m
                if spec.normalised:
                    v, inside = module.length[head] * v / v.norm(), inside + module.bias
                scores.append(v @ torch.tanh(inside[inner]))
                values.append(m[part])
            elif isinstance(spec, GeneralScore):
                k, value = (module.both.weight @ m + module.both.bias).split(D)
                q = module.query.weight @ h + module.query.bias
                inner = slice(head * D // H, (head + 1) * D // H)
                scores.append(q[inner] @ k[inner] / (D / H) ** 0.5)
                values.append(value[inner])
            else:
                q = module.query.weight @ h if isinstance(spec, BilinearScore) else h
                scores.append(q[part] @ m[part])
                values.append(m[part])
        weights = torch.stack(scores).softmax(0)
        contexts.append(sum(w * value for w, value in zip(weights, values, strict=True)))
    return torch.cat(contexts)


def by_hand(model: Any, row: int) -> Tensor:
    """Return the log-probabilities of all next tokens of a row, computed token by token."""
    spec, decoder = model.spec.decoder, model.decoder
    table = model.tables.get("source").weight
    memory, last = read(model, [table[i] for i in SOURCE[row] if i])
    states = []
    for i, module in enumerate(decoder.cells):
        if isinstance(spec.initial_state, ConstantState):
            states.append(
                list(decoder.opening.starts[i].state)
                if spec.initial_state.start.kind == "learned_start"
                else zeros(module)
            )
            continue
        below = last[max(0, len(last) - len(decoder.cells) + i)]
        maps = decoder.opening.maps[i]
        raw = [m.weight @ (below[p] if p < len(below) else below[0]) + m.bias for p, m in enumerate(maps)]
        states.append([torch.tanh(part) if spec.initial_state.activation == "tanh" else part for part in raw])
    fed, past, outputs = torch.zeros(decoder.fed, dtype=torch.float64), [], []
    for word in TARGET[row]:
        x = torch.cat((model.tables.get("target").weight[word], fed))
        context = torch.zeros(0, dtype=torch.float64)
        for i, module in enumerate(decoder.cells):
            states[i] = cell(module, torch.cat((x, context)) if i else x, states[i])
            x = states[i][0] + x if decoder.added[i] else states[i][0]
            if i + 1 == decoder.query_layers:
                past.append(x)
                parts = []
                if spec.attention is not None:
                    parts.append(context_vector(decoder.cross, spec.attention, x, memory))
                if spec.self_attention is not None:
                    parts.append(context_vector(decoder.own, spec.self_attention, x, past))
                context = torch.cat(parts) if parts else context
        fed = context[: decoder.fed]
        if decoder.joint is not None:
            x = torch.tanh(decoder.joint.weight @ torch.cat((x, context)))
            fed = x if spec.input_feeding == "output" else fed
        outputs.append((model.tables.get("output").weight @ x).log_softmax(0))
    return torch.stack(outputs)


GNMT = RecurrentDecoder(
    depth=4, residual_from=3, initial_state=ConstantState(), attention=AdditiveScore(normalised=True), query="bottom"
)
DECODERS = {
    "bottleneck": RecurrentDecoder(GRU(), 2),
    "more layers than the encoder": RecurrentDecoder(LSTM(), 4, residual_from=2, initial_state=EncoderState("linear")),
    "dot": RecurrentDecoder(Elman(), 1, attention=DotScore()),
    "bilinear, output fed": RecurrentDecoder(LSTM(), 2, attention=BilinearScore(), input_feeding="output"),
    "general, context fed": RecurrentDecoder(GRU(), 2, attention=GeneralScore(), input_feeding="context"),
    "additive and self-attention": RecurrentDecoder(
        LSTM(), 1, attention=AdditiveScore(d_hidden=6), self_attention=GeneralScore()
    ),
    "self-attention fed": RecurrentDecoder(GRU(), 2, self_attention=AdditiveScore(), input_feeding="context"),
    "GNMT": GNMT,
    "bottom fed": replace(
        GNMT, input_feeding="context", self_attention=DotScore(), initial_state=ConstantState(LearnedStart())
    ),
}
ENCODERS = {"GNMT": RecurrentEncoder(LSTM(), 4, direction="first_both", residual_from=3)}


@pytest.mark.parametrize("name", DECODERS)
def test_log_probs_match_a_loop_over_the_formulas(name: str) -> None:
    decoder = DECODERS[name]
    attends = decoder.attention is not None or decoder.self_attention is not None
    encoder = ENCODERS.get(name, RecurrentEncoder(decoder.cell, 2, D // 2))
    tokens = Tokens(scaled=False, position=None)
    spec = Recurrent(vocab=V, d_model=D, heads=H if attends else 1, input=tokens, encoder=encoder, decoder=decoder)
    model = perturbed(spec)
    batch = Batch(TARGET, source=SOURCE, source_seg=SOURCE_SEG)
    with torch.no_grad():
        expected = torch.stack([by_hand(model, row) for row in range(2)])
        torch.testing.assert_close(model.log_probs(batch), expected, rtol=0, atol=1e-12)


def test_trace_has_one_entry_per_attention() -> None:
    """With and without input feeding, which processes one token at a time."""
    for input_feeding in ("none", "context"):
        decoder = RecurrentDecoder(attention=GeneralScore(), self_attention=GeneralScore(), input_feeding=input_feeding)
        model: Any = build(tiny.recurrent(decoder)).eval()
        trace = Trace()
        model.log_probs(Batch(TARGET, source=SOURCE, source_seg=SOURCE_SEG), trace=trace)
        assert {name: [w.shape for w in entries] for name, entries in trace.weights.items()} == {
            "decoder.cross": [(2, 2, 4, 5)],
            "decoder.self": [(2, 2, 4, 4)],
        }
        assert not trace.weights["decoder.cross"][0][1, :, :, 2:].any()  # padding
        assert not trace.weights["decoder.self"][0].triu(1).any()  # later tokens


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RecurrentDecoder(initial_state=ConstantState()),
            "^initial_state: .constant_state. does not read the source",
        ),
        (lambda: RecurrentDecoder(query="bottom"), "^query: .bottom. needs attention; set attention"),
        (lambda: RecurrentDecoder(input_feeding="context"), "^input_feeding: needs attention; set attention"),
        (lambda: replace(GNMT, depth=1, residual_from=None), "^depth: with query .bottom., a second layer"),
        (lambda: replace(GNMT, input_feeding="output"), "^input_feeding: with query .bottom., there is no output"),
        (lambda: RecurrentDecoder(residual_from=1), "^residual_from: must be one of layers 2 to 2, not 1"),
        (lambda: RecurrentEncoder(depth=0), "^depth: must be at least 1, not 0"),
        (lambda: RecurrentEncoder(d_hidden=0), "^d_hidden: must be at least 1"),
        (lambda: AdditiveScore(d_hidden=0), "^d_hidden: must be at least 1"),
        (lambda: Recurrent(heads=2), "^heads: needs attention in the decoder; use 1"),
        (
            lambda: Recurrent(attention_dropout=0.1),
            "^attention_dropout: needs attention in the decoder; use 0.0",
        ),
        (lambda: Recurrent(dropout=1.0), "^dropout: must lie in"),
        (lambda: tiny.recurrent(heads=3), "^heads: 3 heads do not divide d_model 16"),
        (lambda: Recurrent(d_model=0), "^d_model: must be at least 1, not 0"),
        (
            lambda: build(Recurrent(encoder=RecurrentEncoder(direction="first_both", residual_from=2)), device="meta"),
            "^encoder.residual_from: layer 2 has 512 outputs and 1024 inputs",
        ),
        (
            lambda: build(
                replace(tiny.recurrent(RecurrentDecoder(attention=DotScore())), encoder=RecurrentEncoder()),
                device="meta",
            ),
            "^decoder.attention.kind: a state of width 16 has no dot product with a memory of 32",
        ),
        (
            lambda: build(tiny.recurrent(RecurrentDecoder(attention=AdditiveScore(d_hidden=5))), device="meta"),
            "^decoder.attention.kind: 2 heads do not divide the 5 channels of d_hidden",
        ),
    ],
)
def test_invalid_specs_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_attention_learns_to_reverse(learned: Learned) -> None:
    encoder, decoder = RecurrentEncoder(GRU(), 1, 24), RecurrentDecoder(GRU(), 1, attention=GeneralScore())
    spec = Recurrent(vocab=9, d_model=48, dropout=0.0, encoder=encoder, decoder=decoder)
    wrong = [wrong_tokens(spec, reversing(8), seed, steps=120, rate=1e-2) for seed in learned.seeds(1)]
    learned("wrong tokens", *wrong, below=0.12, broken=0.33)  # without attention


def test_packed_rows_and_missing_sources_are_refused() -> None:
    spec = tiny.recurrent()
    assert not packs(spec, Translation())
    with pytest.raises(DataError, match=r"^packed: a recurrence would carry its state"):
        build(spec).loss(tiny.collate(spec, tiny.examples(spec, 2), packed=True))
    with pytest.raises(DataError, match=r"^source: this model needs one"):
        build(spec).loss(Batch(TARGET, TARGET))


def test_two_vocabularies_have_two_tables() -> None:
    changes = fitted(tiny.recurrent(), Translation(), {"source": 20, "target": 30}, 50)
    assert changes == {"vocab": 20, "target_vocab": 30, "sharing.source_target": False}
    spec = replace(tiny.recurrent(), vocab=20, target_vocab=30, sharing=Sharing(source_target=False))
    model: Any = build(spec)
    assert model.log_probs(Batch(TARGET, source=SOURCE)).shape == (2, 4, 30)


def test_parameters_of_gnmt() -> None:
    """4 (in + d) d + 4 d per layer and direction; the layer above the bidirectional layer has twice the input width."""
    d, vocab = 1024, 32000

    def lstm(width: int) -> int:
        return 4 * (width + d) * d + 4 * d

    encoder = 2 * lstm(d) + lstm(2 * d) + 6 * lstm(d)
    decoder = lstm(d) + 7 * lstm(2 * d) + (2 * d * d + d + d + 1)
    assert count(preset("gnmt")) == encoder + decoder + 2 * vocab * d + vocab


def test_flops_of_a_recurrent_model() -> None:
    T, d, vocab = 8, 256, 10000
    costs = cost(preset("rnn_attention"), length=T)
    parts = {part.part: part for part in costs.parts}
    # Encoder: 2 layers of 2 directions. Decoder: 2 layers; projections of queries, keys and values; attention; output
    # projection; 4 initial states for all tokens together.
    encoder = 2 * 2 * 8 * (d + d // 2) * (d // 2)
    decoder = 2 * 8 * 2 * d * d + 6 * d * d + 4 * T * d + 4 * d * d + 4 * 2 * d * d / T
    assert parts["encoder"].flops_per_token == encoder
    assert parts["decoder"].flops_per_token == decoder
    assert parts["head"].flops_per_token == 2 * d * vocab
