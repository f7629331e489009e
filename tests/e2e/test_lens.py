"""`regard lens`: the page in a file and on a server, its errors, and the code of docs/lens.md."""

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import regard as package

from .conftest import complaint, process, regard

pytest.importorskip("fastapi")
PAGE = Path(__file__).parents[2] / "docs" / "lens.md"


def saved(path: Path) -> dict[str, Any]:
    """Return the data inside an exported page."""
    found = re.search(r'<script id="saved" type="application/json">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(found[1])


def test_exported_page_contains_the_translation(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = regard("lens", str(run), "--text", "one red house", "--export", str(out))
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == f"regard: {out} is written; open it in a browser\n"
    (answer,) = saved(out)["results"]
    assert answer["output"] == package.load(run).translate("one red house")
    assert saved(out)["models"][0]["example"]


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    started = process("lens", str(run), "--port", "0", "--no-open", "--text", "one")
    try:
        assert started.stderr is not None
        line = started.stderr.readline().decode()
        assert "the lens is at http://127.0.0.1:" in line, line
        assert line.rstrip().endswith(f"/#m={run.name}&q=one (stop with Ctrl-C)")
        yield line.split()[5].partition("#")[0]
        started.send_signal(signal.SIGTERM)
        _, errors = started.communicate(timeout=60)
        assert b"Traceback" not in errors
    finally:
        started.kill()
        started.wait()


def test_lens_is_served_on_loopback(run: Path, address: str) -> None:
    def ask(path: str, body: Any = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(address + path, data), timeout=60) as response:
            return response.read()

    assert b"regard lens" in ask("")
    names = re.findall(rb'(?:src|href)="(lens/page/[^"]+)"', ask(""))
    assert len(names) == 3
    assert all(ask(name.decode()) for name in names)
    answer = json.loads(ask("lens/api/inspect", {"text": "one red house", "heads": {"decoder.cross": [[0, 0, 0]]}}))
    assert answer["ids"]
    plain = json.loads(ask("lens/api/inspect", {"text": "one red house"}))
    assert plain["output"] == package.load(run).translate("one red house")
    assert plain["score"] != answer["score"]


def test_wrong_use_is_one_sentence(run: Path, tmp_path: Path) -> None:
    assert "does not exist" in complaint("lens", str(tmp_path / "none"))
    assert '--text "..."' in complaint("lens", str(run), "--export", "a.html")
    assert "is given twice" in complaint("lens", str(run), str(run), "--text", "one", "--export", "a.html")
    assert "at most 2" in complaint("lens", *[str(run)] * 3, "--text", "one", "--export", "a.html")
    port = complaint("lens", str(run), "--text", "one", "--export", "a.html", "--port", "8010")
    assert "--port: does not apply to --export" in port
    assert "open the file yourself" in complaint("lens", str(run), "--text", "one", "--export", "a.html", "--open")
    nowhere = str(tmp_path / "none" / "a.html")
    assert "cannot be written" in complaint("lens", str(run), "--text", "one", "--export", nowhere)
    assert list(tmp_path.iterdir()) == []


def test_code_of_the_page_runs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    exec(code, {"run": package.load(run)})
    output = capsys.readouterr().out
    assert re.search(r" -\d+\.\d+$", output.strip())
    assert saved(tmp_path / "lens.html")["results"][0]["text"] == "How are you?"
