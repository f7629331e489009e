"""BigBird (Zaheer et al. 2020): attention to neighbouring, global and random blocks of keys."""

from dataclasses import dataclass
from typing import no_type_check

from jaxtyping import Bool, Int
from torch import Tensor

from regard.nn.checks import check_count, require
from regard.nn.pattern import LONGEST, AttentionPattern, Span, blocks_of, distances

MOST_RANDOM = 1024  # random blocks per block: each one is compared with every key block
ROUNDS = ((27_689, 11_987), (31_337, 25_111), (23_209, 5_741), (29_873, 19_927))  # of the hash: multiplier and offset


@dataclass(frozen=True, slots=True)
class BigBird(AttentionPattern):
    """Attention to nearby, global and random blocks of `size` tokens (Zaheer et al. 2020), for bidirectional stacks.

    A query in block a attends to block b if one of these conditions is true. Window: |a - b| <= (window - 1) / 2.
    Global: a or b is the first or the last block. Random: b is one of the `random` random blocks of a. Random block
    number r of a is drawn from the blocks r * n / random ... (r + 1) * n / random - 1, where n is the number of blocks.
    It is chosen by a hash of a, r and `seed`, so that no table is stored. The paper draws it from all blocks.
    """

    kind = "big_bird"
    may_hide_all = False
    causal = False
    size: int = 64
    window: int = 3
    random: int = 3
    seed: int = 0

    def check(self) -> None:
        check_blocks(self)
        require(self.window % 2 == 1, "window", f"must be odd, to reach equally far to both sides, not {self.window}")

    @property
    def reads_length(self) -> bool:
        return True

    @property
    def needs_order(self) -> bool:
        return True

    @no_type_check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        return self.visible_in(q, k, k.amax() + 1)

    @no_type_check  # FlexAttention traces this function for a single pair and cannot trace a shape check
    def visible_in(
        self,
        q: Int[Tensor, "*#n"],
        k: Int[Tensor, "*#n"],
        length: Int[Tensor, "*#n"] | None = None,
        prefix: Bool[Tensor, "*#n"] | None = None,  # noqa: ARG002
    ) -> Bool[Tensor, "*#n"]:
        a, b, n = q // self.size, k // self.size, (length + self.size - 1) // self.size
        shown = (2 * (a - b).abs() < self.window) | (a == 0) | (b == 0) | (a == n - 1) | (b == n - 1)
        for r in range(self.random):
            shown = shown | (b == random_block(a, r, self.random, n, self.seed))
        return shown

    @no_type_check
    def tiles(
        self, q: Span, k: Span, length: Int[Tensor, "*#n"] | None
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        a, b, n = blocks_of(q, self.size), blocks_of(k, self.size), (length + self.size - 1) // self.size
        least, most = distances(a, b)
        reach = (self.window - 1) // 2
        some = (least <= reach) & (most >= -reach) | (a.first == 0) | (b.first == 0)
        some = some | _has(a, n - 1) | _has(b, n - 1)
        every = (most <= reach) & (least >= -reach) | (a.last == 0) | (b.last == 0)
        every = every | _is(a, n - 1) | _is(b, n - 1)
        some_random, every_random = random_tiles(a, b, self.random, n, self.seed)
        return some | some_random, every | every_random


@dataclass(frozen=True, slots=True)
class CausalBigBird(AttentionPattern):
    """BigBird for causal stacks: attention to nearby blocks, the first block and random blocks, up to the query.

    A query in block a attends to block b <= a if one of these conditions is true. Window: a - b < window. Global:
    b = 0. Random: b is one of the `random` random blocks of a, drawn as in `BigBird`, but from the blocks 0 ... a. A
    block has `size` tokens. The paper has no causal pattern. This pattern does not depend on the length of the
    sequence, so a text can be decoded token by token.
    """

    kind = "causal_big_bird"
    may_hide_all = False
    causal = True
    size: int = 64
    window: int = 2
    random: int = 3
    seed: int = 0

    def check(self) -> None:
        check_blocks(self)

    @property
    def needs_order(self) -> bool:
        return True

    @no_type_check
    def visible(self, q: Int[Tensor, "*#n"], k: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
        a, b = q // self.size, k // self.size
        shown = ((a - b).abs() < self.window) | (b == 0)
        for r in range(self.random):
            shown = shown | (b == random_block(a, r, self.random, a + 1, self.seed))
        return shown

    @no_type_check
    def tiles(
        self,
        q: Span,
        k: Span,
        length: Int[Tensor, "*#n"] | None,  # noqa: ARG002
    ) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
        a, b = blocks_of(q, self.size), blocks_of(k, self.size)
        least, most = distances(a, b)
        some = (least < self.window) & (most > -self.window) | (b.first == 0)
        every = (most < self.window) & (least > -self.window) | (b.last == 0)
        some_random, every_random = random_tiles(a, b, self.random, None, self.seed)
        return some | some_random, every | every_random


def _has(tile: Span, block: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
    return (tile.first <= block) & (block <= tile.last)


def _is(tile: Span, block: Int[Tensor, "*#n"]) -> Bool[Tensor, "*#n"]:
    return (tile.first == block) & (tile.last == block)


def check_blocks(spec: BigBird | CausalBigBird) -> None:
    """Raise a `SpecError` for a size, a number of blocks or a seed that is too small or too large."""
    check_count("size", spec.size, LONGEST)
    check_count("window", spec.window, LONGEST)
    check_count("random", spec.random, MOST_RANDOM, least=0)
    check_count("seed", spec.seed, LONGEST, least=0)


@no_type_check
def random_block(
    a: Int[Tensor, "*#n"], r: int, count: int, blocks: Int[Tensor, "*#n"], seed: int
) -> Int[Tensor, "*#n"]:
    """Return random block number r (of `count`) for the queries in block a. It is one of the blocks 0 ... blocks - 1.

    For each r, the block is drawn from a different part of the blocks. If there are at least `count` blocks, the random
    blocks of a therefore differ.
    """
    first, end = r * blocks // count, (r + 1) * blocks // count
    return first + _mixed(a, (r * 19_349_663 + seed * 83_492_791 + 374_761_393) % 2**30) % (end - first).clamp(min=1)


@no_type_check
def _mixed(a: Int[Tensor, "*#n"], key: int) -> Int[Tensor, "*#n"]:
    """Return a pseudo-random number below 2^30 for each a: a Feistel network over two halves of 15 bits.

    All products are below 2^31, because torch.compile may compute with 32 bits.
    """
    high, low = ((a >> 15) ^ (key >> 15)) & 0x7FFF, (a ^ key) & 0x7FFF
    for multiplier, offset in ROUNDS:
        high, low = low, high ^ ((low * multiplier + offset) >> 12 & 0x7FFF)
    return (high << 15) | low


@no_type_check
def random_tiles(
    a: Span, b: Span, count: int, blocks: Int[Tensor, "*#n"] | None, seed: int
) -> tuple[Bool[Tensor, "*#n"], Bool[Tensor, "*#n"]]:
    """Return `some` and `all` of `AttentionPattern.tiles` for random blocks. Spans a and b count blocks, not tokens.

    `blocks` is the number of blocks to draw from. If it is None, random blocks are drawn from the query's block and all
    blocks before it.
    """
    some = (a.first + b.first) < 0
    single = (a.first == a.last) & (b.first == b.last)
    every = some
    if a.size is None:
        return some | (count > 0), every
    for step in range(a.size if count else 0):
        block = (a.first + step).minimum(a.last)
        for r in range(count):
            drawn = random_block(block, r, count, block + 1 if blocks is None else blocks, seed)
            hit = (b.first <= drawn) & (drawn <= b.last)
            some, every = some | hit, every | (hit & single)
    return some, every
