"""The whole path on a toy language: two text files in, translations out."""

import json
import shutil
from pathlib import Path

import pytest

import regard as package
from regard.data.text import lines
from tests.learning import Learned

from .conftest import complaint, regard, training, write

STRANGE = [
    "one two",
    "",
    "   ",
    "three\u2028four",
    "five\x85six",
    "</s> <pad> seven",
    "\N{GRINNING FACE} e\u0301 \N{CJK UNIFIED IDEOGRAPH-4E2D}",
    "nine\ttwo",
    "\x0bone\x0c",
    "red house",
]


def translated(*words: str, stdin: bytes = b"") -> list[str]:
    result = regard("translate", *words, stdin=stdin)
    assert result.returncode == 0, result.stderr
    assert not result.stdout or result.stdout.endswith("\n")
    return result.stdout.split("\n")[:-1]


def test_a_trained_run_reports_all_scores(run: Path, corpus: dict[str, str], learned: Learned) -> None:
    result = regard(
        "evaluate", str(run), "--source", corpus["test_source"], "--reference", corpus["test_target"], "--json"
    )
    report = json.loads(result.stdout)
    assert {"bleu", "chrf", "signature", "perplexity"} <= set(report)
    assert "nrefs:1|case:mixed" in report["signature"]
    learned("perplexity - 1", report["perplexity"] - 1, below=1, broken=2)


