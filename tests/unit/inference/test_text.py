"""Text in, text out, in Python and on the command line: limits, prompts, line counts, streams, recipes, scores."""

import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as package
from regard.cli import main
from regard.data.objectives import Translation
from regard.data.text import lines
from regard.data.token_store import Column, Table
from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.job import Job
from regard.decoding.positions import positions
from regard.decoding.sample import Sample
from regard.decoding.search import Search
from regard.errors import DataError, RegardError, SpecError
from regard.evaluation.loss import likelihood
from regard.inference.engine import Engine, Sources
from regard.inference.text import Constraints, Output
from regard.runs.decode import ensemble, text_decoder
from regard.runs.options import cpu_threads, search_from_options
from regard.runs.trained_model import TrainedModel
from regard.runs.workers import task_of, translate
from regard.tree import Spec
from tests.unit.decoding.untrained import (
    LINES,
    POSITIONS,
    STREAM,
    TWO,
    WINDOW,
    complaint,
    printed,
    regard,
    started,
    untrained,
)

SOURCES = ["abcd efgh", "", "mnop", "  ", "ijkl ijkl abcd"]
LONG = " ".join(["abcd"] * 60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return untrained runs of every kind of model; those with names in capitals have learned positions."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "translator": untrained(folder / "translator", Translation()),
        "TRANSLATOR": untrained(folder / "learned", Translation(), max_len=WINDOW - 2, **POSITIONS),
        "STREAM": untrained(folder / "stream", STREAM, Sample(), **POSITIONS),
        "LINES": untrained(folder / "lines", LINES, Sample(), max_len=WINDOW - 2, **POSITIONS),
        "stream": untrained(
            folder / "rotary", STREAM, Sample(), **{"input.position": None, "decoder.position": "rotary"}
        ),
        "classifier": untrained(folder / "classifier", TWO),
    }


