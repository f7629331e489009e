"""Damaged and random input for everything that reads files: recipes, run folders and corpora.

    python tests/fuzz/fuzz.py --inputs 100000 --seed 1 [--keep DIR] [--only corpora]

Every input is a valid file with random changes. A reader may raise a RegardError, or an error about memory, which the
command line turns into a sentence. Any other exception is a fault, and so is an input that takes more than 20 seconds
of CPU time. The result is printed as JSON; equal faults (the same exception at the same line) are counted once.
"""

import argparse
import gzip
import json
import lzma
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard.ablation.results import Results
from regard.data.text import JSONL, TSV, Corpus, Labelled, Lines, ParallelFiles
from regard.errors import RegardError, lacks_memory
from regard.files import file_digest
from regard.recipe.recipe import load_model
from regard.runs import train as training
from regard.runs.listing import list_runs
from regard.runs.request import request_from_options
from regard.runs.train import TrainingOptions
from regard.runs.trained_model import load
from regard.training.checkpoint import RunFolder
from regard.training.console import TrainingConsole
from regard.training.parallel.group import ALONE

HANG = 20.0  # seconds of CPU time
MEMORY = 6 << 30  # bytes of addresses beyond those in use when the first input is read
WORDS = (
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\n\n", b"\t", b"\xe2\x80\xa8", b"\xed\xa0\x80", b'"', b"\\",
    b"{", b"}", b"[" * 200, b"[" * 100_000, b'{"a":' * 500, b"1e999", b"-1", b"NaN", b"Infinity", b"9" * 5000, b"0.1",
    b"1" + b"0" * 30, b"null", b"true", b'"\\ud800"', b'"kind"', b"=", b"#", b"'''", b"__label__", b"__label__a ",
    b"\x1f\x8b", b"\xfd7zXZ\x00", "ß".encode(), "\U0001f600".encode(), b" " * 300, b"-0.0", b"2e308", b"inf",
    b"1979-05-27T07:32:00Z",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, 10**400, 0.5, -1e308, 1e308, float("nan"), float("inf"), "",
    "x", "\ud800", "bpe", "beam", "module:Class", "../x", "a" * 5000, [], {}, [1], ["x"], [[]], {"kind": "x"},
    {"kind": "beam"}, {"kind": "translation"}, {"kind": "adamw"}, {"kind": "self_attention"}, {"a": {"b": 1}},
)  # fmt: skip
RECIPE = """
model = { preset = "transformer_tiny", dropout = 0.1, variants = ["rotary", "pre_norm"] }

[data]
train = [
  { kind = "parallel", source = "a.en", target = "a.de" },
  { kind = "tsv", path = "b.tsv", weight = 4.0 },
]
valid = [{ kind = "jsonl", path = "c.jsonl" }]
tokenizer = { kind = "bpe", vocab = 800 }
batching = { kind = "packing", tokens = 1024, length = 64 }
max_len = 100

[train]
steps = 20_000
accumulate = 4
optimizer = { kind = "adamw", learning_rate = 1e-3 }
schedule = { kind = "cosine", warmup = 1000 }
ema = 0.999
average = 5
criterion = "bleu"

[decode]
kind = "beam"
beam_size = 3
"""


