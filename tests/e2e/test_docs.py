"""What the docs say is run: the worked example of docs/add-a-variant.md, and the links between pages."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from regard import count

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_worked_example_keeps_the_laws(tmp_path: Path) -> None:
    norm = next(block for block in blocks("docs/add-a-variant.md", "python") if "class AbsNorm" in block)
    use = next(block for block in blocks("docs/add-a-variant.md", "python") if "regard.swap" in block)
    (tmp_path / "my_norm.py").write_text(norm)
    (tmp_path / "use.py").write_text(use)
    run = subprocess.run(
        [sys.executable, "-m", "regard", "check", "my_norm:AbsNorm"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout
    said = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "AbsNorm" in said


def test_the_readme_runs_and_its_numbers_are_true() -> None:
    names: dict[str, Any] = {}
    for block in blocks("README.md", "python"):
        exec(block, names)
    stated = re.search(r"([\d,]+) parameters", blocks("README.md", "python")[0])
    assert stated is not None
    assert count(names["spec"]) == int(stated.group(1).replace(",", ""))
    assert names["loss"].tokens == 3
    assert names["changed"].decoder.depth == 3


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_generated_pages_are_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], check=True, cwd=ROOT)
