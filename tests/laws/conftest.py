"""How laws are examined here: with the shapes in signatures checked where a law walks through a model's code anew."""

from collections.abc import Iterable

from jaxtyping import config

from regard.models.base import ModelSpec
from regard.testing import Verdict, examine

# Padded and packed batches, steps of decoding and ragged prompts: the other laws send the same shapes through the same
# code, and checking those takes longer than computing them.
CHECKED = {"padding", "packing", "steps", "ragged"}


def broken(name: str, model: ModelSpec, laws: Iterable[str]) -> list[str]:
    """What is wrong with a model by these laws."""
    laws = list(laws)
    return [
        f"{verdict.law}: {verdict.detail}"
        for verdict in (
            *examine(name, model, [law for law in laws if law in CHECKED]),
            *_unchecked(name, model, [law for law in laws if law not in CHECKED]),
        )
        if verdict.outcome in ("broken", "refused")
    ]


def _unchecked(name: str, model: ModelSpec, laws: list[str]) -> list[Verdict]:
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        return examine(name, model, laws)
    finally:
        config.update("jaxtyping_disable", before)
