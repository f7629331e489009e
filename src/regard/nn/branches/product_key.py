"""Product-key memory: each token reads the vectors of a large table whose keys best match the token's query."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.branches.base import BranchSpec
from regard.nn.checks import MOST_CHANNELS, MOST_HEADS, check_count, require
from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.norm import LayerNorm
from regard.nn.precision import full_precision, widen


@dataclass(frozen=True, slots=True)
class ProductKeyMemory(BranchSpec):
    """Product-key memory of Lample et al. 2019: attention to a table V of `keys` * `keys` learned values.

    A query x W + b is split into two halves q_1 and q_2, each normalised by LayerNorm. The score of key (i, j) is q_1
    k_1i + q_2 k_2j. y is the sum of softmax(scores) * V[i * keys + j] over the heads and the `knn` best keys of each
    head. The best of all keys^2 sums are among the sums of the `knn` best scores of each half, so only knn^2 sums are
    computed. The model's init initialises the values as embeddings: their standard deviation is d_model^-1/2 in most
    inits, as in the paper, and 1 in the init of T5, as in Narang et al. 2021.

    Differs from the paper, as in Narang et al. 2021: LayerNorm replaces BatchNorm, which would mix tokens.
    """

    kind = "product_key_memory"
    heads: int = 4
    keys: int = 512  # number of keys per half
    d_key: int = 128  # width of both halves together
    knn: int = 32  # number of values read per head

    def check(self) -> None:
        for name, most in (("heads", MOST_HEADS), ("keys", MOST_CHANNELS), ("knn", MOST_CHANNELS)):
            check_count(name, getattr(self, name), most)
        even = self.d_key >= 2 and self.d_key % 2 == 0
        require(even, "d_key", f"must be even, to be split into two halves, not {self.d_key}")
        require(self.knn <= self.keys, "knn", f"{self.knn} exceeds the number of keys; choose at most {self.keys}")

    def build(self, site: Site) -> Branch:
        return ProductKeyMemoryModule(self, site)


class ProductKeyMemoryModule(Branch):
    def __init__(self, spec: ProductKeyMemory, site: Site) -> None:
        super().__init__()
        H, n, half = spec.heads, spec.keys, spec.d_key // 2
        self.query = site.linear(site.d_model, {"query": H * spec.d_key}, bias=True)
        self.norm = LayerNorm(eps=1e-6).build(site, half)
        keys = [site.parameter(n, half, role="key").detach() for _ in range(2 * H)]
        self.keys = nn.Parameter(torch.stack(keys).unflatten(0, (H, 2)))
        self.memory = site.parameter(n * n, site.d_model, role="embedding")
        self.heads, self.knn = H, spec.knn
        self.route = f"{site.side}.memory"  # name in a trace

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:  # noqa: ARG002
        query = self.norm(self.query(x).flatten(0, 1).unflatten(-1, (self.heads, 2, -1)))
        with full_precision(x.device):  # rounding would change which keys are the best
            scores = torch.einsum("nhck,hcik->nhci", widen(query), widen(self.keys))
        best, index = product_top(scores, self.knn)
        weights = best.softmax(-1).to(self.memory.dtype).flatten(1)
        if ctx.trace is not None:
            shape = (*x.shape[:2], self.heads, self.knn)
            ctx.trace.route(self.route, index.view(shape), weights.view(shape), self.memory.shape[0])
        # Sums over heads and keys in one operation, without gathering the values.
        y = nn.functional.embedding_bag(index.flatten(1), self.memory, per_sample_weights=weights, mode="sum")
        return y.view_as(x)


def product_top(scores: Float[Tensor, "N H 2 n"], knn: int) -> tuple[Float[Tensor, "N H k"], Int[Tensor, "N H k"]]:
    """Return the `knn` highest sums scores[..., 0, i] + scores[..., 1, j], and their indices i * n + j."""
    n = scores.shape[-1]
    best, index = scores.topk(knn, -1)
    sums = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).flatten(-2)
    pairs = (index[:, :, 0, :, None] * n + index[:, :, 1, None, :]).flatten(-2)
    top, at = sums.topk(knn, -1)
    return top, pairs.gather(-1, at)
