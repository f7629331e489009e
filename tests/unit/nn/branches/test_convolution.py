import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.convolution import DynamicConv, LightConv, SharedDynamicConv, SharedLightConv
from regard.nn.cache import ActivationCache, Rows
from regard.nn.core import Branch, Site
from regard.nn.linear import Dense
from regard.nn.mask import Context, Mask, View
from tests.unit.nn.branches.random_branch import branch_of

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
D, T = 12, 7
SEG = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]])
PACKED = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 3, 0, 0]])

SPECS = {
    "light": LightConv(5),
    "light, wider than the row": LightConv(17),
    "light of one tap": LightConv(1),
    "light without biases": LightConv(3, bias=False),
    "dynamic": DynamicConv(5),
    "dynamic without biases": DynamicConv(3, bias=False),
    "shared light": SharedLightConv(5),
    "shared light, four heads": SharedLightConv(3, heads=4, bias=False),
    "shared dynamic": SharedDynamicConv(5),
    "shared dynamic, one head": SharedDynamicConv(3, heads=1),
}
MASKS = {
    "nothing hidden": Mask(),
    "padded": Mask(q_seg=SEG, k_seg=SEG),
    "packed": Mask(q_seg=PACKED, k_seg=PACKED, packed=True, segments=3),
}


def context(mask: Mask) -> Context:
    return Context(View(mask, T, T, CPU))


def sigmoid(value: Tensor) -> Tensor:
    return 1 / (1 + (-value).exp())


