"""Product-key memory: exactness among all n^2 keys, the formula, and the layer that the variant replaces."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from regard.errors import SpecError
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.product_key import ProductKeyMemory, product_top
from regard.nn.core import Site
from regard.nn.init import T5Init
from regard.nn.mask import Context, Mask, View
from regard.presets import preset
from regard.training.optim import is_table
from regard.variants import apply

MakeSite = Callable[..., Site]
CTX = Context(View(Mask(), 4, 4, torch.device("cpu")))


@pytest.mark.parametrize(("n", "knn"), [(1, 1), (3, 1), (7, 3), (16, 5), (6, 6)])
def test_product_top_is_the_top_of_all_sums(n: int, knn: int) -> None:
    scores = torch.randn(50, 3, 2, n)
    sums = (scores[:, :, 0, :, None] + scores[:, :, 1, None, :]).flatten(-2)
    expected, at = sums.topk(knn, -1)
    top, index = product_top(scores, knn)
    torch.testing.assert_close(top, expected, rtol=0, atol=0)
    assert torch.equal(index, at)


def test_by_formula(site: MakeSite) -> None:
    """Token by token and head by head over all n^2 keys, from the paper; LayerNorm over each half of the query."""
    H, n, half, knn = 2, 5, 3, 4
    branch: Any = ProductKeyMemory(H, n, 2 * half, knn).build(site())
    for parameter in branch.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 4, 12)
    expected = torch.zeros_like(x)
    for b in range(2):
        for t in range(4):
            q = branch.query.weight @ x[b, t] + branch.query.bias
            for h in range(H):
                halves = []
                for c in range(2):
                    half_query = q[(2 * h + c) * half : (2 * h + c + 1) * half]
                    variance = torch.stack([(v - half_query.mean()) ** 2 for v in half_query]).sum() / half
                    halves.append(
                        (half_query - half_query.mean()) / (variance + 1e-6).sqrt() * branch.norm.weight
                        + branch.norm.bias
                    )
                scores = {
                    (i, j): (halves[0] @ branch.keys[h, 0, i] + halves[1] @ branch.keys[h, 1, j]).item()
                    for i in range(n)
                    for j in range(n)
                }
                best = sorted(scores, key=lambda pair: -scores[pair])[:knn]
                total = sum(math.exp(scores[pair]) for pair in best)
                for i, j in best:
                    expected[b, t] += math.exp(scores[i, j]) / total * branch.memory[i * n + j].detach()
    torch.testing.assert_close(branch(x, CTX), expected, rtol=0, atol=1e-12)


def test_gradients(site: MakeSite) -> None:
    branch: Any = ProductKeyMemory(2, 3, 6, 2).build(site())
    names, weights = zip(
        *[(name, p.detach().clone().requires_grad_()) for name, p in branch.named_parameters()], strict=True
    )

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(branch, dict(zip(names, weights, strict=True)), (x, CTX))

    assert torch.autograd.gradcheck(run, (torch.randn(1, 4, 12, requires_grad=True), *weights), eps=1e-7, atol=1e-5)


def test_moves_no_information_between_tokens(site: MakeSite) -> None:
    branch, x = ProductKeyMemory(2, 6, 8, 3).build(site()), torch.randn(3, 4, 12)
    together = branch(x, CTX)
    for b in range(3):
        for t in range(4):
            torch.testing.assert_close(branch(x[b : b + 1, t : t + 1], CTX)[0, 0], together[b, t], rtol=0, atol=1e-12)


def test_a_memory_of_one_value_is_read_by_every_head(site: MakeSite) -> None:
    """The only attention weight is 1."""
    branch: Any = ProductKeyMemory(3, 1, 8, 1).build(site())
    x = torch.randn(2, 4, 12)
    torch.testing.assert_close(branch(x, CTX), 3 * branch.memory[0].expand(2, 4, 12))


def test_parameters_and_their_initialisation(site: MakeSite) -> None:
    branch: Any = ProductKeyMemory(4, 40, 20, 8).build(site(d_model=60))
    assert sum(p.numel() for p in branch.parameters()) == 1600 * 60 + 4 * 2 * 40 * 10 + (60 * 80 + 80) + 20
    assert branch.memory.std().item() == pytest.approx(60**-0.5, rel=0.02)  # initialised as an embedding by Xavier
    branch = ProductKeyMemory(4, 40, 20, 8).build(site(d_model=60, init_=T5Init()))
    assert branch.memory.std().item() == pytest.approx(1.0, rel=0.02)
    assert branch.keys.std().item() == pytest.approx(10**-0.5, rel=0.05)


def test_the_optimizer_treats_values_as_a_table() -> None:
    """No weight decay, and no Muon."""
    assert is_table("decoder.blocks.10.branches.2.branch.memory")
    assert not is_table("decoder.blocks.10.branches.2.branch.keys")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProductKeyMemory(heads=0), "heads: must be at least 1, not 0"),
        (lambda: ProductKeyMemory(keys=0), "keys: must be at least 1, not 0"),
        (lambda: ProductKeyMemory(knn=0), "knn: must be at least 1, not 0"),
        (lambda: ProductKeyMemory(d_key=7), "d_key: must be even, to be split into two halves, not 7"),
        (lambda: ProductKeyMemory(d_key=0), "d_key: must be even, to be split into two halves, not 0"),
        (lambda: ProductKeyMemory(keys=31), "knn: 32 exceeds the number of keys; choose at most 31"),
    ],
)
def test_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        make()


# -- the variant


def test_the_second_to_last_decoder_layer_is_replaced() -> None:
    model: Any = apply("product_key_memory", preset("narang_base"))
    branches = [model.decoder.block_of(layer).branches[-1] for layer in range(12)]
    assert branches[10] == ProductKeyMemory()
    assert all(branch == FeedForward(3072, bias=True) for layer, branch in enumerate(branches) if layer != 10)
    assert model.encoder == preset("narang_base").encoder  # type: ignore[reportAttributeAccessIssue]


def test_sizes_scale_with_the_base() -> None:
    small: Any = apply("product_key_memory", preset("transformer_small"))
    assert small.decoder.block_of(1).branches[-1] == ProductKeyMemory(keys=148, d_key=42)
    tiny: Any = apply("product_key_memory", preset("transformer_tiny", d_model=16, heads=2, **{"decoder.depth": 1}))
    assert tiny.decoder.block_of(0).branches[-1] == ProductKeyMemory(keys=21, d_key=8, knn=21)
    gpt: Any = apply("product_key_memory", preset("gpt2_small"))
    assert gpt.decoder.block_of(10).branches[-1] == ProductKeyMemory()
    bert: Any = apply("product_key_memory", preset("bert_base"))
    assert bert.encoder.block_of(10).branches[-1] == ProductKeyMemory()
