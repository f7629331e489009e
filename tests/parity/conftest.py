"""Fixtures for double precision, in which a difference of 1e-9 is an error and not rounding."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """Build everything in float64, including constant tables."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def exact(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use float64 also for the norms, rotations and sinusoids that Hugging Face computes in float32."""
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch, "FloatTensor", torch.DoubleTensor)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the global generator, from which other libraries initialise weights."""
    torch.manual_seed(0)
