"""Optimizer slot: torch's optimizers, and the rule that says which parameter goes where."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import DataError, SpecError
from regard.training.muon import BatchedMuon
from regard.tree import Spec

Named = list[tuple[str, nn.Parameter]]
ROUNDING = 1e-6  # torch divides by the norm and this


class OptimizerSpec(Spec):
    """Slot: how gradients change weights."""

    __slots__ = ()
    learning_rate: float | None  # the highest learning rate; None: chosen from the size of the model

    @abstractmethod
    def build(self, model: nn.Module) -> "Optimizer":
        """The optimizer of a model's parameters."""


class Optimizer:
    """One or several of torch's optimizers, driven as one. Their groups cover every parameter exactly once."""

    def __init__(self, model: nn.Module, parts: dict[str, torch.optim.Optimizer], capturable: bool = False) -> None:
        """`capturable`: a CUDA graph can capture a step, which waits for no value and reads the learning rate anew."""
        self.parts, self.capturable, self.factor = parts, capturable, 1.0
        covered = [id(p) for part in parts.values() for group in part.param_groups for p in group["params"]]
        wanted = [id(p) for p in model.parameters() if p.requires_grad]
        assert sorted(covered) == sorted(wanted), "the groups must cover every parameter once"
        self.rates = {name: [group["lr"] for group in part.param_groups] for name, part in parts.items()}
        device = next(model.parameters()).device
        if self.capturable and device.type == "cuda":
            self._hold_rates(device)

    def _hold_rates(self, device: torch.device) -> None:
        """Keep the rates in tensors, which a captured step reads anew every time."""
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
                group["capturable"] = True

    def step(self) -> None:
        """Change the weights."""
        for part in self.parts.values():
            part.step()

    def set_rates(self, factor: float) -> None:
        """Use `factor` of the highest rates from now on."""
        self.factor = factor
        for name, part in self.parts.items():
            for group, rate in zip(part.param_groups, self.rates[name], strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * factor)
                else:
                    group["lr"] = rate * factor

    @property
    def rate(self) -> float:
        """The rate of the first group, now."""
        return next(iter(self.rates.values()))[0] * self.factor

    def zero(self) -> None:
        """Forget the gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """What the optimizers remember, as tensors by name."""
        saved: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            for number, entries in part.state_dict()["state"].items():
                for key, value in entries.items():
                    saved[f"{name}.{number}.{key}"] = torch.as_tensor(value)
        return saved

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Remember again."""
        if any(key.split(".", 1)[0] not in self.parts for key in saved):
            raise DataError(f"the saved optimizer is another one than {' and '.join(self.parts)}")
        for name, part in self.parts.items():
            known = part.state_dict()
            states: dict[int, dict[str, Any]] = {}
            for key, value in saved.items():
                part_name, number, entry = key.split(".", 2)
                if part_name == name:
                    states.setdefault(int(number), {})[entry] = value
            count = sum(len(group["params"]) for group in known["param_groups"])
            if states and (min(states) < 0 or max(states) >= count):
                raise DataError("the saved optimizer has other parameters than this model")
            part.load_state_dict({"state": states, "param_groups": known["param_groups"]})


