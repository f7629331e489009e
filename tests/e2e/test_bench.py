"""regard bench: installed peers are raced, the rows are complete, and invalid races are refused with one sentence."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.bench import peers
from regard.bench.decode import WORKLOADS, Workload, decode
from regard.bench.peers import PEERS, chosen
from regard.bench.peers.base import PeerError, count
from regard.bench.race import Contestant, UnfairError, check_sizes, race, summarise
from regard.bench.shapes import SHAPES, labels, packed, padded, sentences
from regard.bench.train import TrainingWork, check_loss
from regard.models.build import build

from .conftest import complaint, regard

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
ROW = {"name", "tokens_per_second", "ratio", "low", "high", "against", "parameters", "memory_gb"}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of old peers, when they are imported


def raced(*words: str) -> dict[str, Any]:
    """The JSON of a race of one round."""
    result = regard("bench", *words, "--shape", "tiny", "--rounds", "1", "--device", "cpu", "--json")
    assert result.returncode == 0, result.stderr
    assert "round 1 of 1: regard " in result.stderr
    return json.loads(result.stdout)


def test_training_race_uses_the_same_batches() -> None:
    result = raced("train", "--against", "hf,torch,xtransformers")
    assert [row["name"] for row in result["rows"]] == ["regard", "hf marian", "torch.nn.Transformer", "x-transformers"]
    assert all(row.keys() == ROW and row["tokens_per_second"] > 0 for row in result["rows"])
    ours, theirs = result["rows"][0], result["rows"][1:]
    best = max(row["tokens_per_second"] for row in theirs)
    assert ours["ratio"] == pytest.approx(ours["tokens_per_second"] / best)
    assert sorted(row["ratio"] for row in theirs)[-1] == 1.0
    assert {row["parameters"] for row in result["rows"] if row["name"] != "x-transformers"} == {ours["parameters"]}
    assert result["machine"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (result["task"], result["shape"], result["missing"]) == ("train", "tiny", [])


def test_decoding_race_has_several_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WORKLOADS["cpu"].settings == ((1, 1), (1, 5), (32, 1), (32, 5))
    assert WORKLOADS["cuda"].settings == ((1, 5), (64, 5), (512, 5))
    monkeypatch.setitem(WORKLOADS, "cpu", Workload(((1, 1), (3, 5)), 6, 5, torch.float32))
    result = raced("decode", "--against", "hf,ctranslate2")
    ours, theirs = ["regard", "regard (ctranslate2 int8)"], ["hf generate", "ctranslate2 float32", "ctranslate2 int8"]
    assert [row["name"] for row in result["rows"]] == [
        f"{name} {at}" for at in ("1:1", "3:5") for name in ours + theirs
    ]
    assert all(list(row["against"]) == theirs for row in result["rows"])
    assert [row["ratio"] for row in result["rows"] if not row["name"].startswith("regard")].count(1.0) == 2


def test_table_names_the_machine_and_warns_of_few_rounds() -> None:
    result = regard(
        "bench", "train", "--shape", "tiny", "--rounds", "1", "--against", "hf", "--device", "cpu", "--quiet"
    )
    assert result.returncode == 0
    assert result.stderr == ""
    for words in ("tokens/s", "ratio", "hf marian", "torch 2", "needs at least 10 rounds for a verdict"):
        assert words in result.stdout


def test_missing_peers_are_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name in ("joeynmt", "fairseq") else object())
    installed, missing = chosen(None, "train")
    assert [peer.name for peer in installed] == ["hf", "xtransformers", "torch"]
    assert [peer.name for peer in missing] == ["joeynmt", "fairseq"]
    result = complaint("bench", "train", "--against", "hf,fairseq")
    assert result == "--against: fairseq is not installed; make test-oracles installs it"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tran"], "TASK: unknown task 'tran'; did you mean 'train'?"),
        (["train", "--shape", "bas"], "--shape: unknown shape 'bas'; did you mean 'base'?"),
        (["train", "--against", "hf,torhc"], "--against: unknown library 'torhc'; did you mean 'torch'?"),
        (["train", "--against", ","], "--against: names no library"),
        (["decode", "--against", "torch"], "torch.nn.Transformer does not support decode"),
        (["train", "--against", "ctranslate2"], "CTranslate2 does not support train"),
        (["train", "--smoothing", "1"], "--smoothing: must lie in [0, 1), not 1"),
        (["train", "--device", "tpu"], "--device: 'tpu' is not one of"),
    ],
)
def test_invalid_race_is_refused(words: list[str], message: str) -> None:
    assert message in complaint("bench", *words)


def test_peer_that_fails_to_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PeerError, match="transformers cannot be imported"):
        PEERS[0].code().training_model(TINY, 0.1, build(TINY.spec(0.1)))


def test_batches_contain_every_sentence_once_and_count_real_tokens() -> None:
    pairs = sentences(TINY, 300, seed=1)
    assert np.mean([len(target) + 1 for _, target in pairs]) == pytest.approx(TINY.length, rel=0.1)
    expected = sum(len(target) + 1 for _, target in pairs)
    batches = padded(pairs, 64, seed=1)
    assert sum(labels(batch) for batch in batches) == expected
    assert all(batch.target.numel() <= 64 for batch in batches)
    rows = packed(pairs, 256, 64, seed=1)
    assert {tuple(batch.target.shape) for batch in rows} == {(4, 64)}
    assert expected - 5 * 64 < sum(labels(batch) for batch in rows) <= expected


def test_ratios_are_taken_round_by_round_against_the_fastest_peer() -> None:
    contestants = [Contestant(name, 5, lambda _: 1) for name in ("regard", "slow", "fast")]
    rates = np.array([[2.0, 1.0, 1.0], [20.0, 5.0, 10.0], [60.0, 10.0, 20.0]])
    rows = summarise(contestants, rates)
    assert [row.tokens_per_second for row in rows] == [20.0, 5.0, 10.0]
    assert [row.ratio for row in rows] == [2.0, 0.5, 1.0]
    assert rows[0].against == {"slow": 4.0, "fast": 2.0}
    assert (rows[0].low, rows[0].high) == (2.0, 3.0)
    assert summarise(contestants[:1], rates[:, :1])[0].ratio is None


def test_order_of_turns_changes_and_warm_up_is_not_measured() -> None:
    turns: list[tuple[int, str]] = []

    def turn(name: str, number: int) -> int:
        turns.append((number, name))
        return sum(range(2000))

    names = ["regard", "one", "two", "three", "four"]
    messages: list[str] = []
    rows = race([Contestant(name, 5, lambda n, name=name: turn(name, n)) for name in names], 2, CPU, messages.append)
    orders = [[name for number, name in turns if number == i] for i in range(5)]
    assert [number for number, _ in turns] == sorted([0, 1, 2, 3, 4] * 5)
    assert all(sorted(order) == sorted(names) for order in orders)
    assert orders[1] == orders[0][::-1]
    assert orders[3] == orders[2][::-1]
    assert orders[2] != orders[0]
    assert [row.name for row in rows] == names
    assert [line.split(":")[0] for line in messages] == [*["warming up"] * 3, "round 1 of 2", "round 2 of 2"]


def test_peer_of_another_size_is_refused() -> None:
    with pytest.raises(UnfairError, match="peer has 90 parameters, but regard 100"):
        check_sizes(100, [Contestant("peer", 90, lambda _: 1)])


def test_peer_with_another_loss_is_refused() -> None:
    work = TrainingWork.of(TINY, 0.1, CPU, 1)
    ours = build(TINY.spec(0.1), seed=1)
    training_model = PEERS[0].code().training_model(TINY, 0.1, ours)
    check_loss(work, training_model)
    with pytest.raises(UnfairError, match="hf marian computes a loss of"):
        check_loss(replace(work, smoothing=0.2), training_model)
    assert count(training_model.model) == count(ours)


def test_output_of_another_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code = PEERS[0].code()
    models = code.decoding_models
    monkeypatch.setattr(
        code,
        "decoding_models",
        lambda *args: [replace(m, search=lambda ids, b, n, m=m: m.search(ids, b, n - 1)) for m in models(*args)],
    )
    with pytest.raises(UnfairError, match=r"hf generate returned 2 outputs of \[3\] tokens, not 2 of 4"):
        decode(TINY, Workload(((2, 1),), 6, 4, torch.float32), PEERS[:1], 1, CPU, lambda _: None)


def test_page_has_the_newest_race_of_each_kind() -> None:
    speed: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "results" / "speed.py"))
    row = {
        "name": "regard",
        "tokens_per_second": 1234.5,
        "ratio": 1.5,
        "low": 1.4,
        "high": 1.625,
        "against": {"hf": 1.5},
        "parameters": 9,
    }
    machine = {"cpu": "a", "cores": 2, "threads": 1, "versions": {"torch": "2"}}
    race = {
        "task": "train",
        "shape": "base",
        "device": "cpu",
        "unit": "tokens",
        "rounds": 3,
        "date": "1",
        "missing": [],
    }
    race |= {"machine": machine, "rows": [row | {"memory_gb": None}]}
    gpu = race | {"device": "cuda", "machine": machine | {"gpu": "H"}, "rows": [row | {"memory_gb": 3.0}]}
    races = speed["merged"]([race | {"date": "0"}], [race | {"shape": "small"}, race, gpu])
    assert [(r["device"], r["shape"], r["date"]) for r in races] == [
        ("cuda", "base", "1"), ("cpu", "small", "1"), ("cpu", "base", "1")
    ]  # fmt: skip
    page = speed["page"](races)
    assert "| **regard** | 1,234 | 1.50 | 1.40 .. 1.62 | 9 |\n" in page
    assert "| **regard** | 1,234 | 1.50 | 1.40 .. 1.62 | 9 | 3.0 |" in page
    assert "| ratio to | hf |\n|---|--:|\n| regard | 1.50 |" in page


def test_long_sequences_have_rows_exponents_and_a_plot(tmp_path: Path) -> None:
    words = ["bench", "length", "--max", "512", "--models", "full,linformer", "--rounds", "1", "--device", "cpu"]
    result = regard(*words, "--json", "--plot", str(tmp_path / "length.png"))
    assert result.returncode == 0, result.stderr
    assert "512 tokens, full attention: " in result.stderr
    report = json.loads(result.stdout)
    assert [(row["name"], row["length"]) for row in report["rows"]] == [
        ("full", 256), ("full", 512), ("linformer", 256), ("linformer", 512)
    ]  # fmt: skip
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 and row["flops"] > 0 for row in report["rows"])
    assert report["exponents"].keys() == {"full", "linformer"}
    assert report["exponents"]["full"]["peak_bytes"] == pytest.approx(1.0, abs=0.2)
    assert (tmp_path / "length.png").stat().st_size > 10_000
    table = regard("bench", "length", "--max", "300", *words[4:], "--quiet")
    assert table.stderr == ""
    for part in (
        "Seconds per training step",
        "Peak memory, MB",
        "exponent",
        "Linformer, encoder",
        "fitted from 256 to 300",
    ):
        assert part in table.stdout


def test_recall_alone_is_measured_without_times(tmp_path: Path) -> None:
    words = ["bench", "length", "--recall-only", "--models", "convolution", "--steps", "1", "--device", "cpu"]
    result = regard(*words, "--json", "--plot", str(tmp_path / "recall.png"))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["rows"], report["exponents"]) == ([], {})
    assert report["accuracy"]["convolution"].keys() == {"4", "8", "16", "32", "64", "128", "200"}
    assert (tmp_path / "recall.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["length", "--shape", "small"], "--shape: applies only to the tasks train and decode; leave it out"),
        (["train", "--max", "512"], "--max: applies only to the task length; leave it out"),
        (["decode", "--recall"], "--recall: applies only to the task length; leave it out"),
        (["length", "--steps", "5"], "--steps: is the number of training steps of --recall"),
        (["length", "--models", ","], "--models: names no model"),
        (["length", "--plot", "a.txt"], "--plot: must end with .png, .svg, .pdf"),
        (["length", "--plot", "missing/a.png"], "--plot: missing is not a folder; create it, or name another"),
        (["length", "--max-time", "soon"], "--max-time: 'soon' is not a time; write 90s, 30m or 2h"),
        (["length", "--recall-only", "--max", "512"], "--max: has no effect with --recall-only"),
        (["train", "--max-time", "8m"], "--max-time: applies only to the task length; leave it out"),
    ],
)
def test_options_of_another_task_are_refused(words: list[str], message: str) -> None:
    assert message in complaint("bench", *words)


def test_sparse_attention_is_raced_by_every_kernel_and_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "sparse_attention.py"))
    words = ["--device", "cpu", "--max", "1024", "--rounds", "1", "--json", str(tmp_path / "sparse.json")]
    monkeypatch.setattr(sys, "argv", ["sparse_attention.py", *words])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name in ("LAYERS", "WARM_UP"):  # the function reads them in its own copy of the globals
        monkeypatch.setitem(script["main"].__globals__, name, 1)
    script["main"]()
    result = json.loads((tmp_path / "sparse.json").read_text())
    patterns = ["full", "window", "blocks", "sinks", "BigBird, causal"]
    assert [(row["name"], row["length"]) for row in result["attention"]] == [
        (name, length) for length in (128, 512, 1024) for name in patterns
    ]
    assert {row["kernel"] for row in result["attention"] if row["name"] != "full"} == {"chunked"}
    assert [row["kernel"] for row in result["attention"] if row["name"] == "window" and row["chosen"]] == ["chunked"]
    trained = {(row["name"], row["kernel"]): row for row in result["training"]}
    for row in (*result["attention"], *result["training"]):
        assert row["failed"] is None, row
        assert row["seconds"] > 0.0
        assert row["peak_bytes"] > 0
    assert trained["window", "checkpoint_layers"]["peak_bytes"] < trained["window", ""]["peak_bytes"]
    printed = capsys.readouterr().out
    assert all(sentence in printed for sentence in result["checks"])
    assert any("times as fast as full attention" in sentence for sentence in result["checks"])
