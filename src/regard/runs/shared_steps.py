"""Divide the batches of a training step among several processes, and keep the number of tokens per step."""

import math
from collections.abc import Callable
from dataclasses import replace

from regard.data.batching import Buckets, FixedShape
from regard.data.prepare import Prepared
from regard.recipe.recipe import Recipe


def shared(recipe: Recipe, processes: int, longest: int, report: Callable[[str], None]) -> Recipe:
    """Return the recipe with a multiple of `processes` batches per step, and about as many tokens per step as before.

    If `train.accumulate` is a multiple already, the recipe is returned unchanged. `longest` is the number of tokens of
    the longest example, which must fit into a batch.
    """
    train, batching = recipe.train, recipe.data.batching
    parts = processes // math.gcd(train.accumulate, processes)
    if parts == 1 or not isinstance(batching, Buckets | FixedShape) or batching.tokens is None:
        return recipe
    smaller = divided(batching, parts, longest)
    accumulate, tokens = train.accumulate * parts, smaller.tokens or 0
    report(
        f"a step has {accumulate} batches of {tokens:,} tokens (before: {train.accumulate} of {batching.tokens:,}), "
        f"because {processes} processes share it (train.accumulate, data.batching.tokens)"
    )
    return replace(recipe, train=replace(train, accumulate=accumulate), data=replace(recipe.data, batching=smaller))


def longest_example(data: Prepared) -> int:
    """Return the number of tokens of the longest training example."""
    names = data.objective.measured
    return max((int(table[name].lengths.max()) for table in data.train for name in names if table.rows), default=1)


def divided(batching: Buckets | FixedShape, parts: int, longest: int) -> Buckets | FixedShape:
    """Return the batching with a fraction 1 / `parts` of the tokens per batch, rounded up to whole rows or examples."""
    tokens = batching.tokens or 0
    if isinstance(batching, Buckets):
        return replace(batching, tokens=max(longest, -(-tokens // parts)))
    rows = tokens // batching.length
    return replace(batching, tokens=-(-rows // parts) * batching.length)  # type: ignore[type-var]
