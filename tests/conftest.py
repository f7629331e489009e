"""Shapes in signatures are checked while tests run: a wrong one fails where it is passed, with a sentence."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from jaxtyping import install_import_hook

# A lent GPU machine has no beartype; `make setup` always installs it.
if find_spec("beartype"):
    install_import_hook("regard", "beartype.beartype")

from tests.learning import Learned


@pytest.fixture(autouse=True, scope="session")
def no_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test knows what another prepared, nor leaves anything in the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("REGARD_CACHE_SIZE", "0")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what compares something learned with a threshold, for bench/margins.py."""
    for item in items:
        if "learned" in getattr(item, "fixturenames", ()):
            item.add_marker("learns")


@pytest.fixture
def learned(request: pytest.FixtureRequest) -> Learned:
    """Asserts what was learned, with seeds to learn it from."""
    return Learned(request.node.nodeid)
