"""Files of tensors: digests detect every change, and means are exact."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from regard.errors import DataError
from regard.files import file_digest
from regard.training.tensor_files import (
    checksum,
    mean,
    read_about,
    read_tensors,
    read_weights,
    weights_digest,
    write_tensors,
    write_weights,
)
from tests.unit.training.test_checkpoint import Tensors, same, weights_of


@pytest.mark.parametrize("content", [b"", b"nothing", b"\xff" * 100])
def test_invalid_tensor_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights"
    path.write_bytes(content)
    for reader in (read_tensors, read_about):
        with pytest.raises(DataError, match="damaged or not a safetensors file"):
            reader(path)
    with pytest.raises(DataError, match="does not exist"):
        read_tensors(tmp_path / "nowhere")
    with pytest.raises(DataError):
        read_about(tmp_path / "nowhere")


@pytest.mark.parametrize("about", [None, {"steps": "[3, 4]", "scores": '{"bleu": 27.1}'}])
def test_every_flipped_byte_of_weights_is_detected_or_harmless(tmp_path: Path, about: dict[str, str] | None) -> None:
    path = tmp_path / "weights"
    write_weights(path, weights_of(3), about)
    whole, notes = path.read_bytes(), read_about(path)
    detected = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            weights, changed = read_weights(path), read_about(path)
        except DataError:
            detected += 1
        else:  # for example, the name of the checksum has changed
            assert same(weights, weights_of(3))
            assert notes.items() <= changed.items() or not changed.keys() & {"steps", "scores"}
    assert detected > 0.9 * len(whole)


def test_weights_without_a_digest_are_read(tmp_path: Path) -> None:
    save_file(weights_of(3), tmp_path / "weights", {"format": "pt"})  # as earlier versions did
    assert same(read_weights(tmp_path / "weights"), weights_of(3))


def test_a_checksum_does_not_depend_on_the_order_of_keys() -> None:
    assert checksum({"a": 1, "b": [2.5]}) == checksum({"b": [2.5], "a": 1})
    assert len({checksum(record) for record in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": 1.0}, {})}) == 5


def test_digest_depends_on_names_types_shapes_and_values(tmp_path: Path) -> None:
    base = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.zeros(2, dtype=torch.float32)}
    digest = weights_digest(base)
    assert weights_digest(dict(reversed(base.items()))) == digest
    assert weights_digest({name: tensor.clone() for name, tensor in base.items()}) == digest
    assert weights_digest(base | {"a": base["a"].T.contiguous().T}) == digest  # however it lies in memory
    write_tensors(tmp_path / "x", base, {"other": "notes"})
    write_tensors(tmp_path / "y", dict(reversed(base.items())))
    assert file_digest(tmp_path / "x") != file_digest(tmp_path / "y")
    assert weights_digest(read_tensors(tmp_path / "x")) == weights_digest(read_tensors(tmp_path / "y")) == digest
    changed = base["a"].clone()
    changed[1, 2] += 1e-6
    others = [
        {"a": base["a"], "c": base["b"]},
        {"a": base["b"], "b": base["a"]},
        base | {"a": base["a"].reshape(3, 2)},
        base | {"a": base["a"].view(torch.int32)},
        base | {"a": changed},
        base | {"c": torch.zeros(0)},
        {"a": base["a"]},
    ]
    digests = [weights_digest(other) for other in others]
    assert len({digest, *digests}) == 1 + len(others)


def test_a_mean_is_taken_in_float64() -> None:
    values = [1.0, 1e-8, 1e-8, 1e-8]  # float32 would lose the small ones
    average = mean({"a": torch.tensor([value], dtype=torch.float32)} for value in values)
    assert average["a"].dtype == torch.float32
    assert torch.equal(average["a"], torch.tensor([sum(values) / 4], dtype=torch.float64).float())
    large = [2.0**24, 1.0, 1.0]  # summed in float32, the ones vanish
    assert float(mean({"a": torch.tensor(value, dtype=torch.float32)} for value in large)["a"]) == float(
        torch.tensor(sum(large) / 3, dtype=torch.float64).float()
    )


def test_mean_of_one_checkpoint_is_that_checkpoint() -> None:
    weights = weights_of(3)
    assert same(mean([weights]), weights)


def test_mean_does_not_change_its_inputs() -> None:
    weights = [weights_of(3), weights_of(4)]
    average = mean(weights)
    assert same(weights[0], weights_of(3))
    torch.testing.assert_close(average["a"], (weights_of(3)["a"] + weights_of(4)["a"]) / 2, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    "other", [{"a": torch.ones(1)}, {"b": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(3)}]
)
def test_weights_of_different_models_have_no_mean(other: Tensors) -> None:
    with pytest.raises(DataError, match="weights of different models cannot be averaged"):
        mean([{"a": torch.ones(3)}, other])
