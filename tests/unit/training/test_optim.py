"""Optimizers: parameter groups, learning rates, and loading of a saved state."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.batch import translation
from regard.errors import DataError, SpecError
from regard.models.base import Model
from regard.models.build import build
from regard.presets import preset
from regard.training.optim import (
    Adafactor,
    AdamW,
    Muon,
    Optimizer,
    OptimizerSpec,
    clip,
    groups,
    is_table,
    muon_matrices,
    named,
)
from regard.training.tensor_files import read_tensors, write_tensors
from regard.variants import apply

BATCH = translation([([5, 6, 7], [8, 9]), ([4], [5, 6, 7, 8])])
SIZES: dict[str, Any] = {"vocab": 20, "d_model": 16, "heads": 2, "dropout": 0.0}
MUON = Muon(learning_rate=0.01, weight_decay=0.1, rest=AdamW(learning_rate=0.01))


def tiny(*variants: str, seed: int = 1) -> Model:
    spec = preset("transformer_small", **SIZES, **{"encoder.depth": 1, "decoder.depth": 1})
    for variant in variants:
        spec = apply(variant, spec)
    return build(spec, seed=seed)


def backward(model: Model) -> None:
    loss = model.loss(BATCH)
    (loss.total / loss.tokens).backward()


def trained(model: Model, optimizer: Optimizer, *steps: int) -> None:
    for step in steps:
        backward(model)
        optimizer.set_rates(1 / step)
        optimizer.step()
        optimizer.zero()


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("variants", [(), ("untied", "learned"), ("shaw",), ("t5_bias",), ("block_sharing",)])
def test_weight_decay_applies_only_to_matrices_that_are_no_tables(variants: tuple[str, ...]) -> None:
    model = tiny(*variants)
    decayed, others = groups(named(model), 0.1, 0.01)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    assert {group["lr"] for group in (decayed, others)} == {0.1}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    actual = [{names[id(p)] for p in group["params"]} for group in (decayed, others)]
    assert sum(len(group["params"]) for group in (decayed, others)) == len(names)
    assert actual[0] | actual[1] == set(names.values())
    assert not actual[0] & actual[1]
    # By hand: what multiplies a stream inside a block, and nothing else.
    ends = ("qkv.weight", "query.weight", "kv.weight", "output.weight", "up.weight", "down.weight")
    expected = {name for name in names.values() if ".branch." in name and name.endswith(ends)}
    assert actual[0] == expected
    assert len(expected) == 4 + 7


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("tables.tables.source.weight", True),
        ("inputs.inputs.target.position.weight", True),
        ("encoder.position.keys", True),
        ("decoder.blocks.0.branches.0.branch.position.weight", True),
        ("decoder.blocks.0.branches.0.branch.qkv.weight", False),
        ("task.classify.weight", False),
    ],
)
def test_tables_are_recognised_by_name(name: str, table: bool) -> None:
    assert is_table(name) == table


def test_frozen_parameters_are_not_updated() -> None:
    model = tiny()
    frozen = next(parameter for name, parameter in model.named_parameters() if "qkv" in name)
    frozen.requires_grad_(False)
    before = frozen.clone()
    optimizer = AdamW(learning_rate=0.1).build(model)
    trained(model, optimizer, 1)
    assert torch.equal(frozen, before)
    assert len(named(model)) == len(list(model.parameters())) - 1


def test_every_parameter_must_be_covered_once() -> None:
    model = tiny()
    parameters = list(model.parameters())
    for wrong in (parameters[1:], [*parameters, nn.Parameter(torch.zeros(1))]):
        with pytest.raises(AssertionError, match="cover every parameter once"):
            Optimizer(model, {"sgd": torch.optim.SGD(wrong, lr=0.1)})
    with pytest.raises(AssertionError, match="cover every parameter once"):
        Optimizer(model, {n: torch.optim.SGD(parameters, lr=0.1) for n in ("one", "other")})


def test_adamw_matches_its_formula() -> None:
    model = tiny()
    spec = AdamW(learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    optimizer = spec.build(model)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step, factor in enumerate((1.0, 0.5, 0.25), start=1):
        backward(model)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            rate = 0.01 * factor
            if gradient.dim() == 2 and not name.startswith("tables"):
                expected[name] -= rate * 0.1 * expected[name]
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            mean, square = first[name] / (1 - 0.8**step), second[name] / (1 - 0.9**step)
            expected[name] -= rate * mean / (square.sqrt() + 1e-6)
        optimizer.set_rates(factor)
        optimizer.step()
        optimizer.zero()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "spec", [AdamW(learning_rate=0.01, weight_decay=0.1), Adafactor(learning_rate=0.05, weight_decay=0.1), MUON]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_optimizer_resumes_bit_by_bit(spec: OptimizerSpec, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.set_default_dtype(dtype)
    straight = tiny()
    optimizer = spec.build(straight)
    trained(straight, optimizer, 1, 2, 3)
    write_tensors(tmp_path / "state", optimizer.state())
    resumed = tiny(seed=2)
    resumed.load_state_dict(straight.state_dict())
    trained(straight, optimizer, 4, 5, 6)
    again = spec.build(resumed)
    again.load(read_tensors(tmp_path / "state"))
    trained(resumed, again, 4, 5, 6)
    assert same(straight, resumed)
    forgetful = tiny(seed=2)
    forgetful.load_state_dict(resumed.state_dict())
    trained(forgetful, spec.build(forgetful), 7)
    trained(resumed, again, 7)
    assert not same(forgetful, resumed)  # what is remembered matters


def test_optimizer_in_use_can_load_a_state() -> None:
    model, other = tiny(), tiny()
    optimizer, reference = AdamW(learning_rate=0.01).build(model), AdamW(learning_rate=0.01).build(other)
    trained(model, optimizer, 5)
    optimizer.load(reference.state())
    model.load_state_dict(other.state_dict())
    trained(model, optimizer, 1, 2)
    trained(other, reference, 1, 2)
    assert same(model, other)


def test_a_state_of_another_model_is_refused() -> None:
    model, optimizer = tiny(), AdamW(learning_rate=0.01)
    large = build(preset("transformer_small", **SIZES))
    state = optimizer.build(large)
    trained(large, state, 1)
    with pytest.raises(DataError, match="other parameters than those of this model"):
        optimizer.build(model).load(state.state())
    with pytest.raises(DataError, match="is not that of adafactor"):
        Adafactor(learning_rate=0.01).build(large).load(state.state())


def test_a_state_names_its_entries() -> None:
    model = tiny()
    optimizer = AdamW(learning_rate=0.01).build(model)
    assert optimizer.state() == {}
    trained(model, optimizer, 1)
    state = optimizer.state()
    assert len(state) == 3 * len(list(model.parameters()))
    assert {name.split(".")[2] for name in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(isinstance(value, Tensor) for value in state.values())


@pytest.mark.parametrize(
    "spec",
    [
        AdamW(learning_rate=0.02),
        Adafactor(learning_rate=0.02),
        Muon(learning_rate=0.02, rest=AdamW(learning_rate=0.02)),
    ],
)
def test_learning_rates_are_factors_of_the_peak(spec: OptimizerSpec) -> None:
    model = tiny()
    optimizer = spec.build(model)
    for factor in (0.5, 0.1, 1.0):  # of the highest, not of the last
        backward(model)
        optimizer.set_rates(factor)
        optimizer.step()
        assert {group["lr"] for part in optimizer.parts.values() for group in part.param_groups} == {0.02 * factor}
    before = [p.detach().clone() for p in model.parameters()]
    backward(model)
    optimizer.set_rates(0.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_zero_removes_gradients() -> None:
    model = tiny()
    optimizer = AdamW(learning_rate=0.02).build(model)
    backward(model)
    optimizer.zero()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_muon_updates_matrices_and_adamw_the_rest() -> None:
    spec = apply("t5_bias", preset("transformer_small", **SIZES))
    model = build(spec, device="meta")
    optimizer = Muon(learning_rate=0.01, momentum=0.9, weight_decay=0.1, rest=AdamW(learning_rate=0.003)).build(model)
    names = {id(p): name for name, p in model.named_parameters()}
    muon = {names[id(p)] for group in optimizer.parts["muon"].param_groups for p in group["params"]}
    assert muon == {name for name, p in named(model) if p.dim() == 2 and "blocks" in name}
    (group,) = optimizer.parts["muon"].param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.01, 0.9, 0.1)
    assert {group["lr"] for group in optimizer.parts["adamw"].param_groups} == {0.003}


def test_muon_updates_matrices_of_experts_but_no_mixture_of_layers() -> None:
    experts = muon_matrices(tiny("mixture_of_experts"))
    assert experts["encoder.blocks.0.branches.1.branch.up"].dim() == 3
    mixture = tiny("transparent")
    assert "bridge.weight" in dict(named(mixture))
    assert "bridge.weight" not in muon_matrices(mixture)


def test_steps_of_adamw_and_muon_can_be_captured_on_cuda() -> None:
    assert AdamW(learning_rate=0.1).build(tiny()).capturable
    assert Muon(learning_rate=0.1, rest=AdamW(learning_rate=0.1)).build(tiny()).capturable
    assert not Adafactor(learning_rate=0.1).build(tiny()).capturable


def test_muon_without_matrices_is_adamw() -> None:
    model = nn.LayerNorm(4)
    assert list(Muon(learning_rate=0.01, rest=AdamW(learning_rate=0.003)).build(model).parts) == ["adamw"]


def test_learning_rate_must_be_chosen_before_building() -> None:
    for spec in (AdamW(), Adafactor(), Muon()):
        with pytest.raises(SpecError, match=r"train\.optimizer\.learning_rate: is not chosen yet"):
            spec.build(tiny())


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: AdamW(learning_rate=0.0), "learning_rate"),
        (lambda: AdamW(learning_rate=-1.0), "learning_rate"),
        (lambda: AdamW(learning_rate=100.0), "learning_rate"),
        (lambda: AdamW(weight_decay=-0.1), "weight_decay"),
        (lambda: AdamW(betas=(0.9, 1.0)), "betas"),
        (lambda: Adafactor(learning_rate=0.0), "learning_rate"),
        (lambda: Muon(momentum=1.0), "momentum"),
        (lambda: Muon(learning_rate=0.0), "learning_rate"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, path: str) -> None:
    with pytest.raises(SpecError) as raised:
        make()
    assert raised.value.path == path


def test_gradients_are_clipped_by_their_common_norm() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]

    def set_gradients() -> None:
        parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])

    set_gradients()
    assert float(clip(parameters, 1.0)) == pytest.approx(5.0)
    assert parameters[0].grad is not None
    assert parameters[1].grad is not None
    assert [*parameters[0].grad.tolist(), *parameters[1].grad.tolist()] == pytest.approx([0.6, 0.0, 0.8], rel=1e-5)
    for most in (0.0, 5.1):
        set_gradients()
        assert float(clip(parameters, most)) == pytest.approx(5.0)
        assert [*parameters[0].grad.tolist(), *parameters[1].grad.tolist()] == [3.0, 0.0, 4.0]


@pytest.mark.parametrize("size", [1e-3, 0.2, 1.0, 40.0, math.nan, math.inf])
@pytest.mark.parametrize("most", [1.0, 5.0])
def test_clipping_equals_torch_bit_for_bit(size: float, most: float) -> None:
    actual_parameters = [nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    expected_parameters = [nn.Parameter(parameter.detach().clone()) for parameter in actual_parameters]
    for actual, expected in zip(actual_parameters, expected_parameters, strict=True):
        actual.grad = size * torch.randn(3, 4)
        expected.grad = actual.grad.clone()
    actual_norm, expected_norm = clip(actual_parameters, most), nn.utils.clip_grad_norm_(expected_parameters, most)
    torch.testing.assert_close(actual_norm, expected_norm, rtol=0, atol=0, equal_nan=True)
    for actual, expected in zip(actual_parameters, expected_parameters, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=0, atol=0, equal_nan=True)