def named(model: nn.Module) -> Named:
    """The parameters that are trained."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def groups(parameters: Named, rate: float, decay: float) -> list[dict[str, Any]]:
    """Weight decay for projections; none for biases, norms and other vectors, nor for tables and filters."""
    decayed = [p for name, p in parameters if _is_matrix(name, p)]
    others = [p for name, p in parameters if not _is_matrix(name, p)]
    found = [
        {"params": decayed, "lr": rate, "weight_decay": decay},
        {"params": others, "lr": rate, "weight_decay": 0.0},
    ]
    return [group for group in found if group["params"]]


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and not is_table(name) and getattr(parameter, "projects", True)


def is_table(name: str) -> bool:
    """Whether a parameter is a table, of words, positions or memories, by the name that models give those."""
    return any(part in ("tables", "inputs", "position", "positions", "memory") for part in name.split("."))


def check_rate(spec: Any) -> None:
    """Refuse rates and decays that cannot be meant."""
    if spec.learning_rate is not None and not 0 < spec.learning_rate < 100:
        raise SpecError("learning_rate", f"must lie above 0, not {spec.learning_rate}")
    if spec.weight_decay < 0:
        raise SpecError("weight_decay", f"must be at least 0, not {spec.weight_decay}")


def resolved(rate: float | None) -> float:
    """The rate, which must be chosen by now."""
    if rate is None:
        raise SpecError("train.optimizer.learning_rate", "is not chosen yet; give a number")
    return rate


@dataclass(frozen=True, slots=True)
class AdamW(OptimizerSpec):
    """Kingma and Ba 2015 with decoupled decay (Loshchilov and Hutter 2019); torch's, fused."""

    kind = "adamw"
    learning_rate: float | None = None
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: float = 0.0

    def check(self) -> None:
        check_rate(self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SpecError("betas", f"must lie in [0, 1), not {list(self.betas)}")

    def build(self, model: nn.Module) -> Optimizer:
        return Optimizer(model, {"adamw": self.over(named(model))}, capturable=True)

    def over(self, parameters: Named) -> torch.optim.Optimizer:
        """AdamW over some of the parameters."""
        rate = resolved(self.learning_rate)
        # The fused kernel knows float32 and float64 on the CPU, which are what a CPU trains in.
        return torch.optim.AdamW(
            groups(parameters, rate, self.weight_decay), lr=rate, betas=self.betas, eps=self.eps, fused=True
        )


@dataclass(frozen=True, slots=True)
class Adafactor(OptimizerSpec):
    """Shazeer and Stern 2018: the second moment as a product of a row and a column; torch's.

    Differs from the paper: torch's takes the rate as given, scaled by the size of the weights and clipped at `clip`.
    """

    kind = "adafactor"
    learning_rate: float | None = None
    weight_decay: float = 0.0
    beta2_decay: float = -0.8
    clip: float = 1.0

    def check(self) -> None:
        check_rate(self)

    def build(self, model: nn.Module) -> Optimizer:
        rate = resolved(self.learning_rate)
        parts = groups(named(model), rate, self.weight_decay)
        return Optimizer(
            model, {"adafactor": torch.optim.Adafactor(parts, lr=rate, beta2_decay=self.beta2_decay, d=self.clip)}
        )


@dataclass(frozen=True, slots=True)
class Muon(OptimizerSpec):
    """Jordan et al. 2024: orthogonalised momentum for the matrices inside the model, `rest` for everything else."""

    kind = "muon"
    learning_rate: float | None = None
    momentum: float = 0.95
    weight_decay: float = 0.0
    rest: AdamW = AdamW()

    def check(self) -> None:
        check_rate(self)
        if not 0 <= self.momentum < 1:
            raise SpecError("momentum", f"must lie in [0, 1), not {self.momentum}")

    def build(self, model: nn.Module) -> Optimizer:
        matrices = muon_matrices(model)
        others = [(name, p) for name, p in named(model) if name not in matrices]
        parts = {"muon": self.over(list(matrices.values()))} if matrices else {}
        if others:
            parts["adamw"] = self.rest.over(others)
        return Optimizer(model, parts, capturable=True)

    def over(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Muon over some of the parameters."""
        return BatchedMuon(
            matrices, lr=resolved(self.learning_rate), weight_decay=self.weight_decay, momentum=self.momentum
        )


def muon_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that Muon changes: matrices, and stacks of them such as those of experts."""
    return {name: p for name, p in named(model) if _is_matrix(name, p)}


def clip(parameters: Iterable[Tensor], most: float) -> Tensor:
    """Scale the gradients so that their norm is at most `most` (0: never); the norm before."""
    found = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in found if p.grad is not None], foreach=True)
    # On a CPU the norm can be looked at for nothing, and small gradients need no pass that multiplies them by 1.
    small = most <= 0 or (norm.device.type == "cpu" and bool(norm + ROUNDING <= most))
    if not small:
        nn.utils.clip_grads_with_norm_(found, most, norm, foreach=True)
    return norm
