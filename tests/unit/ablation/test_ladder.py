"""The ladder: models of equal size, path lengths, tables and plots."""

import json
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from regard import fast
from regard.ablation import ladder as ladder_module
from regard.ablation.ladder import BEFORE, FULL, LESS, RUNGS, Ladder, Rung, bar, select_rungs
from regard.ablation.path_length import Length, path_lengths
from regard.ablation.report import Mean
from regard.ablation.sizes import nearest_width, resized, widened
from regard.batch import translation
from regard.cli.ladder import ladder as ladder_command
from regard.cli.options import OnCluster, PairFiles, Runs
from regard.errors import SpecError
from regard.evaluation.lengths import buckets
from regard.evaluation.significance import Interval
from regard.models.baselines.attention_score import GeneralScore
from regard.models.baselines.rnn import Recurrent, RecurrentDecoder, RecurrentEncoder
from regard.models.build import build, count
from regard.nn.recurrent import Elman
from regard.presets import preset
from regard.testing import tiny
from regard.variants import apply

SHALLOW = {"encoder.depth": 1, "decoder.depth": 1}


def test_rungs_are_all_or_names_from_the_bottom() -> None:
    assert select_rungs("all") == ([name for name in RUNGS if name != FULL], set())
    assert select_rungs("no_norm, no_scaling,transformer") == (["no_scaling", "no_norm"], {"no_norm", "no_scaling"})
    with pytest.raises(SpecError, match=r"--rungs: unknown rung 'no_norms'; .*'no_norm'"):
        select_rungs("no_norms")
    with pytest.raises(SpecError, match="only the full Transformer"):
        select_rungs(FULL)


def test_the_command_trusts_code_on_the_demo_corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trusted_norms.py").write_text(
        "from dataclasses import dataclass\nfrom regard.catalogue import RMSNorm\n\n"
        "@dataclass(frozen=True, slots=True)\nclass Mine(RMSNorm):\n    kind = 'mine'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    requests: list[Any] = []
    monkeypatch.setattr(ladder_module, "ladder", lambda request, *_: requests.append(request))
    changes = ["model.encoder.pattern[0].residual.norm=trusted_norms:Mine"]
    with pytest.raises(SpecError, match="would import code; add --trust-code"):
        ladder_command(PairFiles(), cluster=OnCluster(), runs=Runs(changes=changes), out=str(tmp_path), quiet=True)
    ladder_command(
        PairFiles(), cluster=OnCluster(), runs=Runs(changes=changes, trust_code=True), out=str(tmp_path), quiet=True
    )
    assert len(requests) == 1


@pytest.mark.parametrize(("target", "step", "width"), [(1000, 1, 32), (1000, 8, 32), (1, 4, 4), (5000, 10, 70)])
def test_nearest_width_minimises_the_difference(target: int, step: int, width: int) -> None:
    """The size is a square, so the width is the root of the target, to the nearest step."""
    calls = []

    def size(side: int) -> int:
        calls.append(side)
        return side * side

    assert nearest_width(size, target, step) == width
    every = range(step, 200, step)
    assert abs(width * width - target) == min(abs(side * side - target) for side in every)
    assert len(calls) < 30


@pytest.mark.parametrize("name", LESS)
def test_a_transformer_without_a_part_has_the_size_of_the_full_one(name: str) -> None:
    base = preset("transformer_tiny", vocab=300, **SHALLOW)
    model, factor = resized(apply(name, base), count(base))
    assert abs(count(model) / count(base) - 1) < 0.02
    assert (factor > 1) == (name == "no_feed_forward")


@pytest.mark.parametrize("name", BEFORE)
def test_a_predecessor_has_the_size_of_the_transformer(name: str) -> None:
    base: Any = preset("transformer_tiny", vocab=800, **SHALLOW)
    model: Any = ladder_module.family(name, base)
    model, _ = resized(replace(model, vocab=800), count(base))
    assert abs(count(model) / count(base) - 1) < 0.05
    assert (model.dropout, model.sharing, model.head.label_smoothing) == (
        base.dropout,
        base.sharing,
        base.head.label_smoothing,
    )