def test_a_run_folder_has_the_documented_files(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert {"recipe.json", "tokenizer.json", "log.jsonl", "environment.json", "weights-final.safetensors"} <= names
    assert {"weights-00000300.safetensors", "trainer-00000300.safetensors", "trainer-00000300.json"} <= names
    assert not any(name.startswith(".") for name in names)
    assert not list(run.rglob("*.pt"))
    assert not list(run.rglob("*.pkl"))
    assert list((run / "tensorboard").glob("events*"))
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert all(0 <= event["padding"] < 1 for event in steps)
    assert [event["step"] for event in events if event["event"] == "valid"] == [75, 150, 225, 300]


def test_show_a_run(run: Path) -> None:
    summary = json.loads(regard("show", str(run), "--json").stdout)
    loaded = package.load(run)
    assert summary["parameters"] == loaded.parameters == sum(p.numel() for p in loaded.model.parameters())
    assert summary["weights_sha256"] == loaded.weights_sha256
    assert summary["step"] == loaded.step
    assert summary["scores"]["bleu"] > 0
    assert summary["recipe"]["train"]["steps"] == 300
    assert regard("show", str(run)).returncode == 0


@pytest.mark.learns
def test_every_input_line_gives_one_output_line(run: Path) -> None:
    text = "".join(line + "\n" for line in STRANGE)
    outputs = translated(str(run), stdin=text.encode())
    assert len(outputs) == len(STRANGE)
    assert outputs[1] == outputs[2] == ""
    assert outputs[0] == "zwei eins"
    assert translated(str(run), stdin=text.encode().removesuffix(b"\n")) == outputs
    assert translated(str(run), stdin=text.replace("\n", "\r\n").encode()) == outputs
    assert translated(str(run), stdin=b"") == []


@pytest.mark.parametrize("search", [(), ("--beam", "1"), ("--temperature", "1.0", "--seed", "3")])
def test_batch_size_and_order_change_nothing(
    run: Path, corpus: dict[str, str], tmp_path: Path, search: tuple[str, ...]
) -> None:
    file = write(tmp_path / "some", list(lines(corpus["test_source"]))[:20])
    outputs = {size: translated(str(run), file, "--batch-size", size, *search) for size in ("1", "7", "64")}
    assert outputs["1"] == outputs["7"] == outputs["64"]


def test_n_best_scores_and_rescoring_agree(run: Path, corpus: dict[str, str], tmp_path: Path) -> None:
    few = write(tmp_path / "few", list(lines(corpus["test_source"]))[:6])
    result = regard("translate", str(run), few, "--n-best", "3", "--beam", "4", "--json")
    n_best = json.loads(result.stdout)
    assert [len(best) for best in n_best] == [3] * 6
    assert len(translated(str(run), few, "--n-best", "3")) == 18
    sources = [source for source, best in zip(lines(few), n_best, strict=True) for _ in best]
    outputs = [output for best in n_best for output in best if output["ended"]]
    assert len(outputs) == 18
    files = write(tmp_path / "s", sources), write(tmp_path / "t", [output["text"] for output in outputs])
    scores = json.loads(regard("score", str(run), "--source", files[0], "--target", files[1], "--json").stdout)
    (tmp_path / "outputs").write_text(result.stdout)
    rescored = json.loads(regard("score", str(run), "--outputs", str(tmp_path / "outputs"), "--json").stdout)
    assert [each["log_prob"] for each in rescored] == pytest.approx([each["log_prob"] for each in outputs], abs=1e-4)
    loaded = package.load(run)
    for output, score in zip(outputs, scores, strict=True):
        # A text may have several tokenizations; only that of the tokenizer can be compared.
        if loaded.tokenizer.tokens(loaded.tokenizer.encode(output["text"])) == output["tokens"]:
            assert score["log_prob"] == pytest.approx(output["log_prob"], abs=1e-4)
            assert score["tokens"] == len(output["tokens"]) + 1


def test_constraints_are_kept(run: Path) -> None:
    source = b"one two red\n"
    assert translated(str(run), "--prefix", "rot zwei", stdin=source)[0].startswith("rot zwei")
    assert "zwei" not in translated(str(run), "--ban", "zwei", stdin=source)[0]
    assert "Haus" in translated(str(run), "--require", "Haus", stdin=source)[0]
    streamed = regard("translate", str(run), "--stream", "--beam", "1", stdin=source).stdout
    assert streamed == translated(str(run), "--beam", "1", stdin=source)[0] + "\n"


def test_an_ensemble_of_one_run_with_itself_is_that_run(run: Path, corpus: dict[str, str]) -> None:
    assert translated(str(run), str(run), corpus["test_source"]) == translated(str(run), corpus["test_source"])


def test_long_input_is_cut_with_a_warning_that_names_the_line(run: Path) -> None:
    long = " ".join(["one"] * 400)
    result = regard("translate", str(run), "--beam", "1", stdin=f"two\n{long}\n".encode())
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 2
    assert "line 2" in result.stderr
    assert "256" in result.stderr


@pytest.mark.learns
def test_comparing_a_run_with_itself_and_with_a_worse_output(run: Path, corpus: dict[str, str], tmp_path: Path) -> None:
    words = ("evaluate", str(run), "--source", corpus["test_source"], "--reference", corpus["test_target"], "--json")
    equal = json.loads(regard(*words, "--against", str(run)).stdout)
    assert equal["difference"]["bleu"]["difference"] == 0
    bad = write(tmp_path / "bad", ["eins"] * 60)
    worse = json.loads(regard(*words, "--against", bad).stdout)
    assert worse["difference"]["bleu"]["low"] > 0
    assert worse["difference"]["bleu"]["p_value"] < 0.05
    assert "would be ignored" in complaint(*words, "--text", bad)
    alone = json.loads(regard("evaluate", bad, *words[2:]).stdout)
    assert alone["bleu"] == worse["against"]["bleu"]
    average = json.loads(regard(*words, "--average", "2").stdout)
    assert average["bleu"] > 0
    assert "keeps 4 checkpoints" in complaint(*words, "--average", "9")


@pytest.mark.learns
def test_the_python_interface(run: Path, corpus: dict[str, str], tmp_path: Path) -> None:
    loaded = package.load(run)
    assert loaded.translate(["red house", ""]) == ["Haus rot", ""]
    assert loaded.score([("red house", "Haus rot")])[0].log_prob > loaded.score([("red house", "rot Haus")])[0].log_prob
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Haus")) == "Haus"
    trained = package.train(
        tmp_path / "run", tsv=[corpus["tsv"]], changes=["train.steps=3", "model.d_model=32", "data.tokenizer.vocab=280"]
    )
    assert isinstance(trained, package.Run)
    assert len(trained.translate(["one"])) == 1


def test_two_runs_with_one_seed_are_identical_and_another_seed_is_not(corpus: dict[str, str], tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        regard(*training(corpus, tmp_path / name, "--set", "train.steps=12", "--set", f"train.seed={seed}"), "-q")
        digests.append(json.loads(regard("show", str(tmp_path / name), "--json").stdout)["weights_sha256"])
    assert digests[0] == digests[1] != digests[2]
    finals = [(tmp_path / name / "weights-final.safetensors").read_bytes() for name in "abc"]
    assert finals[0] == finals[1] != finals[2]


@pytest.mark.learns
def test_fine_tuning_a_run_on_new_text(run: Path, corpus: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    words = ("train", "--tsv", corpus["tsv"], "--from", str(run), "--out", str(out))
    result = regard(
        *words, "--set", "train.steps=2", "--set", "train.optimizer.learning_rate=1e-6", "--set", "train.average=1"
    )
    assert result.returncode == 0, result.stderr
    tuned = package.load(out)
    assert tuned.tokenizer.sha256 == package.load(run).tokenizer.sha256
    assert tuned.translate(["red house"]) == ["Haus rot"]
    assert "uses the model" in complaint(*words[:-1], str(tmp_path / "x"), "--set", "model.dropout=0.2")


def test_separate_tokenizers_of_other_kinds(corpus: dict[str, str], tmp_path: Path) -> None:
    for kind in ("bytes", "characters", "words"):
        out = tmp_path / kind
        words = ("train", "--tsv", corpus["tsv"], "--out", str(out), "--set", f"data.tokenizer={kind}")
        result = regard(*words, "--set", "data.joint=false", "--set", "train.steps=2", "--set", "train.decode=3")
        assert result.returncode == 0, result.stderr
        assert (out / "tokenizer.source.json").exists() == (kind != "bytes")
        assert len(translated(str(out), "--beam", "1", "--max-len", "4", stdin=b"one two\n")) == 1


def test_language_models_by_stream_and_by_line(tmp_path: Path, learned: Learned) -> None:
    text = write(tmp_path / "text", ["abcd efgh ijkl"] * 60)
    common = (
        "--set", "train.optimizer.learning_rate=1e-2", "--set", "model.d_model=32", "--set", "model.heads=4",
        "--set", "model.decoder.depth=1", "--set", "data.tokenizer=characters",
        "--set", f"train.seed={1 + learned.seeds(1)[0]}",
    )  # fmt: skip
    stream, by_line = tmp_path / "stream", tmp_path / "lines"
    windows = ("--set", "train.steps=80", "--set", "data.batching.length=32", "--set", "data.batching.tokens=128")
    result = regard("train", "--text", text, "--out", str(stream), *common, *windows)
    assert result.returncode == 0, result.stderr
    outputs = json.loads(
        regard("generate", str(stream), "--prompt", "abcd", "--max-len", "9", "--beam", "1", "--json").stdout
    )
    assert outputs[0][0]["text"].startswith("abcd")
    long = regard("generate", str(stream), "--prompt", "abcd", "--max-len", "100", "--seed", "2")
    assert long.returncode == 0, long.stderr
    report = json.loads(regard("evaluate", str(stream), "--text", text, "--json").stdout)
    learned("nats per character", report["nats_per_character"], below=1.0, broken=2.5)  # all characters as probable
    assert report["loss"] == pytest.approx(report["nats_per_character"], rel=1e-2)
    windows_ = regard("evaluate", str(stream), "--text", text, "--windows", "2,8")
    assert windows_.returncode == 0, windows_.stderr
    assert [line.split()[0] for line in windows_.stdout.splitlines()[-3:]] == ["window", "2", "8"]
    lines_ = ("--set", "data.objective.unit=lines", "--set", "data.held_out=0", "--set", "train.steps=4")
    result = regard("train", "--text", text, "--out", str(by_line), *common, *lines_)
    assert result.returncode == 0, result.stderr
    assert regard("generate", str(by_line), "--stream", "--prompt", "", "--max-len", "5").returncode == 0
    assert json.loads(regard("score", str(by_line), "--target", text, "--json").stdout)[0]["tokens"] == 15


def test_a_classifier(tmp_path: Path, learned: Learned) -> None:
    text = write(
        tmp_path / "text",
        [f"{'good' if i % 2 else 'bad'}\t{'fine' if i % 2 else 'poor'} thing {i}" for i in range(200)],
    )
    out = tmp_path / "run"
    result = regard(
        "train", "--labelled", text, "--out", str(out), "--set", "train.steps=80",
        "--set", "train.optimizer.learning_rate=5e-3", "--set", f"train.seed={1 + learned.seeds(1)[0]}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    guesses = regard("classify", str(out), stdin=b"fine thing\npoor thing\n\n").stdout.splitlines()
    assert guesses[:2] == ["good", "bad"]
    assert len(guesses) == 3
    report = json.loads(regard("evaluate", str(out), "--labelled", text, "--json").stdout)
    learned("wrong labels, %", 100 - report["accuracy"], below=15, broken=50)  # by chance
    assert "regard classify" in complaint("translate", str(out), stdin=b"x\n")


@pytest.mark.learns
def test_a_recipe_file_and_a_copy_of_a_run_elsewhere(run: Path, corpus: dict[str, str], tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f"""
        model = {{ preset = "transformer_tiny", d_model = 32, variants = ["swiglu"] }}
        [data]
        train = [{{ kind = "tsv", path = "{corpus["tsv"]}", weight = 0.5 }}]
        tokenizer = {{ kind = "bpe", vocab = 290 }}
        [train]
        steps = 2
        optimizer = "adafactor"
        schedule = {{ kind = "warmup_stable_decay", warmup = 1 }}
        ema = 0.9
        decode = 2
        """
    )
    result = regard("train", str(recipe), "--out", str(tmp_path / "a"))
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "a" / "recipe.json").read_text())
    assert record["train"]["optimizer"]["kind"] == "adafactor"
    assert record["model"]["encoder"]["pattern"][0]["branches"][1]["gated"]
    shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("data", "trainer-*"))
    assert translated(str(tmp_path / "copy"), stdin=b"red house\n") == ["Haus rot"]
