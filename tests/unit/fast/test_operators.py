"""The names of our kernels in the fallback list of `torch.compile`."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from regard.fast import operators


@pytest.mark.parametrize(("version", "listed"), [("2.12.1", True), ("2.13.0", False)])
def test_operators_are_listed_before_torch_2_13(version: str, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = SimpleNamespace(FALLBACK_ALLOW_LIST=set())
    monkeypatch.setitem(sys.modules, "torch._inductor.lowering", lowering)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    operators.introduce()
    names = {f"regard::{name}" for name in operators.NAMES}
    assert (names if listed else set()) == lowering.FALLBACK_ALLOW_LIST
