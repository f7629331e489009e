"""bench/data.py: it reads every label of the corpus, and prints the ratio of two corpus sizes."""

import runpy
import sys
from pathlib import Path

import pytest

from regard.data.batching import Packing

SCRIPT = Path(__file__).parents[3] / "bench" / "data.py"


def test_every_label_of_every_epoch_is_read(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    table = script["corpus"](tmp_path, 300)
    counts = script["read"](table, Packing(2048, 512), 2)
    assert counts.labels == 2 * int((table["target"].lengths - 1).sum())
    assert counts.places - counts.padding == counts.labels + 2 * int(table["source"].lengths.sum())


def test_ratio_of_two_corpus_sizes_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["data.py", "--pairs", "60", "--rounds", "1", "--batching", "buckets"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" pairs:")[0].strip() for line in lines[:2]] == ["60", "600"]
    assert lines[2].startswith("large / small: ")
