"""Saved pictures, and the page saved as one file that opens without a server."""

import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.browser.conftest import Served
from tests.browser.page import Page

HOSTILE = "one two </script><script>document.title='broken'</script> <b>"


def wait_for(path: Path) -> bytes:
    for _ in range(100):
        if path.exists() and path.stat().st_size:
            return path.read_bytes()
        time.sleep(0.05)
    raise AssertionError(f"{path.name} was not saved")


@pytest.mark.parametrize(
    ("tab", "name"),
    [
        ("attention", "heads-decoder.cross"),
        ("attention", "attention-decoder.cross-1-0"),
        ("beam", "beam-search"),
        ("layers", "logit-lens"),
        ("positions", "sinusoidal-similarity"),
        ("states", "states-decoder-layer-1"),
    ],
)
def test_pictures_are_saved_as_svg_and_png(page: Page, downloads: Path, tab: str, name: str) -> None:
    page.driver.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    page.open(f"q=one+two+three&t={tab}&m=translator")
    for kind in ("svg", "png"):
        page.click(f'[data-key="save:{name}:{kind}"]')
        content = wait_for(downloads / f"{name}.{kind}")
        if kind == "png":
            assert content.startswith(b"\x89PNG")
            assert len(content) > 1000
        else:
            root = ElementTree.fromstring(content)
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert len(list(root.iter())) > 10


@pytest.fixture
def exported(served: Served, tmp_path: Path) -> Path:
    runs = [str(served.runs[name]) for name in ("translator", "recurrent")]
    command = [sys.executable, "-m", "regard", "lens", *runs, "--text", HOSTILE, "--export", str(tmp_path / "a.html")]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "a.html"


def test_exported_page_opens_without_a_server(page: Page, exported: Path) -> None:
    page.address = exported.as_uri()
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    page.open()
    assert page.one("#text").get_attribute("value") == HOSTILE
    assert page.run("return document.title") != "broken"
    assert len(page.all("#output .panel")) == 2
    assert "saved page" in page.text("#notice")
    for tab in ("beam", "layers", "positions", "states", "attention"):
        page.tab(tab)
        assert page.all("#views svg"), tab
    page.click('[data-key="token:0"]')
    assert not any(button.is_enabled() for button in page.all(".alternative, .switch, .primary, [data-key=factor]"))
    page.click('[data-key="head:0.1"]')
    page.click('[data-key="view:matrix"]')
    page.click('[data-key="theme:dark"]')
    assert page.all(".picture svg")
    online = offline | {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", online)


def test_exported_page_names_no_other_address(exported: Path) -> None:
    page = exported.read_text(encoding="utf-8")
    assert '<link rel="stylesheet"' not in page
    assert " src=" not in page
    assert "import {" not in page
    assert page.count("</script>") == 3
