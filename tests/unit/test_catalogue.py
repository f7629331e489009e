from typing import Any

import pytest

from regard.catalogue import PARTS, SLOTS, edited, from_record
from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.nn.norm import Norm
from regard.nn.position.bias import ALiBi
from regard.nn.residual import PreNorm
from regard.nn.rms_norm import RMSNorm
from regard.nn.scale_norm import ScaleNorm
from regard.presets import t5_base
from regard.tree import Spec, to_record


def test_parts_lists_every_slot_by_kind() -> None:
    assert list(PARTS.values()) == [part for parts in SLOTS.values() for part in parts]
    assert all(PARTS[kind].kind == kind for kind in PARTS)


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.__name__)
def test_every_part_is_a_subclass_of_its_slot(slot: type[Spec]) -> None:
    assert all(issubclass(part, slot) for part in SLOTS[slot])


def test_from_record_with_and_without_a_slot() -> None:
    assert from_record({"kind": "rms_norm", "eps": 1e-3}) == RMSNorm(1e-3)
    assert from_record(Norm, {"kind": "rms_norm"}) == RMSNorm()
    with pytest.raises(SpecError, match=r"^kind: 'rms_norm' is not a ModelSpec; known names: 'bytenet', 'convs2s'"):
        from_record(ModelSpec, {"kind": "rms_norm"})


def test_code_in_a_record_needs_trust() -> None:
    record = to_record(t5_base())
    record["decoder"]["pattern"][0]["residual"]["norm"] = {"kind": "regard.nn.scale_norm:ScaleNorm", "eps": 0.5}
    with pytest.raises(SpecError, match=r"^decoder\.pattern\[0\]\.residual\.norm\.kind: .*would import code"):
        from_record(record)
    assert from_record(record, trust_code=True).decoder.pattern[0].residual == PreNorm(ScaleNorm(0.5))


@pytest.mark.parametrize(
    ("path", "value", "where", "words"),
    [
        ("decoder.pattern[0].branches[2].d_hiden", 8, "decoder.pattern[0].branches[2].d_hiden", "'d_hidden'?"),
        ("decoder.pattern[0].branches[2].d_hidden", True, "decoder.pattern[0].branches[2].d_hidden", "whole number"),
        ("decoder.pattern[0].branches[2].d_hidden", 0, "decoder.pattern[0].branches[2].d_hidden", "at least 1"),
        (
            "decoder.pattern[0].branches[2]",
            {"kind": "feedforward", "d_hidden": 0},
            "decoder.pattern[0].branches[2].d_hidden",
            "at least 1",
        ),
        ("decoder.pattern[0].branches[0].scale", "sqr", "decoder.pattern[0].branches[0].scale", "'sqrt'?"),
        ("decoder.position", "t5_bis", "decoder.position.kind", "did you mean 't5_bias'?"),
        ("decoder.position", "layer_norm", "decoder.position.kind", "'layer_norm' is not a Position"),
        ("decoder.pattern[0].residual", ["pre_norm"] * 2, "decoder.pattern[0].residual", "2 rules for 3 branches"),
        (
            "decoder.pattern[0].residual",
            ["pre_norm", "pre_norm", {"kind": "pre_norm", "norm": "layer_nom"}],
            "decoder.pattern[0].residual[2].norm.kind",
            "did you mean 'layer_norm'?",
        ),
        ("dropout", "0.1", "dropout", "needs a number, not '0.1' (str)"),
        ("encoder.pattern", [], "encoder.pattern", "at least one block"),
    ],
)
def test_invalid_edits_are_refused_with_the_path(path: str, value: Any, where: str, words: str) -> None:
    with pytest.raises(SpecError) as raised:
        edited(t5_base(), {path: value})
    assert raised.value.path == where
    assert words in str(raised.value)


def test_edits_accept_records_and_kind_names() -> None:
    spec = edited(t5_base(), {"decoder.position": "alibi", "encoder.depth": 3, "d_model": 96, "heads": 6})
    assert spec.decoder.position == ALiBi()  # type: ignore[reportAttributeAccessIssue]
    assert (spec.encoder.blocks(), spec.d_model, spec.heads) == (3, 96, 6)
