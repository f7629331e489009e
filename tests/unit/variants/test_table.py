"""Every row of Narang et al. 2021 has exactly the published number of parameters."""

from dataclasses import replace
from typing import Any

import pytest

from regard.models.build import count
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.embedding import Tokens
from regard.nn.position.additive import Learned
from regard.nn.stacks.plain import Plain
from regard.presets import preset
from regard.tree import swap
from regard.variants import VARIANTS, apply

ROWS = {name: variant for name, variant in VARIANTS.items() if variant.row is not None}


def relative() -> EncoderDecoder:
    base = preset("narang_base")
    assert isinstance(base, EncoderDecoder)
    return base


def learned(keep_bias: bool) -> EncoderDecoder:
    """Return the paper's second base, with learned positions shared by encoder and decoder."""
    base = relative()
    base = replace(base, input=Tokens(scaled=False, position=Learned(512)))
    if not keep_bias:
        base = swap(base, Plain, lambda stack: replace(stack, position=None))
    return base


@pytest.mark.parametrize("name", ROWS)
def test_exact_parameters(name: str) -> None:
    row = ROWS[name].row
    assert row is not None
    assert count(apply(name, relative())) == row.parameters


@pytest.mark.parametrize("name", ROWS)
def test_exact_parameters_with_learned_positions(name: str) -> None:
    row = ROWS[name].row
    assert row is not None
    changed: Any = apply(name, learned(keep_bias=name.startswith("synth")))
    # One table of positions wherever encoder and decoder share their input.
    changed = replace(changed, sharing=replace(changed.sharing, positions=changed.sharing.source_target))
    assert count(changed) == row.learned


def test_the_rows_are_numbered_from_1_to_52() -> None:
    numbers = sorted(variant.row.number for variant in ROWS.values() if variant.row is not None)
    assert numbers == sorted(set(numbers))
