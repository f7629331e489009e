import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import fast
from regard.batch import pack
from regard.data.objectives import LanguageModelling
from regard.errors import SpecError
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import EPSILON, RATES, STEPS, GatedDelta, gated_delta_rule
from regard.nn.cache import Rows
from regard.nn.core import Site
from regard.nn.embedding import Tokens
from regard.nn.mask import Context, Mask, View
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.planner import fit
from regard.presets import preset
from regard.training.optim import groups
from tests.learning import Learned, copying, wrong_tokens

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
SPEC = GatedDelta(heads=4, key_heads=2, d_head=3, d_value=5, kernel_size=3)


def context(mask: Mask, T: int) -> Context:
    return Context(View(mask, T, T, CPU))


def branch_of(site: MakeSite, spec: GatedDelta = SPEC, **sizes: Any) -> Any:
    branch = spec.build(site(**sizes))
    for parameter in branch.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.6)
    return branch


def by_formula(branch: Any, x: Tensor) -> Tensor:
    """Return the output of `SPEC` for one text x of shape (T, D), by the formula, token by token and head by head."""
    H, G, K, V = 4, 2, 3, 5
    T = x.shape[0]
    weights, biases = ([*part.split([G * K, G * K, H * V, H * V, H, H])] for part in branch.input.parameters())
    q, k, v, z, b, a = (x @ weight.T + bias for weight, bias in zip(weights, biases, strict=True))
    filters = branch.filters.split([G * K, G * K, H * V])
    mixed = []
    for part, taps in zip((q, k, v), filters, strict=True):
        sums = torch.zeros_like(part)
        for t in range(T):
            for i in range(3):  # the last tap is for the current token
                if t - 2 + i >= 0:
                    sums[t] += taps[:, i] * part[t - 2 + i]
        mixed.append(sums * torch.sigmoid(sums))
    q, k, v = mixed
    outputs = torch.zeros(T, H * V)
    for h in range(H):
        g, S = h // 2, torch.zeros(K, V)
        for t in range(T):
            query, key = (y[t, g * K : (g + 1) * K] for y in (q, k))
            query, key = (y / torch.sqrt(y @ y + EPSILON) for y in (query, key))
            value = v[t, h * V : (h + 1) * V]
            decay = torch.exp(-torch.exp(branch.log_rate[h]) * torch.log1p(torch.exp(a[t, h] + branch.step_bias[h])))
            S = decay * (torch.eye(K) - b[t, h].sigmoid() * torch.outer(key, key)) @ S
            S = S + b[t, h].sigmoid() * torch.outer(key, value)
            y = S.T @ query / math.sqrt(K)
            y = branch.norm.weight * y / torch.sqrt(y.square().mean() + branch.norm.eps)
            gate = z[t, h * V : (h + 1) * V]
            outputs[t, h * V : (h + 1) * V] = y * gate * torch.sigmoid(gate)
    return outputs @ branch.output.weight.T + branch.output.bias


