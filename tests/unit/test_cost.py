"""Parameters and FLOPs by part, against arithmetic."""

import pytest

from regard import preset
from regard.cost import cost
from regard.errors import DataError
from regard.models.encoder_only import MaskedLM, SentenceClassifier, TokenClassifier
from regard.testing import tiny


def test_a_transformer_costs_what_the_arithmetic_says() -> None:
    T, D, F, V, L = 32, 128, 256, 10000, 4
    costs = cost(preset("transformer_tiny"), length=T)
    parts = {part.part: part for part in costs.parts}
    attention, feedforward = 8 * D * D + 4 * T * D, 4 * D * F
    assert parts["encoder.self_attention"].flops_per_token == L * attention
    assert parts["decoder.cross_attention"].flops_per_token == L * attention
    assert parts["decoder.feed_forward"].flops_per_token == L * feedforward
    assert parts["head"].flops_per_token == 2 * D * V
    assert costs.flops_per_token == 3 * L * attention + 2 * L * feedforward + 2 * D * V
    assert parts["encoder.self_attention"].parameters == L * (4 * D * D + 4 * D)
    assert parts["decoder.norms"].parameters == L * 3 * 2 * D
    assert parts["tables"].parameters == V * D


def test_convolutions_cost_what_the_arithmetic_says() -> None:
    T, D, V = 32, 256, 10000
    parts = {part.part: part for part in cost(preset("convs2s"), length=T).parts}
    assert parts["encoder.convolution"].flops_per_token == 4 * 2 * (3 * D) * (2 * D)
    assert parts["decoder.convolution"].flops_per_token == 3 * 2 * (3 * D) * (2 * D)
    assert parts["decoder.attention"].flops_per_token == 3 * (4 * D * D + 4 * T * D)
    assert parts["head"].flops_per_token == 2 * D * V
    parts = {part.part: part for part in cost(preset("bytenet_small"), length=50).parts}
    assert parts["decoder.convolution"].flops_per_token == 10 * 2 * 3 * (D // 2) ** 2
    assert parts["encoder.narrow"].flops_per_token == 10 * 2 * D * (D // 2) * 1.2  # columns for a token
    assert parts["join"].flops_per_token == 2 * 2 * D * D


def test_shared_blocks_cost_parameters_once_and_flops_every_time() -> None:
    plain, shared = preset("transformer_tiny"), preset("transformer_tiny", **{"encoder.unique": 1})
    before = {part.part: part for part in cost(plain).parts}["encoder.feed_forward"]
    after = {part.part: part for part in cost(shared).parts}["encoder.feed_forward"]
    assert after.parameters * 4 == before.parameters
    assert after.flops_per_token == before.flops_per_token


@pytest.mark.parametrize("task", [MaskedLM(), SentenceClassifier(3), TokenClassifier(3), None])
def test_every_family_has_a_cost(task: MaskedLM | None) -> None:
    spec = tiny.encoder_only(task) if task else preset("bert_base")
    costs = cost(spec, 16)
    assert costs.parameters == sum(part.parameters for part in costs.parts)
    assert all(part.flops_per_token >= 0 for part in costs.parts)
    assert costs.flops_per_token > 0


def test_length_must_be_positive() -> None:
    with pytest.raises(DataError, match="length"):
        cost(preset("transformer_tiny"), 0)
