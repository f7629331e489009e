"""Double precision, in which a difference of 1e-9 is a fault and not rounding."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """Whatever is built inside is built in float64, constant tables included."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def exact(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 throughout: also the norms, rotations and sinusoids that Hugging Face makes in float32 otherwise."""
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch, "FloatTensor", torch.DoubleTensor)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Other libraries draw their first weights from the global generator."""
    torch.manual_seed(0)
