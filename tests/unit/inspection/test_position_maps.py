import math
from dataclasses import replace

import pytest
import torch

from regard.inspection.position_maps import position_maps
from regard.models.base import Model
from regard.models.build import build
from regard.nn.embedding import Tokens
from regard.nn.position.additive import Learned
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi, DistanceBias, T5Bias, alibi_slopes
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.stacks.plain import Plain
from regard.testing import tiny
from regard.tree import swap


def with_position(position: Position) -> Model:
    bare = swap(tiny.decoder_only(), Tokens, lambda tokens: replace(tokens, position=None))
    return build(swap(bare, Plain, lambda stack: replace(stack, position=position)))


def test_sinusoids_are_those_of_the_formula() -> None:
    (found,) = position_maps(build(tiny.decoder_only()), 5)
    assert found.scheme == "Sinusoidal"
    assert found.vectors is not None
    for position in range(5):
        for k in range(8):
            angle = position * 10000 ** (-2 * k / 16)
            assert float(found.vectors[position, 2 * k]) == pytest.approx(math.sin(angle), abs=1e-6)
            assert float(found.vectors[position, 2 * k + 1]) == pytest.approx(math.cos(angle), abs=1e-6)


def test_similarity_is_the_cosine_of_two_vectors() -> None:
    (found,) = position_maps(build(tiny.decoder_only()), 4)
    assert found.vectors is not None
    assert found.similarity is not None
    a, b = found.vectors[1], found.vectors[3]
    assert float(found.similarity[1, 3]) == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-6)


def test_learned_vectors_are_no_more_than_the_table_has() -> None:
    spec = swap(tiny.decoder_only(), Tokens, lambda tokens: replace(tokens, position=Learned(6)))
    model = build(spec)
    (found,) = position_maps(model, 50)
    assert found.vectors is not None
    assert found.vectors.shape == (6, 16)


def test_alibi_falls_with_the_distance() -> None:
    (found,) = position_maps(with_position(ALiBi()), 6)
    assert found.bias is not None
    for head, slope in enumerate(alibi_slopes(4)):
        for i in range(6):
            for j in range(6):
                assert float(found.bias[head, i, j]) == pytest.approx(-slope * abs(i - j), abs=1e-6)


@pytest.mark.parametrize("position", [T5Bias(), DistanceBias(3)])
def test_bias_depends_on_the_distance_alone(position: Position) -> None:
    model = with_position(position)
    (found,) = position_maps(model, 6)
    assert found.bias is not None
    assert found.bias.shape == (4, 6, 6)
    weight = dict(model.named_parameters())[f"{found.module}.weight"].float()
    for i in range(1, 6):
        torch.testing.assert_close(found.bias[:, i, i - 1], found.bias[:, 1, 0])
    at = position.bucket(torch.tensor(-1), True) if isinstance(position, T5Bias) else 3 - 1
    torch.testing.assert_close(found.bias[:, 1, 0], weight[:, at])


def test_rotary_similarity_is_the_mean_cosine_of_the_angle_between_two_positions() -> None:
    (found,) = position_maps(with_position(Rotary()), 5)
    assert found.similarity is not None
    for i in range(5):
        for j in range(5):
            expected = sum(math.cos((i - j) * 10000 ** (-2 * k / 4)) for k in range(2)) / 2
            assert float(found.similarity[i, j]) == pytest.approx(expected, abs=1e-6)


def test_shaw_has_a_vector_for_every_distance() -> None:
    (found,) = position_maps(with_position(Shaw(3)), 5)
    assert found.vectors is not None
    assert found.vectors.shape == (7, 4)


@pytest.mark.parametrize("name", ["recurrent", "bytenet"])
def test_models_without_positions_give_none(name: str) -> None:
    assert position_maps(build(tiny.families()[name]), 5) == []
