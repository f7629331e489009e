"""Tiny models and batches for the laws."""

from dataclasses import replace

import pytest
import torch

from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.models.build import count
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.position.rotary import Rotary
from regard.nn.recurrent import GRU
from regard.nn.rms_norm import RMSNorm
from regard.testing import tiny
from regard.tree import Spec, walk


@pytest.mark.parametrize("family", tiny.families())
def test_models_are_tiny(family: str) -> None:
    assert count(tiny.families()[family]) < 30_000


@pytest.mark.parametrize("part", [RMSNorm(), Rotary(), SelfAttention(bias=False), GRU()], ids=lambda part: part.kind)
def test_models_around_a_part_contain_it(part: Spec) -> None:
    models = tiny.around(part)
    assert models
    assert all(part in walk(model) for model in models.values())


def test_a_part_that_fits_no_model_is_refused() -> None:
    with pytest.raises(SpecError, match="Spec fits no slot"):
        tiny.around(Spec())


@pytest.mark.parametrize("spec", [tiny.encoder_decoder(), tiny.decoder_only()], ids=["encoder_decoder", "decoder_only"])
def test_a_packed_batch_has_the_tokens_of_a_padded_one(spec: ModelSpec) -> None:
    rows = tiny.examples(spec, 3)
    padded, packed = tiny.collate(spec, rows, extra=2), tiny.collate(spec, rows, packed=True)
    assert padded.target_seg is not None
    assert packed.target_seg is not None
    assert padded.target.shape == (3, max(len(row.target) for row in rows) + 2)
    assert packed.target.shape == (1, sum(len(row.target) for row in rows))
    assert torch.equal(padded.target[padded.target_seg != 0], packed.target[packed.target_seg != 0])
    assert (padded.source is not None) == spec.reads_source


def test_examples_are_determined_by_their_seed() -> None:
    spec = tiny.decoder_only()
    assert tiny.examples(spec, 4) == tiny.examples(spec, 4)
    assert tiny.examples(spec, 4) != tiny.examples(spec, 4, seed=1)


def test_order_matters_if_and_only_if_there_are_positions() -> None:
    positioned = tiny.streams(tiny.decoder_only())["target"]
    assert tiny.order(positioned, causal=True)[0] == "sinusoidal"
    bare = replace(tiny.decoder_only(), input=replace(tiny.decoder_only().input, position=None))  # type: ignore[reportCallIssue]
    assert tiny.order(tiny.streams(bare)["target"], causal=True) == (None, False)
