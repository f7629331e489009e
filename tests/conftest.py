"""Fixtures of all tests. Tensor shapes in type annotations are checked while tests run."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from jaxtyping import install_import_hook

# A borrowed GPU machine may have no beartype; `make setup` always installs it.
if find_spec("beartype"):
    install_import_hook("regard", "beartype.beartype")

from tests.learning import Learned


@pytest.fixture(autouse=True, scope="session")
def no_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache, so that tests neither share prepared text nor write to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("REGARD_CACHE_SIZE", "0")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that compare a trained model with a threshold (`learns`), for bench/margins.py."""
    for item in items:
        if "learned" in getattr(item, "fixturenames", ()):
            item.add_marker("learns")


@pytest.fixture
def learned(request: pytest.FixtureRequest) -> Learned:
    """Return the object that compares a result of training with a threshold."""
    return Learned(request.node.nodeid)