def changed(rng: random.Random, content: bytes) -> bytes:
    """Return bytes with one to four random changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = rng.choice(CHANGES)(rng, content)
    return content[: 1 << 20]


def _span(rng: random.Random, content: bytes) -> tuple[int, int]:
    start = rng.randint(0, len(content))
    return start, min(len(content), start + rng.choice((0, 1, 2, 8, 64, 512)))


def _flip(rng: random.Random, content: bytes) -> bytes:
    if not content:
        return content
    i = rng.randrange(len(content))
    return content[:i] + bytes([content[i] ^ (1 << rng.randrange(8))]) + content[i + 1 :]


def _cut(rng: random.Random, content: bytes) -> bytes:
    start, end = _span(rng, content)
    return content[:start] + content[end:]


def _truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randint(0, len(content))]


def _repeat(rng: random.Random, content: bytes) -> bytes:
    start, end = _span(rng, content)
    return content[:end] + content[start:end] * rng.choice((1, 3, 100)) + content[end:]


def _insert(rng: random.Random, content: bytes) -> bytes:
    start, end = _span(rng, content)
    return content[:start] + rng.choice(WORDS) + content[rng.choice((start, end)) :]


def _noise(rng: random.Random, content: bytes) -> bytes:
    start, _ = _span(rng, content)
    return content[:start] + rng.randbytes(rng.randint(1, 16)) + content[start:]


def _swap(rng: random.Random, content: bytes) -> bytes:
    """Replace a word by another word of the content."""
    words = content.split()
    if len(words) < 2:
        return content
    return content.replace(rng.choice(words), rng.choice(words), rng.choice((1, 1, -1)))


CHANGES = (_flip, _cut, _truncate, _repeat, _insert, _insert, _noise, _swap)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in inner for found in ((*path, key), *nodes(each, (*path, key)))]


def changed_document(rng: random.Random, content: bytes) -> bytes:
    """Return a JSON document in which one to three nodes are removed, replaced or added."""
    document = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 3))):
        paths = nodes(document)
        if not paths:
            break
        *way, last = rng.choice(paths)
        at = document
        for step in way:
            at = at[step]
        how = rng.choice(("remove", "replace", "replace", "add", "move"))
        if how == "remove":
            del at[last]
        elif how == "add" and isinstance(at, dict):
            at[rng.choice(("x", "kind", "vocab", "format", "step", ""))] = rng.choice(VALUES)
        elif how == "move":
            other: Any = document
            for step in rng.choice(paths):
                if not isinstance(other, dict | list) or isinstance(other, list) != isinstance(step, int):
                    break
                try:
                    other = other[step]
                except (KeyError, IndexError):
                    break
            at[last] = json.loads(json.dumps(other))
        else:
            at[last] = rng.choice(VALUES)
    return json.dumps(document).encode("utf-8", "surrogatepass")


def changed_json(rng: random.Random, content: bytes) -> bytes:
    return changed_document(rng, content) if rng.random() < 0.7 else changed(rng, content)


def changed_tensors(rng: random.Random, content: bytes) -> bytes:
    """Return a safetensors file with a changed header, a changed length of the header, or changed bytes."""
    (size,) = struct.unpack("<Q", content[:8])
    header, rest = content[8 : 8 + size], content[8 + size :]
    how = rng.randrange(4)
    if how == 0:
        return struct.pack("<Q", rng.choice((0, 1, size - 1, size + 1, 2**40, 2**64 - 1))) + header + rest
    if how == 1:
        return changed(rng, content)
    header = changed_json(rng, header)
    return struct.pack("<Q", len(header)) + header + (rest if how == 2 else changed(rng, rest))


# ------------------------------------------------------------------------------------------------------------- readers
def corpora(rng: random.Random, folder: Path) -> Callable[[], object]:
    """Return a reading of a damaged corpus, compressed or not."""
    kind = rng.choice(("parallel", "tsv", "jsonl", "lines", "field", "labelled"))
    rows = rng.randint(1, 12)
    texts = {
        "parallel": "".join(f"a b {i}\n" for i in range(rows)),
        "tsv": "".join(f"a b {i}\tc d {i}\n" for i in range(rows)),
        "jsonl": "".join(
            json.dumps({"source": f"a {i}", "target": f"b {i}", "x": {"y": i}}) + "\n" for i in range(rows)
        ),
        "lines": "".join(f"a b {i}\n" for i in range(rows)),
        "field": "".join(json.dumps({"a": {"b": f"text {i}"}}) + "\n" for i in range(rows)),
        "labelled": "".join(rng.choice((f"{i % 2}\ttext {i}\n", f"__label__{i % 2} text {i}\n")) for i in range(rows)),
    }
    ending = rng.choice(("", "", "", ".gz", ".xz"))
    path = folder / f"corpus{'.jsonl' if kind in {'jsonl', 'field'} else '.txt'}{ending}"
    path.write_bytes(_compressed(rng, texts[kind].encode(), ending))
    other = folder / "other.txt"
    other.write_bytes(rng.choice((texts["parallel"].encode(), changed(rng, texts["parallel"].encode()))))
    columns = rng.choice((1, 2, 3))
    spec: Corpus = {
        "parallel": lambda: ParallelFiles(str(path), str(other)),
        "tsv": lambda: TSV(str(path), 1, columns, header=rng.random() < 0.2),
        "jsonl": lambda: JSONL(str(path), target=rng.choice(("target", "x.y", "x", "z"))),
        "lines": lambda: Lines(str(path)),
        "field": lambda: Lines(str(path), field=rng.choice(("a.b", "a", "b"))),
        "labelled": lambda: Labelled(str(path), header=rng.random() < 0.2),
    }[kind]()

    def read() -> None:
        for record in spec.records():
            for text in record:
                text.encode("utf-8")
        spec.remarks()

    return read


def _compressed(rng: random.Random, content: bytes, ending: str) -> bytes:
    content = changed(rng, content) if not ending or rng.random() < 0.5 else content
    if ending == ".gz":
        content = gzip.compress(content, 1)
    elif ending == ".xz":
        content = lzma.compress(content, preset=0)
    return changed(rng, content) if ending and rng.random() < 0.7 else content


def recipes(rng: random.Random, folder: Path) -> Callable[[], object]:
    """Return a reading of a damaged recipe, to train or to show the model."""
    if rng.random() < 0.5:
        path = folder / "recipe.toml"
        path.write_bytes(changed(rng, RECIPE.encode()))
    else:
        path = folder / "recipe.json"
        path.write_bytes(changed_json(rng, json.dumps(tomllib.loads(RECIPE)).encode()))
    if rng.random() < 0.7:
        return lambda: request_from_options(recipe=path)
    return lambda: load_model(str(path))


class Runs:
    """A finished and a stopped training run, and damaged copies of them."""

    def __init__(self, folder: Path) -> None:
        text = folder / "text.tsv"
        text.write_text("".join(f"a{n % 7} b{n % 5}\tx{n % 7} y{n % 5}\n" for n in range(60)))
        small = ["model.d_model=16", "model.heads=2", "model.encoder.depth=1", "model.decoder.depth=1"]
        small += ["train.steps=4", "train.validate_every=2", "train.decode=2", "data.held_out=10"]
        small += ["data.tokenizer=characters", "train.average=1", "train.keep=1"]
        options: dict[str, Any] = {"tsv": text, "preset": "transformer_small", "changes": small, "device": "cpu"}
        training.train(folder / "finished", cache=False, **options)
        training.train(folder / "stopped", cache=False, max_time=0.001, **options)
        self.finished, self.stopped = folder / "finished", folder / "stopped"

    def load(self, rng: random.Random, folder: Path) -> Callable[[], object]:
        """Return the loading of a damaged run."""
        source = rng.choice((self.finished, self.stopped))
        path = self._damaged(rng, source, folder, ("recipe.json", "tokenizer*", "weights-*", "trainer-*.json"))
        return lambda: load(path, "cpu")

    def list(self, rng: random.Random, folder: Path) -> Callable[[], object]:
        """Return the listing of a damaged run, and of the results of an ablation."""
        path = self._damaged(rng, rng.choice((self.finished, self.stopped)), folder, ("log.jsonl", "re*.json"))
        result = {"hash": "1", "status": "done", "loss": 1.0, "scores": {"loss": 1.0}, "early": {}, "curve": []}
        line = json.dumps(result | {"steps": 1, "steps_per_second": 1.0, "device": "cpu"}).encode()
        (path / "results.jsonl").write_bytes(changed(rng, line + b"\n" + line + b"\n"))

        def read() -> None:
            assert json.dumps([run.json() for run in list_runs(folder)], allow_nan=False)
            Results(path, "bleu", texts=True)

        return read

    def resume(self, rng: random.Random, folder: Path) -> Callable[[], object]:
        """Return the resumption of a damaged run, up to the first training step."""
        files = ("request.json", "recipe.json", "trainer-*", "weights-*", "tokenizer*", "log.jsonl", "data/**/*")
        path = self._damaged(rng, self.stopped, folder, files)

        def read() -> None:
            run, console = RunFolder(path), TrainingConsole(quiet=True)
            request = training._read_request(run, False)
            options = TrainingOptions(device="cpu", cache=False)
            training._prepare_and_assemble(run, request, options, console, ALONE).resume()

        return read

    def _damaged(self, rng: random.Random, source: Path, folder: Path, patterns: tuple[str, ...]) -> Path:
        """Return a copy of a run in which one file is damaged. The digests of a checkpoint are sometimes corrected."""
        path = folder / "run"
        shutil.copytree(source, path, copy_function=os.link)  # files are replaced, never changed in place
        files = [file for file in path.glob(rng.choice(patterns)) if file.is_file()]
        if not files:
            return path
        file = rng.choice(sorted(files))
        content = file.read_bytes()
        change = {".json": changed_json, ".safetensors": changed_tensors}.get(file.suffix, changed)
        file.unlink()
        file.write_bytes(change(rng, content))
        if file.suffix == ".safetensors" and "final" not in file.name and rng.random() < 0.7:
            (state,) = path.glob("trainer-*.json")
            record = json.loads(state.read_bytes())
            record["sha256"][file.name.partition("-")[0]] = file_digest(file)
            state.unlink()
            state.write_text(json.dumps(record))
        return path


# -------------------------------------------------------------------------------------------------------------- faults
class Hang(BaseException):
    """Raised in a reader that takes too long."""


def _hang(*_: object) -> None:
    raise Hang


@dataclass
class Faults:
    """The faults that were found, and where their inputs are kept."""

    keep: Path | None = None
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # what -> name of the first input

    def add(self, error: BaseException, name: str, folder: Path) -> None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "regard" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        what = f"{type(error).__name__} at {where}: {str(error)[:120]!a}" if frames else repr(error)[:200]
        key = f"{type(error).__name__} at {where}"
        self.counts[key] += 1
        if key not in self.first:
            self.first[key] = f"{name}: {what}"
            if self.keep is not None:
                shutil.copytree(folder, self.keep / name.replace(" ", "-"), dirs_exist_ok=True)
                (self.keep / f"{name.replace(' ', '-')}.txt").write_text("".join(traceback.format_exception(error)))


def allowed(error: BaseException) -> bool:
    """Return whether the command line prints a sentence for this error: one of regard's own, or about memory."""
    return isinstance(error, RegardError) or lacks_memory(error)


