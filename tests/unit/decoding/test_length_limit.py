"""The length limit of translations: fitted to the training text, for each row alone, in every way to translate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard as package
from regard.data.objectives import Translation
from regard.data.token_store import Column, Table
from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.length_limit import LengthLimit, fit, of_tables
from regard.decoding.sample import Sample
from regard.decoding.search import Search
from regard.errors import SpecError
from regard.inference.engine import Engine, Sources
from regard.inference.text import Output, Texts
from regard.recipe.recipe import Recipe
from regard.runs.decode import ensemble
from regard.runs.trained_model import TrainedModel
from regard.training.checkpoint import RunFolder, read_json, write_json

from .untrained import LINES, regard, untrained

LIMIT = LengthLimit(0.5, 2, 6)
GREEDY = Beam(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained translator whose recipe contains a length limit."""
    path = untrained(tmp_path_factory.mktemp("runs") / "translator", Translation())
    recipe = RunFolder(path).recipe
    record = read_json(recipe)
    assert record["length_limit"] is None
    write_json(recipe, record | {"length_limit": {"kind": "length_limit", "slope": 0.5, "constant": 2, "longest": 6}})
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> TrainedModel:
    return package.load(folder, "cpu")


class FixedEngine(Engine):
    """Return the same ids for every source, and store the length limits."""

    name = "fixed"

    def __init__(self, ids: tuple[int, ...] = (), ended: bool = True) -> None:
        self.ids, self.ended, self.most = ids, ended, list[int]()

    def check(self, search: Search, limits: Limits, rules: TokenConstraints) -> None: ...

    def find(
        self, sources: Sources, search: Search, batch_size: int, limits: Limits, rules: TokenConstraints, rows: Any
    ) -> list[list[Hypothesis]]:
        self.most += [limits.most(len(source)) for source in sources]
        return [[Hypothesis(self.ids, 0.0, 0.0, (), self.ended)] for _ in sources]


def test_fit_of_known_texts() -> None:
    source = np.arange(1, 101)
    assert fit(source, 2 * source) == LengthLimit(2.0, 0, 200)
    assert fit(source, 0 * source + 7) == LengthLimit(0.0, 7, 7)  # the subjects of e-mails: no slope
    assert fit(np.full(5, 9), np.arange(5)) == LengthLimit(0.0, 4, 4)
    assert LengthLimit(2.0, 0, 200).most(10) == 35
    assert LengthLimit(0.0, 7, 7).most(1000) == 16


def test_one_pair_in_a_thousand_may_be_misaligned() -> None:
    source = np.full(2000, 10)
    target = np.where(np.arange(2000) < 2, 150, 12)
    assert fit(source, target) == LengthLimit(0.0, 12, 150)
    assert fit(source, np.where(np.arange(2000) < 3, 150, 12)).most(10) > 150


def test_lengths_of_tables_are_counted_as_in_a_search() -> None:
    """Sources are counted with eos, targets without bos and eos."""

    def table(*pairs: tuple[int, int]) -> Table:
        ends = np.cumsum([(0, 0), *pairs], axis=0)
        return Table(
            {name: Column(np.zeros(ends[-1, i], np.int32), ends[:, i]) for i, name in enumerate(("source", "target"))}
        )

    assert of_tables([table((5, 6), (9, 10)), table((3, 4))]) == fit(np.array([5, 9, 3]), np.array([4, 8, 2]))
    assert of_tables([table()]) is None


@pytest.mark.parametrize("field", ["slope", "constant", "longest"])
def test_a_damaged_record_is_refused(run: TrainedModel, field: str) -> None:
    with pytest.raises(SpecError, match=field):
        replace(LIMIT, **{field: -1.0 if field == "slope" else -1})
    record = run.recipe.record()
    record["length_limit"][field] = "many"
    with pytest.raises(SpecError, match=f"length_limit.{field}"):
        Recipe.of(record)


def test_a_run_has_the_limit_of_its_recipe(run: TrainedModel) -> None:
    assert Recipe.of(run.recipe.record()).length_limit == LIMIT
    before = {name: value for name, value in run.recipe.record().items() if name != "length_limit"}
    assert Recipe.of(before).length_limit is None  # a run that was saved before this field existed
    engine = FixedEngine()
    texts = replace(ensemble([run]), engine=engine)
    sources = ["abcd", "abcd efgh", "abcd efgh ijkl mnop abcd"]
    lengths = [len(ids) for ids in texts.sources(sources)]
    list(texts.translate(sources, Beam(1)))
    assert engine.most == [LIMIT.most(length) for length in lengths]
    engine.most.clear()
    list(texts.translate(sources, Beam(1), limits=Limits(max_len=50)))
    list(texts.translate(sources, Beam(1), limits=Limits(min_len=30)))
    list(replace(texts, length_limit=None).translate(sources, Beam(1)))
    assert engine.most == [50] * 3 + [30] * 3 + [2 * length + 20 for length in lengths]


