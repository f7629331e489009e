"""The benchmark of the data: it reads what it says, and says what it found."""

import runpy
import sys
from pathlib import Path

import pytest

from regard.data.batching import Packing

SCRIPT = Path(__file__).parents[3] / "bench" / "data.py"


def test_it_reads_every_label_of_every_epoch(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    table = script["corpus"](tmp_path, 300)
    found = script["read"](table, Packing(2048, 512), 2)
    assert found.labels == 2 * int((table["target"].lengths - 1).sum())
    assert found.places - found.padding == found.labels + 2 * int(table["source"].lengths.sum())


def test_it_prints_a_ratio(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["data.py", "--pairs", "60", "--rounds", "1", "--batching", "buckets"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" pairs:")[0].strip() for line in said[:2]] == ["60", "600"]
    assert said[2].startswith("large / small: ")
