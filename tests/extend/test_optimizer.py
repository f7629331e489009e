"""A user-defined optimizer, written outside the package: train and resume."""

import pytest
import torch

import regard
from tests.extend.command import User

MY_OPTIMIZER = '''
from dataclasses import dataclass

import torch

from regard.training.optim import Optimizer, OptimizerSpec, groups, named


class SignSGD(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean.sign())


@dataclass(frozen=True, slots=True)
class SignMomentum(OptimizerSpec):
    """Steps by the sign of the mean gradient (Bernstein et al. 2018)."""

    kind = "sign_momentum"
    learning_rate: float | None = 1e-3
    weight_decay: float = 0.0

    def build(self, model):
        parts = groups(named(model), self.learning_rate, self.weight_decay)
        return Optimizer(model, {"sign": SignSGD(parts, {})})
'''
NAME = "my_optimizer:SignMomentum"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    return User.of(tmp_path_factory.mktemp("user"), "my_optimizer", MY_OPTIMIZER)


def test_training_with_a_user_optimizer_resumes_to_the_same_weights(user: User) -> None:
    settings = ("--set", f"train.optimizer={NAME}", "--set", "train.optimizer.learning_rate=0.01")
    settings += ("--set", "train.save_every=2", "--set", "train.validate_every=4")
    user.train("whole", 4, *settings)
    user.train("parts", 4, *settings, "--max-time", "0.001s")
    assert "would import code" in user.refusal("resume", "parts")
    user.run("resume", "parts", "--trust-code")
    whole, parts = (regard.load(user.folder / name, trust_code=True).model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert '"my_optimizer:SignMomentum"' in (user.folder / "whole" / "recipe.json").read_text()


def test_user_optimizer_needs_trust_code(user: User) -> None:
    words = ("train", "--tsv", "pairs.tsv", "--set", f"train.optimizer={NAME}", "--out", "none")
    assert "'my_optimizer:SignMomentum' would import code" in user.refusal(*words)