def test_layers_keep_their_proportions() -> None:
    model: Any = preset("convs2s_wmt")
    narrow = widened(model, 384)
    assert (narrow.d_model, narrow.d_out) == (384, 256)
    assert narrow.encoder[0] == (256, 3)
    assert narrow.encoder[-1] == (1024, 1)
    lstm: Any = widened(preset("rnn"), 64)
    assert (lstm.d_model, lstm.encoder.d_hidden) == (64, 32)


def test_an_unreachable_size_is_refused() -> None:
    with pytest.raises(SpecError, match="no width gives 50 parameters"):
        resized(preset("transformer_tiny", vocab=300), 50)


@pytest.mark.parametrize(("each", "fixed", "text"), [(0, 4, "4"), (2, 0, "2n"), (1, 3, "n + 3"), (2, -1, "2n - 1")])
def test_a_length_is_formatted(each: int, fixed: int, text: str) -> None:
    assert str(Length(each, fixed)) == text
    assert Length(each, fixed).at(10) == 10 * each + fixed


def chain(node: Any) -> int:
    """Return the length of the longest chain of autograd nodes below `node`."""
    depth: dict[Any, int] = {}
    stack = [node]
    while stack:
        current = stack[-1]
        below = [next_ for next_, _ in current.next_functions if next_ is not None]
        waiting = [next_ for next_ in below if next_ not in depth]
        if waiting:
            stack += waiting
        else:
            depth[current] = 1 + max((depth[next_] for next_ in below), default=0)
            stack.pop()
    return depth[node]


def chain_length(model: Any, n: int) -> int:
    """Return the length of the autograd chain from the score of the last of n target tokens to the embedding tables."""
    batch = translation([([5 + i % 4 for i in range(n)], [6 + i % 3 for i in range(n - 1)])])
    assert batch.target.shape[1] == n
    module = build(model, seed=1).eval()
    fast.install(module)  # with one autograd node per step of a cell
    return chain(module.log_probs(batch)[0, -1, 3].grad_fn)  # type: ignore[operator]


SMALL: dict[str, Any] = {"vocab": 20, "d_model": 8, "heads": 2, "encoder.depth": 2, "decoder.depth": 1}


@pytest.mark.parametrize("name", [None, *LESS])
def test_the_path_of_a_transformer_does_not_depend_on_the_length(name: str | None) -> None:
    base = preset("transformer_tiny", **SMALL)
    model = base if name is None else apply(name, base)
    longest, shortest = path_lengths(model)
    assert (str(longest), str(shortest)) == ("3", "3")
    lengths = [chain_length(model, n) for n in (4, 8, 16)]
    assert lengths[0] == lengths[1] == lengths[2]


def test_every_layer_makes_the_path_longer_by_one_operation() -> None:
    lengths = [
        chain_length(preset("transformer_tiny", **SMALL | {"encoder.depth": depth}), 4) for depth in (1, 2, 3, 4)
    ]
    steps = [path_lengths(preset("transformer_tiny", **SMALL | {"encoder.depth": d}))[0].at(4) for d in (1, 2, 3, 4)]
    assert steps == [2, 3, 4, 5]
    assert len({b - a for a, b in pairwise(lengths)}) == 1


def recurrent(E: int, D: int, direction: Any, attention: bool) -> Recurrent:
    """Return a tiny Elman network. All layers have one width, so that every step has the same operations."""
    scorer = GeneralScore() if attention else None
    encoder = RecurrentEncoder(Elman(), E, 3 if direction == "both" else 6, direction)
    return Recurrent(20, d_model=6, encoder=encoder, decoder=RecurrentDecoder(Elman(), D, attention=scorer))


