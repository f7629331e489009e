import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.batch import Batch, translation
from regard.errors import SpecError
from regard.models.build import build
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.core import Role, Site
from regard.nn.fixup import Fixup, FixupInit, FixupLinear
from regard.nn.init import FanIn, Init, T5Init, Uninitialized, Xavier
from regard.nn.linear import Dense, Linear
from regard.nn.mask import Context, Mask, View
from regard.nn.norm import NoNorm, Norm
from regard.nn.stacks.plain import Plain
from regard.presets import preset
from regard.training.optim import groups, named
from regard.tree import swap, walk
from regard.variants import apply
from tests.unit.nn.affine import Affine

MakeSite = Callable[..., Site]
CTX = Context(View(Mask(), 5, 5, torch.device("cpu")))
SIZES: dict[str, Any] = {"vocab": 20, "d_model": 16, "heads": 2, "encoder.depth": 2, "decoder.depth": 2}


def narang() -> EncoderDecoder:
    spec = preset("narang_base", **SIZES)
    assert isinstance(spec, EncoderDecoder)
    return swap(spec, FeedForward, lambda f: replace(f, d_hidden=24))


def randomised(module: nn.Module) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.5)
    return module


def test_residual_rule_by_formula(site: MakeSite) -> None:
    branch, x = Affine(), torch.randn(2, 5, 12)
    rule: Any = Fixup().wrap(branch, site())
    torch.testing.assert_close(rule(x, CTX), x + branch(x, CTX))
    randomised(rule)
    torch.testing.assert_close(rule(x, CTX), x + rule.scale * branch(x + rule.shift, CTX))
    assert (rule.scale.shape, rule.shift.shape) == ((1,), (1,))


def test_ends_of_the_stacks_by_formula(site: MakeSite) -> None:
    x = torch.randn(2, 5, 12)
    encoder, decoder = (Fixup().end(site(side=side)) for side in ("encoder", "decoder"))
    assert torch.equal(encoder(x), x)
    assert torch.equal(decoder(x), x)
    for end in (encoder, decoder):
        randomised(end)
    torch.testing.assert_close(encoder(x), (x + encoder.shift) * encoder.scale)  # type: ignore[reportOperatorIssue]
    torch.testing.assert_close(decoder(x), x + decoder.shift)  # type: ignore[reportOperatorIssue]
    assert [sum(p.numel() for p in end.parameters()) for end in (encoder, decoder)] == [2, 1]


@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_has_a_scalar_instead_of_biases(gated: bool, site: MakeSite) -> None:
    branch: Any = randomised(FeedForward(7, "relu", gated=gated).build(site(linear_=FixupLinear())))
    x = torch.randn(2, 5, 12)
    if gated:
        W, V = branch.gate_up.weight.split(7)
        hidden = (x @ W.T).relu() * (x @ V.T)
    else:
        hidden = (x @ branch.up.weight.T).relu()
    torch.testing.assert_close(branch(x, CTX), (hidden + branch.down.shift) @ branch.down.dense.weight.T)
    assert sum(p.numel() for p in branch.parameters()) == (3 if gated else 2) * 7 * 12 + 1


@pytest.mark.parametrize("bias", [True, False])
def test_other_projections_are_dense(bias: bool, site: MakeSite) -> None:
    linear: Any = FixupLinear(bias).build(12, {"query": 12, "key": 12}, None, site())
    assert (linear.bias is not None) is bias
    assert (FixupLinear(bias).build(12, {"head": 3}, True, site()).bias is not None) is True
    assert linear.weight.shape == (24, 12)


def test_explicit_biases_are_added(site: MakeSite) -> None:
    branch: Any = randomised(FeedForward(7, bias=True).build(site(linear_=FixupLinear())))
    x = torch.randn(2, 5, 12)
    hidden = (x @ branch.up.weight.T + branch.up.bias).relu() + branch.down.shift
    torch.testing.assert_close(branch(x, CTX), hidden @ branch.down.dense.weight.T + branch.down.dense.bias)


@pytest.mark.parametrize(
    ("role", "bound"),
    [
        ("query", 60 ** (-1 / 6) * math.sqrt(6 / 320)),
        ("key", 60 ** (-1 / 6) * math.sqrt(6 / 320)),
        ("value", 60 ** (-1 / 6) * math.sqrt(6 / 320)),
        ("attend_out", 0.0),
        ("up", math.sqrt(6 / 200 / 60)),
        ("gate", math.sqrt(6 / 200)),
        ("down", 0.0),
    ],
)
def test_uniform_by_role(role: Role, bound: float, site: MakeSite) -> None:
    weight = torch.full((120, 200), 7.0)
    FixupInit().draw(weight, role, site(branches=60))
    assert weight.abs().max().item() <= bound
    assert weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert weight.mean().item() == pytest.approx(0.0, abs=0.02 * bound + 1e-12)


@pytest.mark.parametrize("role", ["embedding", "position", "head", "other", "router"])
@pytest.mark.parametrize("others", [Xavier(), FanIn(), T5Init()], ids=lambda init: init.kind)
def test_other_roles_use_the_inner_init(others: Init, role: Role, site: MakeSite) -> None:
    weight, expected = torch.empty(30, 20), torch.empty(30, 20)
    torch.manual_seed(3)
    FixupInit(others).draw(weight, role, site())
    torch.manual_seed(3)
    others.draw(expected, role, site())
    assert torch.equal(weight, expected)


def test_others_must_initialise_tables() -> None:
    for others in (FixupInit(), Uninitialized()):
        with pytest.raises(SpecError, match=r"^others: '\w+' does not initialise tables"):
            FixupInit(others)


