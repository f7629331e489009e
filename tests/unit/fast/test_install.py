"""Installation and removal of the fast modules of a model."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard import fast
from regard.catalogue import to_record
from regard.fast.install import PREPACKED, REPLACEMENTS
from regard.models.base import LanguageModel, ModelSpec
from regard.models.build import build
from regard.presets import preset
from regard.testing import tiny
from regard.variants import apply

FAMILIES: dict[str, Callable[[], ModelSpec]] = {
    "encoder_decoder": tiny.encoder_decoder,
    "decoder_only": tiny.decoder_only,
    "encoder_only": tiny.encoder_only,
    "rnn": lambda: preset("rnn", vocab=tiny.VOCAB, d_model=16),
    "convs2s": tiny.convs2s,
}
INSTALLED = {replacement.fast for replacement in (*REPLACEMENTS, *PREPACKED)}


def classes(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules()]


def fast_classes(model: nn.Module) -> set[type[nn.Module]]:
    return INSTALLED & set(classes(model))


def outputs(model: nn.Module) -> Tensor:
    assert isinstance(model, LanguageModel)
    batch = tiny.collate(model.spec, tiny.examples(model.spec, 3))
    with torch.inference_mode():
        decoding = model.start(batch, 4, beams=2)
        first = model.advance(batch.target[:, :1].repeat_interleave(2, 0), decoding)
        decoding.reorder(torch.tensor([1, 0, 2, 2, 5, 5]))
        return torch.cat([first, model.advance(torch.full((6, 1), 4), decoding)])


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_weights_and_record_stay_the_same(family: str, fixed: bool) -> None:
    model = build(FAMILIES[family](), seed=1).float()
    before, names, record = classes(model), [*model.state_dict()], to_record(model.spec)
    weights = [parameter.data_ptr() for parameter in model.parameters()]
    fast.install(model, fixed=fixed)
    assert fast_classes(model)
    assert [*model.state_dict()] == names
    assert [parameter.data_ptr() for parameter in model.parameters()] == weights
    assert to_record(model.spec) == record
    fast.remove(model)
    assert classes(model) == before
    assert [*model.state_dict()] == names


@pytest.mark.parametrize("fixed", [False, True])
def test_install_and_remove_may_be_repeated(fixed: bool) -> None:
    model = build(tiny.encoder_decoder(), seed=1).float()
    before, attributes = classes(model), [set(vars(module)) for module in model.modules()]
    fast.remove(model)
    assert classes(model) == before
    fast.install(model, fixed=fixed)
    installed = classes(model)
    fast.install(model, fixed=fixed)
    assert classes(model) == installed
    fast.remove(model)
    fast.remove(model)
    assert classes(model) == before
    assert [set(vars(module)) for module in model.modules()] == attributes


def test_weights_that_are_trained_are_not_prepacked_until_they_are_fixed() -> None:
    model, prepacked = build(tiny.encoder_decoder()).float(), {replacement.fast for replacement in PREPACKED}
    fast.install(model)
    assert not prepacked & set(classes(model))
    fast.install(model, fixed=True)
    assert prepacked & set(classes(model))
    fast.install(model)  # before training continues
    assert not prepacked & set(classes(model))


@pytest.mark.parametrize("copy_model", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_copy_has_the_fast_form_and_its_own_weights(
    fixed: bool, copy_model: Callable[[nn.Module], nn.Module]
) -> None:
    model = build(tiny.encoder_decoder(), seed=1).float().eval()
    fast.install(model, fixed=fixed)
    expected = outputs(model)
    duplicate = copy_model(model)
    assert classes(duplicate) == classes(model)
    torch.testing.assert_close(outputs(duplicate), expected)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(outputs(model), expected)
    changed = outputs(duplicate)
    assert not torch.allclose(changed, expected, atol=1e-3)
    fast.remove(duplicate)
    torch.testing.assert_close(outputs(duplicate), changed, rtol=1e-4, atol=1e-4)


def test_a_subclass_of_a_module_is_not_replaced() -> None:
    """A subclass may compute something else, so the replacement of its parent does not apply."""

    class Mine(nn.LayerNorm): ...

    model = nn.Sequential(Mine(4), nn.LayerNorm(4))
    fast.install(model)
    assert type(model[0]) is Mine
    assert type(model[1]) is not nn.LayerNorm


@pytest.mark.parametrize("name", ["rezero", "shaw", "swiglu"])
def test_variants_install_and_remove(name: str) -> None:
    model = build(apply(name, tiny.narang()), seed=1)
    before = classes(model)
    fast.install(model)
    assert fast_classes(model)
    fast.remove(model)
    assert classes(model) == before


def test_search_on_the_gpu_is_installed_only_for_a_gpu() -> None:
    model = build(tiny.encoder_decoder())
    assert isinstance(model, LanguageModel)
    fast.install(model, "cpu")
    assert model.device_search is None
    fast.install(model, "cuda")
    assert model.device_search is not None
    fast.remove(model)
    assert model.device_search is None


def test_a_model_without_weights_installs() -> None:
    model = nn.Sequential(nn.Dropout(0.1))
    fast.install(model)
    assert fast_classes(model)
