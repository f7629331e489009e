"""regard bench: whoever is here races, the rows are complete, and what cannot be raced is one sentence."""

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
from regard.bench.contest import Contestant, UnfairError, check_sizes, race, summarise
from regard.bench.decode import LOADS, Load, decode
from regard.bench.peers import PEERS, chosen
from regard.bench.peers.base import PeerError, count
from regard.bench.shapes import SHAPES, labels, packed, padded, sentences
from regard.bench.train import Work, check_loss
from regard.models.build import build

from .conftest import complaint, regard

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
ROW = {"name", "tokens_per_second", "ratio", "low", "high", "against", "parameters", "memory_gb"}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what old peers do when they are imported


def raced(*words: str) -> dict[str, Any]:
    """What a race of one round says, as JSON."""
    said = regard("bench", *words, "--shape", "tiny", "--rounds", "1", "--device", "cpu", "--json")
    assert said.returncode == 0, said.stderr
    assert "round 1 of 1: regard " in said.stderr
    return json.loads(said.stdout)


def test_training_is_raced_on_the_same_batches() -> None:
    said = raced("train", "--against", "hf,torch,xtransformers")
    assert [row["name"] for row in said["rows"]] == ["regard", "hf marian", "torch.nn.Transformer", "x-transformers"]
    assert all(row.keys() == ROW and row["tokens_per_second"] > 0 for row in said["rows"])
    ours, theirs = said["rows"][0], said["rows"][1:]
    best = max(row["tokens_per_second"] for row in theirs)
    assert ours["ratio"] == pytest.approx(ours["tokens_per_second"] / best)
    assert sorted(row["ratio"] for row in theirs)[-1] == 1.0
    assert {row["parameters"] for row in said["rows"] if row["name"] != "x-transformers"} == {ours["parameters"]}
    assert said["machine"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (said["task"], said["shape"], said["missing"]) == ("train", "tiny", [])


def test_decoding_is_raced_at_several_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LOADS["cpu"].settings == ((1, 1), (1, 5), (32, 1), (32, 5))
    assert LOADS["cuda"].settings == ((1, 5), (64, 5), (512, 5))
    monkeypatch.setitem(LOADS, "cpu", Load(((1, 1), (3, 5)), 6, 5, torch.float32))
    said = raced("decode", "--against", "hf,ctranslate2")
    ours, theirs = ["regard", "regard (ctranslate2 int8)"], ["hf generate", "ctranslate2 float32", "ctranslate2 int8"]
    assert [row["name"] for row in said["rows"]] == [f"{name} {at}" for at in ("1:1", "3:5") for name in ours + theirs]
    assert all(list(row["against"]) == theirs for row in said["rows"])
    assert [row["ratio"] for row in said["rows"] if not row["name"].startswith("regard")].count(1.0) == 2


def test_a_table_names_the_machine_and_warns_of_few_rounds() -> None:
    said = regard("bench", "train", "--shape", "tiny", "--rounds", "1", "--against", "hf", "--device", "cpu", "--quiet")
    assert said.returncode == 0
    assert said.stderr == ""
    for words in ("tokens/s", "ratio", "hf marian", "torch 2", "fewer than 10 rounds prove nothing"):
        assert words in said.stdout


def test_peers_that_are_missing_are_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name in ("joeynmt", "fairseq") else object())
    here, missing = chosen(None, "train")
    assert [peer.name for peer in here] == ["hf", "xtransformers", "torch"]
    assert [peer.name for peer in missing] == ["joeynmt", "fairseq"]
    said = complaint("bench", "train", "--against", "hf,fairseq")
    assert said == "--against: fairseq is not installed; make test-oracles installs it"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tran"], "TASK: unknown task 'tran'; did you mean 'train'?"),
        (["train", "--shape", "bas"], "--shape: unknown shape 'bas'; did you mean 'base'?"),
        (["train", "--against", "hf,torhc"], "--against: unknown peer 'torhc'; did you mean 'torch'?"),
        (["train", "--against", ","], "--against: names no peer"),
        (["decode", "--against", "torch"], "nothing here is compared with torch.nn.Transformer in decode"),
        (["train", "--against", "ctranslate2"], "nothing here is compared with CTranslate2 in train"),
        (["train", "--smoothing", "1"], "--smoothing: must lie in [0, 1), not 1"),
        (["train", "--device", "tpu"], "--device: 'tpu' is not one of"),
    ],
)
def test_what_cannot_be_raced_is_one_sentence(words: list[str], said: str) -> None:
    assert said in complaint("bench", *words)