def naive(model: EncoderDecoderModel, batch: Batch) -> Tensor:
    """Return log-probabilities by modifications.md 3.4, for two layers per side without positions."""
    P = dict(model.named_parameters())
    E = P["tables.tables.source.weight"]
    assert batch.source is not None
    assert batch.source_seg is not None
    rows = []
    for b in range(batch.target.shape[0]):
        memory = E[batch.source[b, : int(batch.source_seg[b].sum())]]
        for layer in range(2):
            at = f"encoder.blocks.{layer}.branches"
            memory = memory + _attention(P, f"{at}.0", memory, None)
            memory = memory + _feed_forward(P, f"{at}.1", memory)
        memory = (memory + P["encoder.end.shift"]) * P["encoder.end.scale"]
        x = E[batch.target[b]]
        for layer in range(2):
            at = f"decoder.blocks.{layer}.branches"
            x = x + _attention(P, f"{at}.0", x, None, causal=True)
            x = x + _attention(P, f"{at}.1", x, memory)
            x = x + _feed_forward(P, f"{at}.2", x)
        x = x + P["decoder.end.shift"]
        rows.append((x * 16**-0.5 @ E.T).log_softmax(-1))
    return torch.stack(rows)


def _attention(P: dict[str, Any], at: str, x: Tensor, memory: Tensor | None, causal: bool = False) -> Tensor:
    shifted = x + P[f"{at}.shift"]
    if memory is None:
        q, k, v = (shifted @ P[f"{at}.branch.qkv.weight"].T).split(16, -1)
    else:
        q = shifted @ P[f"{at}.branch.query.weight"].T
        k, v = (memory @ P[f"{at}.branch.kv.weight"].T).split(16, -1)
    heads = []
    for h in range(2):
        channels = slice(8 * h, 8 * h + 8)
        scores = q[:, channels] @ k[:, channels].T / math.sqrt(8)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, channels])
    return P[f"{at}.scale"] * (torch.cat(heads, -1) @ P[f"{at}.branch.output.weight"].T)


def _feed_forward(P: dict[str, Any], at: str, x: Tensor) -> Tensor:
    hidden = ((x + P[f"{at}.shift"]) @ P[f"{at}.branch.up.weight"].T).relu() + P[f"{at}.branch.down.shift"]
    return P[f"{at}.scale"] * (hidden @ P[f"{at}.branch.down.dense.weight"].T)


def test_model_by_formula() -> None:
    spec = swap(apply("fixup", narang()), Plain, lambda stack: replace(stack, position=None))
    model = randomised(build(spec, seed=1).double()).eval()
    pairs = [([5, 6, 7], [8, 9]), ([4], [5])]
    batch = translation(pairs)
    outputs, expected = model.log_probs(batch), naive(model, batch)
    assert batch.target_seg is not None
    real = batch.target_seg != 0
    torch.testing.assert_close(outputs[real], expected[real])


def test_new_model_is_the_identity_on_embeddings() -> None:
    model = build(apply("fixup", narang()), seed=1).double()
    assert isinstance(model, EncoderDecoderModel)
    batch = translation([([5, 6, 7], [8, 9]), ([4], [5])])
    table: Any = model.tables.get("target")
    torch.testing.assert_close(model.encode(batch).x[0], table.weight[batch.source])
    torch.testing.assert_close(model.hidden(batch), table.weight[batch.target])


def test_the_variant_of_the_base_of_narang_et_al() -> None:
    """60 * 2 + 24 + 3 scalars, L = 60, no norm, no bias."""
    changed: Any = apply("fixup", preset("narang_base"))
    model = build(changed, device="meta")
    scalars = [p for p in model.parameters() if p.dim() == 1]
    assert len(scalars) == 147
    assert {p.numel() for p in scalars} == {1}
    assert (changed.linear, changed.init) == (FixupLinear(bias=False), FixupInit(T5Init()))
    assert {getattr(part, "scale", "sqrt") for part in walk(changed)} == {"sqrt"}


def test_scalars_are_not_decayed() -> None:
    model = build(apply("fixup", narang()), seed=1)
    decayed, undecayed = groups(named(model), 1e-3, 0.1)
    scalars = {id(p) for p in model.parameters() if p.numel() == 1}
    assert len(scalars) == 10 * 2 + 4 + 3
    assert decayed["weight_decay"] == 0.1
    assert scalars <= {id(p) for p in undecayed["params"]}


@pytest.mark.parametrize("base", ["narang_base", "t5_base", "transformer_small", "gpt2_small", "bert_base"])
def test_every_base(base: str) -> None:
    changed: Any = apply("fixup", preset(base))
    assert {type(part) for part in walk(changed) if isinstance(part, Norm)} <= {NoNorm}
    assert all(part.scale == "sqrt" for part in walk(changed) if isinstance(part, SelfAttention))
    assert changed.init == FixupInit(preset(base).init)
    assert build(changed, device="meta")


def test_bases_unsuitable_for_fixup_are_refused(site: MakeSite) -> None:
    class Other(Linear):
        __slots__ = ()
        kind = "other"

        def build(self, d_in: int, widths: Mapping[Role, int], bias: bool | None, site: Site) -> nn.Module:
            return Dense().build(d_in, widths, bias, site)

    with pytest.raises(SpecError, match=r"^linear: is 'other', but fixup has projections of its own"):
        apply("fixup", replace(narang(), linear=Other()))
    with pytest.raises(SpecError, match=r"^encoder\.pattern\[0\]\.residual\[1\]\.kind: is 'no_residual'"):
        apply("fixup", preset("sahai"))