def test_the_limit_of_a_row_depends_on_no_other_row(run: TrainedModel) -> None:
    sources = ["abcd", "abcd efgh ijkl mnop", "efgh efgh", "mnop abcd efgh ijkl mnop abcd"]
    together = [best[0].ids for best in run.translations(sources, search=Beam(1))]
    assert together == [run.translations(source, search=Beam(1))[0].ids for source in sources]
    texts = ensemble([run])
    most = [LIMIT.most(len(ids)) for ids in texts.sources(sources)]
    assert all(len(ids) <= limit for ids, limit in zip(together, most, strict=True))
    assert any(len(ids) == limit for ids, limit in zip(together, most, strict=True))  # an output is cut at the limit
    for source, ids in zip(sources, together, strict=True):
        assert "".join(texts.translate_stream(source, Beam(1))) == texts.target.decode(list(ids))


def test_an_ensemble_has_the_widest_limit(run: TrainedModel) -> None:
    other = replace(run, recipe=replace(run.recipe, length_limit=LengthLimit(0.1, 5, 3)))
    assert ensemble([run, other]).length_limit == LengthLimit(0.5, 5, 6)
    assert ensemble([run, replace(run, recipe=replace(run.recipe, length_limit=None))]).length_limit is None


# Warnings about outputs


def warned(
    run: TrainedModel, ids: list[int], source: str = "abcd", search: Search = GREEDY, **settings: Any
) -> list[str]:
    warnings: list[str] = []
    ended = settings.pop("ended", True)
    texts = replace(ensemble([run], warnings.append), engine=FixedEngine(tuple(ids), ended))
    list(texts.translate(["efgh", source], search, first=4, **settings))
    return [sentence for sentence in warnings if sentence.startswith("line 6: ")]


def test_an_output_that_repeats_itself_is_warned_about(run: TrainedModel) -> None:
    (sentence,) = warned(run, [20, 21] * 6 + [22])
    assert sentence.startswith("line 6: the output repeats itself: a loop of period 2 fills 12 of its 13 tokens; ")
    assert warned(run, [20, 21] * 3) == []
    assert warned(run, [20, 21] * 6, ended=False) != []
    assert len(warned(run, [20, 21] * 6, ended=False)) == 1  # one warning for a line
    assert warned(run, [20, 21] * 6, search=Sample()) == []


def test_a_source_that_repeats_itself_may_have_such_a_translation(run: TrainedModel) -> None:
    assert warned(run, [20] * 12, "abcd " * 8 + "abcd") == []


def test_a_translation_that_is_cut_at_the_derived_limit_is_warned_about(run: TrainedModel) -> None:
    (sentence,) = warned(run, [*range(20, 28)], ended=False)
    assert "line 6: the translation has not ended after 8 tokens" in sentence
    assert "--max-len" in sentence
    assert warned(run, [*range(20, 28)], ended=False, limits=Limits(max_len=8)) == []  # the limit was set by the user


def test_the_command_line_counts_the_lines(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("abcd efgh\n" * 5)
    result = regard("translate", folder, tmp_path / "in", "--beam", "1")
    assert result.returncode == 0
    assert result.stdout.count("\n") == 5
    first, rest = result.stderr.splitlines()
    assert "warning: line 1: the translation has not ended" in first
    assert "4 more like this one" in rest
    streamed = regard("translate", folder, tmp_path / "in", "--beam", "1", "--stream")
    assert (streamed.stdout, streamed.stderr) == (result.stdout, result.stderr)
    assert regard("translate", folder, tmp_path / "in", "--beam", "1", "--max-len", "3").stderr == ""


def test_a_continuation_that_repeats_itself_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = package.load(untrained(tmp_path / "lines", LINES), "cpu")
    loop = Output("", 0.0, 0.0, (), False, (20,) * 12)
    monkeypatch.setattr(Texts, "_output", lambda *_: loop)
    warnings: list[str] = []
    writer.generate(["abcd", "efgh"], search=Beam(1), limits=Limits(max_len=2), warn=warnings.append)
    assert [sentence.partition(":")[0] for sentence in warnings] == ["line 1", "line 2"]
    assert all("repeats itself" in sentence for sentence in warnings)
    warnings.clear()
    writer.generate(["abcd"], search=Sample(), limits=Limits(max_len=2), warn=warnings.append)
    assert warnings == []
