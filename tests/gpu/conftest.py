"""What every test on a GPU begins with."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """torch and its compiler warn about themselves; in a capture, a warning that is an error would break it off."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def as_regard_runs() -> None:
    """The settings of `choose_device`, and products in full precision."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")
