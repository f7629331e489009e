"""Attention heads of stored runs: table, word alignment, pruning and attribution, in Python and as commands."""

import io
import json
import math
import sys
import tarfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import cli
from regard.errors import DataError, SpecError
from regard.inspection.importance import loss_without
from regard.inspection.interventions import Head, head_counts, scaled_heads, switched_off
from regard.runs.attribution import contrast
from regard.runs.heads import batches_of, single_rows

STORED = Path(__file__).parents[2] / "stored" / "runs-before-17.tar.xz"


@pytest.fixture(autouse=True)
def single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def pairs(stored: Path) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads((stored / "expected.json").read_text())["texts"]]


@pytest.fixture(scope="module")
def files(stored: Path, pairs: list[tuple[str, str]]) -> dict[str, Path]:
    found = {}
    for side, column in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
        found[side] = stored / f"{side}.txt"
        found[side].write_text("".join(f"{line}\n" for line in column), encoding="utf-8")
    return found


def command(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["regard", *map(str, words)])
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as left:
            cli.main()
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


def options(files: Any) -> tuple[str, ...]:
    return ("--source", str(files["source"]), "--target", str(files["target"]))


def test_table_has_a_row_for_every_head(stored: Path, files: Any, pairs: list[tuple[str, str]]) -> None:
    run = regard.load(stored / "translator", "cpu")
    table = regard.heads(run, **files, by="ablation")
    counts = head_counts(run.model)
    assert [row.head for row in table.rows] == [
        Head(kind, n, h) for kind, each in counts.items() for n, H in enumerate(each) for h in range(H)
    ]
    batches = batches_of(run, pairs)
    for row in table.rows[-2:]:
        assert row.importance == pytest.approx(loss_without(run.model, batches, [row.head]) - table.loss, abs=1e-6)
    record = table.json()
    assert record["texts"] == len(pairs)
    assert record["heads"][0].keys() == {
        "kind", "layer", "head", "entropy", "distance", "previous", "next", "current", "same_token", "delimiter",
        "importance",
    }  # fmt: skip
    assert regard.heads(run, **files, limit=2).texts == 2
    with pytest.raises(SpecError, match="--limit: must be at least 1, not 0"):
        regard.heads(run, **files, limit=0)
    with pytest.raises(DataError, match="does not exist; create this folder first"):
        regard.heads(run, **files, limit=2).plot("no_such_folder/heads.png")


@pytest.mark.parametrize("name", ["recurrent", "convolutional"])
def test_heads_of_other_families(name: str, stored: Path, files: Any) -> None:
    table = regard.heads(stored / name, **files, device="cpu")
    assert {row.head.kind for row in table.rows} == {"decoder.cross"}
    assert all(row.importance > 0 and (row.patterns["entropy"] or 0) > 0 for row in table.rows)


def test_rows_of_a_batch_have_no_padding(stored: Path, pairs: list[tuple[str, str]]) -> None:
    run = regard.load(stored / "translator", "cpu")
    (batch,) = batches_of(run, pairs)
    for row, pair in zip(single_rows(batch), pairs, strict=True):
        alone = run.batch([pair])
        assert alone.source is not None
        assert row.source is not None
        assert torch.equal(row.source, alone.source)
        assert torch.equal(row.target, alone.target)
        assert float(run.model.loss(row).total.detach()) == pytest.approx(
            float(run.model.loss(alone).total.detach()), rel=1e-5
        )


