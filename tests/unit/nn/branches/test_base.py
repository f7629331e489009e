from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.errors import SpecError
from regard.nn.attention import merge_heads, split_heads
from regard.nn.attention_heads import attention_site
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.core import Site

MakeSite = Callable[..., Site]


def test_split_gives_each_head_its_consecutive_channels() -> None:
    x = torch.randn(2, 5, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (2, 3, 5, 4)
    for h in range(3):
        assert torch.equal(heads[:, h], x[:, :, 4 * h : 4 * h + 4])
    assert torch.equal(merge_heads(heads), x)


@pytest.mark.parametrize(
    ("fields", "heads", "d_head", "d_value", "groups"),
    [
        ({}, 3, 4, 4, 3),
        ({"kv_heads": 1}, 3, 4, 4, 1),
        ({"heads": 6}, 6, 2, 2, 6),  # d_model is divided by the number of heads
        ({"heads": 6, "d_head": 4}, 6, 4, 4, 6),
        ({"heads": 5, "d_head": 4}, 5, 4, 4, 5),
        ({"d_head": 7}, 3, 7, 7, 3),  # d_value is d_head by default
        ({"d_value": 9}, 3, 4, 9, 3),
        ({"d_head": 7, "d_value": 9}, 3, 7, 9, 3),
        ({"heads": 4, "kv_heads": 2, "d_value": 5}, 4, 3, 5, 2),
    ],
)
def test_missing_sizes_are_derived(
    fields: dict[str, Any], heads: int, d_head: int, d_value: int, groups: int, site: MakeSite
) -> None:
    own, kv_heads = attention_site(SelfAttention(**fields), site())
    assert (own.heads, own.d_head, own.d_value, kv_heads) == (heads, d_head, d_value, groups)


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"heads": 5}, "decoder.heads", "5 heads do not divide d_model 12"),
        ({"kv_heads": 2}, "decoder.kv_heads", "2 key-value heads do not divide 3 heads"),
        ({"kv_heads": 6}, "decoder.kv_heads", "6 key-value heads do not divide 3 heads"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(fields: dict[str, Any], path: str, words: str, site: MakeSite) -> None:
    with pytest.raises(SpecError, match=words) as raised:
        attention_site(SelfAttention(**fields), site(path="decoder"))
    assert raised.value.path == path
