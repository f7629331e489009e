"""BigBird's block-sparse attention equals that of Hugging Face, above the length at which theirs becomes full."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BigBirdConfig, BigBirdModel
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from regard.fast import attention as kernels
from regard.nn.attention import merge_heads, split_heads
from regard.nn.big_bird import BigBird
from regard.nn.mask import Mask, View
from regard.nn.pattern import AnyOf, AttentionPattern

SIZE, RANDOM, HEADS, T = 4, 2, 2, 64  # 64 > (5 + 2 * 2) * 4 tokens
TABLE: dict[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class RandomBlocksOfTheTable(AttentionPattern):
    """Attend to the random blocks in `TABLE`."""

    kind = "random_blocks_of_the_table"

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        return (TABLE["blocks"][q // SIZE] == (k // SIZE)[..., None]).any(-1)


def theirs(x: Tensor) -> tuple[BigBirdBlockSparseAttention, Tensor]:
    """Return their module and its output. `TABLE` gets their random blocks, which are the same for all heads here."""
    config = BigBirdConfig(
        hidden_size=16,
        num_attention_heads=HEADS,
        block_size=SIZE,
        num_random_blocks=RANDOM,
        max_position_embeddings=256,
    )
    module = BigBirdBlockSparseAttention(config, seed=0).to(x.dtype).train()  # in evaluation they use block 0 alone
    draw = module._bigbird_block_rand_mask_with_head

    def drawn(**options: Any) -> list[Any]:
        blocks = [draw(**options | {"num_heads": 1})[0]] * HEADS
        own = torch.full((T // SIZE, RANDOM), -1)  # the first and last block attend to all
        own[1:-1] = torch.tensor(np.array(blocks[0]))
        TABLE["blocks"] = own
        return blocks

    setattr(module, "_bigbird_block_rand_mask_with_head", drawn)  # noqa: B010
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(x.new_ones(x.shape[:2]), SIZE)
    return module, module(x, band, rows, columns, blocked, blocked)[0]


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "chunked"])
def test_block_sparse_attention_equals_hugging_face(kernel: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, T, 16, dtype=torch.float64)
    module, expected = theirs(x)
    q, k, v = (split_heads(layer(x), HEADS) for layer in (module.query, module.key, module.value))
    pattern = AnyOf((BigBird(SIZE, 3, 0), RandomBlocksOfTheTable()))
    with kernels.use(kernel):
        y = kernels.attend(q, k, v, View(Mask(attention_pattern=pattern), T, T, x.device), scale=8**-0.5)
    torch.testing.assert_close(merge_heads(y), expected, rtol=0, atol=1e-9)
    full = kernels.attend(q, k, v, View(Mask(), T, T, x.device), scale=8**-0.5)
    assert (merge_heads(full) - expected).abs().max() > 1e-3