def test_command_heads_prints_a_table_within_80_columns(stored: Path, files: Any, tmp_path: Path) -> None:
    run, picture = stored / "translator", tmp_path / "heads.svg"
    code, out, _ = command("heads", run, *options(files), "--plot", picture)
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 or lines[-1].endswith("heads.svg")
    assert lines[0].split() == ["head", "entropy", "dist", "prev", "next", "cur", "same", "delim", "gradient"]
    assert any(line.startswith("decoder.cross:0.0 ") for line in lines)
    assert picture.read_text().lstrip().startswith("<?xml")
    code, out, _ = command("heads", run, *options(files), "--json")
    assert json.loads(out)["by"] == "gradient"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--by", "magic"), "'magic' is not known"),
        (("--plot", "x.bmp"), "must end in .png, .svg, .pdf"),
        (("--source", "x"), "give --source and --target"),
        (("--text", "x"), "trained for translation, which has no such files; give --source and --target"),
        ((), "has no validation text to measure heads on; give --source and --target"),
    ],
)
def test_unusable_options_give_one_sentence(words: tuple[str, ...], message: str, stored: Path, files: Any) -> None:
    given = options(files) if words[:1] == ("--by",) else ()
    code, out, err = command("heads", stored / "translator", *given, *words)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_alignment_has_one_link_per_target_word(stored: Path, files: Any, tmp_path: Path) -> None:
    pairs = list(zip(*(files[side].read_text().splitlines() for side in ("source", "target")), strict=True))
    gold = tmp_path / "gold"
    gold.write_text("".join("1-1\n" for _ in pairs))
    result = regard.align(stored / "translator", **files, gold=gold, layer="mean", device="cpu")
    for (source, target), links in zip(pairs, result.links, strict=True):
        assert sorted(j for _, j in links) == list(range(len(target.split())))
        assert all(0 <= i < len(source.split()) for i, _ in links)
    depth = len(head_counts(regard.load(stored / "translator", "cpu").model)["decoder.cross"])
    assert set(result.scores) == {*map(str, range(depth)), "mean", "diagonal"}
    code, out, err = command("align", stored / "translator", *options(files), "--gold", gold, "--layer", "mean")
    assert code == 0
    assert out.splitlines() == list(result.lines())
    assert f"mean: error rate {result.scores['mean'].error_rate:.1%}" in err
    assert "diagonal: error rate" in err


def test_alignments_in_both_directions_are_symmetrised(stored: Path, files: Any) -> None:
    run = regard.load(stored / "translator", "cpu")
    own = regard.align(run, **files).links
    backward = regard.align(run, files["target"], files["source"]).links
    turned = [frozenset((i, j) for j, i in links) for links in backward]
    joint = regard.align(run, **files, reverse=run, symmetrise="union").links
    assert list(joint) == [a | b for a, b in zip(own, turned, strict=True)]
    with pytest.raises(SpecError, match="'unions' is not known; did you mean 'union'"):
        regard.align(run, **files, reverse=run, symmetrise="unions")
    with pytest.raises(SpecError, match="needs a model of the other direction"):
        regard.align(run, **files, symmetrise="union")


