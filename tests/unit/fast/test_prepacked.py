"""A prepacked weight gives the same products, and is prepacked again when it changes."""

import copy
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import fast
from regard.fast import prepacked
from regard.fast.prepacked import Prepacked, PrepackedWeight
from regard.models.base import LanguageModel
from regard.models.build import build
from regard.testing import tiny


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    """Use float32, because only float32 weights are prepacked."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


class Product(Prepacked):
    def __init__(self, outputs: int, inputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None
        self.prepacked = PrepackedWeight()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


def plain(module: Product, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 16), (16, 24), (16, 16), (300, 16)])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2,), (5, 1), (3, 4), (32, 1), (33,), (130,), ()])
def test_products_equal_those_of_the_weight(rows: tuple[int, ...], outputs: int, inputs: int, bias: bool) -> None:
    module, x = Product(outputs, inputs, bias), torch.randn(*rows, inputs)
    with torch.inference_mode():
        torch.testing.assert_close(module(x), plain(module, x), rtol=1e-5, atol=1e-5)
    tokens = x.shape[:-1].numel()
    assert (module.prepacked.transposed is not None) == (tokens == 1 and outputs >= inputs)
    assert (module.prepacked.blocks is not None) == (1 < tokens <= (128 if outputs == 300 else 32))


def test_inputs_need_not_be_contiguous() -> None:
    module, x = Product(24, 16), torch.randn(5, 3, 16)[:, -1]
    with torch.inference_mode():
        torch.testing.assert_close(module(x), plain(module, x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(module(x[:1]), plain(module, x[:1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "change",
    [
        "in place",
        "copied",
        "in inference mode",
        "data",
        "an older alias of data",
        "one number",
        "data replaced",
        "numpy",
        "step",
        "fused step",
        "loaded",
        "replaced",
        "trained",
        "double",
    ],
)
def test_a_changed_weight_is_prepacked_again(rows: int, change: str) -> None:
    module, x = Product(24, 16), torch.randn(rows, 16)
    alias = module.weight.data
    with torch.inference_mode():
        before = module(x).clone()
    if change == "in place":
        with torch.no_grad():
            module.weight.mul_(2.0)
    elif change == "copied":
        with torch.no_grad():
            module.weight.copy_(torch.randn(24, 16))
    elif change == "in inference mode":
        with torch.inference_mode():
            module.weight.mul_(2.0)
    elif change == "data":
        module.weight.data.mul_(2.0)
    elif change == "an older alias of data":
        alias.mul_(2.0)
    elif change == "one number":
        module.weight.data[3, 5] += 1.0
    elif change == "data replaced":
        module.weight.data = torch.randn(24, 16)
    elif change == "numpy":
        module.weight.detach().numpy()[3, 5] += 1.0
    elif change.endswith("step"):
        module(x).square().sum().backward()
        torch.optim.Adam(module.parameters(), lr=0.1, fused=change == "fused step").step()
    elif change == "loaded":
        module.load_state_dict({name: 2 * tensor for name, tensor in module.state_dict().items()})
    elif change == "replaced":
        module.weight = nn.Parameter(torch.randn(24, 16))
    elif change == "trained":
        module.train()
        module.weight.data.mul_(2.0)  # does not change the version of the parameter
        module.eval()
    else:
        module.double()
        x = x.double()
    with torch.inference_mode():
        after = module(x)
        torch.testing.assert_close(after, plain(module, x), rtol=1e-5, atol=1e-5)
    assert change == "double" or not torch.allclose(after, before, rtol=1e-3, atol=1e-3)


def test_foreign_memory_is_prepacked_only_if_it_is_frozen() -> None:
    module, x = Product(24, 16), torch.randn(5, 16)
    module.weight = nn.Parameter(torch.from_numpy(np.ones((24, 16), np.float32)))
    for frozen in (False, True):
        module.prepacked = PrepackedWeight(frozen)
        with torch.inference_mode():
            torch.testing.assert_close(module(x), plain(module, x), rtol=1e-5, atol=1e-5)
        assert (module.prepacked.blocks is not None) == frozen
    with torch.no_grad():
        module.weight.mul_(2)  # in place: the address stays
    with torch.inference_mode():
        torch.testing.assert_close(module(x), plain(module, x), rtol=1e-5, atol=1e-5)


def test_a_decoding_prepacks_every_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation in a step counts as a write to a weight, which would prepack it again."""
    prepacked_weights: list[PrepackedWeight] = []
    begin = PrepackedWeight._begin

    def counted(layout: PrepackedWeight, weight: Tensor) -> None:
        prepacked_weights.append(layout)
        begin(layout, weight)

    monkeypatch.setattr(PrepackedWeight, "_begin", counted)
    model = build(tiny.encoder_decoder(), seed=1).eval()
    assert isinstance(model, LanguageModel)
    fast.install(model, fixed=True)
    batch = tiny.collate(tiny.encoder_decoder(), tiny.examples(tiny.encoder_decoder(), 2))
    for beams in (1, 3):
        with torch.inference_mode():
            decoding = model.start(batch, 6, beams=beams)
            for _ in range(3):
                model.advance(torch.ones(2 * beams, 1, dtype=torch.int64), decoding)
    assert len(prepacked_weights) == len(set(map(id, prepacked_weights))) > 10


def test_gradients_are_those_of_the_weight() -> None:
    module, x = Product(24, 16), torch.randn(5, 16)
    with torch.inference_mode():
        module(x)
    module(x).sum().backward()
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(24, 16))


def test_prepacking_keeps_parameters_and_excludes_the_encoder() -> None:
    model = build(tiny.encoder_decoder(), seed=1).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fast.install(model, fixed=True)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    names = [name for name, module in model.named_modules() if isinstance(module, Prepacked)]
    assert "tables.tables.source" in names
    assert any(name.startswith("decoder.") for name in names)
    assert not any(name.startswith("encoder.") for name in names)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_prepack_their_own_weight(copied: object) -> None:
    module, x = Product(24, 16), torch.randn(5, 16)
    with torch.inference_mode():
        module(x)
    duplicate = copied(module)  # type: ignore[reportCallIssue]
    duplicate.weight.data.mul_(3.0)
    with torch.inference_mode():
        torch.testing.assert_close(duplicate(x), plain(duplicate, x), rtol=1e-5, atol=1e-5)


def test_without_the_operators_nothing_is_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "available", lambda: False)
    model = build(tiny.encoder_decoder(), seed=1).eval()
    fast.install(model, fixed=True)
    assert not [module for module in model.modules() if isinstance(module, Prepacked)]


def test_this_torch_has_the_operators() -> None:
    """Without these private operators decoding is slower; this test fails if a torch version drops them."""
    assert prepacked.available()
