"""A run folder is locked by one process at a time, and a damaged or hostile folder is refused in one sentence."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from regard.training.tensor_files import read_about

from .conftest import complaint, process, regard, training

DEEP = ('{"model": ' * 500 + "1" + "}" * 500, "[" * 200_000)
LONG = ("--set", "train.steps=100000", "--set", "train.validate_every=100000", "--set", "train.save_every=30", "-q")


def wait_for(running: "subprocess.Popen[bytes]", path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists(), running.communicate()[1].decode() if running.poll() is not None else "too slow"


def test_a_run_in_training_is_locked(corpus: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = process(*training(corpus, run, *LONG))
    try:
        wait_for(running, run / "trainer-00000030.json")
        assert "is in use by another process" in complaint("resume", str(run))
        assert "is in use by another process" in complaint(*training(corpus, run))
        assert regard("translate", str(run), "--beam", "1", stdin=b"one\n").returncode == 0  # reading needs no lock
        assert running.poll() is None
    finally:
        running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130, stderr.decode()
    assert not list(run.glob(".*"))


@pytest.fixture(scope="module")
def stopped(corpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has one checkpoint and can be resumed."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    few = ("--set", "train.steps=2", "--set", "train.validate_every=1", "--max-time", "0.01", "-q")
    assert regard(*training(corpus, run, *few)).returncode == 0
    return run


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "name", ["tensorboard", "baselines.json", ".environment.json-making", ".log.jsonl-making", ".saving"]
)
def test_a_run_with_a_link_is_not_resumed(copy: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(copy / name, ignore_errors=True)
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(outside)
    assert f"{name} is a link" in complaint("resume", str(copy))
    assert not list(outside.iterdir())


def test_a_run_with_links_that_are_only_read_is_resumed(copy: Path, tmp_path: Path) -> None:
    (copy / "data").rename(tmp_path / "elsewhere")
    (copy / "data").symlink_to(tmp_path / "elsewhere")
    (copy / "best").symlink_to(next(copy.glob("weights-*")).name)
    assert regard("resume", str(copy), "-q").returncode == 0


def test_a_copy_of_a_checkpoint_is_ignored(copy: Path) -> None:
    for path in [*copy.glob("weights-*"), *copy.glob("trainer-*")]:
        shutil.copyfile(path, path.with_name(f"{path.stem} (copy){path.suffix}"))
    assert regard("translate", str(copy), "--beam", "1", stdin=b"one\n").returncode == 0
    assert regard("show", str(copy), "--json").returncode == 0
    assert regard("resume", str(copy), "-q").returncode == 0


def test_a_damaged_record_is_one_sentence(copy: Path) -> None:
    (state,) = copy.glob("trainer-*.json")
    whole = json.loads(state.read_text())
    for name, value in (
        ("saved", 3),
        ("best", ["x"]),
        ("scores", []),
        ("place", None),
        ("stale", "much"),
        ("best", [7]),
    ):
        state.write_text(json.dumps(whole | {name: value}))
        assert state.name in complaint("resume", str(copy))
        assert state.name in complaint("translate", str(copy), stdin=b"one\n")
    for lost in ("saved", "best", "place"):
        state.write_text(json.dumps({key: value for key, value in whole.items() if key != lost}))
        assert state.name in complaint("resume", str(copy))


def test_a_file_that_is_nested_too_deeply_is_one_sentence(copy: Path) -> None:
    (copy / "environment.json").write_text(DEEP[1])  # read only for the number of threads
    (copy / "log.jsonl").write_text(DEEP[1] + "\n")
    unread = {copy / name for name in ("environment.json", "request.json", "baselines.json")}
    for path in sorted({*copy.rglob("*.json")} - unread):
        text = path.read_text()
        prepared = copy / "data" in path.parents
        for deep in DEEP[1:] if prepared else DEEP:
            path.write_text(deep)
            assert str(copy / "data" if prepared else path) in complaint("resume", str(copy)), path
        path.write_text(text)
    assert regard("resume", str(copy), "-q").returncode == 0


@pytest.mark.parametrize("damaged", ['{"baselines": [3]}', DEEP[0]], ids=["other", "deep"])
def test_damaged_baselines_are_computed_again(copy: Path, damaged: str) -> None:
    baselines = copy / "baselines.json"
    whole = baselines.read_text()
    baselines.write_text(damaged)
    assert str(baselines) in complaint("show", str(copy))
    assert regard("translate", str(copy), "--beam", "1", stdin=b"one\n").returncode == 0
    assert regard("resume", str(copy), "-q").returncode == 0
    assert baselines.read_text() == whole
    baselines.unlink()
    assert json.loads(regard("show", str(copy), "--json").stdout)["baselines"] == []


def test_a_lost_tokenizer_is_not_replaced_by_another(corpus: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    few = ("--set", "train.steps=1", "--set", "data.joint=false", "--set", "data.tokenizer=characters", "-q")
    assert regard("train", "--tsv", corpus["tsv"], "--out", str(run), *few).returncode == 0
    for lost in ("target", "source"):
        (run / f"tokenizer.{lost}.json").rename(run / "away")
        for words in (("translate", str(run)), ("show", str(run)), ("evaluate", str(run), "--tsv", corpus["tsv"])):
            assert f"lacks tokenizer.{lost}.json; restore it" in complaint(*words, stdin=b"one\n")
        (run / "away").rename(run / f"tokenizer.{lost}.json")
    assert regard("translate", str(run), "--beam", "1", stdin=b"one\n").returncode == 0
    for lost in ("target", "source"):
        (run / f"tokenizer.{lost}.json").unlink()
    assert "lacks tokenizer.json" in complaint("translate", str(run), stdin=b"one\n")


def test_final_weights_without_metadata_are_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    final = copy / "weights-final.safetensors"
    weights, about = load_file(final), read_about(final)
    wrong: list[dict[str, str] | None] = [
        None, {"format": "pt"}, {}, {"regard": "["}, {"regard": "[]"}, {"regard": "[" * 100_000},
        about | {"steps": "3"}, about | {"steps": "[]"}, about | {"steps": '["x"]'}, about | {"scores": "[1]"},
        about | {"steps": "{"}, {"regard": json.dumps(about | {"steps": 3})},
    ]  # fmt: skip
    for metadata in wrong:
        save_file(weights, final, metadata)
        assert "restore it from a copy" in complaint("translate", str(copy), stdin=b"one\n")
    save_file(weights, final, about)  # as earlier versions did
    assert regard("translate", str(copy), "--beam", "1", stdin=b"one\n").returncode == 0
