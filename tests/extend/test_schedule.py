"""A user-defined learning-rate schedule, written outside the package: train and resume."""

import json

import pytest
import torch

import regard
from tests.extend.command import User

MY_SCHEDULE = '''
from dataclasses import dataclass

from regard.training.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Sawtooth(Schedule):
    """Fall from 1 to 0 every `period` steps (warm restarts, Loshchilov and Hutter 2017, with straight lines)."""

    kind = "sawtooth"
    period: int = 2

    def factor(self, step, steps):
        return 1 - (step - 1) % self.period / self.period
'''
NAME = "my_schedule:Sawtooth"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    return User.of(tmp_path_factory.mktemp("user"), "my_schedule", MY_SCHEDULE)


def test_training_with_a_user_schedule_resumes_to_the_same_weights(user: User) -> None:
    settings = ("--set", f'train.schedule={{kind = "{NAME}", period = 3}}', "--set", "train.log_every=1")
    settings += ("--set", "train.validate_every=5", "--set", "train.optimizer.learning_rate=0.003")
    user.train("whole", 5, *settings)
    user.train("parts", 5, *settings, "--max-time", "0.001s")
    assert "would import code" in user.refusal("resume", "parts")
    user.run("resume", "parts", "--trust-code")
    whole, parts = (regard.load(user.folder / name, trust_code=True).model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    events = [json.loads(line) for line in (user.folder / "whole" / "log.jsonl").read_text().splitlines()]
    rates = [event["learning_rate"] for event in events if event["event"] == "step"]
    assert rates == pytest.approx([0.003 * factor for factor in (1, 2 / 3, 1 / 3, 1, 2 / 3)])


def test_user_schedule_needs_trust_code(user: User) -> None:
    words = ("train", "--tsv", "pairs.tsv", "--set", f"train.schedule={NAME}", "--out", "none")
    assert "'my_schedule:Sawtooth' would import code" in user.refusal(*words)
