"""Synthesizers, compared with their formulas, and with attention and averages in special cases."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import SpecError
from regard.models.build import build, count
from regard.models.cost import cost
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.synthesizer import (
    DenseScores,
    FactorisedScores,
    RandomScores,
    Scores,
    Synthesizer,
    TwoLayerScores,
)
from regard.nn.cache import ActivationCache, KVCache, Rows
from regard.nn.core import Branch, Site
from regard.nn.mask import Context, Mask, View
from regard.nn.pattern import Window
from regard.nn.position.additive import Injected
from regard.nn.position.base import AtHeads, position_bias
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace
from regard.presets import preset
from regard.tree import swap, walk
from regard.variants import VARIANTS, apply
from tests.unit.nn.branches.random_branch import branch_of

MakeSite = Callable[..., Site]
IsVisible = Callable[[Mask, int, int, int], bool]
CPU = torch.device("cpu")
T, MAX = 5, 8
SEG = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
PACKED = torch.tensor([[1, 1, 2, 2, 2], [1, 2, 2, 0, 0]])
WITHIN = torch.tensor([[0, 1, 0, 1, 2], [0, 0, 1, 0, 0]])
MASKS = {
    "everything": Mask(),
    "causal": Mask(causal=True),
    "strict": Mask(causal=True, strict=True),
    "padded": Mask(q_seg=SEG, k_seg=SEG),
    "window": Mask(causal=True, attention_pattern=Window(2)),
    "prefix": Mask(causal=True, prefix=torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)),
    **{
        f"packed, causal {causal}": Mask(
            causal=causal, q_pos=WITHIN, k_pos=WITHIN, q_seg=PACKED, k_seg=PACKED, packed=True, segments=2, longest=3
        )
        for causal in (False, True)
    },
}
SCORES: dict[str, Scores] = {
    "dense": DenseScores(),
    "two layers": TwoLayerScores(),
    "random": RandomScores(),
    "factorised": FactorisedScores(2),
}
SPECS = {
    f"{name} {mix}": Synthesizer(scores, mix, heads=2, d_head=5, max_len=MAX)
    for name, scores in SCORES.items()
    for mix in ("alone", "plus", "alpha")
}
# The other specs are variants, for which the laws in tests/laws examine decoding.
NOT_VARIANTS = {
    name: spec for name, spec in SPECS.items() if name.startswith(("factorised", "two")) and spec.mix != "alone"
}
ALONE = {name: spec for name, spec in SPECS.items() if spec.mix == "alone"}


def context(mask: Mask, **more: Any) -> Context:
    return Context(View(mask, T, T, CPU), **more)


def synthesized(branch: Any, spec: Synthesizer, x: Tensor, q: Tensor | None, h: int, i: int, j: int) -> Tensor:
    """Return the score of position j for token x at position i, with query q in head h."""
    s = branch.scores
    if isinstance(spec.scores, DenseScores):
        assert q is not None
        return sum(q[c].clamp(min=0) * s.weight[j, c] for c in range(5))  # type: ignore[reportReturnType]
    if isinstance(spec.scores, TwoLayerScores):
        rows = slice(5 * h, 5 * h + 5)
        hidden = (s.first.weight[rows] @ x + s.first.bias[rows]).clamp(min=0)
        return hidden @ s.weight[h, j] + s.bias[h, j]
    if isinstance(spec.scores, RandomScores):
        return s.weight[h, i, j]
    return s.queries[h, i] @ s.keys[h, j]


def by_hand(
    branch: Any, spec: Synthesizer, x: Tensor, mask: Mask, is_visible: IsVisible, bias: Tensor | None = None
) -> Tensor:
    """Return concat_h(softmax(scores_h) v_h) W_o, query by query, by the formulas of Tay et al. and Narang et al."""
    linear = branch.project if spec.mix == "alone" else branch.qkv
    projections = len(linear.weight) // 10
    projected = [
        x @ w.T + b for w, b in zip(linear.weight.chunk(projections), linear.bias.chunk(projections), strict=True)
    ]
    share = branch.alpha.sigmoid() if spec.mix == "alpha" else None
    rows = []
    for b in range(2):
        for t in range(T):
            heads = []
            for h in range(2):
                c = slice(5 * h, 5 * h + 5)
                q = projected[0][b, t, c] if projections > 1 else None
                keys, scores = [s for s in range(T) if is_visible(mask, b, t, s)], []
                for s in keys:
                    i = t if mask.q_pos is None else int(mask.q_pos[b, t])
                    j = s if mask.k_pos is None else int(mask.k_pos[b, s])
                    score = synthesized(branch, spec, x[b, t], q, h, i, j)
                    if spec.mix != "alone":
                        assert q is not None
                        product = q @ projected[1][b, s, c] / math.sqrt(5)
                        score = product + score if share is None else (1 - share) * product + share * score
                    scores.append(score if bias is None else score + bias[0, h, t, s])
                values = projected[-1][b, keys, c]
                heads.append(torch.stack(scores).softmax(0) @ values if keys else torch.zeros(5))
            rows.append(torch.cat(heads))
    return torch.stack(rows).unflatten(0, (2, T)) @ branch.output.weight.T + branch.output.bias


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_by_formula(spec: Synthesizer, mask: Mask, site: MakeSite, is_visible: IsVisible) -> None:
    branch, x = branch_of(spec, site()), torch.randn(2, T, 12)
    outputs, expected = branch(x, context(mask)), by_hand(branch, spec, x, mask, is_visible)
    real = torch.ones(2, T, dtype=torch.bool) if mask.q_seg is None else mask.q_seg != 0
    torch.testing.assert_close(outputs[real], expected[real], rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_gradients_by_formula(spec: Synthesizer, site: MakeSite, is_visible: IsVisible) -> None:
    branch, x, mask = branch_of(spec, site()), torch.randn(2, T, 12), MASKS["packed, causal True"]
    real = mask.q_seg != 0
    parameters = list(branch.parameters())
    gradients = torch.autograd.grad(branch(x, context(mask))[real].square().sum(), parameters)
    expected = torch.autograd.grad(by_hand(branch, spec, x, mask, is_visible)[real].square().sum(), parameters)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_stack_bias_for_the_number_of_heads_is_added_to_scores(
    spec: Synthesizer, site: MakeSite, is_visible: IsVisible
) -> None:
    branch, x = branch_of(spec, site(positions={2: T5Bias(8, 9)})), torch.randn(2, T, 12)
    view = View(Mask(causal=True), T, T, CPU)
    terms = branch_of(T5Bias(8, 9), site(heads=2))(view)
    with_stack_bias = replace(view, by_heads={2: view.with_terms(terms)})
    expected = by_hand(branch, spec, x, view.mask, is_visible, position_bias(view.with_terms(terms)))
    torch.testing.assert_close(branch(x, Context(with_stack_bias)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [SPECS["dense alone"], SPECS["random plus"]], ids=["alone", "plus"])
def test_the_position_of_the_layer_replaces_that_of_the_stack(
    spec: Synthesizer, site: MakeSite, is_visible: IsVisible
) -> None:
    branch, x = branch_of(replace(spec, position=ALiBi()), site(position=T5Bias())), torch.randn(2, T, 12)
    view = View(Mask(causal=True), T, T, CPU)
    bias = position_bias(view.with_terms(ALiBi().build(site(heads=2))(view)))
    with_stack_bias = view.with_terms(T5Bias(8, 9).build(site())(view))
    expected = by_hand(branch, spec, x, view.mask, is_visible, bias)
    torch.testing.assert_close(branch(x, Context(with_stack_bias)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("spec", NOT_VARIANTS.values(), ids=list(NOT_VARIANTS))
def test_decoding_steps_equal_the_full_pass(spec: Synthesizer, static: bool, site: MakeSite) -> None:
    branch, x = branch_of(spec, site()), torch.randn(2, T, 12)
    full = branch(x, context(Mask(causal=True)))
    rows = Rows(torch.zeros(2, dtype=torch.int64), MAX, uniform=not static, static=static)
    state, outputs = branch.start(rows, context(Mask())), []
    assert isinstance(state, ActivationCache if spec.mix == "alone" else KVCache)
    for step in (2, 1, 2):
        at, S = rows.bound, rows.reach(step)
        outputs.append(branch(x[:, at : at + step], Context(View(rows.mask(step), step, S, CPU)), state))
        rows.advance(step, None)
    torch.testing.assert_close(torch.cat(outputs, 1), full, rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("spec", NOT_VARIANTS.values(), ids=list(NOT_VARIANTS))
def test_rows_of_unequal_length_decode_and_reorder(spec: Synthesizer, static: bool, site: MakeSite) -> None:
    branch, x = branch_of(spec, site()), torch.randn(2, T, 12)
    full = branch(x, context(Mask(causal=True)))
    rows = Rows(torch.zeros(2, dtype=torch.int64), 6, uniform=not static, static=static)
    state = branch.start(rows, context(Mask()))
    branch(x[:, :3], Context(View(rows.mask(3), 3, rows.reach(3), CPU)), state)
    rows.advance(3, torch.tensor([3, 1]))
    parent = torch.tensor([1, 0])
    state.reorder(parent)
    rows.reorder(parent)
    following = torch.stack([x[1, 1:2], x[0, 3:4]])
    outputs = branch(following, Context(View(rows.mask(1), 1, rows.reach(1), CPU)), state)
    torch.testing.assert_close(outputs[:, 0], torch.stack([full[1, 1], full[0, 3]]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_a_trace_records_the_weights_and_does_not_change_the_output(spec: Synthesizer, site: MakeSite) -> None:
    branch, x, trace = branch_of(spec, site(side="encoder")), torch.randn(2, T, 12), Trace()
    traced = branch(x, context(Mask(), trace=trace))
    assert torch.equal(traced, branch(x, context(Mask())))
    (weights,) = trace.weights["encoder.self"]
    assert weights.shape == (2, 2, T, T)
    assert not weights.requires_grad
    linear = branch.project if spec.mix == "alone" else branch.qkv
    values = (x @ linear.weight.T + linear.bias)[:, :, -10:].unflatten(-1, (2, 5)).transpose(1, 2)
    torch.testing.assert_close(branch.output((weights @ values).transpose(1, 2).flatten(2)), traced)


def weights_of(branch: Branch, x: Tensor, mask: Mask) -> Tensor:
    trace = Trace()
    branch(x, context(mask, trace=trace))
    return trace.weights["decoder.self"][0]


@pytest.mark.parametrize("name", ["random alone", "factorised alone"])
def test_random_scores_do_not_depend_on_the_tokens(name: str, site: MakeSite) -> None:
    branch = branch_of(SPECS[name], site())
    first, second = (weights_of(branch, torch.randn(2, T, 12), Mask(causal=True)) for _ in range(2))
    assert torch.equal(first, second)
    # With the released factors, all queries have the same scores; here they do not.
    assert (first[0, :, 3, :3] / first[0, :, 3, :1] - first[0, :, 2, :3] / first[0, :, 2, :1]).abs().max() > 1e-3


def test_full_rank_factors_equal_random_scores(site: MakeSite) -> None:
    full = branch_of(replace(SPECS["factorised alone"], scores=FactorisedScores(MAX)), site())
    random = branch_of(SPECS["random alone"], site())
    with torch.no_grad():
        full.scores.queries.copy_(random.scores.weight)
        full.scores.keys.copy_(torch.eye(MAX).expand(2, -1, -1))
    x = torch.randn(2, T, 12)
    for mask in MASKS.values():
        torch.testing.assert_close(weights_of(full, x, mask), weights_of(random, x, mask))


def test_two_layers_with_shared_parameters_equal_dense_scores(site: MakeSite) -> None:
    dense, two_layers = branch_of(SPECS["dense alone"], site()), branch_of(SPECS["two layers alone"], site())
    with torch.no_grad():
        two_layers.scores.first.weight.copy_(dense.project.weight[:10])
        two_layers.scores.first.bias.copy_(dense.project.bias[:10])
        two_layers.scores.weight.copy_(dense.scores.weight.expand(2, -1, -1))
        two_layers.scores.bias.zero_()
    x = torch.randn(2, T, 12)
    torch.testing.assert_close(weights_of(two_layers, x, Mask()), weights_of(dense, x, Mask()))


@pytest.mark.parametrize("name", ["dense alone", "random alone", "factorised alone"])
def test_zero_scores_average_the_values(name: str, site: MakeSite) -> None:
    branch, x = branch_of(SPECS[name], site()), torch.randn(2, T, 12)
    for parameter in branch.scores.parameters():
        nn.init.zeros_(parameter)
    weights = weights_of(branch, x, Mask(causal=True))
    torch.testing.assert_close(weights[0, 0], torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None])


@pytest.mark.parametrize("name", ["dense", "random"])
@pytest.mark.parametrize("mix", ["plus", "alpha"])
def test_with_zero_scores_it_is_attention(name: str, mix: str, site: MakeSite) -> None:
    branch, x = branch_of(SPECS[f"{name} {mix}"], site()), torch.randn(2, T, 12)
    attention = SelfAttention(heads=2, d_head=5).build(site())
    shared = {key: tensor for key, tensor in branch.state_dict().items() if not key.startswith(("scores", "alpha"))}
    attention.load_state_dict(shared)
    if mix == "plus":
        nn.init.zeros_(branch.scores.weight)
    else:
        nn.init.constant_(branch.alpha, -200.0)
    for mask in MASKS.values():
        torch.testing.assert_close(branch(x, context(mask)), attention(x, context(mask)), rtol=0, atol=1e-12)


def test_alpha_starts_at_one_half_and_interpolates(site: MakeSite) -> None:
    spec = SPECS["random alpha"]
    assert spec.build(site()).alpha == 0
    branch, alone, x = branch_of(spec, site()), branch_of(SPECS["random alone"], site()), torch.randn(2, T, 12)
    nn.init.constant_(branch.alpha, 200.0)
    alone.scores.load_state_dict(branch.scores.state_dict())
    torch.testing.assert_close(weights_of(branch, x, Mask()), weights_of(alone, x, Mask()))


def test_attention_dropout_differs_between_rows_and_is_off_in_evaluation(site: MakeSite) -> None:
    for name in ("random alone", "random plus"):
        branch, x = branch_of(SPECS[name], site(attention_dropout=0.5)), torch.randn(1, T, 12).expand(2, -1, -1)
        y = branch(x, context(Mask()))
        assert not torch.equal(y[0], y[1])
        branch.eval()
        y = branch(x, context(Mask()))
        torch.testing.assert_close(y[0], y[1])


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_sequences_longer_than_the_scores_are_refused(spec: Synthesizer, site: MakeSite) -> None:
    branch = branch_of(spec, site(path="decoder.pattern[0].branches[0]"))
    assert branch(torch.randn(1, MAX, 12), Context(View(Mask(), MAX, MAX, CPU))).shape == (1, MAX, 12)
    with pytest.raises(SpecError, match="a sequence of 9 tokens exceeds the 8 positions with scores") as raised:
        branch(torch.randn(1, 9, 12), Context(View(Mask(), 9, 9, CPU)))
    assert raised.value.path == "decoder.pattern[0].branches[0].max_len"
    rows = Rows(torch.zeros(1, dtype=torch.int64), 9, uniform=False, static=True)
    with pytest.raises(SpecError, match="exceeds the 8"):
        branch(torch.randn(1, 1, 12), Context(View(rows.mask(1), 1, 9, CPU)), branch.start(rows, context(Mask())))


def test_a_long_packed_row_of_short_texts_is_accepted(site: MakeSite) -> None:
    seg, pos = torch.tensor([[1] * 6 + [2] * 6]), torch.arange(6).repeat(2)[None]
    mask = Mask(q_pos=pos, k_pos=pos, q_seg=seg, k_seg=seg, packed=True, segments=2, longest=6)
    x = torch.randn(1, 6, 12).repeat(1, 2, 1)
    for spec in SPECS.values():
        y = branch_of(spec, site())(x, Context(View(mask, 12, 12, CPU)))
        torch.testing.assert_close(y[:, :6], y[:, 6:])


@pytest.mark.parametrize(
    ("spec", "changes", "name", "message"),
    [
        (Synthesizer(heads=2), {"position": T5Bias()}, "heads", "is 2, but the stack's 't5_bias' position is for 3"),
        (Synthesizer(), {"position": Rotary()}, "position", "can add a bias to its scores, but 'rotary' acts on"),
        (Synthesizer(), {"position": Shaw()}, "position", "'shaw' acts on queries and keys"),
        (Synthesizer(heads=2), {"positions": {2: Injected()}}, "position", "'injected' acts on queries and keys"),
    ],
)
def test_refusals(spec: Synthesizer, changes: dict[str, Any], name: str, message: str, site: MakeSite) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        spec.build(site(path="decoder.pattern[0].branches[0]", **changes))
    assert raised.value.path == f"decoder.pattern[0].branches[0].{name}"


def test_invalid_fields_are_refused() -> None:
    for name in ("heads", "d_head", "max_len"):
        with pytest.raises(SpecError, match=f"^{name}: must be at least 1, not 0"):
            Synthesizer(**dict.fromkeys([name], 0))  # type: ignore[reportArgumentType]
    with pytest.raises(SpecError, match=r"^rank: must be at least 1, not 0"):
        FactorisedScores(0)
    with pytest.raises(SpecError, match=r"^position: a synthesizer can add a bias"):
        Synthesizer(position=Rotary())


NAMES = [name for name in VARIANTS if name.startswith("synth")]
AS_RUN = [name for name in NAMES if name != "synth_dense_tay"]


@pytest.mark.parametrize("name", AS_RUN)
def test_variants_have_the_settings_of_narang_et_al(name: str) -> None:
    changed = apply(name, preset("narang_base"))
    assert isinstance(changed, EncoderDecoder)
    synthesizers = [part for part in walk(changed) if isinstance(part, Synthesizer)]
    assert {(s.heads, s.d_head, s.max_len, s.scale) for s in synthesizers} == {(8, 128, 512, "none")}
    for stack in (changed.encoder, changed.decoder):
        assert isinstance(stack, Plain)
        assert (stack.position, stack.positions) == (None, (AtHeads(8, T5Bias()),))
    assert not any(isinstance(part, SelfAttention) for part in walk(changed))


# Parameters of one layer: up to four projections, and the scores (modifications.md, 3.14).
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("synth_dense", 2_424_832),
        ("synth_dense_plus", 3_211_264),
        ("synth_dense_plus_alpha", 3_211_265),
        ("synth_factorised", 1_703_936),
        ("synth_random", 3_670_016),
        ("synth_random_plus", 5_242_880),
        ("synth_random_plus_alpha", 5_242_881),
    ],
)
def test_parameters_of_a_layer(name: str, parameters: int) -> None:
    model: Any = build(apply(name, preset("narang_base")), device="meta")
    layer = model.decoder.blocks[0].branches[0].branch
    assert sum(p.numel() for p in layer.parameters()) == parameters


@pytest.mark.parametrize("base", ["t5_base", "transformer_small", "transformer_tiny", "bert_base", "gpt2_small"])
@pytest.mark.parametrize("name", NAMES)
def test_on_other_bases(name: str, base: str) -> None:
    spec: Any = preset(base)
    changed = apply(name, spec)
    assert count(changed) > 0
    heads = {part.heads for part in walk(changed) if isinstance(part, Synthesizer)}
    assert heads == ({None} if name == "synth_dense_tay" else {round(spec.heads * 2 / 3)})


@pytest.mark.parametrize("name", NAMES)
def test_unsuitable_bases_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="'rotary' acts on queries and keys"):
        count(apply(name, apply("rotary", preset("transformer_small"))))
    for odd in (SelfAttention(kv_heads=1), SelfAttention(output=False), SelfAttention(query_key_norm=RMSNorm())):
        with pytest.raises(SpecError, match="a synthesizer has no shared key-value heads"):
            apply(name, swap(preset("transformer_small"), SelfAttention, lambda _, odd=odd: odd))


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_counted(name: str) -> None:
    """Twelve layers with 128 tokens: projections, synthesized scores, query-key products, weighted sums of values."""
    counted = cost(apply(name, preset("narang_base")), 128)
    (layer,) = (part for part in counted.parts if part.part in {"decoder.synthesizer", "decoder.synthesizer_plus"})
    if name == "synth_dense_tay":
        projections, synthesized, products = 3 * 768 * 768, 768 * 128, 0
    else:
        projections = {"synth_factorised": 2, "synth_random": 2, "synth_dense": 3}.get(name, 4) * 768 * 1024
        synthesized = {"dense": 1024 * 128, "factorised": 8 * 16 * 128}.get(name.split("_")[1], 0)
        products = 1024 * 128 if "plus" in name else 0
    inner = 768 if name == "synth_dense_tay" else 1024
    assert layer.flops_per_token == 2 * 12 * (projections + synthesized + products + inner * 128)
