from tests.unit.nn.conftest import case, naive, seen

__all__ = ["case", "naive", "seen"]
