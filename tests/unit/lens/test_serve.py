from dataclasses import replace
from pathlib import Path

import pytest

from regard.errors import DataError
from regard.lens.serve import named
from tests.unit.lens.conftest import Make


def test_models_are_named_after_their_folders(make: Make) -> None:
    run = make("translator")
    one, two, three = (replace(run, path=Path(path)) for path in ("/runs/a/mine", "/runs/b/other", "/runs/b/mine"))
    assert list(named([one, two])) == ["mine", "other"]
    assert list(named([one, three])) == ["/runs/a/mine", "/runs/b/mine"]
    with pytest.raises(DataError, match="is given twice"):
        named([one, two, one])
