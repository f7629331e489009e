import pytest
import torch
from torch import Tensor

from regard import build, swap
from regard.errors import SpecError
from regard.nn.big_bird import BigBird, CausalBigBird, random_block
from regard.nn.mask import Mask
from regard.nn.pattern import AttentionPattern
from regard.nn.stacks.plain import Plain
from regard.testing import tiny

CPU = torch.device("cpu")


def dense(pattern: AttentionPattern, T: int, **options: object) -> Tensor:
    mask = Mask(attention_pattern=pattern, **options).dense(T, T, CPU)  # type: ignore[reportArgumentType]
    assert mask is not None
    return mask[:, 0]


@pytest.mark.parametrize("length", [64, 61])
def test_blocks_that_are_visible_without_random_blocks(length: int) -> None:
    shown = dense(BigBird(size=4, window=3, random=0), length)[0]
    last = (length - 1) // 4
    for i in range(length):
        for j in range(length):
            a, b = i // 4, j // 4
            assert shown[i, j] == (abs(a - b) <= 1 or 0 in (a, b) or last in (a, b))


def test_each_block_has_the_given_number_of_random_blocks() -> None:
    size, random, blocks = 2, 3, 40
    without, shown = (dense(BigBird(size, 1, count, seed=5), size * blocks)[0] for count in (0, random))
    by_block = shown.unflatten(1, (blocks, size)).unflatten(0, (blocks, size))
    assert torch.equal(by_block.any(3).any(1), by_block.all(3).all(1))  # whole blocks
    a = torch.arange(blocks)
    drawn = torch.stack([random_block(a, r, random, torch.tensor(blocks), 5) for r in range(random)], 1)
    for block in range(1, blocks - 1):
        assert len(set(drawn[block].tolist())) == random
        extra = (by_block[block].any(2).any(0) & ~without[block * size].unflatten(0, (blocks, size)).any(1)).nonzero()
        assert set(extra[:, 0].tolist()) <= set(drawn[block].tolist())


def test_random_blocks_are_spread_evenly_and_differ_between_seeds() -> None:
    a = torch.arange(6000)
    counts = torch.zeros(30)
    for r in range(3):
        counts += torch.bincount(random_block(a, r, 3, torch.tensor(30), 0), minlength=30)
    assert counts.min() > 450  # 600 on average; the standard deviation is 23
    assert counts.max() < 750
    different = random_block(a, 0, 3, torch.tensor(30), 0) != random_block(a, 0, 3, torch.tensor(30), 1)
    assert different.float().mean() > 0.8


def test_random_blocks_need_only_32_bits() -> None:
    """Compiled code may compute with 32 bits, where larger products would wrap around."""
    a = torch.cat((torch.arange(5000), torch.arange(2**24 - 5000, 2**24)))
    for seed in (0, 1, 2**31 - 1):
        wide, narrow = (random_block(x, 2, 3, x + 1, seed) for x in (a, a.int()))
        assert narrow.dtype == torch.int32
        assert torch.equal(wide, narrow.long())


def test_length_is_that_of_the_text_and_not_of_the_row() -> None:
    pattern = BigBird(2, 1, 1)
    seg = torch.tensor([[1] * 10 + [0] * 6, [1] * 16])
    padded = dense(pattern, 16, q_seg=seg, k_seg=seg)
    assert torch.equal(padded[0, :10, :10], dense(pattern, 10)[0])
    packed_seg = torch.tensor([[1] * 6 + [2] * 10])
    pos = torch.tensor([[*range(6), *range(10)]])
    packed = dense(pattern, 16, q_seg=packed_seg, k_seg=packed_seg, q_pos=pos, k_pos=pos, packed=True, segments=2)
    assert torch.equal(packed[0, :6, :6], dense(pattern, 6)[0])
    assert torch.equal(packed[0, 6:, 6:], dense(pattern, 10)[0])


def test_causal_form_does_not_depend_on_the_length() -> None:
    pattern = CausalBigBird(2, 2, 2)
    assert torch.equal(dense(pattern, 40, causal=True)[0, :17, :17], dense(pattern, 17, causal=True)[0])
    shown = dense(CausalBigBird(2, 2, 0), 20, causal=True)[0]
    for i in range(20):
        assert shown[i].tolist() == [j <= i and (i // 2 - j // 2 < 2 or j < 2) for j in range(20)]


def test_two_layers_connect_all_tokens() -> None:
    """Every token attends to every other in two steps, through the global blocks (claim C75)."""
    shown = dense(BigBird(4, 3, 1), 400)[0].float()
    assert (shown @ shown > 0).all()
    assert shown.mean() < 0.1


@pytest.mark.parametrize(
    ("pattern", "family", "message"),
    [
        (BigBird(), "decoder_only", "'big_bird' is for bidirectional attention, and this stack is causal"),
        (CausalBigBird(), "masked_lm", "'causal_big_bird' is for causal attention, and this stack is bidirectional"),
    ],
)
def test_each_form_is_refused_in_the_other_kind_of_stack(pattern: AttentionPattern, family: str, message: str) -> None:
    spec = swap(tiny.families()[family], Plain, lambda stack: type(stack)(stack.pattern, attention_pattern=pattern))
    with pytest.raises(SpecError, match=message):
        build(spec)


@pytest.mark.parametrize("sizes", [{"window": 2}, {"size": 0}, {"random": -1}])
def test_bad_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(SpecError, match=next(iter(sizes))):
        BigBird(**sizes)
