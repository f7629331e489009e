"""The predicted tokens at each position: the probability of the actual next token, and the alternatives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

ELEMENTS = 2**24  # log-probabilities that are computed at a time

Names = Callable[[Sequence[int]], Sequence[str]]  # the tokens of ids in printable form


class Alternative(NamedTuple):
    """A token of the vocabulary, and its probability at one position."""

    id: int
    token: str
    probability: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The distribution over the next token at one position: its most probable tokens, and the token read next.

    `position` is the index in the tokens of the decoder (or encoder, if the model has no decoder) that the model has
    read last. `id`, `token`, `probability` and `rank` (1: most probable) describe the token that is read next. They are
    None at the end of a text that has no next token. A classifier of whole texts has one prediction, whose position is
    None and whose "tokens" are classes.
    """

    position: int | None
    id: int | None
    token: str | None
    probability: float | None
    rank: int | None
    alternatives: tuple[Alternative, ...]


def predictions(
    log_probs: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "T D"],
    following: Sequence[int | None],
    positions: Sequence[int | None],
    names: Names,
    top: int,
) -> tuple[Prediction, ...]:
    """Return the predictions for hidden states, computed for some positions at a time to bound the memory.

    `log_probs` maps hidden states (n, D) to log-probabilities (n, V). `following` has the token after each position.
    """
    made: list[Prediction] = []
    width = log_probs(hidden[:1]).shape[-1]
    step = min(hidden.shape[0], max(1, ELEMENTS // width))  # all at once where possible, as in the model itself
    for first in range(0, hidden.shape[0], step):
        here = slice(first, first + step)
        made += _ranked(log_probs(hidden[here]), following[here], positions[here], names, top)
    return tuple(made)


def _ranked(
    log_probs: Float[Tensor, "T V"],
    following: Sequence[int | None],
    positions: Sequence[int | None],
    names: Names,
    top: int,
) -> list[Prediction]:
    best, ids = log_probs.topk(min(top, log_probs.shape[-1]), -1)
    read = torch.tensor([0 if i is None else i for i in following], device=log_probs.device)
    own = log_probs.gather(-1, read[:, None])
    ranks = ((log_probs > own).sum(-1) + 1).tolist()
    chosen, probabilities = own[:, 0].double().exp().tolist(), best.double().exp().tolist()
    made = []
    for t, row in enumerate(ids.tolist()):
        alternatives = tuple(map(Alternative, row, names(row), probabilities[t]))
        i = following[t]
        if i is None:
            made.append(Prediction(positions[t], None, None, None, None, alternatives))
        else:
            made.append(Prediction(positions[t], i, names([i])[0], chosen[t], ranks[t], alternatives))
    return made
