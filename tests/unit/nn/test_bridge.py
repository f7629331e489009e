from collections.abc import Callable

import torch

from regard.nn.bridge import Last
from regard.nn.core import Site
from regard.nn.stacks.base import StackOut


def test_last_returns_the_last_layer_and_its_padding(site: Callable[..., Site]) -> None:
    x, seg = torch.randn(2, 3, 12), torch.ones(2, 3, dtype=torch.int64)
    memory = Last().build(3, 4, site())(StackOut(x, seg))
    assert len(memory.x) == 1
    assert memory.x[0] is x
    assert memory.seg is seg
    assert not Last.needs_layers