def by_hand(branch: Any, spec: Any, x: Tensor, seg: Tensor | None, causal: bool) -> Tensor:
    """Position by position, channel by channel and tap by tap, from modifications.md 3.11."""
    P = dict(branch.named_parameters())

    def dense(name: str, v: Tensor) -> Tensor:
        y = P[f"{name}.weight"] @ v
        return y + P[f"{name}.bias"] if f"{name}.bias" in P else y

    shared = isinstance(spec, SharedLightConv | SharedDynamicConv)
    H = (spec.heads or 3) if shared else D
    K = spec.width
    taps = list(range(-K + 1, 1)) if causal else list(range(-(K // 2), K // 2 + 1))
    rows = []
    for b in range(x.shape[0]):
        gated = [dense("gated", v) for v in x[b]]
        g = [v[:D] * sigmoid(v[D:]) for v in gated]
        out = []
        for t in range(x.shape[1]):
            learned = "filters.weight" in P
            k = P["filters.weight"] if learned else dense("filters.predict", g[t]).reshape(K, H).T  # (H, K)
            y = []
            for c in range(D):
                powers = [math.e**value for value in k[c // (D // H)]]
                total = torch.zeros(())
                for i, tap in enumerate(taps):
                    s = t + tap
                    if not 0 <= s < x.shape[1]:
                        continue
                    if seg is not None and (seg[b, s] == 0 or seg[b, s] != seg[b, t]):
                        continue
                    total = total + powers[i] / sum(powers) * g[s][c]
                y.append(total)
            v = torch.stack(y)
            if shared:
                out.append(dense("output", v))
                continue
            if "output.bias" in P:
                v = v + P["output.bias"]
            out.append(dense("output.output", dense("output.pointwise", v)))
        rows.append(torch.stack(out))
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_by_formula(spec: BranchSpec, mask: Mask, causal: bool, site: MakeSite) -> None:
    branch = branch_of(spec, site(causal=causal, side="decoder" if causal else "encoder"))
    x = torch.randn(2, T, D)
    output = branch(x, context(mask))
    real = torch.ones(2, T, dtype=torch.bool) if mask.k_seg is None else mask.k_seg != 0
    expected = by_hand(branch, spec, x, mask.k_seg, causal)
    torch.testing.assert_close(output[real], expected[real], rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [LightConv(5), DynamicConv(3), SharedLightConv(5), SharedDynamicConv(3)], ids=repr)
def test_gradients_by_formula(spec: BranchSpec, site: MakeSite) -> None:
    branch, x = branch_of(spec, site(causal=False)), torch.randn(2, T, D, requires_grad=True)
    upstream, mask = torch.randn(2, T, D) * (PACKED != 0)[:, :, None], MASKS["packed"]
    inputs = [x, *branch.parameters()]
    gradients = torch.autograd.grad((branch(x, context(mask)) * upstream).sum(), inputs)
    expected = torch.autograd.grad((by_hand(branch, spec, x, PACKED, False) * upstream).sum(), inputs)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", [LightConv(5), SharedLightConv(5, heads=4)], ids=repr)
def test_the_filter_is_torchs_grouped_convolution(spec: BranchSpec, causal: bool, site: MakeSite) -> None:
    branch, x = branch_of(spec, site(causal=causal)), torch.randn(2, T, D)
    g = F.glu(branch.gated(x), -1).transpose(1, 2)
    weight = branch.filters.weight.softmax(-1)
    weight = weight.repeat_interleave(D // weight.shape[0], 0)[:, None]
    y = F.conv1d(F.pad(g, (4, 0) if causal else (2, 2)), weight, groups=D).transpose(1, 2)
    torch.testing.assert_close(branch(x, context(Mask())), branch.output(y))


def test_light_and_dynamic_conv_are_the_shared_ones_with_a_head_per_channel(site: MakeSite) -> None:
    """Narang's convolution is that of Wu with d heads, apart from one more projection."""
    for spec, original in ((LightConv(5), SharedLightConv(5, D)), (DynamicConv(5), SharedDynamicConv(5, D))):
        narang, wu = branch_of(spec, site()), branch_of(original, site())
        nn.init.eye_(narang.output.pointwise.weight)
        nn.init.zeros_(narang.output.pointwise.bias)
        nn.init.zeros_(narang.output.bias)
        wu.gated.load_state_dict(narang.gated.state_dict())
        wu.output.load_state_dict(narang.output.output.state_dict())
        if isinstance(spec, DynamicConv):
            nn.init.zeros_(narang.filters.predict.bias)  # Wu's filters have no bias
        wu.filters.load_state_dict(narang.filters.state_dict(), strict=False)
        x = torch.randn(2, T, D)
        torch.testing.assert_close(narang(x, context(Mask())), wu(x, context(Mask())))


def test_zero_filter_logits_average_the_window(site: MakeSite) -> None:
    light, dynamic = branch_of(SharedLightConv(3, 2), site()), branch_of(SharedDynamicConv(3, 2), site())
    dynamic.gated.load_state_dict(light.gated.state_dict())
    dynamic.output.load_state_dict(light.output.state_dict())
    nn.init.zeros_(light.filters.weight)
    nn.init.zeros_(dynamic.filters.predict.weight)
    x = torch.randn(2, T, D)
    g = F.glu(light.gated(x), -1)
    mean = light.output((g[:, 2:] + g[:, 1:-1] + g[:, :-2]) / 3)
    torch.testing.assert_close(light(x, context(Mask()))[:, 2:], mean)
    torch.testing.assert_close(dynamic(x, context(Mask())), light(x, context(Mask())))


def run_steps(branch: Branch, x: Tensor, counts: list[list[int]], static: bool) -> list[list[Tensor]]:
    """Read `counts[n][b]` tokens of row b in step n, and return the outputs for the real tokens of each row."""
    B, rows = x.shape[0], Rows(torch.zeros(x.shape[0], dtype=torch.int64), 12, uniform=not static, static=static)
    state: Any = branch.start(rows, context(Mask()))
    outputs: list[list[Tensor]] = [[] for _ in range(B)]
    for step in counts:
        width = max(step)
        read = torch.full((B, width, x.shape[2]), 99.0)  # values of padding must not matter
        for b, n in enumerate(step):
            read[b, :n] = x[b, len(outputs[b]) : len(outputs[b]) + n]
        y = branch(read, Context(View(rows.mask(width), width, rows.reach(width), CPU)), state)
        for b, n in enumerate(step):
            outputs[b] += y[b, :n]
        rows.advance(width, None if min(step) == width else torch.tensor(step))
    return outputs


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_ragged_decoding_steps_equal_the_full_pass(spec: BranchSpec, static: bool, site: MakeSite) -> None:
    """Rows read different numbers of tokens in the middle of decoding, which no law covers."""
    counts = [[3, 1], [1, 1], [1, 3], [2, 2]]
    branch, x = branch_of(spec, site()), torch.randn(2, T, D)
    full = branch(x, context(Mask(causal=True)))
    for b, row in enumerate(run_steps(branch, x, counts, static)):
        torch.testing.assert_close(torch.stack(row), full[b, : len(row)], rtol=0, atol=1e-12)


def test_cached_inputs_can_be_reordered(site: MakeSite) -> None:
    branch, x = branch_of(LightConv(5), site()), torch.randn(2, T, D)
    rows = Rows(torch.zeros(2, dtype=torch.int64), T)
    state = branch.start(rows, context(Mask()))
    assert isinstance(state, ActivationCache)
    branch(x[:, :3], Context(View(rows.mask(3), 3, 3, CPU)), state)
    rows.advance(3, None)
    state.reorder(torch.tensor([1, 1]))
    outputs = branch(x[:, 3:4], Context(View(rows.mask(1), 1, 4, CPU)), state)
    mixed = torch.cat((x[[1, 1], :3], x[:, 3:4]), 1)
    full = branch(mixed, Context(View(Mask(causal=True), 4, 4, CPU)))
    torch.testing.assert_close(outputs, full[:, 3:])


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (LightConv(), 2_370_048),
        (DynamicConv(), 7_678_464),
        (SharedLightConv(31), 3 * 768 * 769 + 12 * 31),
        (SharedDynamicConv(31), 3 * 768 * 769 + 768 * 12 * 31),
    ],
)
def test_parameters(spec: BranchSpec, count: int, site: MakeSite) -> None:
    """The first two are those of Narang et al.; Wu's convolutions have one projection less than attention."""
    with torch.device("meta"):
        branch = spec.build(site(d_model=768, heads=12))
    assert sum(p.numel() for p in branch.parameters()) == count


def test_biases(site: MakeSite) -> None:
    """Narang's convolutions have biases whatever the linear spec of the model is; Wu's follow that spec."""

    def biases(spec: BranchSpec) -> int:
        branch = spec.build(site(linear_=Dense(bias=False)))
        return sum(p.numel() for name, p in branch.named_parameters() if name.endswith("bias"))

    assert biases(LightConv(3)) == 5 * D
    assert biases(DynamicConv(3)) == 8 * D
    assert biases(LightConv(3, bias=False)) == biases(DynamicConv(3, bias=False)) == 0
    assert biases(SharedLightConv(3)) == biases(SharedDynamicConv(3)) == 0
    assert biases(SharedLightConv(3, bias=True)) == biases(SharedDynamicConv(3, bias=True)) == 3 * D


@pytest.mark.parametrize("spec", [LightConv(3), SharedLightConv(3), SharedDynamicConv(3)], ids=repr)
def test_filters_are_dropped_in_training_only(spec: BranchSpec, site: MakeSite) -> None:
    branch, x = branch_of(spec, site(attention_dropout=0.5)), torch.randn(2, T, D)
    assert not torch.equal(branch(x, context(Mask())), branch(x, context(Mask())))
    branch.eval()
    assert torch.equal(branch(x, context(Mask())), branch(x, context(Mask())))


def test_each_position_has_its_own_filter_dropout(site: MakeSite) -> None:
    """With one tap, each head of the output is 0 or 2 g, because dropout doubles what it keeps."""
    branch, x = branch_of(SharedLightConv(1, heads=4), site(attention_dropout=0.5)), torch.randn(8, T, D)
    nn.init.eye_(branch.output.weight)
    nn.init.zeros_(branch.output.bias)
    g = F.glu(branch.gated(x), -1)
    ratio = (branch(x, context(Mask())) / g).unflatten(-1, (4, 3))
    torch.testing.assert_close(ratio, ratio.round())
    assert set(ratio.round().flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(ratio.round(), ratio.round()[..., :1].expand_as(ratio))
    assert all(len(ratio.round().transpose(0, axis).flatten(1).unique(dim=0)) > 1 for axis in range(3))


@pytest.mark.parametrize("kind", [LightConv, DynamicConv, SharedLightConv, SharedDynamicConv])
@pytest.mark.parametrize("width", [0, -3, 4])
def test_even_widths_are_refused(kind: Any, width: int) -> None:
    with pytest.raises(SpecError, match=f"^width: must be odd, .* not {width}"):
        kind(width)


@pytest.mark.parametrize("kind", [SharedLightConv, SharedDynamicConv])
def test_heads_must_divide_d_model(kind: Any, site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^heads: must be at least 1, not 0"):
        kind(3, heads=0)
    with pytest.raises(SpecError, match=r"^here\.heads: 5 heads do not divide d_model 12; choose a divisor"):
        kind(3, heads=5).build(site(path="here"))
