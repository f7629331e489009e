"""PyPI product-key-memory: row 52 with copied weights. Theirs has no bias at the query."""

from typing import Any

import pytest
import torch
from product_key_memory import PKM

from regard import build
from regard.models.decoder_only import DecoderOnly
from regard.nn.block import Block
from regard.nn.branches.product_key import ProductKeyMemory
from regard.nn.mask import Context, Mask, View
from regard.nn.stacks.plain import Plain
from regard.testing import tiny
from regard.weights import copy_from

from .copying import close, randomise

D, HALF, B, T = 12, 5, 3, 7


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("heads", "keys", "knn"), [(4, 9, 3), (1, 6, 6), (2, 16, 1)])
def test_output_and_gradients(heads: int, keys: int, knn: int) -> None:
    block = Block((ProductKeyMemory(heads, keys, 2 * HALF, knn),))
    model = build(DecoderOnly(vocab=tiny.VOCAB, d_model=D, heads=2, decoder=Plain((block,), 1)))
    ours = next(module for module in model.modules() if hasattr(module, "memory"))
    theirs: Any = PKM(D, heads, keys, knn, HALF).eval()
    theirs.norm.eps = 1e-6
    randomise(theirs, 1.0)

    def moved(source: dict[str, Any]) -> dict[str, Any]:
        """Their weights or gradients in our order: theirs goes by half, then by head."""
        query = source["to_queries.weight"].view(2, heads, HALF, D).transpose(0, 1).reshape(-1, D)
        return {
            "query.weight": query,
            "norm.weight": source["norm.weight"],
            "norm.bias": source["norm.bias"],
            "keys": source["keys"].transpose(1, 2),
            "memory": source["values.weight"],
        }

    weights = dict(theirs.named_parameters())
    copy_from(ours, moved(weights) | {"query.bias": torch.zeros(2 * heads * HALF)})
    x, probe = torch.randn(B, T, D), torch.randn(B, T, D)
    output, expected = ours(x, Context(View(Mask(), T, T, torch.device("cpu")))), theirs(x)
    close(output, expected)
    (output * probe).sum().backward()
    (expected * probe).sum().backward()
    for name, gradient in moved({name: weight.grad for name, weight in weights.items()}).items():
        close(ours.get_parameter(name).grad, gradient)  # type: ignore[reportArgumentType]
