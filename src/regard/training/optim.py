"""Specs that build torch's optimizers, with parameter groups with and without weight decay."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import DataError, SpecError
from regard.nn.checks import require
from regard.training.muon import BatchedMuon
from regard.tree import Spec

Named = list[tuple[str, nn.Parameter]]
ROUNDING = 1e-6  # torch adds this to the gradient norm before dividing by it


class OptimizerSpec(Spec):
    """Abstract base class of optimizer specs. A spec builds the optimizer for a model."""

    __slots__ = ()
    learning_rate: float | None  # the peak learning rate; None: chosen from the model size

    def scaled(self, factor: float) -> "OptimizerSpec":
        """Return the same spec with all learning rates multiplied by `factor`."""
        return replace(self, learning_rate=resolved(self.learning_rate) * factor)  # type: ignore[type-var]

    @abstractmethod
    def build(self, model: nn.Module) -> "Optimizer":
        """Return the optimizer for the parameters of a model."""


class Optimizer:
    """Wraps one or more of torch's optimizers. Every trained parameter is in exactly one parameter group."""

    def __init__(self, model: nn.Module, parts: dict[str, torch.optim.Optimizer], capturable: bool = False) -> None:
        """If `capturable` is true, a CUDA graph can capture a step, because the step needs no value on the host."""
        self.parts, self.capturable, self.factor = parts, capturable, 1.0
        covered = [id(p) for part in parts.values() for group in part.param_groups for p in group["params"]]
        trained = [id(p) for p in model.parameters() if p.requires_grad]
        assert sorted(covered) == sorted(trained), "the groups must cover every parameter once"
        self.rates = {name: [group["lr"] for group in part.param_groups] for name, part in parts.items()}
        device = next(model.parameters()).device
        if capturable and device.type == "cuda":
            for part in parts.values():
                for group in part.param_groups:  # a captured step reads the tensor at every replay
                    group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
                    group["capturable"] = True

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def step_if_finite(self, found_inf: Tensor) -> None:
        """Update the weights, unless `found_inf` is 1 rather than 0. This does not wait for the value of `found_inf`.

        torch's fused optimizers and `BatchedMuon` then change neither weights nor state. Other optimizers get gradients
        of 0, because torch has no way to skip their step.
        """
        for part in self.parts.values():
            if getattr(part, "_step_supports_amp_scaling", False):
                part.found_inf = found_inf  # type: ignore[reportAttributeAccessIssue]  # as torch.amp.GradScaler does
            else:
                for parameter in (p for group in part.param_groups for p in group["params"] if p.grad is not None):
                    parameter.grad = torch.where(found_inf > 0, 0.0, parameter.grad)
            part.step()

    def set_rates(self, factor: float) -> None:
        """Set all learning rates to `factor` times their peak values."""
        self.factor = factor
        for name, part in self.parts.items():
            for group, rate in zip(part.param_groups, self.rates[name], strict=True):
                current = group["lr"]
                group["lr"] = current.fill_(rate * factor) if isinstance(current, Tensor) else rate * factor

    @property
    def rate(self) -> float:
        """The current learning rate of the first parameter group."""
        return next(iter(self.rates.values()))[0] * self.factor

    def zero(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the state of all optimizers as tensors keyed by name."""
        return {
            f"{name}.{number}.{key}": torch.as_tensor(value)
            for name, part in self.parts.items()
            for number, entries in part.state_dict()["state"].items()
            for key, value in entries.items()
        }

    def load(self, saved: Mapping[str, Tensor], placed: Callable[[Tensor, Tensor], Tensor] = lambda t, _: t) -> None:
        """Load the state of all optimizers, in the format of `state`.

        `placed(tensor, parameter)` returns the part of a whole tensor that this process stores, if several processes
        share it.
        """
        entries = [key.split(".", 2) for key in saved]
        if any(len(entry) < 3 or entry[0] not in self.parts or not entry[1].isdecimal() for entry in entries):
            raise DataError(f"the saved optimizer state is not that of {' and '.join(self.parts)}")
        for name, part in self.parts.items():
            known = part.state_dict()
            states: dict[int, dict[str, Any]] = {}
            for key, value in saved.items():
                part_name, number, entry = key.split(".", 2)
                if part_name == name:
                    states.setdefault(int(number), {})[entry] = value
            count = sum(len(group["params"]) for group in known["param_groups"])
            if states and (min(states) < 0 or max(states) >= count):
                raise DataError("the saved optimizer state belongs to other parameters than those of this model")
            parameters = [parameter for group in part.param_groups for parameter in group["params"]]
            if type(part).__module__.startswith(("torch.", "regard.")):  # an optimizer of yours may differ
                _check_states({parameters[number]: state for number, state in states.items()})
            placed_states = {
                number: {entry: placed(value, parameters[number]) for entry, value in state.items()}
                for number, state in states.items()
            }
            part.load_state_dict({"state": placed_states, "param_groups": known["param_groups"]})


WHOLE = {"exp_avg", "exp_avg_sq", "momentum_buffer", "variance"}  # entries with the shape of their parameter


def _check_states(states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Raise an error if an entry is missing or has the wrong shape.

    All matrices must have the same entries, and so must all vectors.
    """
    entries: dict[bool, set[str]] = {}
    for parameter, state in states.items():
        entries.setdefault(parameter.ndim > 1, set()).update(state)
    for parameter, state in states.items():
        fits = all(state[name].shape == parameter.shape for name in WHOLE & state.keys())
        if not fits or state.keys() != entries[parameter.ndim > 1]:
            raise DataError("the saved optimizer state is incomplete or of another model; restore it from a copy")


def named(model: nn.Module) -> Named:
    """Return the names and tensors of all trainable parameters of a model."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def groups(parameters: Named, rate: float, decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: projections with weight decay, and vectors, embeddings and filters without it."""
    decayed = [p for name, p in parameters if _is_matrix(name, p)]
    others = [p for name, p in parameters if not _is_matrix(name, p)]
    both = ((decayed, decay), (others, 0.0))
    return [{"params": group, "lr": rate, "weight_decay": weight_decay} for group, weight_decay in both if group]


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and not is_table(name) and getattr(parameter, "projects", True)


def is_table(name: str) -> bool:
    """Return whether a parameter of this name is a table of word, position or memory embeddings."""
    return any(part in ("tables", "inputs", "position", "positions", "memory") for part in name.split("."))


def check_rate(spec: Any) -> None:
    """Raise SpecError if the learning rate or the weight decay is out of range."""
    rate = spec.learning_rate
    require(rate is None or 0 < rate < 100, "learning_rate", f"must lie above 0, not {rate}")
    require(spec.weight_decay >= 0, "weight_decay", f"must be at least 0, not {spec.weight_decay}")


def resolved(rate: float | None) -> float:
    """Return the learning rate; raise SpecError if it is None."""
    if rate is None:
        raise SpecError("train.optimizer.learning_rate", "is not chosen yet; give a number")
    return rate


@dataclass(frozen=True, slots=True)
class AdamW(OptimizerSpec):
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019): torch's fused version."""

    kind = "adamw"
    learning_rate: float | None = None
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: float = 0.0

    def check(self) -> None:
        check_rate(self)
        require(all(0 <= beta < 1 for beta in self.betas), "betas", f"must lie in [0, 1), not {list(self.betas)}")

    def build(self, model: nn.Module) -> Optimizer:
        return Optimizer(model, {"adamw": self.over(named(model))}, capturable=True)

    def over(self, parameters: Named) -> torch.optim.Optimizer:
        """Return torch's AdamW for the given parameters."""
        rate = resolved(self.learning_rate)
        parts = groups(parameters, rate, self.weight_decay)
        # On a CPU the fused kernel supports only float32 and float64, but a CPU trains in float32.
        return torch.optim.AdamW(parts, lr=rate, betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True, slots=True)
