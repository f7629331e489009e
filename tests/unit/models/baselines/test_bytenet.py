"""ByteNet against loops over the paper's formulas, outputs beyond the estimated length, and errors."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.batch import Batch, translation
from regard.data.objectives import Translation
from regard.errors import DataError, SpecError
from regard.models.baselines.bytenet import ByteNet
from regard.models.build import build
from regard.nn.causal_convolution import unfold
from regard.nn.mask import Mask, View
from regard.planner.fit import packs
from regard.testing import tiny
from tests.learning import Learned, copying, wrong_tokens

Perturbed = Callable[[Any], Any]
PAIRS = [([5, 9, 4, 7], [6, 3, 8]), ([8, 3], [4, 4, 9, 5, 7, 6, 6]), ([7], [3])]


def linear(part: Any, x: Tensor) -> Tensor:
    return part.weight @ x + part.bias


def normed(norm: Any, x: Tensor) -> Tensor:
    deviation = x - x.mean()
    return deviation / ((deviation**2).mean() + norm.eps).sqrt() * norm.weight + norm.bias


def blocks(stack: Any, spec: ByteNet, x: list[Tensor], causal: bool) -> list[Tensor]:
    """x + W_2 r(conv(r(W_1 r(x)))), position by position, with zeros beyond the end of the row."""
    for i, block in enumerate(stack.blocks):
        step, half = (1, 2)[i % 2], spec.kernel // 2  # the tiny model's dilations are 1, 2, 1, ...
        inner = [linear(block.narrow, normed(block.norms[0], vector).relu()) for vector in x]
        inner = [normed(block.norms[1], vector).relu() for vector in inner]
        outputs = []
        for t, vector in enumerate(x):
            last = t if causal else t + half * step
            reads = [last - (spec.kernel - 1 - n) * step for n in range(spec.kernel)]
            window = [inner[p] if 0 <= p < len(x) else torch.zeros_like(inner[0]) for p in reads]
            y = linear(block.convolution, torch.cat(window))
            outputs.append(vector + linear(block.widen, normed(block.norms[2], y).relu()))
        x = outputs
    return x


def by_formula(model: Any, source: list[int], target: list[int]) -> Tensor:
    """Return the log-probabilities of all tokens at every position, for one pair."""
    spec, table = model.spec, model.tables.get("source").weight
    length = math.ceil(Fraction(6, 5) * len(source))
    x = [table[i] for i in source] + [model.filler[0]] * (length - len(source))
    x = blocks(model.encoder, spec, x, causal=False)
    zero = torch.zeros_like(x[0])
    aligned = [x[t] if t < length else zero for t in range(len(target))]
    joined = [linear(model.join, torch.cat((encoded, table[i]))) for encoded, i in zip(aligned, target, strict=True)]
    out = blocks(model.decoder, spec, joined, causal=True)
    return torch.stack([(table @ normed(model.norm, place)).log_softmax(0) for place in out])


def test_log_probs_match_the_formula(perturbed: Perturbed) -> None:
    """The second target is longer than the estimate of its source, and of the longest source in the batch."""
    model = perturbed(build(tiny.bytenet()).double())
    with torch.no_grad():
        outputs = model.log_probs(translation(PAIRS, source_end=()))
        for row, (source, target) in enumerate(PAIRS):
            expected = by_formula(model, source, [1, *target])
            torch.testing.assert_close(outputs[row, : len(expected)], expected, rtol=0, atol=1e-10)


def test_estimated_length_is_exact() -> None:
    spec = ByteNet()
    lengths = list(range(1, 500))
    assert [spec.estimate(n) for n in lengths] == [math.ceil(Fraction(6, 5) * n) for n in lengths]
    assert spec.estimates(torch.tensor(lengths)[:, None]).flatten().tolist() == [spec.estimate(n) for n in lengths]
    spec = replace(spec, stretch=1.0, extra=3)
    assert spec.estimate(5) == 8


@pytest.mark.parametrize("static", [False, True])
def test_encoder_output_beyond_the_estimated_length_is_zero(perturbed: Perturbed, static: bool) -> None:
    """Outputs whose receptive field is beyond the estimated length do not depend on the source."""
    model = perturbed(build(replace(tiny.bytenet(), decoder_blocks=1)).double())
    target = [[1, *range(3, 13)]]
    with torch.no_grad():
        batch, changed = (translation([(source, target[0][1:])], source_end=()) for source in ([5, 6, 7], [8, 4, 9]))
        outputs, changed_outputs = model.log_probs(batch)[0], model.log_probs(changed)[0]
        columns, field = model.spec.estimate(3), model.spec.receptive_fields()[1]
        beyond = columns + field - 1
        torch.testing.assert_close(outputs[beyond:], changed_outputs[beyond:], rtol=0, atol=1e-12)
        assert not torch.allclose(outputs[beyond - 1], changed_outputs[beyond - 1])
        decoding = model.start(batch, len(target[0]), static=static)
        steps = [model.advance(torch.tensor([[i]]), decoding)[0] for i in target[0]]
        torch.testing.assert_close(torch.stack(steps), outputs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kernel", "dilations", "depth"), [(3, (1, 2, 4), 6), (3, (1,), 4), (5, (1, 3), 3)])
def test_receptive_field_is_exact(kernel: int, dilations: tuple[int, ...], depth: int, perturbed: Perturbed) -> None:
    """C27: an output has a gradient to 1 + (k - 1) * (sum of the dilations) inputs."""
    sizes = {"encoder_blocks": depth, "decoder_blocks": depth, "kernel": kernel, "dilations": dilations}
    model = perturbed(build(ByteNet(vocab=9, d_model=32, dropout=0.0, **sizes)).double())
    field = 1 + (kernel - 1) * sum((dilations * depth)[:depth])
    assert model.spec.receptive_fields() == (field, field)
    N = 2 * field + 3
    x = torch.randn(1, N, 32, dtype=torch.float64, requires_grad=True)
    for stack, causal, t in ((model.encoder, False, N // 2), (model.decoder, True, N - 1)):
        y = stack(x, View(Mask(causal=causal), N, N, x.device))
        reached = torch.autograd.grad(y[0, t].sum(), x)[0][0].abs().sum(-1).nonzero().flatten().tolist()
        assert (reached[0], reached[-1]) == ((N - field, N - 1) if causal else (t - field // 2, t + field // 2))
        # If dilations grow faster than the receptive field of lower layers, some inputs in between are not read.
        assert len(reached) == field


def test_decoder_convolution_matches_torch(perturbed: Perturbed) -> None:
    model = perturbed(build(tiny.bytenet()).double())
    block = model.decoder.blocks[1]
    h = torch.randn(2, 9, 8, dtype=torch.float64)
    weight = block.convolution.weight.view(8, 3, 8).transpose(1, 2)
    left = F.conv1d(F.pad(h.transpose(1, 2), (4, 0)), weight, block.convolution.bias, dilation=2).transpose(1, 2)
    ours = block.convolution(unfold(h, block.extent, View(Mask(causal=True), 9, 9, h.device)))
    torch.testing.assert_close(ours, left, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"d_model": 7}, "d_model"),
        ({"kernel": 2}, "kernel"),
        ({"dilations": ()}, "dilations"),
        ({"dilations": (1, 0)}, "dilations"),
        ({"stretch": 0.9}, "stretch"),
        ({"extra": -1}, "extra"),
        ({"encoder_blocks": 0}, "encoder_blocks"),
        ({"decoder_blocks": 0}, "decoder_blocks"),
        ({"dropout": -0.1}, "dropout"),
    ],
)
def test_invalid_specs_are_refused(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refusal:
        replace(tiny.bytenet(), **changes)
    assert refusal.value.path == path


def test_inputs_that_would_be_ignored_are_refused() -> None:
    model: Any = build(tiny.bytenet())
    ids = torch.tensor([[3, 4]])
    with pytest.raises(DataError, match="source"):
        model.hidden(Batch(ids))
    with pytest.raises(DataError, match="target_pos"):
        model.hidden(Batch(ids, source=ids, target_pos=torch.tensor([[0, 1]])))
    for use in (model.hidden, model.loss, lambda batch: model.start(batch, 5)):
        with pytest.raises(DataError, match="packed: a ByteNet aligns"):
            use(translation(PAIRS, packed=True))
    assert not packs(tiny.bytenet(), Translation())
    assert packs(tiny.convs2s(), Translation())


def test_learns_to_copy(learned: Learned) -> None:
    spec = ByteNet(vocab=9, d_model=32, encoder_blocks=2, decoder_blocks=2, dilations=(1, 2), dropout=0.0)
    task = copying(2, 3, 4, 5)
    wrong = [wrong_tokens(spec, task, seed, steps=30, rate=1e-2) for seed in learned.seeds(3)]
    learned("wrong tokens", *wrong, below=0.15, broken=0.46)  # without the order of the source; 0.70 without the source
