"""How laws are examined here: with the shapes in signatures checked where a law walks through a model's code anew."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jaxtyping import config

from regard.models.base import ModelSpec
from regard.testing import examine, subject_of

# Padded and packed batches, prompts of unequal length and what follows them, with static shapes and without: the other
# laws send the same shapes through the same code, and checking those takes longer than computing them.
CHECKED = ("packing", "ragged")


def broken(name: str, model: ModelSpec, laws: Iterable[str], shapes: bool = True) -> list[str]:
    """What is wrong with a model by these laws; with `shapes`, in signatures too."""
    laws, subject = list(laws), subject_of(model)
    checked = [law for law in laws if shapes and law in CHECKED]
    with unchecked():
        verdicts = examine(name, subject, [law for law in laws if law not in checked])
    verdicts += examine(name, subject, checked)
    return [f"{v.law}: {v.detail}" for v in verdicts if v.outcome in ("broken", "refused")]


@contextmanager
def unchecked() -> Iterator[None]:
    """Signatures say shapes, and nobody looks."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)
