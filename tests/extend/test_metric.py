"""A user-defined metric, written outside the package: as training criterion, in evaluation and in an ablation."""

import json
from pathlib import Path

import pytest

import regard
from regard.errors import SpecError
from regard.evaluation.metrics import metric
from tests.extend.command import SMALL, User

MY_METRIC = '''
from regard.evaluation.metric import Metric


class LengthRatio(Metric):
    """Characters of the outputs in percent of those of the references."""

    name = "length_ratio"
    title = "length ratio"
    higher_is_better = False

    def segment(self, output, references):
        return len(output), len(references[0])

    def value(self, total):
        return 100 * total[0] / total[1]
'''
NAME = "my_metric:LengthRatio"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    user = User.of(tmp_path_factory.mktemp("user"), "my_metric", MY_METRIC)
    (user.folder / "long.txt").write_text("xx\n" * 120)
    (user.folder / "short.txt").write_text("x\n" * 120)
    user.train("run", 4, "--set", "train.validate_every=2", "--set", f"train.criterion={NAME}")
    return user


def test_user_metric_ranks_checkpoints_and_is_logged_and_printed(user: User) -> None:
    events = [json.loads(line) for line in (user.folder / "run" / "log.jsonl").read_text().splitlines()]
    validations = [event for event in events if event["event"] == "valid"]
    assert len(validations) == 2
    lowest = min(validations, key=lambda event: (event["length_ratio"], event["loss"]))
    within = lowest["length_ratio"] + lowest["standard_error"] / 2
    candidates = [event for event in validations if event["length_ratio"] <= within]
    assert validations[-1]["best"] == min(candidates, key=lambda event: event["loss"])["step"]
    baselines = json.loads((user.folder / "run" / "baselines.json").read_text())["baselines"]
    assert baselines[0]["metrics"]["length_ratio"] == 100  # the source is as long as the target
    console = user.train("other", 1, "--set", f"train.criterion={NAME}").err
    assert "length ratio" in console


def test_user_metric_is_evaluated_and_compared(user: User) -> None:
    words = ("evaluate", "long.txt", "--tsv", "pairs.tsv", "--against", "short.txt", "--json", "--metric", NAME)
    report = json.loads(user.run(*words, "--metric", "ter", "--trust-code").out)
    assert report["length_ratio"] == pytest.approx(2 * report["against"]["length_ratio"])
    assert set(report["difference"]) == {"length_ratio", "ter"}
    assert report["verdict"].startswith("long.txt is worse than short.txt: length ratio ")
    assert "--metric: 'my_metric:LengthRatio' would import code; add --trust-code" in user.refusal(*words)
    run = regard.load(user.folder / "run", trust_code=True)
    values = run.evaluate(tsv=str(user.folder / "pairs.tsv"), metrics=[NAME], trust_code=True)
    assert values["length_ratio"] > 0


@pytest.mark.slow
def test_user_metric_is_a_column_of_an_ablation(user: User) -> None:
    words = ("ablate", "--tsv", "pairs.tsv", *SMALL, "--steps", "8", "--seeds", "1", "--jobs", "1", "--rows", "swiglu")
    report = json.loads(user.run(*words, "--metric", NAME, "--trust-code", "--json", "--out", "ablation").out)
    assert report["metric"] == "length_ratio"
    assert all(row["metric"]["value"] > 0 for row in report["rows"])


def test_user_criterion_needs_trust_code(user: User) -> None:
    words = ("train", "--tsv", "pairs.tsv", "--set", f"train.criterion={NAME}", "--out", "none")
    assert "train.criterion: 'my_metric:LengthRatio' would import code; add --trust-code" in user.refusal(*words)
    user.train("parts", 4, "--set", f"train.criterion={NAME}", "--max-time", "0.001s")
    assert "would import code; add --trust-code" in user.refusal("resume", "parts")
    user.run("resume", "parts", "--trust-code")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("class M: pass", "is not a Metric class"),
        ("class M(Metric): name = title = 'm'", "is not a Metric class"),
        ("class M(Metric):\n    title = 'm'\n    def value(self, total): return 0", "has no name"),
        (
            "class M(Metric):\n    name = title = 'bleu'\n    def value(self, total): return 0",
            "which is another metric",
        ),
        ("M2 = 3", "has no 'M'"),
    ],
)
def test_a_class_that_is_no_metric_is_refused_by_a_sentence(
    body: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"no_metric_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"from regard.evaluation.metric import Metric\n{body}\n")
    with pytest.raises(SpecError, match=sentence):
        metric(f"{name}:M", trust_code=True)
