"""ConvS2S against loops over the paper's formulas, and errors."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.batch import Batch, translation
from regard.errors import DataError, SpecError
from regard.models.baselines.convs2s import ConvS2S
from regard.models.build import build
from regard.nn.init import Xavier
from regard.nn.linear import Dense
from regard.nn.mask import Mask, View
from regard.nn.trace import Trace
from regard.nn.vocab.tables import Sharing
from regard.testing import tiny
from tests.learning import Learned, reversing, wrong_tokens

Perturbed = Callable[[Any], Any]
PAIRS = [([5, 9, 4, 7], [6, 3, 8]), ([8, 3], [4, 4, 9, 5, 7]), ([7], [3])]


def linear(part: Any, x: Tensor) -> Tensor:
    """Weight-normalised layer, row by row: g v . x / |v| + b."""
    rows = zip(part.rows.length, part.rows.direction, part.bias, strict=True)
    return torch.stack([g * (v @ x) / math.sqrt(float((v * v).sum())) + b for g, v, b in rows])


def gated(block: Any, h: list[Tensor], before: int, after: int) -> list[Tensor]:
    """GLU(conv(h)), with zeros beyond the text."""
    outputs = []
    for t in range(len(h)):
        window = [h[p] if 0 <= p < len(h) else torch.zeros_like(h[0]) for p in range(t - before, t + after + 1)]
        a, b = linear(block.convolution, torch.cat(window)).chunk(2)
        outputs.append(a / (1 + (-b).exp()))
    return outputs


def matched(block: Any, h: list[Tensor]) -> list[Tensor]:
    return h if block.match is None else [linear(block.match, x) for x in h]


def by_formula(model: Any, source: list[int], target: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probabilities at every position, and the attention weights of every layer, for one pair."""
    half = math.sqrt(0.5)
    tables, inputs = model.tables, model.inputs
    e_source, e_target = (
        [tables.get(side).weight[i] + inputs.get(side).position.weight[p] for p, i in enumerate(ids)]
        for side, ids in (("source", source), ("target", target))
    )
    h = [linear(model.encoder.enter, e) for e in e_source]
    for block, (_, kernel) in zip(model.encoder.blocks, model.spec.encoder, strict=True):
        y = gated(block, h, (kernel - 1) // 2, kernel // 2)
        h = [(a + b) * half for a, b in zip(y, matched(block, h), strict=True)]
    z = [linear(model.encoder.leave, x) for x in h]
    values = [(a + b) * half for a, b in zip(z, e_source, strict=True)]
    h, attention_weights = [linear(model.decoder.enter, e) for e in e_target], []
    for block, (_, kernel) in zip(model.decoder.blocks, model.spec.decoder, strict=True):
        y, weights = gated(block, h, kernel - 1, 0), []
        for t, e in enumerate(e_target):
            query = (linear(block.attention.query, y[t]) + e) * half
            weights.append(torch.stack([query @ key for key in z]).softmax(0))
            average = torch.stack([w * v for w, v in zip(weights[-1], values, strict=True)]).sum(0)
            context = average * math.sqrt(len(z))
            y[t] = (linear(block.attention.output, context) + y[t]) * half
        h = [(a + b) * half for a, b in zip(y, matched(block, h), strict=True)]
        attention_weights.append(torch.stack(weights))
    out = [linear(model.decoder.leave, x) for x in h]
    rows = tables.get("output").rows
    matrix = rows.length[:, None] * rows.direction / rows.direction.norm(dim=1, keepdim=True)
    return torch.stack([(matrix @ x + model.head.bias).log_softmax(0) for x in out]), attention_weights


@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_match_the_formula(perturbed: Perturbed, packed: bool) -> None:
    """In padded batches, and with several pairs packed in one row."""
    model = perturbed(build(tiny.convs2s()).double())
    batch, trace = translation(PAIRS, packed=packed, source_end=()), Trace()
    with torch.no_grad():
        outputs = model.log_probs(batch, trace=trace)
        at = 0
        for i, (source, target) in enumerate(PAIRS):
            expected, expected_weights = by_formula(model, source, [1, *target])
            row, first = (0, at) if packed else (i, 0)
            torch.testing.assert_close(outputs[row, first : first + len(expected)], expected, rtol=0, atol=1e-10)
            offset = sum(len(s) for s, _ in PAIRS[:i]) if packed else 0
            for layer, weights in enumerate(trace.weights["decoder.cross"]):
                attention_weights = weights[row, 0, first : first + len(expected), offset : offset + len(source)]
                torch.testing.assert_close(attention_weights, expected_weights[layer], rtol=0, atol=1e-10)
            at += len(expected)
    assert len(trace.weights["decoder.cross"]) == len(model.spec.decoder)


def test_encoder_gradients_are_scaled(perturbed: Perturbed) -> None:
    """Gradients into z are divided by twice the number of attentions; values have them twice, through z and e."""
    model = perturbed(build(replace(tiny.convs2s(), dropout=0.0)).double())
    batch, leave = translation(PAIRS), model.encoder.leave.bias
    model.loss(batch).total.backward()
    gradient, position = leave.grad.clone(), model.inputs.get("source").position.weight.grad.clone()
    model.zero_grad()
    model.encoder.factor = 1.0
    model.loss(batch).total.backward()
    torch.testing.assert_close(gradient * 2 * len(model.spec.decoder), leave.grad, rtol=0, atol=1e-10)
    assert not torch.allclose(position * 2 * len(model.spec.decoder), model.inputs.get("source").position.weight.grad)


def test_initial_weights_match_the_paper() -> None:
    p = 0.3
    model: Any = build(ConvS2S(vocab=300, d_model=200, encoder=((150, 3),), decoder=((150, 3),), dropout=p))
    block = model.decoder.blocks[0]
    deviations = {
        block.convolution.rows: math.sqrt(4 * (1 - p) / (3 * 150)),
        model.decoder.enter.rows: math.sqrt((1 - p) / 200),
        model.decoder.leave.rows: math.sqrt(1 / 150),
        block.attention.query.rows: math.sqrt(1 / 150),
        block.attention.output.rows: math.sqrt(1 / 200),
        model.tables.get("output").rows: math.sqrt((1 - p) / 200),
    }
    for rows, std in deviations.items():
        assert abs(rows.direction.std().item() / std - 1) < 0.03
        torch.testing.assert_close(rows(), rows.direction)
    assert abs(model.tables.get("source").weight.std().item() / 0.1 - 1) < 0.03
    assert abs(model.inputs.get("target").position.weight.std().item() / 0.1 - 1) < 0.03


@pytest.mark.parametrize(("kernel", "depth"), [(3, 1), (3, 4), (5, 2), (2, 3), (1, 3)])
def test_receptive_field_is_exact(kernel: int, depth: int, perturbed: Perturbed) -> None:
    """C27: an output has a gradient to 1 + L (k - 1) inputs (in the decoder, without attention)."""
    layers = ((6, kernel),) * depth
    model = perturbed(build(ConvS2S(vocab=9, d_model=6, encoder=layers, decoder=layers, dropout=0.0)).double())
    field = 1 + depth * (kernel - 1)
    assert model.spec.receptive_fields() == (field, field)
    N = 2 * field + 3
    e = torch.randn(1, N, 6, dtype=torch.float64, requires_grad=True)
    z = model.encoder(e, View(Mask(), N, N, e.device))
    reached = torch.autograd.grad(z[0, N // 2].sum(), e)[0][0].abs().sum(-1).nonzero().flatten().tolist()
    first = N // 2 - depth * ((kernel - 1) // 2)
    assert reached == list(range(first, first + field))
    h = e
    for block in model.decoder.blocks:
        h = block.join(block.gated(h, View(Mask(causal=True), N, N, e.device)), h)
    reached = torch.autograd.grad(h[0, -1].sum(), e)[0][0].abs().sum(-1).nonzero().flatten().tolist()
    assert reached == list(range(N - field, N))


def test_weight_variants_build(perturbed: Perturbed) -> None:
    spec = replace(tiny.convs2s(), d_out=None, sharing=Sharing(), output_table=None, linear=Dense(), init=Xavier())
    model = perturbed(build(spec))
    assert math.isfinite(model.loss(translation(PAIRS)).total.item())
    assert model.tables.get("source") is model.tables.get("output")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"encoder": ()}, "encoder"),
        ({"decoder": ((4, 0),)}, "decoder[0]"),
        ({"decoder": ((4, 3), (0, 3))}, "decoder[1]"),
        ({"dropout": 1.0}, "dropout"),
        ({"d_model": 0}, "d_model"),
        ({"d_out": -1}, "d_out"),
    ],
)
def test_invalid_specs_are_refused(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refusal:
        replace(tiny.convs2s(), **changes)
    assert refusal.value.path == path


def test_inputs_that_would_be_ignored_are_refused() -> None:
    model: Any = build(tiny.convs2s())
    ids = torch.tensor([[3, 4]])
    with pytest.raises(DataError, match="source"):
        model.hidden(Batch(ids))
    with pytest.raises(DataError, match="types"):
        model.hidden(Batch(ids, source=ids, types=ids))
    with pytest.raises(DataError, match="packed"):
        model.start(translation(PAIRS, packed=True), 5)
    with pytest.raises(SpecError, match="sharing"):
        build(replace(tiny.convs2s(), sharing=Sharing(), output_table=None))


def test_learns_to_reverse(learned: Learned) -> None:
    spec = ConvS2S(vocab=9, d_model=24, encoder=((24, 3),), decoder=((24, 3),) * 2, dropout=0.0)
    task = reversing(2, 3, 4, 5)
    wrong = [wrong_tokens(spec, task, seed, steps=60, rate=1.2e-2) for seed in learned.seeds(3)]
    learned("wrong tokens", *wrong, below=0.2, broken=0.34)  # without the order of the source; 0.70 without attention