@pytest.mark.parametrize("direction", ["forwards", "backwards", "both"])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize(("E", "D"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_the_path_of_an_rnn_follows_the_formula(E: int, D: int, direction: str, attention: bool) -> None:
    """The autograd chain grows with n by as many nodes as the formula has additional steps."""
    model = recurrent(E, D, direction, attention)
    longest, shortest = path_lengths(model)
    lengths = [chain_length(model, n) for n in (6, 10, 14)]
    smallest = [chain_length(recurrent(1, 1, "forwards", attention=False), n) for n in (6, 10)]
    step = (smallest[1] - smallest[0]) // 8  # nodes per step: 4 tokens more are 8 steps more
    assert lengths[2] - lengths[1] == lengths[1] - lengths[0] == 4 * step * longest.each
    assert 0 <= shortest.at(6) <= longest.at(6)


@pytest.mark.parametrize(
    ("direction", "E", "D"), [("forwards", 2, 2), ("backwards", 2, 1), ("both", 2, 2), ("both", 1, 2)]
)
@pytest.mark.parametrize("attention", [False, True])
def test_paths_of_an_rnn_equal_those_of_an_explicit_graph(direction: str, E: int, D: int, attention: bool) -> None:
    """In the graph, every step of every layer is a node. Longest and shortest paths are searched over all edges."""
    for n in (4, 7):
        longest, shortest = path_lengths(recurrent(E, D, direction, attention))
        assert searched_path_lengths(direction, E, D, attention, n) == (longest.at(n), shortest.at(n))


def searched_path_lengths(direction: str, E: int, D: int, attention: bool, n: int) -> tuple[int, int]:
    """Return (longest path from any source token, shortest path from the first) to the last output of a graph."""
    directions = {"forwards": (1,), "backwards": (-1,), "both": (1, -1)}[direction]
    first = {1: 0, -1: n - 1}
    last = {1: n - 1, -1: 0}

    def before(node: Any, waits: bool) -> list[Any]:
        """Return the inputs of a node. If `waits`, they include the whole layer below."""
        kind, layer, t, *way = node
        if kind == "token":
            return []
        needed = range(n) if waits else (t,)
        if kind == "encoder":
            below = [("encoder", layer - 1, s, w) for s in needed for w in directions] if layer else [("token", 0, t)]
            return below if t == first[way[0]] else [*below, ("encoder", layer, t - way[0], *way)]
        if kind == "decoder":
            initial = [("encoder", max(0, E - D + layer), last[w], w) for w in directions]
            past = [("decoder", layer, t - 1)] if t else initial
            return past + ([("decoder", layer - 1, s) for s in needed] if layer else [])
        return [("decoder", D - 1, t), *(("encoder", E - 1, s, w) for s in range(n) for w in directions)]  # attention

    @cache
    def longest(node: Any) -> int:
        return max((longest(below) for below in before(node, waits=True)), default=-1) + 1

    @cache
    def shortest(node: Any) -> float:
        if node[0] == "token":
            return 0 if node[2] == 0 else float("inf")
        return min(shortest(below) for below in before(node, waits=False)) + 1

    end = ("attention", 0, n - 1) if attention else ("decoder", D - 1, n - 1)
    return longest(end), int(shortest(end))


@pytest.mark.parametrize("name", ["convs2s", "bytenet"])
def test_the_path_of_convolutions_is_their_depth(name: str) -> None:
    def deep(depth: int) -> Any:
        layers: Any = {"encoder": ((8, 3),) * depth} if name == "convs2s" else {"encoder_blocks": depth}
        model: Any = tiny.families()[name]
        return replace(model, **layers)

    lengths = [chain_length(deep(2), n) for n in (6, 10, 14)]
    assert lengths[0] == lengths[1] == lengths[2]
    deeper = [chain_length(deep(depth), 6) for depth in (2, 3, 4)]
    assert deeper[2] - deeper[1] == deeper[1] - deeper[0] > 0
    assert [path_lengths(deep(depth))[0].at(6) for depth in (2, 3, 4)] == [5, 6, 7]


def test_models_without_known_path_lengths_are_refused() -> None:
    with pytest.raises(SpecError, match="path lengths are known only for decoders that"):
        path_lengths(preset("gnmt"))
    with pytest.raises(SpecError, match="the path length of 'decoder_only' is not known"):
        path_lengths(preset("gpt2_small"))


def test_lines_of_one_length_stay_in_one_bucket() -> None:
    lengths = [5, 1, 2, 2, 9, 3, 7, 7, 2, 8]
    result = buckets(lengths, 3)
    assert [bucket.name for bucket in result] == ["1-2", "3-5", "7-9"]
    assert sorted(line for bucket in result for line in bucket.lines) == list(range(10))
    for bucket in result:
        assert all(bucket.least <= lengths[line] <= bucket.most for line in bucket.lines)
    assert [bucket.name for bucket in buckets([4, 4, 4])] == ["4"]
    assert buckets([]) == []
    with pytest.raises(SpecError, match="buckets"):
        buckets([1], 0)


def test_bars_are_proportional_to_their_values() -> None:
    assert bar(0.0) == ""
    assert bar(1.0, 4) == "████"
    assert bar(0.5, 4) == "██"
    assert bar(0.40625, 4) == "█▋"
    assert bar(7.0, 2) == "██"


def rung(name: str, metric: float | None, **more: Any) -> Rung:
    missing: dict[str, Any] = {
        "low": None,
        "high": None,
        "sd": None,
        "loss": None,
        "tokens_per_second": None,
        "steps": None,
    }
    defaults: dict[str, Any] = missing | {
        "seconds": None,
        "buckets": [],
        "curve": [],
        "effect": None,
        "verdict": "worse",
        "note": "",
    }
    paths: dict[str, Any] = {"path_length": 16, "path": "2n", "shortest_path": 3, "shortest": "3"}
    return Rung(name=name, about="", parameters=1000, metric=metric, **defaults | paths | more)


def test_a_ladder_is_printed_and_saved(tmp_path: Path) -> None:
    by_length = [Interval(30.0, 25.0, 35.0, 6), Interval(float("nan"), float("nan"), float("nan"), 0)]
    done: dict[str, Any] = {"low": 18.0, "high": 22.0, "sd": 1.0, "loss": Mean(2.0, 0.1), "buckets": by_length}
    done |= {"tokens_per_second": 12345.0, "steps": 40, "seconds": 5.0, "curve": [(20, 3.0), (40, 2.0)]}
    groups = buckets([1, 2, 3, 4, 5, 6], 2)
    rungs = [rung("rnn", None, verdict="diverged"), rung("no_norm", 20.0, **done)]
    result = Ladder([*rungs, rung(FULL, 40.0, **done)], groups, "bleu", 2, None, 5.0, 8, ["cpu"], complete=False)
    result.save(tmp_path)
    record = json.loads((tmp_path / "ladder.json").read_text())
    assert [row["name"] for row in record["rows"]] == ["rnn", "no_norm", FULL]
    assert {"name", "parameters", "metric", "tokens_per_second"} <= record["rows"][1].keys()
    assert record["rows"][1]["buckets"][1]["value"] is None
    assert record["rows"][0]["metric"] is None
    page = (tmp_path / "ladder.md").read_text()
    assert "| no_norm | 1,000 | 20.0 | [18.0, 22.0] | 2.000 ± 0.100 | 12.3K | 2n = 16 [3] | 40 | 5 | worse |" in page
    assert "| no_norm | 30.0 [25.0, 35.0] |  |" in page
    assert "5 seconds of training per rung" in page
    for narrow in (False, True):
        console = Console(width=90 if narrow else 140, file=StringIO())
        console.print(result.table(narrow))
        console.print(result.plot())
        output = console.file.getvalue()  # type: ignore[reportAttributeAccessIssue]
        assert "…" not in output
        assert "no_norm      ██████████████████████████████ 20.0" in output
    assert "run the same command again" in page
    html = (tmp_path / "ladder.html").read_text()
    assert html.count("<svg") == 3
    assert "20.0  (18.0 to 22.0)" in html


def test_a_metric_that_cannot_be_resampled_is_refused(tmp_path: Path) -> None:
    settings = ladder_module.Settings(metric="perplexity")
    with pytest.raises(SpecError, match="--metric: 'perplexity' is not a metric of translations"):
        ladder_module.ladder(lambda: pytest.fail("called"), tmp_path / "out", settings=settings)
    assert not (tmp_path / "out").exists()


def test_every_rung_has_a_description() -> None:
    assert all(ladder_module.about(name) for name in RUNGS)
