import pytest

from regard.fast import flex
from tests.unit.nn.conftest import case, is_visible, naive

__all__ = ["case", "is_visible", "naive"]


@pytest.fixture(autouse=True)
def flex_runs_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing FlexAttention on a CPU takes a third of a second per shape and fails at the shape checks of tests."""
    monkeypatch.setattr(flex.flexible, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
