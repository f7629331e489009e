"""Small trained models, the lens that serves them, and a headless Chromium."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import regard

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

    from tests.browser.page import Page

# A borrowed GPU machine has pytest alone, and collects this folder.
collect_ignore_glob = [] if find_spec("selenium") else ["test_*.py"]
NUMBERS = dict(zip(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], "123456789", strict=True))
TINY = (
    "model.d_model=32",
    "data.tokenizer.vocab=280",
    "data.batching.tokens=400",
    "train.average=1",
    "train.decode=4",
    "train.validate_every=1000",
)
HEADS = ("model.heads=4",)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
)


@dataclass(frozen=True)
class Served:
    """The address of a lens, and the run folders of its models by name."""

    address: str
    runs: dict[str, Path]


def pairs(count: int) -> list[tuple[str, str]]:
    rng = random.Random(1)
    texts = [rng.choices(list(NUMBERS), k=rng.randint(2, 5)) for _ in range(count)]
    return [(" ".join(words), " ".join(NUMBERS[word] for word in reversed(words))) for words in texts]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A translator, a recurrent translator, a language model and a classifier, each trained for seconds."""
    folder = tmp_path_factory.mktemp("runs")
    lines = [f"{source}\t{target}\n" for source, target in pairs(300)]
    (folder / "pairs.tsv").write_text("".join(lines))
    (folder / "text.txt").write_text("".join(line.partition("\t")[0] + "\n" for line in lines))
    (folder / "labels.tsv").write_text("".join(f"{'even' if i % 2 else 'odd'}\t{lines[i]}" for i in range(300)))
    side = ("model.encoder.depth=2", "model.decoder.depth=2")
    train: dict[str, dict[str, Any]] = {
        "translator": {"tsv": "pairs.tsv", "preset": "transformer_tiny", "changes": side, "steps": 80},
        "recurrent": {"tsv": "pairs.tsv", "preset": "rnn_attention"},
        "language_model": {"text": "text.txt", "preset": "gpt2_small", "changes": ["model.decoder.depth=2", *HEADS]},
        "classifier": {"labelled": "labels.tsv", "preset": "bert_base", "changes": ["model.encoder.depth=2", *HEADS]},
    }
    for name, options in train.items():
        files = {kind: folder / options[kind] for kind in ("tsv", "text", "labelled") if kind in options}
        changes = [*TINY, *options.get("changes", ())]
        regard.train(
            folder / name,
            preset=options["preset"],
            changes=changes,
            steps=options.get("steps", 10),
            device="cpu",
            quiet=True,
            **files,
        )
    return {name: folder / name for name in train}


@pytest.fixture(scope="session")
def served(runs: dict[str, Path]) -> Iterator[Served]:
    """A lens with all models, in a process of its own."""
    command = [sys.executable, "-m", "regard", "lens", *map(str, runs.values()), "--port", "0", "--no-open"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "the lens is at " in line, line + process.stderr.read()
        try:
            yield Served(line.split("the lens is at ")[1].split("#")[0], runs)
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory, downloads: Path) -> "Iterator[Chrome]":
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if None in programs.values():
        pytest.exit("the browser tests need chromium and its driver: apt-get install chromium chromium-driver", 2)
    options = ChromeOptions()
    options.binary_location = str(programs["chromium"])
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(str(programs["chromedriver"])))
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium: "Chrome", served: Served) -> "Iterator[Page]":
    """The page in the browser. After the test: no console message, and no request to another origin."""
    from tests.browser.page import Page

    opened = Page(chromium, served.address)
    opened.resize(1280, 1000)
    opened.logs()
    yield opened
    opened.check_logs()
