from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples on every machine and no clock: a failure in CI is a failure here.
settings.register_profile(
    "regard", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("regard")


@pytest.fixture(autouse=True, scope="module")
def exact() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