@pytest.fixture(scope="module")
def runs(folders: dict[str, Path]) -> dict[str, TrainedModel]:
    return {name: package.load(path, "cpu") for name, path in folders.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_text("".join(line + "\n" for line in SOURCES))
    return path


# Limits and positions


@pytest.mark.parametrize("option", ["--max-len", "--min-len"])
@pytest.mark.parametrize(
    ("command", "name"), [("translate", "TRANSLATOR"), ("generate", "STREAM"), ("generate", "LINES")]
)
@pytest.mark.parametrize("search", [("--beam", "3"), ("--temperature", "1")])
def test_limits_beyond_the_positions_are_refused(
    folders: dict[str, Path], source: Path, command: str, name: str, option: str, search: tuple[str, ...]
) -> None:
    message = complaint(command, folders[name], source, option, str(WINDOW + 1), *search)
    assert f"{WINDOW} positions" in message
    assert option[2:5] in message
    assert printed(command, folders[name], source, "--max-len", "5", *search)


def test_without_a_table_of_positions_there_is_no_limit(runs: dict[str, TrainedModel]) -> None:
    far = Limits(min_len=70, max_len=70)
    (output,) = runs["stream"].generate("abcd", limits=far)
    assert len(output.ids) == 70
    assert len(runs["translator"].translations("abcd", search=Beam(1), limits=far)[0].ids) == 70


def test_parts_without_a_limit_have_no_positions(
    runs: dict[str, TrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runs["stream"].model
    assert isinstance(model, package.Generator)
    for parts, count in ((), None), ((Limited(max_len=9), Limited()), 9):
        monkeypatch.setattr(model, "spec", Limited(parts))
        assert positions([model]).count == count


@dataclass(frozen=True, slots=True)
class Limited(Spec):
    kind = "limited"
    parts: tuple["Limited", ...] = ()
    max_len: int | None = None


def test_min_len_above_max_len_is_refused(folders: dict[str, Path], source: Path) -> None:
    for command, name in (("translate", "translator"), ("generate", "STREAM")):
        assert "min_len" in complaint(command, folders[name], source, "--min-len", "6", "--max-len", "5")


def test_a_prompt_that_leaves_less_room_than_max_len_is_warned_about(
    folders: dict[str, Path], runs: dict[str, TrainedModel]
) -> None:
    prompt = "abcd efgh ijkl"
    read = len(runs["STREAM"].tokenizer.encode(prompt))
    words = ("generate", folders["STREAM"], "--prompt", prompt, "--ban", "<unused>")
    result = regard(*words, "--max-len", str(WINDOW), "--json")
    assert result.returncode == 0
    assert result.stderr.count("\n") == 1
    assert f"line 1: at most {WINDOW - read + 1} tokens" in result.stderr
    (output,) = json.loads(result.stdout)[0]
    assert output["ended"] or len(output["ids"]) == WINDOW - read + 1
    assert regard(*words, "--max-len", "4").stderr == ""
    assert regard(*words).stderr == ""  # no max_len was set
    assert "leaves no room" in complaint(*words, "--min-len", str(WINDOW))


def test_without_max_len_a_continuation_uses_the_positions_that_are_left(
    runs: dict[str, TrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    (output,) = runs["LINES"].generate("abcd", limits=Limits(min_len=10))
    assert output.ended or len(output.ids) == WINDOW - len(output.read) + 1
    monkeypatch.setattr("regard.inference.text.NEW", 9)
    for fewest in (9, 11):  # min_len is reached even if it exceeds the default
        (output,) = runs["stream"].generate("abcd", search=Sample(seed=1), limits=Limits(min_len=fewest))
        assert len(output.ids) == fewest


def test_a_source_that_takes_up_positions_leaves_less_room(tmp_path: Path) -> None:
    run = package.load(untrained(tmp_path / "run", Translation(), variants=("decoder_only",), **POSITIONS), "cpu")
    warnings = list[str]()
    source = "abcd efgh ijkl abcd"
    read = len(run.tokenizer.encode(source)) + 1  # with its end
    for search in (Beam(1), Beam(3), Sample()):
        warnings.clear()
        (output,) = run.translations(source, search=search, limits=Limits(max_len=WINDOW - 1), warn=warnings.append)
        assert output.ended or len(output.ids) == WINDOW - read
        assert [f"at most {WINDOW - read} tokens" in warning for warning in warnings] == [True]
    with pytest.raises(DataError, match=r"line 1: .* no room"):
        run.translate(source, limits=Limits(min_len=WINDOW - 2))
    with pytest.raises(SpecError, match="24 positions"):
        run.translate(source, limits=Limits(max_len=WINDOW + 1))


# Prompts


@pytest.mark.parametrize("name", ["STREAM", "LINES", "stream"])
def test_the_end_of_a_long_prompt_is_kept(runs: dict[str, TrainedModel], name: str) -> None:
    run, warnings = runs[name], list[str]()
    (output,) = run.generate(LONG, search=Beam(1), limits=Limits(max_len=5), warn=warnings.append)
    begin = len(run.begin)
    encoded = run.tokenizer.encode(LONG)
    kept = output.read[begin:]
    assert 1 < len(kept) < len(encoded)
    assert list(kept) == encoded[-len(kept) :]
    assert output.read[:begin] == run.begin
    assert output.text.startswith(LONG)
    (warning,) = warnings
    assert f"line 1: {len(encoded)} tokens" in warning
    assert f"the last {len(kept)}" in warning
    short = run.tokenizer.decode(list(kept))
    (again,) = run.generate(short, search=Beam(1), limits=Limits(max_len=5))
    assert (again.ids, again.text.removeprefix(short)) == (output.ids, output.text.removeprefix(LONG))


def test_many_long_lines_are_one_warning_and_a_count(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "long").write_text(f"abcd\n{LONG}\n{LONG}\n{LONG}\n")
    short = ("--max-len", "3")
    for command, name, *words in (
        ("translate", "translator", *short),
        ("generate", "STREAM", *short),
        ("classify", "classifier"),
    ):
        result = regard(command, folders[name], tmp_path / "long", *words)
        assert result.returncode == 0, result.stderr
        first, rest = result.stderr.splitlines()
        assert "line 2: " in first
        assert "2 more like this one" in rest


def test_an_empty_prompt_begins_a_text(runs: dict[str, TrainedModel]) -> None:
    assert runs["STREAM"].generate("")[0].text.startswith("\n")
    assert runs["LINES"].generate("")[0].read == (runs["LINES"].tokenizer.bos,)


# The number of outputs


class Poor(Engine):
    """Returns one hypothesis per source, whatever `n_best` is."""

    name = "poor"

    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None: ...

    def find(
        self,
        sources: Sources,
        search: Search,
        batch_size: int,
        limits: Limits,
        rules: TokenConstraints,
        rows: Sequence[int],
    ) -> list[list[Hypothesis]]:
        return [[Hypothesis((5,), -1.0, -1.0, (-1.0,), True)] for _ in sources]


SEARCHES = {"beam": ("--beam", "4"), "sample": ("--temperature", "0.9")}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_n_best_prints_n_outputs_for_every_input_line(
    folders: dict[str, Path], source: Path, search: tuple[str, ...]
) -> None:
    words = ("translate", folders["translator"], source, *search, "--n-best", "3", "--max-len", "6")
    assert printed(*words).count("\n") == 3 * len(SOURCES)
    assert [len(best) for best in json.loads(printed(*words, "--json"))] == [3] * len(SOURCES)


def test_an_engine_may_perform_the_search_of_the_recipe_in_its_own_way(runs: dict[str, TrainedModel]) -> None:
    class Greedy(Poor):
        def adapted(self, search: Search, warn: Callable[[str], None]) -> Search:
            warn("greedy")
            return Beam(1)

    warned: list[str] = []
    assert text_decoder([runs["translator"]], engine=Greedy(), warn=warned.append).search == Beam(1)
    assert warned == ["greedy"]
    assert text_decoder([runs["translator"]], engine=Greedy(), search=Beam(3)).search == Beam(3)
    assert text_decoder([runs["translator"]], engine=Poor()).search == runs["translator"].recipe.decode


def test_n_best_in_python_by_workers_and_by_other_engines(
    folders: dict[str, Path], runs: dict[str, TrainedModel]
) -> None:
    search, limits = Beam(4, 3), Limits(max_len=4)
    assert [len(best) for best in runs["translator"].translations(SOURCES, search=search, limits=limits)] == [3] * 5
    few = [len(best) for best in runs["translator"].translations(SOURCES, search=search, engine=Poor())]
    assert few == [3] * len(SOURCES)
    decoder = text_decoder([runs["translator"]], search=search, limits=limits)
    with cpu_threads(None):  # a worker has one thread
        task = json.dumps(task_of(decoder, [str(folders["translator"])], {}))
        outputs = translate(task, 0, SOURCES, lambda _: None)["outputs"]
    assert [len(best) for best in outputs] == [3] * len(SOURCES)


def test_missing_outputs_are_null_in_json(folders: dict[str, Path], runs: dict[str, TrainedModel]) -> None:
    # With a prefix that fills the output, only one output is possible.
    prefix = runs["translator"].tokenizer.decode([100, 101])
    words = ("--prefix", prefix, "--max-len", str(len(runs["translator"].tokenizer.encode(prefix))), "--n-best", "3")
    text = printed("translate", folders["translator"], *words, "--json", stdin=b"abcd\n")
    (best,) = json.loads(text, parse_constant=pytest.fail)
    assert len(best) == 3
    assert best[-1]["score"] is None


# Streams


@pytest.mark.parametrize("search", [("--beam", "1"), ("--temperature", "1.3", "--seed", "4")])
@pytest.mark.parametrize(
    ("command", "name"), [("translate", "translator"), ("generate", "STREAM"), ("generate", "LINES")]
)
def test_a_stream_prints_the_same_text_as_without_it(
    folders: dict[str, Path], source: Path, command: str, name: str, search: tuple[str, ...]
) -> None:
    source.write_text("abcd\nabcd\n\nabcd efgh\nabcd\n")
    words = (command, folders[name], source, *search, "--max-len", "8")
    together, streamed = printed(*words), printed(*words, "--stream")
    assert streamed == together
    if search[0] == "--temperature":
        outputs = [best[0]["ids"] for best in json.loads(printed(*words, "--json"))]
        assert outputs[0] != outputs[1]  # the same text twice, with different random numbers


def test_a_refused_stream_prints_nothing(folders: dict[str, Path]) -> None:
    assert "streamed" in complaint("generate", folders["STREAM"], "--prompt", "abcd", "--beam", "3", "--stream")
    words = ("generate", folders["STREAM"], "--prompt", "abcd", "--n-best", "2", "--stream")
    assert "streamed" in complaint(*words)


# The search of the recipe


RECIPES = {
    "sample": Sample(temperature=1.5, top_k=9, n_best=2, seed=11),
    "beam": Beam(3, 2, normalise="gnmt", alpha=0.3, stopping="first"),
}


@pytest.mark.parametrize("decode", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(("command", "name"), [("translate", "translator"), ("generate", "STREAM")])
def test_the_search_of_the_recipe_is_the_default_everywhere(
    folders: dict[str, Path], tmp_path: Path, command: str, name: str, decode: Search
) -> None:
    objective = Translation() if command == "translate" else STREAM
    run = package.load(untrained(tmp_path / "run", objective, decode), "cpu")
    (tmp_path / "text").write_text("abcd\nmnop efgh\n")
    texts, limits = list(lines(tmp_path / "text")), Limits(max_len=7)
    outputs = list(
        run.translations(texts, limits=limits) if command == "translate" else run.generate(texts, limits=limits)
    )
    assert [len(best) for best in outputs] == [2, 2]
    words = (command, run.path, tmp_path / "text", "--max-len", "7")
    json_outputs = json.loads(printed(*words, "--json"))
    assert [[output["ids"] for output in best] for best in json_outputs] == [
        [list(output.ids) for output in best] for best in outputs
    ]
    assert [[output["score"] for output in best] for best in json_outputs] == [
        [output.score for output in best] for best in outputs
    ]
    usual = json.loads(printed(command, folders[name], tmp_path / "text", "--max-len", "7", "--json"))
    assert [len(best) for best in usual] == [1, 1]
    # Options override only their own settings.
    if isinstance(decode, Sample):
        other = json.loads(printed(*words, "--seed", "12", "--json"))
        assert [len(best) for best in other] == [2, 2]
        assert [best[0]["ids"] for best in other] != [best[0]["ids"] for best in json_outputs]
        assert printed(*words, "--seed", "11", "--temperature", "1.5") == printed(*words)
    else:
        assert printed(*words, "--beam", "3") == printed(*words, "--n-best", "2") == printed(*words)
        assert "decode.n_best" in complaint(*words, "--beam", "1")
    if command == "translate":
        assert run.translate(texts, limits=limits) == [best[0].text for best in outputs]


@dataclass(frozen=True, slots=True)
class Own(Search):
    """A search that is neither a beam nor a sample."""

    kind = "own"
    size: int = 1

    def find(self, job: Job) -> list[list[Hypothesis]]:
        raise AssertionError("options are settled before anything is searched")


def test_a_search_of_another_kind_is_kept_and_takes_no_options() -> None:
    assert search_from_options(Own(), top_k=None) == Own()
    assert search_from_options(Own(), changes="size=3") == Own(3)
    options: dict[str, dict[str, Any]] = {
        "--beam": {"beam": 2}, "--n-best": {"n_best": 2}, "--top-k": {"top_k": 3}, "--seed": {"seed": 0},
    }  # fmt: skip
    for name, option in options.items():
        with pytest.raises(SpecError, match=rf"^{name}: the search of the recipe is 'own'; change it with --set"):
            search_from_options(Own(), **option)


def test_evaluate_takes_a_beam_smaller_than_the_n_best_of_the_recipe(source: Path, tmp_path: Path) -> None:
    path = untrained(tmp_path / "run", Translation(), Beam(4, 4))
    words = ("evaluate", path, "--source", source, "--reference", source, "--json")
    greedy = json.loads(printed(*words, "--beam", "1"))
    assert greedy == json.loads(printed(*words, "--set", "n_best=1", "--set", "beam_size=1"))


def test_a_language_model_samples_by_default(tmp_path: Path) -> None:
    from regard.recipe.recipe import request_from_record

    corpus = {"train": [{"kind": "lines", "path": "x"}], "objective": "language_model"}
    assert request_from_record({"data": corpus}).decode == Sample()
    assert request_from_record({"data": corpus, "decode": "beam"}).decode == Beam()
    assert request_from_record({"data": {"train": [{"kind": "tsv", "path": "x"}]}}).decode == Beam()


# Nothing is ignored


FILES = ("--source", "SOURCE", "--reference", "SOURCE")
IGNORED = [
    ("translate", "translator", ("--seed", "1"), "--seed"),
    ("translate", "translator", ("--beam", "2", "--seed", "1"), "--seed"),
    ("translate", "translator", ("--beam", "2", "--top-k", "3"), "--beam"),
    ("translate", "translator", ("--beam", "2", "--set", "beam_size=3"), "--set"),
    ("translate", "translator", ("--n-best", "2", "--set", "n_best=3"), "--set"),
    ("translate", "translator", ("--set", "alpha=0.5", "--set", "decode.alpha=0.6"), "--set"),
    ("translate", "translator", ("--quantize", "int8"), "--quantize"),
    ("translate", "translator", ("--beam", "1", "--stream", "--batch-size", "2"), "--batch-size"),
    ("translate", "translator", ("--beam", "1", "--stream", "--json"), "--stream"),
    ("translate", "translator", ("--beam", "1", "--stream", "--workers", "2"), "--stream"),
    ("translate", "translator", ("--workers", "2", "--threads", "1"), "--threads"),
    ("translate", "translator", ("--workers", "2", "--device", "cuda"), "--device"),
    ("translate", "translator", ("--temperature", "1", "--require", "abcd"), "required"),
    ("translate", "translator", ("--ban", ""), "banned"),
    ("translate", "translator", ("--require", " "), "required"),
    ("generate", "STREAM", ("--prompt", "abcd"), "--prompt"),
    ("generate", "STREAM", ("--beam", "2", "--seed", "1"), "--seed"),
    ("generate", "STREAM", ("--stream", "--batch-size", "2"), "--batch-size"),
    ("generate", "STREAM", ("--stream", "--json"), "--stream"),
    ("evaluate", "translator", (*FILES, "--samples", "200"), "--samples"),
    ("evaluate", "translator", (*FILES, "--text", "SOURCE"), "--text"),
    ("evaluate", "STREAM", ("--text", "SOURCE", "--beam", "2"), "--beam"),
    ("evaluate", "STREAM", ("--text", "SOURCE", "--set", "alpha=1"), "--set"),
    ("evaluate", "STREAM", ("--text", "SOURCE", "--tokenize", "char"), "--tokenize"),
    ("evaluate", "STREAM", ("--text", "SOURCE", "--batch-size", "3"), "--batch-size"),
    ("evaluate", "STREAM", ("--text", "SOURCE", "--stride", "100000"), "--stride"),
    ("evaluate", "LINES", ("--text", "SOURCE", "--stride", "2"), "--stride"),
    ("evaluate", "translator", (*FILES, "--stride", "2"), "--stride"),
    ("evaluate", "SOURCE", (*FILES, "--stride", "2"), "--stride"),
    ("evaluate", "classifier", ("--labelled", "SOURCE", "--tokenize", "char"), "--tokenize"),
    ("evaluate", "classifier", ("--labelled", "SOURCE", "--beam", "3"), "--beam"),
    ("evaluate", "SOURCE", (*FILES, "--beam", "3"), "--beam"),
    ("evaluate", "SOURCE", (*FILES, "--average", "3"), "--average"),
    ("evaluate", "SOURCE", (*FILES, "--batch-size", "3"), "--batch-size"),
    ("score", "STREAM", ("--source", "SOURCE", "--target", "SOURCE"), "--source"),
    ("score", "translator", ("--outputs", "SOURCE", "--target", "SOURCE"), "--target"),
    ("score", "translator", ("--outputs", "SOURCE", "--source", "SOURCE"), "--source"),
    ("score", "translator", ("--outputs", "SOURCE"), "translate --json"),
]


@pytest.mark.parametrize(
    ("command", "name", "words", "named"), IGNORED, ids=lambda it: it if isinstance(it, str) else " ".join(it)
)
def test_options_that_would_be_ignored_are_refused(
    folders: dict[str, Path], source: Path, command: str, name: str, words: tuple[str, ...], named: str
) -> None:
    arguments = [str(source) if word == "SOURCE" else word for word in words]
    file = [source] if command in {"translate", "generate"} else []
    assert named in complaint(command, folders.get(name, source), *file, *arguments)


def test_backslash_n_is_a_newline_in_prompt_options_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("C:\\new\n")
    for options in ((), ("--stream",)):
        words = ("generate", folders["STREAM"], "--max-len", "5", *options)
        assert printed(*words, tmp_path / "prompts").startswith("C:\\new")
        assert printed(*words, "-", stdin=b"C:\\new\n").startswith("C:\\new")
        assert printed(*words, "--prompt", "C:\\new").startswith("C:\new")


def test_evaluate_reads_outputs_from_pipes(source: Path) -> None:
    files = ("--source", source, "--reference", source)
    with piped(source.read_bytes()) as pipe:
        assert json.loads(printed("evaluate", pipe, *files, "--json"))["exact_match"] == 100
    with piped(source.read_bytes()) as pipe:
        assert "--beam" in complaint("evaluate", source, *files, "--against", pipe, "--beam", "3")


@contextmanager
def piped(content: bytes) -> Iterator[str]:
    """Yield the path of a pipe with this content, as a shell passes it for `<(command)`."""
    ours, theirs = os.pipe()
    os.write(theirs, content)
    os.close(theirs)
    yield f"/dev/fd/{ours}"
    os.close(ours)


# Scores


def test_scoring_an_output_reproduces_its_log_probability(runs: dict[str, TrainedModel]) -> None:
    texts = ["abcd efgh", LONG, "", "mnop"]  # one is cut, one is empty
    for name in ("translator", "TRANSLATOR", "STREAM", "LINES", "stream"):
        run = runs[name]
        search, limits = Sample(temperature=1.3, n_best=3, seed=2), Limits(max_len=8)
        results = (
            run.generate(texts, search=search, limits=limits)
            if "translator" not in name.lower()
            else run.translations(texts, search=search, limits=limits)
        )
        outputs = [output for best in results for output in best]
        scores = run.score(outputs, batch_size=5)
        for output, score in zip(outputs, scores, strict=True):
            assert score.log_prob == pytest.approx(output.log_prob, abs=1e-4)
            assert score.tokens == (len(output.ids) + output.ended if output.read else 0)
        # These are segmentations that the tokenizer would not choose.
        assert any(run.tokenizer.encode(run.tokenizer.decode(output.ids)) != list(output.ids) for output in outputs)


def test_outputs_are_scored_from_json(folders: dict[str, Path], tmp_path: Path) -> None:
    for command, name in (("translate", "translator"), ("generate", "STREAM")):
        json_text = printed(
            command, folders[name], "-", "--temperature", "1.2", "--n-best", "2", "--max-len", "6", "--json",
            stdin=b"abcd\n\nmnop\n",
        )  # fmt: skip
        (tmp_path / "outputs").write_text(json_text)
        expected = [output["log_prob"] for best in json.loads(json_text) for output in best]
        scores = [float(line) for line in printed("score", folders[name], "--outputs", tmp_path / "outputs").split()]
        assert scores == pytest.approx(expected, abs=1e-5)
    assert "the run that generated it" in complaint("score", folders["LINES"], "--outputs", wrong(tmp_path))


def wrong(folder: Path, **changes: Any) -> Path:
    output = {"text": "x", "score": 0.0, "log_prob": 0.0, "tokens": ["x"], "ended": True, "ids": [99999], "read": [5]}
    (folder / "wrong").write_text(json.dumps([[output | changes]]))
    return folder / "wrong"


BAD = {
    "infinite": {"ids": [float("inf")]},
    "fraction": {"ids": [3.7]},
    "boolean": {"read": [True]},
    "huge": {"score": 10**400},
    "nothing read": {"read": []},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_damaged_outputs_are_refused(folders: dict[str, Path], tmp_path: Path, bad: dict[str, Any]) -> None:
    path = wrong(tmp_path, ids=[5], **bad) if "ids" not in bad else wrong(tmp_path, **bad)
    message = complaint("score", folders["LINES"], "--outputs", path)
    assert ("cannot be scored" if bad == {"read": []} else "is not the output of translate --json") in message


def test_score_refuses_a_classifier_before_it_waits_for_text(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.inference.pieces_of", pytest.fail)
    assert "regard classify, not score" in complaint("score", folders["classifier"])


def test_every_line_has_a_score_even_if_empty(
    folders: dict[str, Path], runs: dict[str, TrainedModel], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("abcd\n\nefgh abcd\n\n")
    for name in ("STREAM", "LINES"):
        assert len(printed("score", folders[name], "--target", text).split()) == 4
        assert printed("score", folders[name], stdin=text.read_bytes()) == printed(
            "score", folders[name], "--target", text
        )
        scores = json.loads(printed("score", folders[name], "--target", text, "--json"))
        run = runs[name]
        # The end of a line counts, and so does its first token.
        assert [score["tokens"] for score in scores] == [
            len(run.tokenizer.encode(line + "\n" if name == "STREAM" else line)) + (name == "LINES")
            for line in text.read_text().split("\n")[:-1]
        ]


def test_a_language_model_scores_the_first_token_of_a_line(runs: dict[str, TrainedModel]) -> None:
    for name in ("STREAM", "LINES"):
        run = runs[name]
        begin = list(run.begin) or run.tokenizer.encode("\n")
        ids = run.tokenizer.encode("abcd\n" if name == "STREAM" else "abcd") + [run.tokenizer.eos] * (name == "LINES")
        batch = package.Batch(torch.tensor([[*begin, *ids[:-1]]]))
        assert isinstance(run.model, package.Generator)
        expected = run.model.log_probs(batch)[0, len(begin) - 1 :].gather(1, torch.tensor(ids)[:, None])  # type: ignore
        assert run.score("abcd").log_prob == pytest.approx(float(expected.detach().sum()), abs=1e-4)
        assert run.score("").tokens == 1


def test_a_long_source_is_scored_as_it_is_translated(runs: dict[str, TrainedModel]) -> None:
    warnings = list[str]()
    (cut,) = runs["translator"].score([(LONG, "mnop")], warn=warnings.append)
    tokenizer = runs["translator"].tokenizer
    read = tokenizer.decode(tokenizer.encode(LONG)[:20])
    assert cut.log_prob == pytest.approx(runs["translator"].score([(read, "mnop")])[0].log_prob, abs=1e-4)
    assert "line 1" in warnings[0]
    with pytest.raises(DataError, match=r"line 2: .* 24 positions"):
        runs["TRANSLATOR"].score([("abcd", "mnop"), ("abcd", LONG)])


# A string is one text


def test_a_string_is_one_text(runs: dict[str, TrainedModel]) -> None:
    translator, writer, classifier = runs["translator"], runs["STREAM"], runs["classifier"]
    limits = Limits(max_len=5)
    assert translator.translate("abcd", limits=limits) == translator.translate(["abcd"], limits=limits)[0]
    assert (
        translator.translate("abcd", beam=2, limits=limits) == translator.translate(["abcd"], beam=2, limits=limits)[0]
    )
    assert translator.translations("abcd", limits=limits) == next(translator.translations(["abcd"], limits=limits))
    assert writer.generate("abcd", limits=limits) == writer.generate(["abcd"], limits=limits)[0]
    assert classifier.classify("abcd") == classifier.classify(["abcd"])[0]
    assert writer.score("abcd") == writer.score(["abcd"])[0]
    output = writer.generate("abcd", limits=limits)[0]
    assert writer.score(output) == writer.score([output])[0]
    texts = ensemble([translator])
    with pytest.raises(DataError, match="needs a list of texts, not one string"):
        next(texts.translate("abcd", Beam(1)))
    with pytest.raises(DataError, match="needs a list of texts, not one string"):
        next(ensemble([writer]).generate("abcd", Beam(1)))
    for wrong_ in ("abcd", ("abcd", "efgh"), ["abcd"]):
        with pytest.raises(DataError, match="pairs"):
            translator.score(wrong_)
    with pytest.raises(DataError, match="single texts"):
        writer.score([("abcd", "efgh")])
    banned = Constraints(banned="abcd").rules(translator.tokenizer).banned
    assert banned == Constraints(banned=("abcd",)).rules(translator.tokenizer).banned
    with pytest.raises(SpecError, match="one of the two"):
        translator.translate("abcd", beam=2, search=Beam(3))


def test_a_path_is_one_path() -> None:
    from regard.runs.request import request_from_options

    for name in ("tsv", "jsonl", "text", "labelled"):
        for path in ("corpus", Path("corpus")):
            files: dict[str, Any] = {name: path}
            request = request_from_options(**files, changes="train.steps=7", variants="rotary")
            files = {name: ["corpus"]}
            assert request == request_from_options(**files, changes=["train.steps=7"], variants=["rotary"])
            assert len(request.data.train) == 1
    assert request_from_options(source=Path("a"), target=Path("b")) == request_from_options(source="a", target="b")


# From text to a batch


RECORDS = {
    "translator": [("abcd efgh", "mnop"), ("ijkl", "abcd abcd ijkl")],
    "LINES": ["abcd efgh", "mnop"],
    "STREAM": ["abcd efgh " * 9, "mnop", "ijkl"],
    "classifier": [("good", "abcd"), ("bad", "efgh mnop")],
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_batch_of_texts_has_the_loss_of_validation(runs: dict[str, TrainedModel], name: str) -> None:
    run = runs[name]
    records = [(record,) if isinstance(record, str) else record for record in RECORDS[name]]
    table = run.objective.limit(run.objective.table(records, run.tokenizers), run.recipe.data.longest).table
    if run.objective.stream:
        table = Table({"target": Column(table["target"].ids, table["target"].offsets[[0, -1]])})
    assert run.recipe.data.batching is not None
    expected = likelihood(run.model, table, run.objective, run.recipe.data.batching)
    loss = run.model.loss(run.batch(RECORDS[name]))
    assert float(loss.nll / loss.tokens) == pytest.approx(expected.loss, abs=1e-6)
    assert int(loss.tokens) == expected.tokens
    if name == "translator":
        scores = run.score(RECORDS[name])
        assert float(loss.nll) == pytest.approx(-sum(score.log_prob for score in scores), abs=1e-4)


def test_a_batch_of_ids_is_the_batch_of_their_texts(runs: dict[str, TrainedModel]) -> None:
    run = runs["translator"]
    encode = run.tokenizer.encode
    pairs = [(encode(source), encode(target)) for source, target in RECORDS["translator"]]
    from regard.batch import translation

    ids, texts = translation(pairs, run.tokenizer.bos, run.tokenizer.eos), run.batch(RECORDS["translator"])
    assert ids.alike(texts)
    assert torch.equal(ids.source, texts.source)  # type: ignore[reportArgumentType]
    assert torch.equal(ids.target, texts.target)


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("translator", [("abcd efgh ijkl", "mnop abcd efgh"), ("mnop", "ijkl"), ("ijkl mnop", "abcd")]),
        ("LINES", ["abcd efgh ijkl", "mnop", "ijkl mnop"]),
        ("classifier", [("good", "abcd efgh ijkl"), ("bad", "mnop"), ("good", "ijkl mnop")]),
    ],
)
def test_rows_of_a_batch_are_in_the_order_of_the_records(
    runs: dict[str, TrainedModel], name: str, records: list[Any]
) -> None:
    batch = runs[name].batch(records)
    for i, record in enumerate(records):
        alone = runs[name].batch([record])
        assert batch.labels is not None
        assert alone.labels is not None
        for row, expected in ((batch.target[i], alone.target[0]), (batch.labels[i].view(-1), alone.labels.view(-1))):
            assert row.tolist() == expected.tolist() + [0] * (len(row) - len(expected))


def test_records_that_cannot_be_trained_on_are_refused(runs: dict[str, TrainedModel]) -> None:
    for name, records in (
        ("translator", "abcd"),
        ("translator", []),
        ("translator", ["abcd"]),
        ("LINES", [("a", "b")]),
    ):
        with pytest.raises(DataError):
            runs[name].batch(records)
    with pytest.raises(DataError, match="record 2"):
        runs["translator"].batch([("abcd", "abcd"), (LONG, "abcd")])
    with pytest.raises(DataError, match="label"):
        runs["classifier"].batch([("awful", "abcd")])


# Lines are processed as they arrive


def test_lines_of_a_pipe_are_answered_when_it_pauses(folders: dict[str, Path]) -> None:
    with started("translate", folders["translator"], "--max-len", "5") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = []
        for text in ("abcd\n", "mnop\nijkl abcd\n\n"):  # the pipe stays open: an answer waits for no line after it
            process.stdin.write(text)
            process.stdin.flush()
            answers += [process.stdout.readline() for _ in range(text.count("\n"))]
        process.stdin.close()
        assert process.stdout.read() == ""
    assert process.returncode == 0
    together = printed("translate", folders["translator"], "--max-len", "5", stdin=b"abcd\nmnop\nijkl abcd\n\n")
    assert "".join(answers) == together


@pytest.mark.parametrize(
    ("command", "name"),
    [("translate", "translator"), ("generate", "STREAM"), ("classify", "classifier"), ("score", "LINES")],
)
def test_a_line_is_answered_before_the_next_one_is_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    answered = list[int]()

    def slowly(file: str | None, size: int) -> Iterator[tuple[int, list[str]]]:
        for number, line in enumerate(("abcd", "", "mnop")):
            answered.append(sys.stdout.getvalue().count("\n"))  # type: ignore[reportAttributeAccessIssue]
            yield number, [line]

    monkeypatch.setattr("regard.cli.inference.pieces_of", slowly)
    words = (command, folders[name], *(("-", "--max-len", "3") if command == "generate" else ()))
    printed(*words)
    assert answered[0] == 0
    assert answered[1] >= 1
    assert answered[2] >= 2


def test_lines_of_a_pipe_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from regard.cli import input_lines as reading

    ours, theirs = os.pipe()
    opened = os.fdopen(ours, "r")
    monkeypatch.setattr("sys.stdin", opened)
    pieces, before = reading.pieces_of(None, 4), threading.active_count()
    with os.fdopen(theirs, "w") as pipe:
        pipe.write("".join(f"{n}\n" for n in range(9)))  # all at once: as many together as from a file
        pipe.flush()
        assert [next(pieces) for _ in range(3)] == [(0, list("0123")), (4, list("4567")), (8, ["8"])]
        pipe.write("9\n10\n")
        pipe.flush()
        assert next(pieces) == (9, ["9", "10"])
        pipe.write("last\n")
    assert list(pieces) == [(11, ["last"])]
    opened.close()
    assert threading.active_count() <= before + 2  # not one for each piece


def test_a_file_is_read_in_full_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.cli import input_lines as reading

    (tmp_path / "text").write_text("a\nb\nc\n")
    monkeypatch.setattr(reading, "_as_they_come", pytest.fail)
    assert list(reading.pieces_of(str(tmp_path / "text"), 2)) == [(0, ["a", "b"]), (2, ["c"])]
    with open(tmp_path / "text") as opened:
        monkeypatch.setattr("sys.stdin", opened)
        assert list(reading.pieces_of("-", 2)) == [(0, ["a", "b"]), (2, ["c"])]


def test_a_line_that_is_no_text_is_refused_after_the_lines_before_it(tmp_path: Path) -> None:
    from regard.cli import input_lines as reading

    (tmp_path / "text").write_bytes(b"a\nb\nc\n\xff\nd\n")
    with piped((tmp_path / "text").read_bytes()) as pipe:
        for file in (pipe, str(tmp_path / "text")):
            pieces = reading.pieces_of(file, 2)
            assert [next(pieces), next(pieces)] == [(0, ["a", "b"]), (2, ["c"])]
            with pytest.raises(RegardError, match="line 4"):
                next(pieces)


def test_closed_standard_streams_are_one_sentence(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.cli import input_lines as reading

    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DataError, match="standard input is closed"):
        list(reading.pieces_of(None, 4))
    monkeypatch.setattr("sys.argv", ["regard", "generate", str(folders["STREAM"]), "--max-len", "3"])
    error, handler = io.StringIO(), signal.getsignal(signal.SIGINT)
    with redirect_stderr(error), redirect_stdout(None), pytest.raises(SystemExit) as left:
        main()
    signal.signal(signal.SIGINT, handler)
    assert left.value.code == 2
    assert error.getvalue().startswith("regard: the output: cannot be read or written (Bad file descriptor)")


def test_runs_that_learned_different_things_are_no_ensemble(folders: dict[str, Path]) -> None:
    assert re.search("objective", complaint("generate", folders["STREAM"], folders["LINES"], "--prompt", "abcd"))


def test_outputs_are_equal_whatever_the_batch_size(runs: dict[str, TrainedModel]) -> None:
    def generate(size: int) -> list[list[Output]]:
        return runs["STREAM"].generate(["abcd", "", LONG, "mnop efgh"], batch_size=size, limits=Limits(max_len=6))

    assert [[output.ids for output in best] for best in generate(1)] == [
        [output.ids for output in best] for best in generate(3)
    ]
