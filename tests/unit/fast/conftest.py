from tests.unit.nn.conftest import case, is_visible, naive

__all__ = ["case", "is_visible", "naive"]
