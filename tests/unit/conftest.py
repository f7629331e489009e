from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.nn.core import Site
from regard.nn.init import Xavier
from regard.nn.linear import Dense


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Double precision and a fixed seed, so that a formula is met to rounding and a failure comes again."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def site() -> Callable[..., Site]:
    """A site in the middle of an encoder-decoder's decoder; fields can be overridden."""

    def make(**changes: Any) -> Site:
        usual = Site(
            d_model=12,
            heads=3,
            d_head=4,
            d_value=4,
            side="decoder",
            causal=True,
            layer=1,
            depth=4,
            encoder_depth=2,
            decoder_depth=4,
            branches=16,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            linear_=Dense(),
            init_=Xavier(),
        )
        return replace(usual, **changes)

    return make