@pytest.mark.parametrize("causal", [True, False])
def test_outputs_by_formula(causal: bool, site: MakeSite) -> None:
    """S_t = a (I - b k k') S_(t-1) + b k v', as in the paper. In an encoder, too, tokens are read left to right."""
    branch, x, seg = branch_of(site, causal=causal), torch.randn(2, 6, 12), torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    y = branch(x, context(Mask(causal=causal, q_seg=seg, k_seg=seg), 6))
    torch.testing.assert_close(y[0], by_formula(branch, x[0]), rtol=0, atol=1e-12)
    torch.testing.assert_close(y[1, :4], by_formula(branch, x[1, :4]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunked", [False, True])
def test_texts_of_a_packed_row_do_not_affect_each_other(chunked: bool, site: MakeSite) -> None:
    """Neither the state nor the convolution crosses a border, also within and between chunks of 64 tokens."""
    branch, lengths = branch_of(site), [3, 70, 1, 58, 9]
    if chunked:
        fast.install(branch)
    texts = [torch.randn(1, length, 12) for length in lengths]
    seg, pos = pack([[[1] * length for length in lengths]], sum(lengths) + 2)[1:]
    x = torch.cat((*texts, torch.randn(1, 2, 12)), 1)
    mask = Mask(causal=True, q_seg=seg, k_seg=seg, q_pos=pos, k_pos=pos, packed=True, segments=5)
    packed = branch(x, context(mask, x.shape[1]))
    alone = torch.cat([branch(text, context(Mask(causal=True), text.shape[1])) for text in texts], 1)
    torch.testing.assert_close(packed[:, :-2], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_prefill_in_parts_continues_each_row_at_its_own_end(chunked: bool, static: bool, site: MakeSite) -> None:
    """Prompts of 70 and 3 tokens, cut anywhere, with padding after the shorter one; then single tokens."""
    branch = branch_of(site)
    if chunked:
        fast.install(branch)
    lengths, more = [70, 3], 2
    texts = [torch.randn(1, length + more, 12) for length in lengths]
    with torch.no_grad():
        whole = [branch(text, context(Mask(causal=True), text.shape[1])) for text in texts]
        for cuts in ((0, 70), (0, 1, 70), (0, 2, 5, 69, 70), (0, 64, 70)):
            rows = Rows.start(2, 1, CPU, 80, static)
            state = branch.start(rows, context(Mask(), 1))
            for start, stop in pairwise(cuts):
                x = torch.randn(2, stop - start, 12)
                counts = torch.tensor([max(0, min(stop, length) - start) for length in lengths])
                for row, count in enumerate(counts.tolist()):
                    x[row, :count] = texts[row][0, start : start + count]
                rows.claim(stop - start, counts)
                y = branch(x, Context(rows.view(stop - start)), state)
                rows.advance(stop - start, counts)
                for row, count in enumerate(counts.tolist()):
                    expected = whole[row][0, start : start + count]
                    torch.testing.assert_close(y[row, :count], expected, rtol=0, atol=1e-12)
            for step in range(more):
                x = torch.stack([texts[row][0, length + step] for row, length in enumerate(lengths)])[:, None]
                rows.claim(1)
                y = branch(x, Context(rows.view(1)), state)
                rows.advance(1, None)
                for row, length in enumerate(lengths):
                    torch.testing.assert_close(y[row, 0], whole[row][0, length + step], rtol=0, atol=1e-12)


def test_the_delta_rule_replaces_the_value_of_a_key() -> None:
    """With strength 1 and no decay, a new value of a key replaces the old one, and other keys keep theirs."""
    keys = torch.eye(3)[[0, 1, 0]][None, None]
    values, ones = torch.randn(1, 1, 3, 4), torch.ones(1, 1, 3)
    _, state = gated_delta_rule(keys, keys, values, 0 * ones, ones, torch.zeros(1, 1, 3, 4))
    torch.testing.assert_close(state[0, 0], torch.stack((values[0, 0, 2], values[0, 0, 1], torch.zeros(4))))


def test_the_state_has_one_size_for_any_length(site: MakeSite) -> None:
    sizes = []
    for length in (8, 4096):
        rows = Rows.start(2, 3, CPU, length, static=False)
        branch = branch_of(site)
        recurrent, cache = branch.start(rows, context(Mask(), 1))
        branch(torch.randn(6, 5, 12), Context(rows.view(5)), (recurrent, cache))
        assert recurrent.parts[0].shape == (6, 4, 3, 5)
        assert cache.x is not None
        sizes.append(recurrent.parts[0].numel() + cache.x.numel())
    assert sizes[0] == sizes[1]


def test_initial_decays_are_in_their_ranges(site: MakeSite) -> None:
    """A head begins with a decay of exp(-rate * step) per token."""
    branch: Any = GatedDelta(heads=500, d_head=1, d_value=1).build(site())
    rates, steps = branch.log_rate.detach().exp(), torch.nn.functional.softplus(branch.step_bias.detach())
    for values, (low, high) in ((rates, RATES), (steps, STEPS)):
        assert values.min() >= low * (1 - 1e-9)
        assert values.max() <= high * (1 + 1e-9)
    assert rates.median().item() == pytest.approx(8.0, rel=0.2)
    assert steps.median().item() == pytest.approx(0.01, rel=0.4)


def test_filters_and_decays_have_no_weight_decay(site: MakeSite) -> None:
    branch = SPEC.build(site())
    decayed, others = groups([*branch.named_parameters()], 1.0, 0.1)
    names = {id(parameter): name for name, parameter in branch.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["input.weight", "output.weight"]
    assert {"filters", "log_rate", "step_bias", "norm.weight"} <= {names[id(p)] for p in others["params"]}


def test_the_state_is_computed_in_full_precision(site: MakeSite) -> None:
    """Under autocast to bfloat16, 300 tokens give the outputs of float32 up to the rounding of single projections."""
    torch.set_default_dtype(torch.float32)
    branch: Any = GatedDelta().build(site(d_model=64, d_head=16, d_value=16))
    fast.install(branch)  # as in training
    dtypes = []

    def recorded(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        dtypes.extend(x.dtype for x in inputs)
        y, state = type(branch).rule(*inputs)
        dtypes.extend((y.dtype, state.dtype))
        return y, state

    branch.rule = recorded
    x = torch.randn(2, 300, 64)
    exact = branch(x, context(Mask(causal=True), 300))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = branch(x, context(Mask(causal=True), 300))
    assert set(dtypes) == {torch.float32}
    assert (rounded - exact).norm() < 0.03 * exact.norm()
    assert branch.bfloat16()(x.bfloat16(), context(Mask(causal=True), 300)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 0}, "^heads: must be at least 1, not 0"),
        ({"key_heads": 0}, "^key_heads: must be at least 1, not 0"),
        ({"d_value": -1}, "^d_value: must be at least 1, not -1"),
        ({"kernel_size": 1}, "^kernel_size: must be at least 2, not 1"),
    ],
)
def test_wrong_sizes_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        GatedDelta(**fields)  # type: ignore[reportArgumentType]


def test_heads_share_keys_evenly(site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^key_heads: 2 key heads do not divide 3 heads; choose a divisor"):
        GatedDelta(key_heads=2).build(site())


def test_language_models_with_it_are_trained_on_packed_rows() -> None:
    assert fit.packs(preset("hybrid"), LanguageModelling("lines"))


def test_it_learns_to_copy(learned: Learned) -> None:
    """A decoder-only translator without attention and without positions: one gated delta layer."""
    block = Block((GatedDelta(), FeedForward(48, "swish", gated=True)), PreNorm())
    spec = DecoderOnlyTranslator(
        vocab=9, d_model=32, heads=2, dropout=0.0, input=Tokens(scaled=False, position=None), decoder=Plain((block,), 1)
    )
    wrong = [wrong_tokens(spec, copying(4), seed, steps=150, rate=2e-2) for seed in learned.seeds(1)]
    learned("wrong tokens", *wrong, below=0.1, broken=0.8)  # without the layer
