"""The names of our kernels in torch.compile's list of known operators."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from regard.fast import operators


@pytest.mark.parametrize(("version", "announced"), [("2.12.1", True), ("2.13.0", False)])
def test_operators_are_announced_before_torch_2_13(
    version: str, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowering = SimpleNamespace(FALLBACK_ALLOW_LIST=set())
    monkeypatch.setitem(sys.modules, "torch._inductor.lowering", lowering)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    operators.introduce()
    names = {f"regard::{name}" for name in operators.NAMES}
    assert (names if announced else set()) == lowering.FALLBACK_ALLOW_LIST