def test_a_peer_that_does_not_import_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PeerError, match="transformers does not import"):
        PEERS[0].code().trainee(TINY, 0.1, build(TINY.spec(0.1)))


def test_batches_hold_every_sentence_once_and_only_real_tokens_count() -> None:
    pairs = sentences(TINY, 300, seed=1)
    assert np.mean([len(target) + 1 for _, target in pairs]) == pytest.approx(TINY.length, rel=0.1)
    wanted = sum(len(target) + 1 for _, target in pairs)
    batches = padded(pairs, 64, seed=1)
    assert sum(labels(batch) for batch in batches) == wanted
    assert all(batch.target.numel() <= 64 for batch in batches)
    rows = packed(pairs, 256, 64, seed=1)
    assert {tuple(batch.target.shape) for batch in rows} == {(4, 64)}
    assert wanted - 5 * 64 < sum(labels(batch) for batch in rows) <= wanted


def test_ratios_are_taken_round_by_round_against_the_fastest_peer() -> None:
    contestants = [Contestant(name, 5, lambda _: 1) for name in ("regard", "slow", "fast")]
    rates = np.array([[2.0, 1.0, 1.0], [20.0, 5.0, 10.0], [60.0, 10.0, 20.0]])
    rows = summarise(contestants, rates)
    assert [row.tokens_per_second for row in rows] == [20.0, 5.0, 10.0]
    assert [row.ratio for row in rows] == [2.0, 0.5, 1.0]
    assert rows[0].against == {"slow": 4.0, "fast": 2.0}
    assert (rows[0].low, rows[0].high) == (2.0, 3.0)
    assert summarise(contestants[:1], rates[:, :1])[0].ratio is None


def test_turns_are_taken_in_changing_order_and_warming_up_does_not_count() -> None:
    turns: list[tuple[int, str]] = []

    def turn(name: str, number: int) -> int:
        turns.append((number, name))
        return sum(range(2000))

    names = ["regard", "one", "two", "three", "four"]
    told: list[str] = []
    rows = race([Contestant(name, 5, lambda n, name=name: turn(name, n)) for name in names], 2, CPU, told.append)
    orders = [[name for number, name in turns if number == i] for i in range(4)]
    assert [number for number, _ in turns] == sorted([0, 1, 2, 3] * 5)
    assert all(sorted(order) == sorted(names) for order in orders)
    assert orders[1] == orders[0][::-1]
    assert orders[3] == orders[2][::-1]
    assert orders[2] != orders[0]
    assert [row.name for row in rows] == names
    assert [line.split(":")[0] for line in told] == ["warming up", "warming up", "round 1 of 2", "round 2 of 2"]


def test_another_model_is_refused() -> None:
    with pytest.raises(UnfairError, match="peer has 90 parameters and regard 100"):
        check_sizes(100, [Contestant("peer", 90, lambda _: 1)])


def test_another_loss_is_refused() -> None:
    work = Work.of(TINY, 0.1, CPU, 1)
    ours = build(TINY.spec(0.1), seed=1)
    trainee = PEERS[0].code().trainee(TINY, 0.1, ours)
    check_loss(work, trainee)
    with pytest.raises(UnfairError, match="hf marian finds a loss of"):
        check_loss(replace(work, smoothing=0.2), trainee)
    assert count(trainee.model) == count(ours)


def test_an_output_of_another_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code = PEERS[0].code()
    speakers = code.speakers
    monkeypatch.setattr(
        code,
        "speakers",
        lambda *given: [replace(s, say=lambda ids, b, n, s=s: s.say(ids, b, n - 1)) for s in speakers(*given)],
    )
    with pytest.raises(UnfairError, match=r"hf generate said 2 outputs of \[3\] tokens, not 2 of 4"):
        decode(TINY, Load(((2, 1),), 6, 4, torch.float32), PEERS[:1], 1, CPU, lambda _: None)


def test_the_page_has_every_race_once_and_the_newest() -> None:
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
