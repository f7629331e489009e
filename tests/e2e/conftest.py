import io
import os
import random
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from regard import cli
from tests.learning import Learned

WORDS = {
    "one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs", "seven": "sieben",
    "eight": "acht", "nine": "neun", "big": "groß", "red": "rot", "house": "Haus",
}  # fmt: skip
SMALL = (
    "--set", "model.d_model=48", "--set", "model.head.label_smoothing=0.0",
    "--set", "model.encoder.depth=1", "--set", "model.decoder.depth=1", "--set", "train.optimizer.learning_rate=5e-3",
    "--set", "train.schedule.warmup=20", "--set", "data.tokenizer.vocab=300", "--set", "data.batching.tokens=400",
    "--set", "train.decode=20", "--set", "train.average=1",
)  # fmt: skip


class Result(subprocess.CompletedProcess[str]):
    """The output and the exit code of a command."""


def regard(*words: str, stdin: bytes = b"", cwd: Path | None = None) -> Result:
    """Run a command in this process, where torch is loaded already."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["regard", *words])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "100")
        if cwd:
            patch.chdir(cwd)
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        signal.signal(signal.SIGINT, handler)
    return Result(words, int(exit_info.value.code or 0), out.getvalue(), err.getvalue())


def process(*words: str) -> subprocess.Popen[bytes]:
    """Start a command in a separate process, which can be killed."""
    env = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "regard", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )


def complaint(*words: str, stdin: bytes = b"") -> str:
    """Return the error message of a refused command, which is one sentence."""
    run = regard(*words, stdin=stdin)
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith("regard: ")
    return last.removeprefix("regard: ")


def reversed_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """A toy language: every word has a translation, and the order is reversed."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        words = rng.choices(list(WORDS), k=rng.randint(1, 4))
        pairs.append((" ".join(words), " ".join(WORDS[word] for word in reversed(words))))
    return pairs


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
    return str(path)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The toy language in files."""
    folder = tmp_path_factory.mktemp("corpus")
    train, test = reversed_pairs(1500, 1), reversed_pairs(60, 2)
    files = {
        "source": write(folder / "train.en", [s for s, _ in train]),
        "target": write(folder / "train.de", [t for _, t in train]),
        "test_source": write(folder / "test.en", [s for s, _ in test]),
        "test_target": write(folder / "test.de", [t for _, t in test]),
    }
    files["tsv"] = write(folder / "train.tsv", [f"{s}\t{t}" for s, t in train])
    return files


def training(corpus: dict[str, str], out: Path | str, *options: str) -> tuple[str, ...]:
    """Return the words of a command that trains on the toy language. `options` override those in SMALL."""
    edited = {word.partition("=")[0] for word in options}
    pairs = zip(SMALL[::2], SMALL[1::2], strict=True)
    small = [word for option in pairs if option[1].partition("=")[0] not in edited for word in option]
    return ("train", "--source", corpus["source"], "--target", corpus["target"], "--out", str(out), *small, *options)


@pytest.fixture(scope="session")
def run(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on the toy language."""
    out = tmp_path_factory.mktemp("runs") / "toy"
    (seed,) = Learned.seeds(1)
    result = regard(
        *training(corpus, out, "--set", "train.steps=300", "--set", "train.validate_every=75"),
        "--set", "model.dropout=0.0", "--set", "train.schedule=cosine", "--set", f"train.seed={1 + seed}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return out
