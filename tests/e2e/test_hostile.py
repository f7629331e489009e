"""Hostile input gives one sentence and the documented exit code, no traceback, and no files left behind."""

import gzip
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import cli
from regard.data import text
from regard.demo import run as demo
from regard.errors import DataError
from regard.runs import evaluate as report
from regard.training.executor import Eager

from .conftest import Result, regard, write

TINY = (
    "--set", "model.d_model=16", "--set", "model.heads=2", "--set", "model.encoder.depth=1",
    "--set", "model.decoder.depth=1", "--set", "train.decode=2", "--set", "train.average=1", "--device", "cpu", "-q",
)  # fmt: skip
NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139 GiB"),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 640000000000 bytes."
    ),
    MemoryError(),
)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "en": write(tmp_path / "en", [f"a b {i}" for i in range(60)]),
        "de": write(tmp_path / "de", [f"c d {i}" for i in range(60)]),
        "tsv": write(tmp_path / "tsv", [f"a b {i}\tc d {i}" for i in range(60)]),
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, in a folder whose name is markup."""
    folder = tmp_path_factory.mktemp("tiny")
    source, target = write(folder / "en", ["a b"] * 30 + ["a"] * 30), write(folder / "de", ["c d"] * 30 + ["c"] * 30)
    out = folder / "[/x] [bold] :cat:"
    words = ("train", "--source", source, "--target", target, "--out", str(out), *TINY)
    result = regard(*words, "--set", "train.steps=2", "--set", "data.max_len=8", "--set", "data.held_out=0")
    assert result.returncode == 0, result.stderr
    return out


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def sentence(*words: str, stdin: bytes = b"") -> str:
    """Return the error message of a refused command, which prints nothing else."""
    return one_sentence(regard(*words, stdin=stdin))


def one_sentence(result: Result) -> str:
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("regard: ")
    return lines[0].removeprefix("regard: ")


def refused(folder: Path, *words: str) -> str:
    """Return the error message of a refused training, which leaves no files behind."""
    before = everything(folder)
    message = sentence("train", "--out", str(folder / "run"), *words, *TINY)
    assert everything(folder) == before
    return message


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error if any text is read from here on."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the text was read")

    monkeypatch.setattr("regard.runs.train.prepare", never)


# -- memory


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_a_first_step_without_memory(
    error: Exception, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Eager, "run", fail)
    message = refused(tmp_path, "--tsv", files["tsv"], "--set", "data.batching.tokens=4000")
    assert "memory ran out on cpu" in message
    assert re.search(r"row \d+ of \d+, with \d source and \d target tokens, does not fit even alone; lower ", message)


def test_a_later_step_without_memory_is_computed_in_parts(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls, run = tmp_path / "run", [0], Eager.run
    words = [f"--set={change}" for change in ("train.steps=4", "train.validate_every=2", "data.batching.tokens=100")]

    def fail(self: Eager, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise NO_MEMORY[0]
        return run(self, *arguments)

    monkeypatch.setattr(Eager, "run", fail)
    result = regard("train", "--tsv", files["tsv"], "--out", str(out), *words, *TINY[:-1])
    assert result.returncode == 0, result.stderr
    assert "warning: memory ran out at step 4; batches of" in " ".join(result.stderr.split()).lower()
    assert "are computed in 2 parts, with the same gradient" in " ".join(result.stderr.split())
    events = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    (event,) = [event for event in events if event["event"] == "split"]
    assert (event["step"], event["parts"]) == (4, 2)


def test_a_later_step_for_which_no_part_is_small_enough_loses_nothing(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, steps, run = tmp_path / "run", [0], Eager.run
    words = [f"--set={change}" for change in ("train.steps=4", "train.validate_every=2", "data.batching.tokens=100")]

    def fail(self: Eager, *arguments: Any) -> Any:
        steps[0] += 1
        if steps[0] >= 4:
            raise NO_MEMORY[0]
        return run(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Eager, "run", fail)
        message = sentence("train", "--tsv", files["tsv"], "--out", str(out), *words, *TINY)
    assert "does not fit even alone" in message
    assert f"the checkpoint of step 2 is intact: continue from its weights with regard train --from {out}" in message
    assert regard("resume", str(out), "-q").returncode == 0
    assert (out / "weights-final.safetensors").exists()


def test_decoding_without_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NO_MEMORY[0]

    monkeypatch.setattr("regard.runs.trained_model.load", fail)
    assert "memory ran out" in sentence("translate", str(tiny), stdin=b"a\n")


def test_other_errors_are_not_called_a_lack_of_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("regard.runs.trained_model.load", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        on_stdout(io.StringIO(), "translate", str(tiny))


# -- where the output goes


def on_stdout(stdout: Any, *words: str) -> Result:
    """Run a command with its output sent to `stdout`."""
    err, handler = io.StringIO(), signal.getsignal(signal.SIGINT)
    with redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["regard", *words])
        patch.setattr(sys, "stdout", stdout)
        patch.setenv("NO_COLOR", "1")
        try:
            with pytest.raises(SystemExit) as exit_info:
                cli.main()
        finally:
            signal.signal(signal.SIGINT, handler)
            if not isinstance(stdout, io.StringIO | Buffered):
                stdout.close()
    return Result(words, int(exit_info.value.code or 0), "", err.getvalue())


COMMANDS = [("--help",), ("show",), ("show", "transformer_tiny"), ("show", "transformer_tiny", "--json"), ("cache",)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_disk_under_the_output(words: tuple[str, ...]) -> None:
    message = one_sentence(on_stdout(open("/dev/full", "w"), *words))  # noqa: SIM115  # closed with the last reference
    assert "No space left on device" in message


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_closed_pipe_ends_the_command_quietly(words: tuple[str, ...]) -> None:
    read, written = os.pipe()
    os.close(read)
    result = on_stdout(open(written, "w"), *words)  # noqa: SIM115
    assert (result.returncode, result.stderr) == (141, "")


class Buffered(io.TextIOWrapper):
    """A file in memory, or a terminal that shows what its encoding has."""

    def __init__(self, encoding: str, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def written(self) -> bytes:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_that_is_not_utf8(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "größe-日本.json"
    path.write_text('{"model": {"preset": "transformer_tiny"}}')
    file, terminal = Buffered(encoding, terminal=False), Buffered(encoding, terminal=True)
    for stdout in (file, terminal):
        assert on_stdout(stdout, "show", str(path)).returncode == 0
    assert "größe-日本" in file.written().decode("utf-8").replace("\n", "")  # a long path is wrapped
    assert "\\u65e5" in terminal.written().decode(encoding)


def test_arguments_that_are_not_utf8() -> None:
    assert "is not UTF-8" in sentence("train", "--tsv", os.fsdecode(b"caf\xe9.tsv"), "--out", "x")


def test_markup_in_a_path_is_text(tiny: Path, tmp_path: Path) -> None:
    result = regard("show", str(tiny))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("[/x] [bold] :cat:") >= 2  # the root of the tree, and the fact `run`
    path = tmp_path / "[bold] :cat: [" / "x].json"
    path.parent.mkdir()
    path.write_text('{"model": {"preset": "transformer_tiny"}}')
    result = regard("show", str(path), "--set", "decoder.depth=2")
    assert result.returncode == 0, result.stderr
    assert "[bold] :cat: [/x].json" in result.stdout
    assert "[/x]" in sentence("show", "[/x]")
    result = regard("show", "transformer_tiny", "[/x]")
    assert result.returncode == 2
    assert "[/x]" in result.stderr


# -- files that are damaged or hostile


def nested(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


def test_deeply_nested_values_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    deep = nested(50_000)
    for name, content in (("a.json", f'{{"model": {deep}}}'), ("b.toml", f"model = {deep}")):
        (tmp_path / name).write_text(content)
        assert "nested more than" in sentence("show", str(tmp_path / name))
        assert "nested more than" in refused(tmp_path, str(tmp_path / name), "--tsv", files["tsv"])
    assert "nested more than" in sentence("show", "transformer_tiny", "--set", f"decoder.depth={deep}")
    assert "nested more than" in refused(tmp_path, "--tsv", files["tsv"], "--set", f"train.steps={deep}")
    (tmp_path / "pairs.jsonl").write_text(f'{{"source": {deep}, "target": "x"}}\n')
    assert "line 1 is not JSON" in refused(tmp_path, "--jsonl", str(tmp_path / "pairs.jsonl"))
    (tmp_path / "pairs.jsonl").write_text(f'{{"source": {nested(400)}, "target": "x"}}\n')
    assert "needs a string, not a list" in refused(tmp_path, "--jsonl", str(tmp_path / "pairs.jsonl"))
    (tmp_path / "tokenizer.json").write_text(f'{{"model": {deep}}}')
    imported = f'data.tokenizer={{kind="imported", path="{tmp_path}/tokenizer.json"}}'
    assert "is not JSON" in refused(tmp_path, "--tsv", files["tsv"], "--set", imported)


@pytest.mark.parametrize("value", ["1" * 5000, "0x" + "f" * 5000, "1e999", "nan", "99999999999999999999", '"\\ud800"'])
def test_invalid_numbers_are_refused(value: str, files: dict[str, str], tmp_path: Path) -> None:
    assert "train.steps" in refused(tmp_path, "--tsv", files["tsv"], "--set", f"train.steps={value}")
    assert "clip" in refused(tmp_path, "--tsv", files["tsv"], "--set", f"train.clip={value}")


@pytest.mark.parametrize("field", ["data", "train", "model", "decode", "start"])
@pytest.mark.parametrize("value", [5, [5], True])
def test_sections_of_a_wrong_type(field: str, value: Any, files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps({field: value}))
    assert f"{field}: needs" in refused(tmp_path, str(tmp_path / "recipe.json"), "--tsv", files["tsv"])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"data": 5}', "train: is missing"),
        ("[]", "does not contain a JSON object"),
        ('{"data": NaN', "cannot be read"),
    ],
)
def test_a_damaged_request_is_refused(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(content)
    message = sentence("resume", str(tmp_path), "--threads", "1", "--device", "cpu", "-q")
    assert str(tmp_path / "request.json") in message
    assert problem in message


def test_a_very_long_line_is_refused(files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_LINE", 3 << 20)
    bomb = b"good\n" + b"a" * (8 << 20)
    (tmp_path / "bomb").write_bytes(bomb)
    with gzip.open(tmp_path / "bomb.gz", "wb", compresslevel=1) as file:
        file.write(bomb)
    for name in ("bomb", "bomb.gz"):
        path = str(tmp_path / name)
        message = f"{path}: line 2 is longer than 3 MiB; break the text into lines"
        assert message in refused(tmp_path, "--source", path, "--target", files["de"])
        with pytest.raises(DataError) as raised, open(path, "rb") as stream:
            list(text.decoded_lines(stream if name == "bomb" else gzip.GzipFile(fileobj=stream), path))
        assert str(raised.value) == message
    (tmp_path / "bomb").write_bytes(b"a\tb\n" + b"a" * (8 << 20) + b"\tb")
    assert "line 2 is longer" in refused(tmp_path, "--tsv", str(tmp_path / "bomb"))


# -- nothing is written before all options are checked


def test_a_demo_into_a_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PAIRS", 20)
    (tmp_path / "mine").write_text("precious")
    assert "exists; choose another folder" in sentence("demo", "--out", str(tmp_path), "--steps", "1")
    assert "exists; choose another folder" in sentence("demo", "--out", str(tmp_path / "mine"), "--steps", "1")
    assert everything(tmp_path) == {tmp_path / "mine"}


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("did you mean 'rotary'", ("--variant", "rotari")),
        ("'rotary' is given twice", ("--variant", "rotary", "--variant", "rotary")),
        ("transformer_tiny", ("--preset", "transformer_tini")),
        ("did you mean 'dropout'", ("--set", "model.dropuot=0.1")),
        ("did you mean 'depth'", ("--set", "model.encoder.dept=3")),
        ("train.seed is set twice", ("--set", "train.seed=3", "--set", "train.seed=4")),
        ("train.criterion: 'accuracy' is not available", ("--set", "train.criterion=accuracy")),
        ("did you mean 'bleu'", ("--set", "train.criterion=blue")),
        ("did you mean 'intl'", ("--set", "train.bleu_tokenize=intel")),
        ("CPU trains in float32", ("--set", "train.precision=bfloat16")),
        ("--device: 'tpu' is not one of", ("--device", "tpu")),
        ("cannot learn 'translation'", ("--preset", "gpt2_small")),
        ("nowhere.tsv: there is no such file", ("--valid", "nowhere.tsv")),
        ("nowhere.json: cannot be read", ("--set", 'data.tokenizer={kind="imported", path="nowhere.json"}')),
        ("is not a time", ("--max-time", "soon")),
        ("--from uses the tokenizer", ("--from", "runs/x", "--set", "data.tokenizer=bytes")),
    ],
)
def test_invalid_options_are_refused_before_text_is_read(
    problem: str, words: tuple[str, ...], files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread(monkeypatch)
    before = everything(tmp_path)
    small = () if {"--preset", "--from"} & set(words) else ("--set", "model.d_model=16")
    device = () if "--device" in words else ("--device", "cpu")
    command = ("train", "--tsv", files["tsv"], "--out", str(tmp_path / "run"), "-q", *device, *small, *words)
    assert problem in sentence(*command)
    assert everything(tmp_path) == before


# -- columns, pipes, warnings


def test_columns_beyond_the_second_are_named(files: dict[str, str], tmp_path: Path) -> None:
    lines = [f"{line}\tCC-BY {i}" for i, line in enumerate(Path(files["tsv"]).read_text().splitlines())]
    path = write(tmp_path / "three", lines)
    out = str(tmp_path / "run")
    result = regard("train", "--tsv", path, "--out", out, *TINY[:-1], "--set", "train.steps=1")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("has 3 columns between tabs; only the first two are read") == 1
    folder = tmp_path / "ragged"
    folder.mkdir()
    ragged = write(folder / "tsv", ["a\tb", "c\td", "e\tf\tg"])
    assert "line 3 has 3 columns between tabs and line 1 has 2" in refused(folder, "--tsv", ragged)
    ragged = write(folder / "tsv", ["x\tb", "y\td", "x\tf\tg"])
    with pytest.raises(DataError, match="line 3 has 3 columns between tabs and line 1 has 2"):
        list(text.Labelled(ragged).records())


@contextmanager
def pipes(folder: Path, **contents: str) -> Iterator[dict[str, str]]:
    """Named pipes that are written to once, as the shell's `<(...)`."""
    paths = {name: folder / f"{name}.pipe" for name in contents}
    threads = []
    for name, path in paths.items():
        os.mkfifo(path)
        threads.append(threading.Thread(target=path.write_text, args=(contents[name],), daemon=True))
        threads[-1].start()
    yield {name: str(path) for name, path in paths.items()}
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "the pipe was not read"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_gives_the_same_run_as_a_file(files: dict[str, str], tmp_path: Path) -> None:
    contents = {"en": Path(files["en"]).read_text(), "de": Path(files["de"]).read_text()}
    digests = []
    with pipes(tmp_path, **contents) as piped:
        for number, paths in enumerate((files, piped)):
            words = ("train", "--source", paths["en"], "--target", paths["de"], "--set", "train.steps=1", *TINY)
            result = regard(*words, "--out", str(tmp_path / f"run-{number}"), "--json")
            assert result.returncode == 0, result.stderr
            digests.append(json.loads(result.stdout)["weights_sha256"])
    assert digests[0] == digests[1]
    assert not list((tmp_path / "run-1").glob(".text*"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_errors_in_a_pipe_name_the_pipe(files: dict[str, str], tmp_path: Path) -> None:
    with pipes(tmp_path, tsv="a\tb\nc\n") as piped:
        assert f"{piped['tsv']}: line 2 has 1 column" in refused(tmp_path, "--tsv", piped["tsv"])
    (tmp_path / "tsv.pipe").unlink()
    with pipes(tmp_path, tsv="") as piped:
        assert f"{piped['tsv']}: is empty" in refused(tmp_path, "--tsv", piped["tsv"])
    with pipes(tmp_path, source="a\n", reference="b\n") as piped:
        test = report.Test(piped["source"], piped["reference"])
        assert test.pairs == test.pairs == [("a", "b")]
    os.mkfifo(tmp_path / "unread")
    words = ("ablate", "--tsv", str(tmp_path / "unread"), "--out", str(tmp_path / "table"), "-q", "--device", "cpu")
    assert "is a pipe" in sentence(*words)


def test_repeated_warnings_are_counted(tiny: Path) -> None:
    long = b"a b\n" + b"a b a b a b a b a b a b\n" * 40
    result = regard("translate", str(tiny), "--beam", "1", "--max-len", "2", "--device", "cpu", stdin=long)
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 41
    first, count = result.stderr.splitlines()
    assert first.startswith("regard: warning: line 2: ")
    assert count.startswith("regard: warning: 39 more like this one: line 2: ")
