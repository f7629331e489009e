import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.input import Input, Tokens
from regard.nn.norm import LayerNorm
from regard.nn.position.additive import Learned, Sinusoidal
from regard.nn.vocab.tables import Embeddings, Table

MakeSite = Callable[..., Site]
IDS = torch.tensor([[3, 1, 4], [1, 5, 2]])
PLACES = torch.tensor([[0, 1, 2]])
OWN_PLACES = torch.tensor([[0, 1, 2], [4, 0, 1]])


def made(spec: Tokens, site: Site) -> tuple[Input, Table]:
    return spec.build(site), Embeddings().build(7, spec.table_width(site.d_model), site)


def test_scaled_embedding_plus_sinusoids(site: MakeSite) -> None:
    module, table = made(Tokens(), site())
    y = module(IDS, table, PLACES, 3)
    E = table.embed(torch.arange(7))
    for b in range(2):
        for t in range(3):
            for c in range(12):
                angle = t * 10000 ** (-2 * (c // 2) / 12)
                wave = math.sin(angle) if c % 2 == 0 else math.cos(angle)
                expected = math.sqrt(12) * E[IDS[b, t], c].item() + wave
                assert y[b, t, c].item() == pytest.approx(expected, abs=1e-12)


def test_unscaled_without_position_is_the_table(site: MakeSite) -> None:
    module, table = made(Tokens(scaled=False, position=None), site())
    assert torch.equal(module(IDS, table, PLACES, 3), table.embed(IDS))


def test_positions_of_each_row(site: MakeSite) -> None:
    module, table = made(Tokens(scaled=False, position=Learned(5)), site())
    vectors = next(module.parameters())
    y = module(IDS, table, OWN_PLACES, 5)
    for b in range(2):
        for t in range(3):
            assert torch.equal(y[b, t], table.embed(IDS[b, t]) + vectors[OWN_PLACES[b, t]])


@pytest.mark.parametrize("places", [PLACES, OWN_PLACES])
def test_concatenation_appends_the_position(places: torch.Tensor, site: MakeSite) -> None:
    spec = Tokens(scaled=False, position=Sinusoidal(), join="concat", position_width=4)
    assert spec.table_width(12) == 8
    module, table = made(spec, site())
    y = module(IDS, table, places, 5)
    waves = Sinusoidal().table(5, 4)
    for b in range(2):
        for t in range(3):
            assert torch.equal(y[b, t, :8], table.embed(IDS[b, t]))
            assert torch.equal(y[b, t, 8:], waves[places[b % len(places), t]])


def test_concatenation_contains_addition(site: MakeSite) -> None:
    """C55: W [i; c] with W = [A A] is A (i + c), at twice the width of the stream."""
    wide, table = made(Tokens(scaled=False, join="concat", position_width=6), site())
    narrow, _ = made(Tokens(scaled=False), site(d_model=6))
    A = torch.randn(6, 4)
    appended, added = wide(IDS, table, PLACES, 3), narrow(IDS, table, PLACES, 3)
    assert (appended.shape[-1], added.shape[-1]) == (12, 6)
    torch.testing.assert_close(appended @ torch.cat((A, A)), added @ A)


def test_types_and_norm(site: MakeSite) -> None:
    module, table = made(Tokens(scaled=False, position=None, norm=LayerNorm(), types=2), site())
    kinds = module.types
    assert isinstance(kinds, torch.nn.Parameter)
    types = torch.tensor([[0, 1, 1], [0, 0, 1]])
    expected = torch.nn.functional.layer_norm(table.embed(IDS) + kinds[types], (12,))
    torch.testing.assert_close(module(IDS, table, PLACES, 3, types), expected)
    # Text of one kind needs no types: they are all 0.
    torch.testing.assert_close(
        module(IDS, table, PLACES, 3), module(IDS, table, PLACES, 3, torch.zeros(2, 3, dtype=torch.int64))
    )


def test_types_that_would_be_ignored_are_refused(site: MakeSite) -> None:
    module, table = made(Tokens(), site(path="input"))
    with pytest.raises(SpecError, match=r"^input\.types: this input does not tell kinds of tokens apart"):
        module(IDS, table, PLACES, 3, torch.zeros(2, 3, dtype=torch.int64))


def test_dropout_comes_last_and_only_in_training(site: MakeSite) -> None:
    module, table = made(replace(Tokens(), norm=LayerNorm()), site(dropout=0.5))
    plain = module.eval()(IDS, table, PLACES, 3)
    dropped = module.train()(IDS, table, PLACES, 3)
    assert bool(((dropped == 0) | ((dropped - 2 * plain).abs() < 1e-12)).all())
    assert bool((dropped == 0).any())


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"join": "concat"}, "position_width"),
        ({"join": "concat", "position": None, "position_width": 4}, "position_width"),
        ({"position_width": 4}, "position_width"),
        ({"types": -1}, "types"),
    ],
)
def test_refusals(given: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        Tokens(**given)
    assert raised.value.path == path


@pytest.mark.parametrize("width", [12, 13, -1])
def test_a_position_must_leave_room_for_tokens(width: int) -> None:
    with pytest.raises(SpecError, match=r"^input\.position_width: .* of 12 channels for tokens"):
        Tokens(join="concat", position_width=width).table_width(12)