def test_empty_lines_have_no_links(stored: Path, tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    for side, lines in {"a": ["", pairs[0][0]], "b": ["x", pairs[0][1]], "empty": ["", ""]}.items():
        (tmp_path / side).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    result = regard.align(stored / "translator", tmp_path / "a", tmp_path / "b")
    assert [bool(links) for links in result.links] == [False, True]
    with pytest.raises(DataError, match="every line is empty"):
        regard.align(stored / "translator", tmp_path / "empty", tmp_path / "b")


def test_unusable_alignments_give_a_sentence(stored: Path, files: Any, tmp_path: Path) -> None:
    (tmp_path / "gold").write_text("1-1\n")
    with pytest.raises(DataError, match=r"has 1 lines, but there are \d+ sentence pairs"):
        regard.align(stored / "translator", **files, gold=tmp_path / "gold")
    pairs = files["source"].read_text().splitlines()
    (tmp_path / "gold").write_text("1-1\n1p99\n" + "1-1\n" * (len(pairs) - 2))
    with pytest.raises(DataError, match=r"line 2: links words 1 and 99, but the sentences have \d+ and \d+ words"):
        regard.align(stored / "translator", **files, gold=tmp_path / "gold")
    with pytest.raises(SpecError, match="'9' is not one of 0"):
        regard.align(stored / "translator", **files, layer="9")
    with pytest.raises(DataError, match="use regard classify, not translate"):
        regard.align(stored / "classifier", **files)
    for side in ("source", "target"):
        (tmp_path / side).write_text("a\n" + "word " * 5000 + "\n")
    with pytest.raises(DataError, match="line 2: has more than"):
        regard.align(stored / "translator", tmp_path / "source", tmp_path / "target")


def test_pruned_run_has_fewer_parameters_and_is_used_like_any_other(
    stored: Path, files: Any, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    whole = regard.load(stored / "translator", "cpu")
    code, out, err = command(
        "prune", whole.path, "--heads", "0.25", "--out", tmp_path / "small", *options(files), "--json"
    )
    assert code == 0, err
    result = json.loads(out)
    removed = [Head.parse(head) for head in result["removed"]]
    assert len(removed) == result["heads"][0] - result["heads"][1] > 0
    run = regard.load(tmp_path / "small", "cpu")
    assert [whole.parameters, run.parameters] == result["parameters"]
    assert run.parameters < whole.parameters
    sizes = [(path / "weights-final.safetensors").stat().st_size for path in (run.path, whole.path)]
    assert sizes[0] < sizes[1]
    sources = [source for source, _ in pairs]
    with scaled_heads(whole.model, switched_off(removed)):
        assert run.translate(sources, beam=2) == whole.translate(sources, beam=2)
        assert [s.log_prob for s in run.score(pairs)] == pytest.approx(
            [s.log_prob for s in whole.score(pairs)], abs=1e-4
        )
    evaluated = run.evaluate(source=str(files["source"]), reference=str(files["target"]))
    assert math.log(evaluated["perplexity"]) == pytest.approx(result["loss"][1], abs=1e-3)
    tuned = regard.train(tmp_path / "tuned", **files, start=run.path, steps=2, device="cpu")
    assert head_counts(tuned.model) == head_counts(run.model)


def test_listed_heads_are_removed(stored: Path, tmp_path: Path) -> None:
    result = regard.prune(stored / "translator", "decoder.cross:0.1, encoder.self:0.0", tmp_path / "small")
    assert result.removed == (Head("decoder.cross", 0, 1), Head("encoder.self", 0, 0))
    assert result.loss is None
    again = regard.prune(tmp_path / "small", [Head("decoder.self", 0, 0)], tmp_path / "smaller")
    assert again.heads == (result.heads[1], result.heads[1] - 1)


@pytest.mark.parametrize(
    ("name", "heads", "more", "message"),
    [
        ("translator", "0.25", {}, "has no validation text"),
        ("translator", "decoder.cross:0.1", {"by": "gradient"}, "no effect on a list of heads"),
        ("translator", "decoder.cross", {}, "is not a head; write kind:layer.head"),
        ("translator", "decoder.crss:0.0", {}, "did you mean 'decoder.cross'"),
        ("recurrent", "decoder.cross:0.0", {}, "only heads of self_attention and cross_attention can be pruned"),
    ],
)
def test_unusable_pruning_is_refused_and_nothing_is_written(
    name: str, heads: str, more: dict[str, str], message: str, stored: Path, tmp_path: Path
) -> None:
    with pytest.raises((DataError, SpecError), match=message):
        regard.prune(stored / name, heads, tmp_path / "small", **more)  # type: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []


def test_pruning_replaces_no_folder(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("text")
    with pytest.raises(DataError, match="exists; choose another folder"):
        regard.prune(stored / "translator", "decoder.cross:0.1", tmp_path)
    assert (tmp_path / "kept").read_text() == "text"


def test_contrast_of_two_next_words(stored: Path, pairs: list[tuple[str, str]]) -> None:
    run = regard.load(stored / "translator", "cpu")
    source, target = max(pairs, key=lambda pair: len(pair[1].split()))
    first, second = target.split()[:2]
    result = contrast(run, source, second, "zzz", prefix=first)
    assert set(result.scores) == {"source", "target"}
    for side, names in result.tokens.items():
        assert len(names) == len(result.scores[side])
    assert "difference of the logits" in repr(result)
    opposite = contrast(run, source, "zzz", second, prefix=first)
    assert torch.allclose(opposite.scores["source"], -result.scores["source"], atol=1e-5)
    with pytest.raises(SpecError, match="do not differ"):
        contrast(run, source, second, second, prefix=first)
    with pytest.raises(DataError, match="classifier"):
        contrast(stored / "classifier", source, second, "zzz")
