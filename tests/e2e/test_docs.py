"""The documentation: its programs and commands run, its links exist, and the generated page is up to date."""

import json
import os
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
SHORT = ("train.steps=2", "train.decode=2", "model.d_model=24")  # shortens the training runs of a page
SIGNS = ("<", ">", "|")
Blocks = list[tuple[str, str]]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(markdown: str) -> Blocks:
    """The language and the content of every code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", markdown, re.DOTALL | re.MULTILINE)


def sections(page: str) -> dict[str, Blocks]:
    """The code blocks under every heading of the second level."""
    parts = re.split(r"^## (.*)$", text(page), flags=re.MULTILINE)
    return {heading: blocks(content) for heading, content in zip(parts[1::2], parts[2::2], strict=True)}


def commands(content: Blocks) -> list[list[str]]:
    """The `regard` commands of the blocks without a language, split into words."""
    lines = [line for language, block in content if not language for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("regard ")]


def shortened(words: list[str]) -> list[str]:
    """A command with options that make it short."""
    few = [option for change in SHORT for option in ("--set", change)]
    if words[0] == "train":
        return [*words, *(few[:4] if "--from" in words else few)]
    if words[0] == "ablate":
        return [*words, "--seeds", "1", "--steps", "8", *few[2:]]
    if words[0] == "ladder":
        return [*words, "--seeds", "1", "--steps", "8", "--rungs", "rnn", "--jobs", "1", *few[2:4]]
    return [*words, "--max-len", "5"] if words[0] == "translate" else words


def execute(command: list[str]) -> None:
    """Run a command in this process, with the files that it redirects."""
    words = command[1 : min(command.index(sign) if sign in command else len(command) for sign in SIGNS)]
    if words[0] == "check":  # compiles, where the type checks of the tests must not be traced
        assert " 0 broken" in python("-m", "regard", *words)
        return
    stdin = Path(command[command.index("<") + 1]).read_bytes() if "<" in command else b""
    result = regard(*shortened(words), stdin=stdin)
    assert result.returncode == 0, f"{words}: {result.stdout} {result.stderr}"
    if ">" in command:
        Path(command[command.index(">") + 1]).write_text(result.stdout)
        assert len(result.stdout.splitlines()) == stdin.count(b"\n")


def python(*words: str) -> str:
    """The output of a Python process in the current folder."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def code_lines(block: str) -> int:
    """Lines of code: neither blank nor comments nor docstrings of one line."""
    return sum(bool(line.strip()) and not line.strip().startswith(("#", '"""')) for line in block.splitlines())


def save(content: Blocks) -> Blocks:
    """Write the Python blocks that begin with `# name.py` to such files; return the others."""
    remaining = []
    for language, block in content:
        name = re.match(r"# (\w+\.py)\n", block)
        if language == "python" and name:
            Path(name.group(1)).write_text(block, encoding="utf-8")
        else:
            remaining.append((language, block))
    return remaining


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the text files that the pages refer to."""
    pairs = reversed_pairs(400, 5)
    for name in ("train", "new", "test"):
        write(tmp_path / f"{name}.en", [source for source, _ in pairs[: 400 if name == "train" else 5]])
        write(tmp_path / f"{name}.de", [target for _, target in pairs[: 400 if name == "train" else 5]])
    for name in ("pairs", "more"):  # a different text, as a reader's own would be
        write(tmp_path / f"{name}.tsv", [f"{source} yes\t{target} ja" for source, target in pairs])
    write(tmp_path / "novel.txt", [f"{source} {target}" for source, target in pairs])
    write(tmp_path / "reviews.tsv", [f"{'good' if 'one' in source else 'bad'}\t{source}" for source, _ in pairs])
    norm = next(block for _, block in blocks(text("docs/extend.md")) if "class AbsNorm" in block)
    (tmp_path / "my_module.py").write_text(norm.replace("AbsNorm", "MyNorm"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


EXAMPLES = {heading: content for heading, content in sections("docs/extend.md").items() if content}


@pytest.mark.parametrize("heading", EXAMPLES)
def test_extension_from_outside_the_package_runs(heading: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are under 30 lines of code; its commands and scripts succeed, in their order."""
    monkeypatch.syspath_prepend(desk)
    remaining = save(EXAMPLES[heading])
    assert all(code_lines(file.read_text()) < 30 for file in desk.glob("*.py"))
    try:
        for language, block in remaining:
            for command in commands([(language, block)]):
                execute(command)
            if language == "python":
                exec(block, {})
    finally:
        for file in desk.glob("*.py"):
            sys.modules.pop(file.stem, None)


def test_deployment_page_serves_a_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("fastapi.testclient").TestClient
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RUN", str(run))
    save(sections("docs/deployment.md")["An HTTP service"])
    from app import app  # type: ignore[reportMissingImports]

    http = client(app)
    texts = ["one two", "big red house"]
    expected = package.load(run).translate(texts, beam=2)
    assert http.post("/translate", json={"texts": texts, "beam": 2}).json() == expected
    assert http.post("/translate", json={"texts": texts, "beam": 0}).status_code == 422
    assert http.get("/health").json() == {"run": str(run), "weights": package.load(run).weights_sha256}


def test_deployment_page_translates_without_regard(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ctranslate2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(run)
    content = sections("docs/deployment.md")["Translate with CTranslate2 only (regard and torch not installed)"]
    save(content)
    for command in commands(content):
        execute(command)
    texts = ["one two", "big red house", "three four five"]
    program = "import json, sys; from translate import translate; print(json.dumps(translate(sys.argv[1:])))"
    absent = "import sys; sys.modules['regard'] = sys.modules['torch'] = None\n"
    expected = package.load(run).translate(texts, engine="ctranslate2", beam=5)
    assert json.loads(python("-c", absent + program, *texts)) == expected


def test_inspection_page_runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(run)
    for language, block in blocks(text("docs/inspection.md")):
        if language == "python":
            exec(block, {})
    for command in commands(blocks(text("docs/inspection.md"))):
        assert regard(*command[1:]).returncode == 0
    assert {"attention.svg", "recording.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.usefixtures("desk")
def test_readme_commands_run() -> None:
    words = " ".join(word for command in commands(blocks(text("README.md"))) for word in command)
    assert {"mine", "changed", "novel", "reviews", "tuned"} <= set(re.findall(r"runs/(\w+)", words))
    for command in commands(blocks(text("README.md"))):
        execute(command)
    assert regard("generate", "runs/novel", "--stream", "--max-len", "3").returncode == 0
    assert regard("classify", "runs/reviews", "new.en").returncode == 0


@pytest.mark.usefixtures("desk")
def test_readme_python_runs_and_its_numbers_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "train", partial(package.train, changes=SHORT), raising=False)
    names: dict[str, Any] = {}
    source = [block for language, block in blocks(text("README.md")) if language == "python"]
    for block in source:
        exec(block, names)
    stated = re.search(r"([\d,]+) parameters", "".join(source))
    assert stated is not None
    assert count(names["spec"]) == int(stated.group(1).replace(",", ""))
    assert names["loss"].tokens == 3
    assert names["changed"].decoder.depth == 3
    assert isinstance(names["run"], package.TrainedModel)


def test_readme_names_every_make_target() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", text("Makefile"), re.MULTILINE)
    assert [target for target in targets if f"`make {target}`" not in text("README.md")] == []


def test_readme_is_short() -> None:
    assert len(text("README.md").splitlines()) < 200


def test_links_lead_to_existing_files() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_generated_pages_are_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], check=True, cwd=ROOT)
