from collections.abc import Callable

import pytest
import torch

from regard.nn.core import Site
from regard.nn.init import T5Init
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.terms import Terms
from regard.nn.trace import Trace

MakeSite = Callable[..., Site]
VIEW = View(Mask(), 3, 3, torch.device("cpu"))


def test_site_errors_contain_the_path(site: MakeSite) -> None:
    inner = site().inside("decoder").inside("pattern[0]", layer=3).inside("branches[1]")
    assert inner.path == "decoder.pattern[0].branches[1]"
    assert inner.layer == 3
    error = inner.error("heads", "are odd")
    assert (error.path, error.message) == ("decoder.pattern[0].branches[1].heads", "are odd")


def test_parameters_are_initialised_by_the_init_spec(site: MakeSite) -> None:
    weight = site(init_=T5Init(), d_model=10_000).parameter(50, 40, role="position")
    assert weight.requires_grad
    assert weight.std().item() == pytest.approx(0.01, rel=0.1)


def test_block_receives_its_own_memory(site: MakeSite) -> None:
    first, second, seg = torch.randn(1, 3, 12), torch.randn(1, 3, 12), torch.ones(1, 3, dtype=torch.int64)
    shared = Context(VIEW, VIEW, Memory((first,), seg))
    assert shared.block(1) is shared
    assert Context(VIEW).block(1).memory is None
    memory = Context(VIEW, VIEW, Memory((first, second), seg)).block(1).memory
    assert memory is not None
    assert memory.x == (second,)
    assert memory.seg is seg


def test_with_terms_keeps_only_the_cache_of_the_mask() -> None:
    view = View(Mask(), 3, 3, torch.device("cpu"))
    view.lowered["additive"], view.shared["dense"] = 1, 2
    changed = view.with_terms(Terms())
    assert changed.lowered == {}
    assert changed.shared is view.shared
    assert changed.mask is view.mask


def test_a_trace_records_layers_in_order() -> None:
    trace, first, second = Trace(), torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    trace.add("decoder.self", first)
    trace.add("decoder.self", second)
    assert [id(w) for w in trace.weights["decoder.self"]] == [id(first), id(second)]
