"""Parameters and FLOPs by part, against arithmetic."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from regard import preset, swap
from regard.batch import Batch
from regard.errors import DataError
from regard.models import cost as costs
from regard.models.build import build
from regard.models.cost import cost
from regard.models.encoder_only import MaskedLM, SentenceClassifier, TokenClassifier
from regard.nn.branches.experts import MixtureOfExperts, Switch
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import GatedDelta
from regard.nn.branches.product_key import ProductKeyMemory
from regard.nn.branches.self_attention import SelfAttention
from regard.testing import tiny
from regard.variants import apply


def test_transformer_flops_and_parameters_match_the_formulas() -> None:
    T, D, F, V, L = 32, 128, 256, 10000, 4
    model_cost = cost(preset("transformer_tiny"), length=T)
    parts = {part.part: part for part in model_cost.parts}
    attention, feedforward = 8 * D * D + 4 * T * D, 4 * D * F
    assert parts["encoder.self_attention"].flops_per_token == L * attention
    assert parts["decoder.cross_attention"].flops_per_token == L * attention
    assert parts["decoder.feed_forward"].flops_per_token == L * feedforward
    assert parts["head"].flops_per_token == 2 * D * V
    assert model_cost.flops_per_token == 3 * L * attention + 2 * L * feedforward + 2 * D * V
    assert parts["encoder.self_attention"].parameters == L * (4 * D * D + 4 * D)
    assert parts["decoder.norms"].parameters == L * 3 * 2 * D
    assert parts["tables"].parameters == V * D


def test_flops_of_convolutional_models_match_the_formulas() -> None:
    T, D, V = 32, 256, 10000
    parts = {part.part: part for part in cost(preset("convs2s"), length=T).parts}
    assert parts["encoder.convolution"].flops_per_token == 4 * 2 * (3 * D) * (2 * D)
    assert parts["decoder.convolution"].flops_per_token == 3 * 2 * (3 * D) * (2 * D)
    assert parts["decoder.attention"].flops_per_token == 3 * (4 * D * D + 4 * T * D)
    assert parts["head"].flops_per_token == 2 * D * V
    parts = {part.part: part for part in cost(preset("bytenet_small"), length=50).parts}
    assert parts["decoder.convolution"].flops_per_token == 10 * 2 * 3 * (D // 2) ** 2
    assert parts["encoder.narrow"].flops_per_token == 10 * 2 * D * (D // 2) * 1.2  # positions per source token
    assert parts["join"].flops_per_token == 2 * 2 * D * D


def test_shared_blocks_count_parameters_once_and_flops_every_time() -> None:
    plain, shared = preset("transformer_tiny"), preset("transformer_tiny", **{"encoder.unique": 1})
    before = {part.part: part for part in cost(plain).parts}["encoder.feed_forward"]
    after = {part.part: part for part in cost(shared).parts}["encoder.feed_forward"]
    assert after.parameters * 4 == before.parameters
    assert after.flops_per_token == before.flops_per_token


@pytest.mark.parametrize("task", [MaskedLM(), SentenceClassifier(3), TokenClassifier(3), None])
def test_every_family_has_a_cost(task: MaskedLM | None) -> None:
    spec = tiny.encoder_only(task) if task else preset("bert_base")
    model_cost = cost(spec, 16)
    assert model_cost.parameters == sum(part.parameters for part in model_cost.parts)
    assert all(part.flops_per_token >= 0 for part in model_cost.parts)
    assert model_cost.flops_per_token > 0


def test_length_must_be_positive() -> None:
    with pytest.raises(DataError, match="length"):
        cost(preset("transformer_tiny"), 0)


def attention_on_a_cpu(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    """FLOPs of the attention kernel on a CPU, which the counter does not know."""
    return 4 * prod(q) * k[-2]


CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_on_a_cpu}
VARIANTS = (
    "adaptive_input", "adaptive_softmax", "decoder_only", "dynamic_conv", "evolved", "factorised_shared", "funnel",
    "grouped_query", "light_conv", "mixture_of_experts", "mixture_of_softmaxes", "parallel", "product_key_memory",
    "shaw", "switch", "synth_dense_plus", "synth_factorised", "synth_random", "transparent", "weighted",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_on_the_meta_device_equal_those_of_a_real_forward_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = apply(name, tiny.narang(d_model=48, heads=12))
    expected = cost(spec, 8)
    monkeypatch.setattr(costs, "BAGS", costs.BAGS | CPU)
    model = build(spec, seed=1).eval().requires_grad_(False)
    ids = torch.ones(1, 8, dtype=torch.int64)
    _, total = costs._counted(model, Batch(target=ids, source=ids if model.spec.reads_source else None))
    assert expected.flops_per_token * 8 == total


@pytest.mark.parametrize("length", [1, 7, 128])
@pytest.mark.parametrize("experts", [4, 32])
def test_only_the_experts_that_a_token_uses_are_counted(experts: int, length: int) -> None:
    D, F = 16, 24
    for branch, used in ((MixtureOfExperts(experts, F), 2), (Switch(experts, F), 1)):
        spec = swap(tiny.decoder_only(), FeedForward, lambda _, branch=branch: branch)
        parts = {part.part: part.flops_per_token for part in cost(spec, length).parts}
        attention = 8 * D * D + 4 * length * D
        assert parts[f"decoder.{branch.kind}"] == 2 * (2 * D * experts + used * 4 * D * F)
        assert parts["decoder.self_attention"] == 2 * attention
        assert cost(spec, length).flops_per_token == sum(parts.values())


def test_flops_of_parts_match_their_formulas() -> None:
    base, D, V = tiny.narang(d_model=48, heads=12), 48, tiny.VOCAB

    def part(name: str, part: str, **changes: Any) -> float:
        spec = swap(apply(name, base), ProductKeyMemory, lambda memory: replace(memory, **changes))
        return {entry.part: entry.flops_per_token for entry in cost(spec, 8).parts}[part]

    H, n, key, knn = 3, 16, 8, 5
    query, scores, read = 2 * D * H * key, 2 * H * 2 * n * key // 2, 2 * H * knn * D
    memory = part("product_key_memory", "decoder.product_key_memory", heads=H, keys=n, d_key=key, knn=knn)
    assert memory == query + scores + read
    assert part("mixture_of_softmaxes", "head") == 15 * (2 * D + 2 * D * D + 2 * D * V)
    assert part("untied", "head") == 2 * D * V
    light = 2 * D * 2 * D + 2 * D * D + 2 * D * D  # gate, pointwise, output; depthwise filters are elementwise
    assert part("light_conv", "decoder.convolution") == 2 * light


def test_flops_of_the_gated_delta_rule_need_no_loop_over_the_tokens() -> None:
    """Reading the state, predicting a value and correcting the state take 2 d_head d_value FLOPs each per token."""
    spec = swap(tiny.decoder_only(), SelfAttention, lambda _: GatedDelta(4, 2, d_head=3, d_value=5))
    D, H, G, K, V = 16, 4, 2, 3, 5
    projections = 2 * D * (2 * G * K + 2 * H * V + 2 * H) + 2 * H * V * D
    for length in (7, 65536):
        parts = {part.part: part.flops_per_token for part in cost(spec, length).parts}
        assert parts["decoder.gated_delta"] == 2 * (projections + 6 * H * K * V)
    model = build(spec, seed=1).eval().requires_grad_(False)
    _, total = costs._counted(model, Batch(torch.ones(1, 7, dtype=torch.int64)))
    assert total == 7 * cost(spec, 7).flops_per_token


def test_recurrent_encoder_needs_two_flops_per_weight() -> None:
    parts = cost(preset("rnn"), 16).parts
    weights = {part.part: part for part in parts if part.part.startswith("encoder")}
    assert sum(part.flops_per_token for part in weights.values()) == pytest.approx(
        sum(2 * part.parameters for part in weights.values()), rel=0.05
    )
