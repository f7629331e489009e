"""The commands and programs of docs/heads.md run."""

from pathlib import Path

import pytest

from .conftest import write
from .test_docs import blocks, commands, execute, text


def test_heads_page_runs(run: Path, corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(run)
    for side, name in (("en", "source"), ("de", "target")):
        for part, key, count in (("train", name, 200), ("test", f"test_{name}", 20)):
            lines = Path(corpus[key]).read_text(encoding="utf-8").splitlines()[:count]
            write(tmp_path / f"{part}.{side}", lines)
    for language, block in blocks(text("docs/heads.md")):
        for command in commands([(language, block)]):
            execute([word for word in command if word not in {">", "test.align"}])
        if language == "python":
            exec(block, {})
    assert (tmp_path / "heads.svg").exists()
    assert (tmp_path / "runs" / "recovered").exists()
