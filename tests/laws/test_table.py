"""Every variant keeps every law at a tiny size, or says which it bends and why."""

import pytest

from regard.models.base import ModelSpec
from regard.testing import LAWS, examine, tiny
from regard.variants import VARIANTS, apply

from .conftest import broken, unchecked

LATER = {"compile", "kernels"}  # they examine the kernels, which the parts are examined with in test_laws
# What the base of the table has already stands on another one.
POST_NORM = {"pre_norm", "t5_bias", "learned", "no_scaling"}
DEEP = {"layers_24", "layers_18", "layers_8", "layers_6"}


def base(name: str) -> ModelSpec:
    """The base of the table, or another that lacks the row, at a tiny size that the row can divide."""
    if name in POST_NORM:
        return tiny.encoder_decoder()
    return tiny.narang(depth=6, d_model=24, heads=6) if name in DEEP else tiny.narang()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_keeps_the_laws(name: str) -> None:
    subject = apply(name, base(name))
    bends = VARIANTS[name].bends
    assert set(bends) <= set(LAWS), f"{name} bends a law that there is not"
    assert broken(name, subject, (law for law in LAWS if law not in LATER | set(bends))) == []
    with unchecked():
        for law in bends:
            verdict = examine(name, subject, [law])[0]
            assert verdict.outcome != "kept", f"{name} says that it bends {law}, and keeps it"
