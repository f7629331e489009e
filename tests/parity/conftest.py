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


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Other libraries draw their first weights from the global generator."""
    torch.manual_seed(0)