def attempt(read: Callable[[], object]) -> BaseException | None:
    """Read an input and return the error, if any. The time limit counts CPU time."""
    signal.setitimer(signal.ITIMER_PROF, HANG)
    try:
        read()
    except (Exception, Hang) as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def fuzz(inputs: int, seed: int, keep: Path | None = None, only: str | None = None) -> dict[str, Any]:
    """Read `inputs` random inputs and return how many were accepted and refused, and the faults."""
    signal.signal(signal.SIGPROF, _hang)
    torch.set_num_threads(1)
    training.environment = lambda _: {}  # starts git
    training.TensorBoard.installed = staticmethod(lambda: False)  # starts a thread that lives as long as the process
    faults, outcomes, slowest = Faults(keep), Counter[str](), (0.0, "")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        runs = Runs(root)
        readers = {"corpora": corpora, "recipes": recipes, "load": runs.load, "list": runs.list, "resume": runs.resume}
        shares = {"corpora": 50, "recipes": 30, "load": 12, "list": 5, "resume": 3}
        limit_memory()
        for number in range(inputs):
            rng = random.Random(f"{seed} {number}")
            kind = only or rng.choices(list(shares), list(shares.values()))[0]
            folder = root / "input"
            folder.mkdir()
            read = readers[kind](rng, folder)
            began = time.process_time()
            error = attempt(read)
            slowest = max(slowest, (time.process_time() - began, f"{kind} {seed} {number}"))
            outcomes[f"{kind}: {'accepted' if error is None else 'refused' if allowed(error) else 'fault'}"] += 1
            if error is not None and not allowed(error):
                faults.add(error, f"{kind} {seed} {number}", folder)
            shutil.rmtree(folder)
    return {
        "inputs": inputs,
        "seed": seed,
        "outcomes": dict(sorted(outcomes.items())),
        "slowest": {"seconds": round(slowest[0], 2), "input": slowest[1]},
        "faults": [{"count": count, "first": faults.first[key]} for key, count in faults.counts.most_common()],
    }


def limit_memory() -> None:
    """Limit the memory of this process, because a damaged recipe may describe an enormous model."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the inputs of faults")
    parser.add_argument("--only", choices=("corpora", "recipes", "load", "list", "resume"))
    options = parser.parse_args()
    began = time.monotonic()
    result = fuzz(options.inputs, options.seed, options.keep, options.only)
    sys.stdout.write(json.dumps(result | {"minutes": round((time.monotonic() - began) / 60, 1)}, indent=2) + "\n")
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
