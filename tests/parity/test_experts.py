"""Hugging Face: the sparse layer of Switch Transformers, and the top-2 router of NLLB; PyPI mixture-of-experts."""

from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
import torch
from mixture_of_experts import MoE
from torch import Tensor, nn
from transformers import NllbMoeConfig, SwitchTransformersConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeTop2Router
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from regard import build
from regard.models.decoder_only import DecoderOnly
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.experts import MixtureOfExperts, Switch
from regard.nn.mask import Context, Mask, View
from regard.nn.stacks.plain import Plain
from regard.testing import tiny
from regard.weights import Input, computed, copy_from, transpose

D, F, E, B, T = 12, 10, 4, 3, 18

pytestmark = pytest.mark.usefixtures("float64")


def ours(spec: BranchSpec) -> Any:
    model = build(DecoderOnly(vocab=tiny.VOCAB, d_model=D, heads=2, decoder=Plain((Block((spec,)),), 1))).double()
    branch = next(module for module in model.modules() if hasattr(module, "router"))
    for parameter in branch.parameters():
        nn.init.normal_(parameter)
    return branch


def context(seg: Tensor | None = None) -> Context:
    return Context(View(Mask(q_seg=seg, k_seg=seg), T, T, torch.device("cpu")))


@pytest.mark.parametrize("training", [False, True])
def test_switch(training: bool) -> None:
    """Outputs and gradients: no tokens dropped in evaluation, at most 4 tokens per sequence and expert in training."""
    branch = ours(Switch(E, F, capacity=0.5, group=T, jitter=0.0)).train(training)
    config = SwitchTransformersConfig(
        d_model=D,
        d_ff=F,
        num_experts=E,
        expert_capacity=4 if training else T,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
    )
    theirs: Any = SwitchTransformersSparseMLP(config).double().train(training)
    theirs.router.dtype = torch.float64  # their configuration supports at most float32
    mapping: dict[str, Input] = {"router.classifier.weight": "router"}
    for e in range(E):
        mapping[f"experts.expert_{e}.wi.weight"] = computed(itemgetter(e), "up")
        mapping[f"experts.expert_{e}.wo.weight"] = computed(itemgetter(e), "down")
    copy_from(theirs, mapping, branch)
    x = torch.randn(B, T, D)
    output, expected = branch(x, context()), theirs(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert bool((output == 0).all(-1).any()) is training
    probe = torch.randn(B, T, D)
    (output * probe).sum().backward()
    (expected * probe).sum().backward()
    torch.testing.assert_close(branch.router.grad, theirs.router.classifier.weight.grad, rtol=0, atol=1e-10)
    for e in range(E):
        expert = theirs.experts[f"expert_{e}"]
        torch.testing.assert_close(branch.up.grad[e], expert.wi.weight.grad, rtol=0, atol=1e-10)
        torch.testing.assert_close(branch.down.grad[e], expert.wo.weight.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_top_2(training: bool, padded: bool) -> None:
    """The weight of every expert for every token, then the experts themselves."""
    spec = MixtureOfExperts(E, F, capacity=0.6, group=B * T, threshold=0.0)
    room = int(B * T * 0.6 / E)
    branch = ours(spec).train(training)
    config = NllbMoeConfig(
        d_model=D,
        num_experts=E,
        expert_capacity=room if training else B * T,
        router_ignore_padding_tokens=False,
        second_expert_policy="all",
        normalize_router_prob_before_dropping=True,
        batch_prioritized_routing=False,
        moe_eval_capacity_token_fraction=-1.0,
    )
    theirs = NllbMoeTop2Router(config).double().train(training)
    theirs.dtype = torch.float64
    copy_from(theirs, {"classifier.weight": branch.router})
    seg = torch.ones(B, T, dtype=torch.int64)
    if padded:
        seg[1, 5:] = seg[2, 11:] = 0
    x = torch.randn(B, T, D)
    _, weights, _ = theirs(x.flatten(0, 1), (seg == 0).flatten())
    experts = torch.einsum("xd,efd->xef", x.flatten(0, 1), branch.up).relu()
    expected = torch.einsum("xe,xef,edf->xd", weights, experts, branch.down).view(B, T, D)
    output = branch(x, context(seg))
    # They divide by p_1 + p_2, we by p_1 + p_2 + 1e-9, as Narang et al. did.
    torch.testing.assert_close(output, expected, rtol=1e-8, atol=1e-8)
    if training:
        assert int(branch.report()["dropped_tokens"]) == 2 * int((seg != 0).sum()) - int((weights > 0).sum())


def test_top_2_drops_in_training() -> None:
    """Tokens are dropped, so that the comparison above tests dropping."""
    branch = ours(replace(MixtureOfExperts(E, F), capacity=0.6, group=B * T, threshold=0.0)).train()
    branch(torch.randn(B, T, D), context())
    assert int(branch.report()["dropped_tokens"]) > 0


@pytest.mark.parametrize("training", [False, True])
def test_mixture_of_experts(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transcription of the code that Narang et al. ran: output, loss and gradients; groups are sequences."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # they count in float32 otherwise
    branch = ours(MixtureOfExperts(E, F, capacity=0.9, group=T, threshold=0.0)).train(training)
    every: dict[str, Any] = {"second_policy_train": "all", "second_policy_eval": "all"}
    room: dict[str, Any] = {"capacity_factor_train": 0.9, "capacity_factor_eval": float(E)}
    theirs: Any = MoE(D, E, F, **every, **room).double().train(training)
    mapping = {"gate.w_gating": "router", "experts.w1": "up", "experts.w2": "down"}
    copy_from(theirs, {name: transpose(ours) for name, ours in mapping.items()}, branch)
    x, losses = torch.randn(B, T, D), []
    output = branch(x, replace(context(), losses=losses))
    expected, loss = theirs(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(losses[0], loss, rtol=0, atol=1e-12)
    probe = torch.randn(B, T, D)
    ((output * probe).sum() + losses[0]).backward()
    ((expected * probe).sum() + loss).backward()
    torch.testing.assert_close(branch.router.grad, theirs.gate.w_gating.grad.T, rtol=0, atol=1e-9)
    torch.testing.assert_close(branch.up.grad, theirs.experts.w1.grad.mT, rtol=0, atol=1e-9)
    torch.testing.assert_close(branch.down.grad, theirs.experts.w2.grad.mT, rtol=0, atol=1e-9)
    assert (int(branch.report()["dropped_tokens"]) > 0) is training
