import json
import re
from pathlib import Path

import pytest

from regard.errors import DataError
from regard.lens.export import EXPORT, IMPORT, PAGE, bundle, html, safe_json, save
from tests.unit.lens.conftest import Make

MODULES = {path.stem: path.read_text(encoding="utf-8") for path in PAGE.glob("*.js")}


def test_every_import_is_exported_and_every_module_is_in_the_bundle() -> None:
    exported = {name: set(EXPORT.findall(source)) for name, source in MODULES.items()}
    for source in MODULES.values():
        assert source.count("\nimport ") + source.startswith("import ") == len(IMPORT.findall(source))
        for names, module in IMPORT.findall(source):
            assert {name.strip() for name in names.split(",") if name.strip()} <= exported[module]
    made = bundle()
    assert all(f"const modules_{name} = " in made for name in MODULES)
    assert not re.search(r"^(import|export) ", made, re.MULTILINE)
    assert "</script" not in made


def test_data_cannot_end_the_script_element() -> None:
    data = {"text": "</script><!-- <script> \u2028"}
    text = safe_json(data)
    assert "<" not in text
    assert json.loads(text) == data


def test_page_is_one_file_that_names_no_other() -> None:
    page = html({"models": [], "results": [], "view": ""})
    assert " src=" not in page
    assert 'rel="stylesheet"' not in page
    assert "default-src 'none'" in page.replace("&#x27;", "'")


def test_saved_page_contains_the_results_of_both_models(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    save({"a": make("translator"), "b": make("recurrent")}, "one </script>", path)
    inside = r'<script id="saved" type="application/json">(.*?)</script>'
    (found,) = re.findall(inside, path.read_text(encoding="utf-8"))
    data = json.loads(found)
    assert [result["model"] for result in data["results"]] == ["a", "b"]
    assert data["results"][0]["text"] == "one </script>"
    assert data["view"] == "q=one+%3C%2Fscript%3E&m=a&m2=b"
    assert list(tmp_path.glob(".*")) == []


def test_page_that_cannot_be_written_is_one_sentence(make: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        save({"a": make("translator")}, "one", tmp_path / "none" / "page.html")
