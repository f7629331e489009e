"""Settings of all tests on a GPU."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Do not turn warnings into errors: torch and its compiler emit warnings, and an error would end a capture."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def device_settings() -> None:
    """Use the settings of `choose_device`, and matrix products in full precision."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")
