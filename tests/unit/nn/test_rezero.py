from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from regard.batch import translation
from regard.errors import SpecError
from regard.models.build import build
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.cache import KVCache, Rows
from regard.nn.core import Site
from regard.nn.init import FanIn, GPT2Init, T5Init
from regard.nn.mask import Context, Mask, View
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.rezero import ReZero
from regard.nn.rms_norm import RMSNorm
from regard.presets import preset
from regard.training.optim import groups, named
from regard.tree import swap, walk
from regard.variants import apply
from tests.unit.nn.affine import Affine

MakeSite = Callable[..., Site]
CTX = Context(View(Mask(), 5, 5, torch.device("cpu")))
SIZES: dict[str, Any] = {"vocab": 20, "d_model": 16, "heads": 2, "encoder.depth": 2, "decoder.depth": 2}
ROWS = ("rezero", "rezero_layer_norm", "rezero_rms_norm")


def narang() -> EncoderDecoder:
    spec = preset("narang_base", **SIZES)
    assert isinstance(spec, EncoderDecoder)
    return spec


@pytest.mark.parametrize("norm", [NoNorm(), LayerNorm(), RMSNorm()], ids=lambda norm: norm.kind)
def test_formula(norm: Norm, site: MakeSite) -> None:
    branch, x = Affine(), torch.randn(2, 5, 12)
    rule: Any = ReZero(norm).wrap(branch, site())
    assert torch.equal(rule(x, CTX), x)
    nn.init.constant_(rule.alpha, 0.7)
    for parameter in rule.norm.parameters():
        nn.init.normal_(parameter, 1.0)
    torch.testing.assert_close(rule(x, CTX), x + 0.7 * branch(rule.norm(x), CTX))


def test_the_stack_ends_with_the_norm_of_the_branches(site: MakeSite) -> None:
    assert isinstance(ReZero().end(site()), nn.Identity)
    assert isinstance(ReZero(RMSNorm()).end(site()), nn.RMSNorm)


def test_decode_state_is_that_of_the_branch(site: MakeSite) -> None:
    rows = Rows(torch.zeros(2, dtype=torch.int64), 4)
    assert isinstance(ReZero().wrap(Affine(), site()).start(rows, CTX), KVCache)


def test_dropout_applies_to_the_branch_output(site: MakeSite) -> None:
    rule: Any = ReZero().wrap(Affine(), site(dropout=0.5)).train()
    nn.init.ones_(rule.alpha)
    x = torch.randn(2, 5, 12)
    assert not torch.equal(rule(x, CTX), rule(x, CTX))
    assert bool(torch.isclose(rule(x, CTX), x).any())


def test_new_model_is_the_identity_on_embeddings() -> None:
    model = build(apply("rezero", narang()), seed=1).double()
    assert isinstance(model, EncoderDecoderModel)
    batch = translation([([5, 6, 7], [8, 9]), ([4], [5])])
    table: Any = model.tables.get("target")
    embedded = table.weight[batch.target]
    torch.testing.assert_close(model.hidden(batch), embedded)
    torch.testing.assert_close(model.encode(batch).x[0], table.weight[batch.source])
    expected = (embedded * 16**-0.5 @ table.weight.T).log_softmax(-1)
    torch.testing.assert_close(model.log_probs(batch), expected)


@pytest.mark.parametrize("name", ROWS)
def test_a_new_model_learns_alpha_first(name: str) -> None:
    model = build(apply(name, narang()), seed=1).double().train()
    model.loss(translation([([5, 6, 7], [8, 9]), ([4], [5])])).total.backward()
    alphas = {key: p.grad for key, p in model.named_parameters() if key.endswith("alpha")}
    assert len(alphas) == 2 * 2 + 2 * 3
    decoder = [grad for key, grad in alphas.items() if key.startswith("decoder") and grad is not None]
    assert len(decoder) == 6
    assert all(bool(grad != 0) for grad in decoder)
    inner = [p.grad for key, p in model.named_parameters() if "branch." in key]
    assert all(grad is not None and not bool(grad.any()) for grad in inner)


def test_scalars_are_not_decayed() -> None:
    model = build(apply("rezero", narang()), seed=1)
    decayed, undecayed = groups(named(model), 1e-3, 0.1)
    alphas = {id(p) for key, p in model.named_parameters() if key.endswith("alpha")}
    assert decayed["weight_decay"] == 0.1
    assert alphas <= {id(p) for p in undecayed["params"]}


@pytest.mark.parametrize(("name", "norm"), [*zip(ROWS, (NoNorm, LayerNorm, RMSNorm), strict=True)])
@pytest.mark.parametrize("base", ["narang_base", "t5_base", "transformer_small", "gpt2_small", "bert_base"])
def test_every_base(name: str, norm: type[Norm], base: str) -> None:
    changed: Any = apply(name, preset(base))
    rules = [part for part in walk(changed) if isinstance(part, ReZero)]
    assert rules
    assert {type(rule.norm) for rule in rules} == {norm}
    scales = {part.scale for part in walk(changed) if isinstance(part, SelfAttention | CrossAttention)}
    assert scales == {"sqrt"}
    assert type(changed.init) is (FanIn if isinstance(preset(base).init, T5Init) else type(preset(base).init))


def test_the_base_keeps_the_epsilon_of_its_norm() -> None:
    changed: Any = apply("rezero_rms_norm", preset("narang_base"))
    assert changed.encoder.pattern[0].residual == ReZero(RMSNorm(1e-6))
    assert apply("rezero_layer_norm", preset("narang_base")).encoder.pattern[0].residual == ReZero(  # type: ignore[reportAttributeAccessIssue]
        LayerNorm(eps=1e-6)
    )


def test_an_unscaled_attention_stays_unscaled_if_its_init_has_no_scale() -> None:
    unscaled = swap(preset("gpt2_small"), SelfAttention, lambda a: replace(a, scale="none"))
    changed: Any = apply("rezero", unscaled)
    assert changed.init == GPT2Init()
    assert {part.scale for part in walk(changed) if isinstance(part, SelfAttention)} == {"none"}


def test_no_residual_bases_are_refused() -> None:
    with pytest.raises(SpecError, match=r"^encoder\.pattern\[0\]\.residual\[1\]\.kind: is 'no_residual'"):
        apply("rezero", preset("sahai"))
