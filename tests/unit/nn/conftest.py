from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.nn.mask import Mask
from regard.nn.pattern import Window

SEG = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
PACKED = torch.tensor([[1, 1, 2, 2, 2], [1, 2, 3, 0, 0]])
WITHIN = torch.tensor([[0, 1, 0, 1, 2], [0, 0, 0, 0, 0]])
RAGGED = torch.tensor([[2, 3], [0, 1]])
PREFIX = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)

# Each mask with its number of queries and keys.
MASKS = {
    "everything": (Mask(), 3, 5),
    "causal": (Mask(causal=True), 5, 5),
    "strict": (Mask(causal=True, strict=True), 5, 5),
    "padded": (Mask(q_seg=SEG, k_seg=SEG), 5, 5),
    "padded keys": (Mask(k_seg=SEG), 3, 5),
    "causal after a past": (Mask(causal=True, start=3), 2, 5),
    "last token": (Mask(causal=True, start=4), 1, 5),
    "strict last token": (Mask(causal=True, strict=True, start=4), 1, 5),
    "ragged": (Mask(causal=True, q_pos=RAGGED), 2, 5),
    "packed": (Mask(q_seg=PACKED, k_seg=PACKED, packed=True, segments=3), 5, 5),
    "packed causal": (
        Mask(causal=True, q_pos=WITHIN, k_pos=WITHIN, q_seg=PACKED, k_seg=PACKED, packed=True, segments=3),
        5,
        5,
    ),
    "packed cross": (Mask(q_seg=PACKED, k_seg=SEG.repeat(1, 2)[:, :7], packed=True, segments=3), 5, 7),
    "prefix": (Mask(causal=True, prefix=PREFIX), 5, 5),
    "prefix strict": (Mask(causal=True, strict=True, prefix=PREFIX), 5, 5),
    "packed prefix": (
        Mask(causal=True, q_seg=PACKED, k_seg=PACKED, packed=True, segments=3, prefix=PACKED == 2),
        5,
        5,
    ),
    "window": (Mask(attention_pattern=Window(2)), 5, 5),
    "causal window": (Mask(causal=True, attention_pattern=Window(2)), 5, 5),
    "window over a past": (Mask(causal=True, start=3, attention_pattern=Window(3)), 2, 5),
    "padded window": (Mask(k_seg=SEG, attention_pattern=Window(2)), 5, 5),
    # Without causality, `strict` and `prefix` have no effect.
    "strict alone": (Mask(strict=True), 5, 5),
    "prefix alone": (Mask(prefix=PREFIX), 5, 5),
}

IsVisible = Callable[[Mask, int, int, int], bool]
Naive = Callable[..., Tensor]


def is_visible_pair(mask: Mask, b: int, i: int, j: int) -> bool:
    """Return whether query i attends to key j in row b, by the definition in the docstring of `Mask`."""

    def at(tensor: Tensor | None, n: int, otherwise: int) -> int:
        return otherwise if tensor is None else int(tensor[b if tensor.shape[0] > 1 else 0, n])

    q, k = at(mask.q_pos, i, mask.start + i), at(mask.k_pos, j, j)
    if at(mask.k_seg, j, 1) == 0:
        return False
    if mask.packed and at(mask.q_seg, i, 1) != at(mask.k_seg, j, 1):
        return False
    if mask.causal and not (k < q if mask.strict else k <= q) and not at(mask.prefix, j, 0):
        return False
    return mask.attention_pattern is None or abs(q - k) < mask.attention_pattern.size  # type: ignore[reportAttributeAccessIssue]  # a Window


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    bias: Tensor | None = None,
    visible: IsVisible = is_visible_pair,
) -> Tensor:
    """Return softmax(scale * q k' + bias) v, computed query by query; 0 for a query without visible keys."""
    B, H, T, _ = q.shape
    out = torch.zeros(B, H, T, v.shape[-1])
    for b in range(B):
        for i in range(T):
            keys = [j for j in range(k.shape[2]) if visible(mask, b, i, j)]
            for h in range(H if keys else 0):
                g = h // (H // k.shape[1])
                scores = scale * (k[b, g, keys] @ q[b, h, i])
                if bias is not None:
                    scores = scores + bias[b if len(bias) > 1 else 0, h, i, keys]
                weights = scores.exp() / scores.exp().sum()
                out[b, h, i] = weights @ v[b, g, keys]
    return out


@pytest.fixture(params=MASKS.values(), ids=list(MASKS))
def case(request: pytest.FixtureRequest) -> tuple[Mask, int, int]:
    """Return (mask, T, S) for each entry of `MASKS`. The masks are for two batch rows."""
    return request.param


@pytest.fixture
def is_visible() -> IsVisible:
    return is_visible_pair


@pytest.fixture
def naive() -> Naive:
    return attention
