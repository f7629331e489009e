from collections.abc import Callable

import torch

from regard.nn.core import Site, View
from regard.nn.mask import Mask
from regard.nn.position.bias import ALiBi
from regard.nn.sight import Window
from regard.nn.stacks.base import prepare

CPU = torch.device("cpu")


def test_nothing_to_prepare_leaves_the_view_alone() -> None:
    view = View(Mask(causal=True), 3, 3, CPU)
    assert prepare(view, None, None, False) is view


def test_sight_and_strictness_join_the_mask_and_forget_what_was_lowered() -> None:
    view = View(Mask(causal=True), 3, 3, CPU)
    view.lowered["x"] = view.shared["x"] = 1
    prepared = prepare(view, None, Window(2), True)
    assert prepared.mask == Mask(causal=True, strict=True, sight=Window(2))
    assert (prepared.lowered, prepared.shared) == ({}, {})
    assert view.mask == Mask(causal=True)


def test_positions_join_as_terms(site: Callable[..., Site]) -> None:
    module = ALiBi().build(site())
    prepared = prepare(View(Mask(causal=True, start=2), 1, 3, CPU), module, None, False)
    assert prepared.terms is not None
    assert prepared.terms.bias is not None
    assert prepared.terms.bias.shape == (1, 3, 1, 3)
