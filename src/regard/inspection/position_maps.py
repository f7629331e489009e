"""The position encodings and position biases of a model as matrices, for heat maps."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from regard.models.base import Model
from regard.nn.mask import Mask, View
from regard.nn.position.additive import LearnedModule
from regard.nn.position.base import AdditiveTable, PositionTerms
from regard.nn.position.rotary import RotaryModule
from regard.nn.position.shaw import ShawModule
from regard.nn.terms import Terms


@dataclass(frozen=True, slots=True)
class PositionMap:
    """The position scheme of one module: a vector for every position, a bias for every pair of positions, or both.

    `similarity` is the product of the (normalised) vectors of two positions.
    """

    module: str  # the name of the module in the model
    scheme: str  # the class of the module without "Module", such as Sinusoidal
    vectors: Float[Tensor, "n D"] | None = None
    similarity: Float[Tensor, "n n"] | None = None
    bias: Float[Tensor, "H n n"] | None = None  # added to the scores of attention: head, query, key


@torch.no_grad()
def position_maps(model: Model, positions: int) -> list[PositionMap]:
    """Return the position schemes of a model, for its first `positions` positions.

    A table with fewer positions is returned as it is. The list is empty for a model that perceives token order only
    through recurrence, convolution or causal masks.
    """
    device = next(model.parameters()).device
    found: list[PositionMap] = []
    inside: list[str] = []  # names of modules whose parts are not listed on their own
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        described = partial(PositionMap, name, type(module).__name__.removesuffix("Module"))
        if isinstance(module, AdditiveTable):
            n = min(positions, module.weight.shape[0]) if isinstance(module, LearnedModule) else positions
            vectors = module(torch.arange(n, device=device)[None], n)[0].float()
            found.append(described(vectors=vectors, similarity=cosine(vectors)))
        elif isinstance(module, PositionTerms):
            inside.append(name)
            found += [described(**fields) for fields in _fields(module, positions, device)]
    return found


def _fields(module: PositionTerms, n: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield the matrices of a position scheme of attention, as fields of `PositionMap`."""
    view = View(Mask(), n, n, device)
    if isinstance(module, RotaryModule):
        vectors = rotations(module, view)
        yield {"vectors": vectors, "similarity": vectors @ vectors.T / (vectors.shape[1] / 2)}
        return
    if isinstance(module, ShawModule):  # its vectors belong to distances; the product of two is no score
        yield {"vectors": module.keys.float(), "similarity": cosine(module.keys.float())}
        return
    terms: Terms = module(view)
    if terms.by_distance is not None:
        at = torch.arange(n, device=device)
        yield {"bias": terms.by_distance(at[None, :] - at[:, None]).float()}
    elif terms.bias is not None:
        yield {"bias": terms.bias[0].float()}
    elif terms.offset is not None:
        vectors = terms.offset[0].float()
        yield {"vectors": vectors, "similarity": cosine(vectors)}


def rotations(module: RotaryModule, view: View) -> Float[Tensor, "n K"]:
    """Return the cosines of the rotary angles of every position, then their sines: the rotation of (1, 0) pairs."""
    rotate = module(view).rotation
    assert rotate is not None
    width = 2 * module.bits.shape[0]
    ones = torch.zeros(1, 1, view.T, width, device=view.device)
    ones[..., : width // 2] = 1.0
    return rotate(ones)[0, 0].float()


def cosine(vectors: Float[Tensor, "n D"]) -> Float[Tensor, "n n"]:
    """Return the cosine similarity of every pair of vectors."""
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    return unit @ unit.T
