"""regard translate --cluster: the output of one process, continuation, and invalid options."""

from pathlib import Path

import pytest

from .conftest import complaint, regard, write

pytest.importorskip("submitit")


@pytest.mark.slow
def test_shards_translate_to_the_output_of_one_process(run: Path, corpus: dict[str, str], tmp_path: Path) -> None:
    lines = Path(corpus["test_source"]).read_text().splitlines()[:12]
    file = write(tmp_path / "new.en", lines)
    expected = regard("translate", str(run), file)
    assert expected.returncode == 0, expected.stderr
    words = ("translate", str(run), file, "--cluster", "local", "--shard-lines", "20")
    result = regard(*words)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected.stdout
    assert not (tmp_path / "new.en.shards").exists()


def test_options_without_effect_are_refused(run: Path, corpus: dict[str, str], tmp_path: Path) -> None:
    words, cluster = ("translate", str(run), corpus["test_source"]), ("--cluster", "local")
    assert "--work: applies to --cluster" in complaint(*words, "--work", str(tmp_path / "work"))
    assert "--shard-lines: applies to --cluster" in complaint(*words, "--shard-lines", "5")
    assert "native engine" in complaint(*words, *cluster, "--engine", "ctranslate2")
    assert "whole shards" in complaint(*words, *cluster, "--stream", "--beam", "1")
    assert "--work: is missing" in complaint(*words[:2], *cluster, stdin=b"x\n")
    assert not list(tmp_path.iterdir())
