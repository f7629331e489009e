import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard import from_record
from regard.batch import Batch
from regard.errors import DataError, SpecError
from regard.models.base import ModelSpec
from regard.models.build import build
from regard.nn.core import Site
from regard.nn.embedding import Sinusoidal, Tokens
from regard.nn.input import Input, InputSpec
from regard.nn.norm import LayerNorm
from regard.nn.position.additive import Learned
from regard.nn.vectors import BySide, Vectors
from regard.nn.vocab.tables import Embeddings, Table
from regard.testing import tiny
from regard.tree import swap, to_record

MakeSite = Callable[..., Site]
IDS = torch.tensor([[3, 1, 4], [1, 5, 2]])
POSITIONS = torch.tensor([[0, 1, 2]])
ROW_POSITIONS = torch.tensor([[0, 1, 2], [4, 0, 1]])


def input_and_table(spec: Tokens, site: Site) -> tuple[Input, Table]:
    return spec.build(site), Embeddings().build(7, spec.table_width(site.d_model), site)


def test_scaled_embedding_plus_sinusoids(site: MakeSite) -> None:
    module, table = input_and_table(Tokens(), site())
    y = module(IDS, table, POSITIONS, 3)
    E = table(torch.arange(7))
    for b in range(2):
        for t in range(3):
            for c in range(12):
                angle = t * 10000 ** (-2 * (c // 2) / 12)
                wave = math.sin(angle) if c % 2 == 0 else math.cos(angle)
                expected = math.sqrt(12) * E[IDS[b, t], c].item() + wave
                assert y[b, t, c].item() == pytest.approx(expected, abs=1e-12)


def test_unscaled_without_position_is_the_table(site: MakeSite) -> None:
    module, table = input_and_table(Tokens(scaled=False, position=None), site())
    assert torch.equal(module(IDS, table, POSITIONS, 3), table(IDS))


def test_rows_may_have_different_positions(site: MakeSite) -> None:
    module, table = input_and_table(Tokens(scaled=False, position=Learned(5)), site())
    vectors = next(module.parameters())
    y = module(IDS, table, ROW_POSITIONS, 5)
    for b in range(2):
        for t in range(3):
            assert torch.equal(y[b, t], table(IDS[b, t]) + vectors[ROW_POSITIONS[b, t]])


@pytest.mark.parametrize("positions", [POSITIONS, ROW_POSITIONS])
def test_concatenation_appends_the_position(positions: torch.Tensor, site: MakeSite) -> None:
    spec = Tokens(scaled=False, position=Sinusoidal(), join="concat", position_width=4)
    assert spec.table_width(12) == 8
    module, table = input_and_table(spec, site())
    y = module(IDS, table, positions, 5)
    waves = Sinusoidal().table(5, 4)
    for b in range(2):
        for t in range(3):
            assert torch.equal(y[b, t, :8], table(IDS[b, t]))
            assert torch.equal(y[b, t, 8:], waves[positions[b % len(positions), t]])


def test_concatenation_contains_addition(site: MakeSite) -> None:
    """C55: W [i; c] with W = [A A] is A (i + c), at twice the width."""
    wide, table = input_and_table(Tokens(scaled=False, join="concat", position_width=6), site())
    narrow, _ = input_and_table(Tokens(scaled=False), site(d_model=6))
    A = torch.randn(6, 4)
    appended, added = wide(IDS, table, POSITIONS, 3), narrow(IDS, table, POSITIONS, 3)
    assert (appended.shape[-1], added.shape[-1]) == (12, 6)
    torch.testing.assert_close(appended @ torch.cat((A, A)), added @ A)


def test_types_and_norm(site: MakeSite) -> None:
    module, table = input_and_table(Tokens(scaled=False, position=None, norm=LayerNorm(), types=2), site())
    type_vectors = module.types
    assert isinstance(type_vectors, torch.nn.Parameter)
    types = torch.tensor([[0, 1, 1], [0, 0, 1]])
    expected = torch.nn.functional.layer_norm(table(IDS) + type_vectors[types], (12,))
    torch.testing.assert_close(module(IDS, table, POSITIONS, 3, types), expected)
    # Without types, all tokens have type 0.
    torch.testing.assert_close(
        module(IDS, table, POSITIONS, 3), module(IDS, table, POSITIONS, 3, torch.zeros(2, 3, dtype=torch.int64))
    )


def test_types_that_would_be_ignored_are_refused(site: MakeSite) -> None:
    module, table = input_and_table(Tokens(), site(path="input"))
    with pytest.raises(SpecError, match=r"^input\.types: this input does not distinguish token types"):
        module(IDS, table, POSITIONS, 3, torch.zeros(2, 3, dtype=torch.int64))


def test_dropout_comes_last_and_only_in_training(site: MakeSite) -> None:
    module, table = input_and_table(replace(Tokens(), norm=LayerNorm()), site(dropout=0.5))
    undropped = module.eval()(IDS, table, POSITIONS, 3)
    dropped = module.train()(IDS, table, POSITIONS, 3)
    assert bool(((dropped == 0) | ((dropped - 2 * undropped).abs() < 1e-12)).all())
    assert bool((dropped == 0).any())


def word_dropped(module: Input, table: Table, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return module(ids, table, positions, 400)


@pytest.mark.parametrize("packed", [False, True])
def test_word_dropout_zeroes_whole_embeddings_and_keeps_positions(packed: bool, site: MakeSite) -> None:
    module, table = input_and_table(Tokens(scaled=False, position=Learned(400), word_dropout=0.3), site())
    ids = torch.arange(7).repeat(2, 400)[:, :400]
    positions = (torch.arange(400) % 50).expand(2, 400) if packed else torch.arange(400)[None]
    vectors = next(module.parameters())[positions]
    words = word_dropped(module.train(), table, ids, positions) - vectors
    dropped = (words.abs() < 1e-12).all(-1)
    torch.testing.assert_close(words[~dropped], table(ids)[~dropped])  # not rescaled
    assert 0.24 < float(dropped.double().mean()) < 0.36  # 4 standard errors of 800 tokens are 0.065
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(word_dropped(module, table, ids, positions), word_dropped(module, table, ids, positions))
    gradient = torch.autograd.grad(word_dropped(module, table, ids, positions).sum(), list(table.parameters()))[0]
    kept = torch.bincount(ids[~dropped], minlength=7).double()
    torch.testing.assert_close(gradient, kept[:, None].expand(7, 12))


def test_word_dropout_keeps_an_appended_position(site: MakeSite) -> None:
    spec = Tokens(scaled=False, join="concat", position_width=4, word_dropout=0.9)
    module, table = input_and_table(spec, site())
    y = word_dropped(module.train(), table, IDS, POSITIONS)
    assert torch.equal(y[..., 8:], Sinusoidal().table(3, 4).expand(2, 3, 4))
    assert bool((y[..., :8] == 0).all(-1).any())


def test_word_dropout_is_off_in_evaluation_and_at_zero(site: MakeSite) -> None:
    module, table = input_and_table(Tokens(word_dropout=0.9), site())
    undropped = input_and_table(Tokens(), site())[0].train()(IDS, table, POSITIONS, 3)
    assert torch.equal(module.eval()(IDS, table, POSITIONS, 3), undropped)


def test_records_from_before_word_dropout_are_read() -> None:
    record = to_record(tiny.decoder_only())
    del record["input"]["word_dropout"]
    assert from_record(record) == tiny.decoder_only()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"join": "concat"}, "position_width"),
        ({"join": "concat", "position": None, "position_width": 4}, "position_width"),
        ({"position_width": 4}, "position_width"),
        ({"types": -1}, "types"),
        ({"word_dropout": -0.1}, "word_dropout"),
        ({"word_dropout": 1.0}, "word_dropout"),
        ({"word_dropout": math.nan}, "word_dropout"),
    ],
)
def test_refusals(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        Tokens(**fields)
    assert raised.value.path == path


@pytest.mark.parametrize("width", [12, 13, -1])
def test_a_position_must_leave_room_for_tokens(width: int) -> None:
    with pytest.raises(SpecError, match=r"^input\.position_width: .* of 12 channels for tokens"):
        Tokens(join="concat", position_width=width).table_width(12)


def with_input(family: str, spec: InputSpec) -> ModelSpec:
    return swap(tiny.families()[family], InputSpec, lambda _: spec)


def test_vectors_are_projected_and_get_positions(site: MakeSite) -> None:
    module = Vectors(2).build(site())
    values = torch.tensor([[[1.0, -2.0], [0.5, 3.0]]], dtype=torch.float32)
    weights = dict(module.named_parameters())
    y = module(values, None, torch.tensor([[0, 1]]), 2)
    for t in range(2):
        for c in range(12):
            angle = t * 10000 ** (-2 * (c // 2) / 12)
            wave = math.sin(angle) if c % 2 == 0 else math.cos(angle)
            linear = sum(weights["linear.weight"][c, i].item() * values[0, t, i].item() for i in range(2))
            expected = linear + weights["linear.bias"][c].item() + wave
            assert y[0, t, c].item() == pytest.approx(expected, abs=1e-12)


def test_a_model_of_vectors_has_no_vocabulary_table() -> None:
    model = build(with_input("sentence_classifier", Vectors(2)))
    assert not [name for name, _ in model.named_parameters() if "tables" in name]
    translator = build(with_input("encoder_decoder", BySide(Vectors(2))))
    assert [name for name, _ in translator.named_parameters() if "tables" in name] == ["tables.tables.target.weight"]


def test_ids_and_vectors_of_wrong_shape_are_refused() -> None:
    ids, vectors = torch.tensor([[3, 4]]), torch.zeros(1, 2, 2)
    reads_vectors = build(with_input("sentence_classifier", Vectors(2)))
    with pytest.raises(DataError, match=r"^source: this model reads vectors \(B, T, 2\), not \(1, 2\) of torch.int64"):
        reads_vectors(Batch(ids))
    with pytest.raises(DataError, match=r"^source: this model reads vectors \(B, T, 2\), not \(1, 2, 3\)"):
        reads_vectors(Batch(torch.zeros(1, 2, 3)))
    with pytest.raises(DataError, match=r"^source: this model reads token ids \(B, T\), not \(1, 2, 2\)"):
        build(tiny.families()["sentence_classifier"])(Batch(vectors))


def test_vectors_are_refused_where_tokens_are_predicted() -> None:
    for name in ("decoder_only", "encoder_decoder"):
        with pytest.raises(SpecError, match=r"^input: a decoder reads the tokens it predicts"):
            with_input(name, Vectors(2))
    with pytest.raises(SpecError, match=r"^task\.kind: 'masked_lm' predicts the tokens that it reads"):
        build(with_input("masked_lm", Vectors(2)))
