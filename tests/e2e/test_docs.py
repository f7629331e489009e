"""What the docs say is run: the worked example of docs/add-a-variant.md, and the links between pages."""

import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import regard as package
from regard import count

from .conftest import regard, reversed_pairs, write

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


FEW = ("train.steps=2", "train.decode=2", "model.d_model=24")  # a run of the README, made short


def commands(page: str) -> list[list[str]]:
    """The commands of a page, in words."""
    found = []
    for block in re.findall(r"```\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
        found += [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("regard ")]
    return found


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the files that the README speaks of."""
    pairs = reversed_pairs(400, 5)
    for name in ("train", "new", "test"):
        write(tmp_path / f"{name}.en", [source for source, _ in pairs[: 400 if name == "train" else 5]])
        write(tmp_path / f"{name}.de", [target for _, target in pairs[: 400 if name == "train" else 5]])
    for name in ("pairs", "more"):  # another text, as a reader's own would be
        write(tmp_path / f"{name}.tsv", [f"{source} yes\t{target} ja" for source, target in pairs])
    write(tmp_path / "novel.txt", [f"{source} {target}" for source, target in pairs])
    write(tmp_path / "reviews.tsv", [f"{'good' if 'one' in source else 'bad'}\t{source}" for source, _ in pairs])
    norm = next(block for block in blocks("docs/add-a-variant.md", "python") if "class AbsNorm" in block)
    (tmp_path / "my_module.py").write_text(norm.replace("AbsNorm", "MyNorm"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_commands_run(desk: Path) -> None:
    words_of_all = " ".join(word for words in commands("README.md") for word in words)
    made = {path.split("/")[1] for path in re.findall(r"runs/\w+", words_of_all)}
    assert {"mine", "changed", "novel", "reviews", "tuned"} <= made
    for command in commands("README.md"):
        stdin, out = b"", None
        if "<" in command:
            stdin = Path(command[command.index("<") + 1]).read_bytes()
        if ">" in command:
            out = Path(command[command.index(">") + 1])
        words = command[1 : min(command.index(sign) if sign in command else len(command) for sign in ("<", ">"))]
        if words[0] == "train" and "--from" in words:
            words += ["--set", "train.steps=2", "--set", "train.decode=2"]
        elif words[0] == "train":
            words += [each for change in FEW for each in ("--set", change)]
        elif words[0] == "ablate":
            words += ["--seeds", "1", "--steps", "8", "--set", "model.d_model=24", "--set", "train.decode=2"]
        elif words[0] == "ladder":
            words += ["--seeds", "1", "--steps", "8", "--rungs", "rnn", "--set", "train.decode=2", "--jobs", "1"]
        if words[0] == "translate":
            words += ["--max-len", "5"]
        said = regard(*words, stdin=stdin)
        assert said.returncode == 0, f"{words}: {said.stdout} {said.stderr}"
        if out:
            out.write_text(said.stdout)
            assert len(said.stdout.splitlines()) == stdin.count(b"\n")
    assert regard("generate", "runs/novel", "--stream", "--max-len", "3").returncode == 0
    assert regard("classify", "runs/reviews", "new.en").returncode == 0


def test_the_readme_python_runs_and_its_numbers_are_true(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = partial(package.train, changes=FEW)
    monkeypatch.setattr(package, "train", short, raising=False)
    names: dict[str, Any] = {}
    for block in blocks("README.md", "python"):
        exec(block, names)
    stated = re.search(r"([\d,]+) parameters", "".join(blocks("README.md", "python")))
    assert stated is not None
    assert count(names["spec"]) == int(stated.group(1).replace(",", ""))
    assert names["loss"].tokens == 3
    assert names["changed"].decoder.depth == 3
    assert isinstance(names["run"], package.Run)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_generated_pages_are_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], check=True, cwd=ROOT)
