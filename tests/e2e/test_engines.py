"""A run gives the same outputs with another engine and with several processes."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as package
from regard.decoding.beam import Beam
from regard.inference import export as exported
from regard.inference.ctranslate2 import CTranslate2
from regard.runs.trained_model import load
from regard.training.tensor_files import read_about, read_tensors, write_weights

from .conftest import complaint, regard
from .test_path import STRANGE, translated


@pytest.fixture(scope="module")
def copied(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run that has been exported."""
    copy = tmp_path_factory.mktemp("exported") / "run"
    shutil.copytree(run, copy)
    result = regard("export", str(copy))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0].startswith(f"{copy / 'exports' / 'ctranslate2-float32'}: float32, ")
    assert "outputs the same; over" in result.stdout
    return copy


def test_export_prints_the_stored_record(copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    output = json.loads(regard("export", str(copied), "--quantize", "int8", "--out", str(out), "--json").stdout)
    record = json.loads((out / "regard.json").read_text())
    assert output == {"path": str(out), **record}
    assert record["weights_sha256"] == package.load(copied).weights_sha256
    assert record["check"]["inputs"] == "validation text"
    assert record["check"]["agreed"] > 0
    names = {"model.bin", "config.json", "shared_vocabulary.json", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == {*names, "regard.json"} == {*record["files"], "regard.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    whole = copied / "exports" / "ctranslate2-float32" / "model.bin"
    assert (out / "model.bin").stat().st_size < whole.stat().st_size


def test_an_export_replaces_only_exports(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert complaint("export", str(copied), "--out", str(tmp_path / "mine")).endswith("or replace it with --force")
    assert "remove it yourself" in complaint("export", str(copied), "--out", str(tmp_path / "mine"), "--force")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert "is not known" in complaint("export", str(copied), "--quantize", "int4")
    assert "is not known" in complaint("export", str(copied), "--to", "onnx")
    (tmp_path / "file").touch()
    assert "cannot write" in complaint("export", str(copied), "--out", str(tmp_path / "file" / "x"))


@pytest.mark.parametrize(
    "words",
    [(), ("--beam", "1"), ("--n-best", "3"), ("--set", "normalise=none"), ("--max-len", "3", "--batch-size", "2")],
    ids=" ".join,
)
def test_the_engine_returns_the_same_translations(copied: Path, words: tuple[str, ...]) -> None:
    text = "".join(f"{line}\n" for line in (*STRANGE, "one two three four five six seven eight nine")).encode()
    native = regard("translate", str(copied), *words, "--set", "stopping=ctranslate2", "--json", stdin=text)
    engine = regard("translate", str(copied), *words, "--engine", "ctranslate2", "--json", stdin=text)
    assert engine.stderr == (
        "regard: warning: the engine 'ctranslate2' uses its own stopping rule (stopping=ctranslate2), not 'optimal'\n"
    )
    expected, outputs = json.loads(native.stdout), json.loads(engine.stdout)
    assert len(outputs) == len(STRANGE) + 1
    for best, best_actual in zip(expected, outputs, strict=True):
        for output, actual in zip(best, best_actual, strict=True):
            assert output.keys() == actual.keys()
            assert (output["text"], output["tokens"], output["ended"]) == (
                actual["text"],
                actual["tokens"],
                actual["ended"],
            )
            assert actual["score"] == pytest.approx(output["score"], abs=1e-4)
            assert actual["log_prob"] == pytest.approx(output["log_prob"], abs=1e-3)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--prefix", "eins"), "prefix"),
        (("--ban", "eins"), "banned"),
        (("--require", "eins"), "required"),
        (("--no-repeat", "2"), "no_repeat"),
        (("--min-len", "2"), "min_len"),
        (("--temperature", "1"), "search"),
        (("--set", "stopping=optimal"), "stopping"),
        (("--set", "coverage=0.2"), "coverage"),
        (("--set", "normalise=gnmt"), "normalise"),
        (("--set", "groups=5", "--set", "diversity=1"), "groups"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_options_that_the_engine_lacks_are_refused(copied: Path, words: tuple[str, ...], name: str) -> None:
    sentence = complaint("translate", str(copied), "--engine", "ctranslate2", *words, stdin=b"one\n")
    assert sentence.startswith(f"{name}: cannot be used as given with the engine 'ctranslate2': ")
    assert sentence.endswith("; use --engine native")


def test_other_invalid_options_are_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("translate", str(copied), "--engine", "ctranslate2")
    assert complaint(*command, "--stream").startswith("--stream: ")
    assert complaint(*command, "--device", "cuda").startswith("--device: the engine 'ctranslate2' computes on the CPU")
    assert "ensemble" in complaint("translate", str(copied), *command[1:])
    assert complaint("translate", str(copied), "--engine", "torch").startswith("--engine: 'torch' is not known")
    assert complaint("translate", str(copied), "--quantize", "int8").startswith("--quantize: the native engine")
    assert complaint("translate", str(copied), "--workers", "2", "--stream").startswith("--stream: ")
    assert complaint("translate", str(copied), "--workers", "2", "--threads", "1").startswith("--threads: ")
    assert complaint("translate", str(copied), "--workers", "2", "--device", "cuda").startswith("--device: ")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert complaint(*command, stdin=b"one\n").endswith("is not installed here: pip install 'regard[export]'")


def test_a_stale_or_damaged_export_is_exported_again(copied: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(copied, run)
    command = ("translate", str(run), "--engine", "ctranslate2")
    folder = run / "exports" / "ctranslate2-float32"
    assert "exporting again" not in regard(*command, stdin=b"one\n").stderr
    weights, about = read_tensors(run / "weights-final.safetensors"), read_about(run / "weights-final.safetensors")
    changed = {name: -weight if "output.weight" in name else weight.clone() for name, weight in weights.items()}
    write_weights(run / "weights-final.safetensors", changed, about)
    result = regard(*command, stdin=b"one\ntwo red house\n")
    assert f"the export {folder} is stale or damaged; exporting again" in result.stderr
    assert (
        result.stdout
        == regard("translate", str(run), "--set", "stopping=ctranslate2", stdin=b"one\ntwo red house\n").stdout
    )
    (folder / "model.bin").write_bytes((folder / "model.bin").read_bytes()[:-100])
    assert "is stale or damaged" in regard(*command, stdin=b"one\n").stderr
    (folder / "regard.json").write_text("{")
    again = regard(*command, stdin=b"one\ntwo red house\n")
    assert "is stale or damaged" in again.stderr
    assert again.stdout == result.stdout
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["ctranslate2-float32"]


def test_the_engine_in_python(copied: Path) -> None:
    run = package.load(copied)
    lines = [line for line in STRANGE if line.strip()]
    engine = run.engine("ctranslate2", "int8", threads=1)
    assert isinstance(engine, CTranslate2)
    assert len(run.translate(lines, engine=engine)) == len(lines)
    search = Beam(4, stopping="ctranslate2")
    expected = [best[0].text for best in run.translations(lines, search=search)]
    assert run.translate(lines, beam=4, engine="ctranslate2") == expected


def test_the_engine_never_outputs_padding(copied: Path) -> None:
    """A model whose most probable token is padding outputs its second choice."""
    run = package.load(copied)
    table: Any = run.model.get_parameter("tables.tables.source.weight")
    with torch.no_grad():
        table[0] = table.mean(0) * 50
    engine = exported.engine(run.trained(), copied / "exports" / "odd")
    outputs = list(run.translations(["one two", "three"], engine=engine))
    assert all("<pad>" not in output.tokens for best in outputs for output in best)
    shutil.rmtree(copied / "exports" / "odd")


def test_mapped_weights_stay_in_their_file(run: Path) -> None:
    mapped = load(run, "cpu", mapped=True)
    at = next(mapped.model.parameters()).data_ptr()
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    inside = [words[-1] for words in ranges if int(words[0].split("-")[0], 16) <= at < int(words[0].split("-")[1], 16)]
    assert inside == [str((run / "weights-final.safetensors").resolve())]


@pytest.mark.slow
def test_workers_return_the_outputs_of_one_process(run: Path) -> None:
    lines = [f"{['one', 'two', 'three', 'four'][i % 4]} {['red', 'house', 'nine'][i % 3]}" for i in range(40)]
    text = "".join(f"{line}\n" for line in (*lines, *STRANGE)).encode()
    words = (str(run), "--temperature", "1", "--n-best", "2", "--batch-size", "3", "--json")
    single = regard("translate", *words, stdin=text)
    workers = regard("translate", *words, "--workers", "2", stdin=text)
    assert workers.returncode == 0, workers.stderr
    for best, of_workers in zip(json.loads(single.stdout), json.loads(workers.stdout), strict=True):
        for output, other in zip(best, of_workers, strict=True):
            assert {**output, "score": 0, "log_prob": 0} == {**other, "score": 0, "log_prob": 0}
            assert other["score"] == pytest.approx(output["score"], abs=1e-4)  # other batches, hence other rounding
    assert "need at least 2 beams" in complaint(
        "translate", str(run), "--beam", "1", "--require", "x", "--workers", "1", stdin=b"one\n"
    )


def test_threads_of_the_engine_change_nothing(copied: Path) -> None:
    text = b"one two\nthree\nred house nine\n" * 20
    options = (str(copied), "--engine", "ctranslate2", "--batch-size", "4")
    assert translated(*options, "--workers", "3", stdin=text) == translated(*options, "--threads", "1", stdin=text)