class Adafactor(OptimizerSpec):
    """Adafactor (Shazeer and Stern 2018), torch's version: second moments are products of a row and a column vector.

    Two constants of the paper are settings here. The step size relative to the weights is min(learning_rate,
    1/sqrt(step)); the paper has 0.01 instead of `learning_rate`. Updates are clipped to a root mean square of `clip`;
    the paper has 1.
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
        parameters = groups(named(model), rate, self.weight_decay)
        adafactor = torch.optim.Adafactor(parameters, lr=rate, beta2_decay=self.beta2_decay, d=self.clip)
        return Optimizer(model, {"adafactor": adafactor})


@dataclass(frozen=True, slots=True)
class Muon(OptimizerSpec):
    """Muon (Jordan et al. 2024): orthogonalised momentum for matrices inside the model; AdamW for other parameters."""

    kind = "muon"
    learning_rate: float | None = None
    momentum: float = 0.95
    weight_decay: float = 0.0
    rest: AdamW = AdamW()

    def check(self) -> None:
        check_rate(self)
        require(0 <= self.momentum < 1, "momentum", f"must lie in [0, 1), not {self.momentum}")

    def build(self, model: nn.Module) -> Optimizer:
        matrices = muon_matrices(model)
        others = [(name, p) for name, p in named(model) if name not in matrices]
        parts: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            rate = resolved(self.learning_rate)
            parts["muon"] = BatchedMuon(matrices.values(), rate, self.weight_decay, self.momentum)
        if others:
            parts["adamw"] = self.rest.over(others)
        return Optimizer(model, parts, capturable=True)

    def scaled(self, factor: float) -> "Muon":
        rate = resolved(self.learning_rate) * factor
        return replace(self, learning_rate=rate, rest=self.rest.scaled(factor))


def muon_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that Muon updates, keyed by name: matrices, and stacks of matrices such as experts."""
    return {name: p for name, p in named(model) if _is_matrix(name, p)}


def clip(parameters: Iterable[Tensor], most: float) -> Tensor:
    """Clip the gradients to a norm of at most `most`, or not at all if `most` is 0. Return the norm before clipping."""
    trained = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None], foreach=True)
    if hasattr(norm, "full_tensor"):  # of gradients that are sharded over several processes
        norm = norm.full_tensor()  # type: ignore[reportAttributeAccessIssue]
    # On a CPU, reading the norm costs nothing, and avoids multiplying the gradients by 1 if the norm is small.
    small = norm.device.type == "cpu" and bool(norm + ROUNDING <= most)
    if most > 0 and not small:
        nn.utils.clip_grads_with_norm_(trained, most, norm, foreach=True)
    return norm
