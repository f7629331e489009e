"""Every variant keeps every law at a tiny size, except for the laws that it declares to bend."""

import pytest

from regard.models.base import ModelSpec
from regard.testing import LAWS, examine, tiny
from regard.variants import VARIANTS, apply

from .conftest import broken, unchecked

LATER = {"compile", "kernels"}  # these laws examine kernels, for which test_laws examines the parts
# Variants that the base of the table already contains need another base.
POST_NORM = {"pre_norm", "t5_bias", "learned", "no_scaling"}
DEEP = {"layers_24", "layers_18", "layers_8", "layers_6"}


def base(name: str) -> ModelSpec:
    """Return the base of the table, or a base without the variant, at a tiny size that suits the variant."""
    if name in POST_NORM:
        return tiny.encoder_decoder()
    return tiny.narang(depth=6, d_model=24, heads=6) if name in DEEP else tiny.narang()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_keeps_the_laws(name: str) -> None:
    subject = apply(name, base(name))
    bends = VARIANTS[name].bends
    assert set(bends) <= set(LAWS), f"{name} bends a law that does not exist"
    assert broken(name, subject, (law for law in LAWS if law not in LATER | set(bends))) == []
    with unchecked():
        for law in bends:
            verdict = examine(name, subject, [law])[0]
            assert verdict.outcome != "kept", f"{name} declares that it bends {law}, but keeps it"
