import math
from collections.abc import Callable

import pytest
import torch

from regard.errors import SpecError
from regard.fast import attention as kernels
from regard.nn.core import Site
from regard.nn.mask import Mask, View
from regard.nn.position.shaw import Shaw

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(
    "mask",
    [
        Mask(),
        Mask(causal=True),
        Mask(causal=True, strict=True),
        Mask(k_seg=torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])),
    ],
    ids=["everything", "causal", "strict", "padded"],
)
def test_matches_the_double_loop_of_the_paper(mask: Mask, values: bool, site: MakeSite) -> None:
    """Shaw et al. 2018, equations 3 and 4: for every pair, with the clipped distance's vectors (C62)."""
    B, H, T, K, V, limit, scale = 2, 3, 6, 4, 5, 2, 0.7
    module = Shaw(limit, values).build(site(d_head=K, d_value=V))
    q, k, v = torch.randn(B, H, T, K), torch.randn(B, H, T, K), torch.randn(B, H, T, V)
    view = View(mask, T, T, CPU)
    view = view.with_terms(module(view))
    a, c = module.keys, module.values
    dense = mask.dense(T, T, CPU)
    expected = torch.zeros(B, H, T, V)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                weights = {}
                for j in range(T):
                    if dense is None or dense[b % len(dense), 0, i % dense.shape[2], j]:
                        key = k[b, h, j] + a[max(-limit, min(limit, j - i)) + limit]  # type: ignore[reportIndexIssue]
                        weights[j] = math.exp(scale * (q[b, h, i] @ key).item())
                for j, weight in weights.items():
                    value = v[b, h, j] + (c[max(-limit, min(limit, j - i)) + limit] if values else 0.0)  # type: ignore[reportOptionalSubscript, reportIndexIssue]
                    expected[b, h, i] += weight / sum(weights.values()) * value.detach()
    torch.testing.assert_close(kernels.attend(q, k, v, view, scale=scale), expected, rtol=0, atol=1e-12)


def test_only_the_value_term_needs_the_reference_kernel(site: MakeSite) -> None:
    view = View(Mask(), 6, 6, CPU)
    with_values, without = Shaw(2).build(site())(view), Shaw(2, values=False).build(site())(view)
    assert with_values.context is not None
    assert without.context is None
    assert without.content is not None


def test_the_scores_of_a_decoding_step_are_a_row_of_the_full_scores(site: MakeSite) -> None:
    module, q = Shaw(2).build(site(d_head=4)), torch.randn(2, 3, 6, 4)
    full = module(View(Mask(), 6, 6, CPU)).content
    step = module(View(Mask(causal=True, start=5), 1, 6, CPU)).content
    assert full is not None
    assert step is not None
    torch.testing.assert_close(step(q[:, :, 5:]), full(q)[:, :, 5:])


def test_tables_are_shared_by_heads_and_as_wide_as_keys_and_values(site: MakeSite) -> None:
    module = Shaw(2).build(site(d_head=4, d_value=6))
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {"keys": (5, 4), "values": (5, 6)}


def test_zero_max_distance_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^max_distance: must be at least 1, not 0"):
        Shaw(0)
