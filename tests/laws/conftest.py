"""Helpers that examine laws. Shapes in signatures are checked only for the laws that cover all code of a model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jaxtyping import config

from regard.models.base import ModelSpec
from regard.testing import examine, subject_of

# Padded and packed batches, and prompts of unequal length with their continuations, with and without static shapes. The
# other laws pass the same shapes through the same code, and checking shapes takes longer than the computation.
CHECKED = ("packing", "ragged")


def broken(name: str, model: ModelSpec, laws: Iterable[str], shapes: bool = True) -> list[str]:
    """Return a line for each law that the model breaks. With `shapes`, shapes in signatures are checked too."""
    laws, subject = list(laws), subject_of(model)
    checked = [law for law in laws if shapes and law in CHECKED]
    with unchecked():
        verdicts = examine(name, subject, [law for law in laws if law not in checked])
    verdicts += examine(name, subject, checked)
    return [f"{v.law}: {v.detail}" for v in verdicts if v.outcome in ("broken", "refused")]


@contextmanager
def unchecked() -> Iterator[None]:
    """Disable the checks of tensor shapes in signatures."""
    previous = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", previous)
