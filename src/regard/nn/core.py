"""Shared by all parts: Site (where a part is built) and Branch (the interface of a residual branch)."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import SpecError, join
from regard.nn.cache import Rows, State
from regard.nn.mask import Context

if TYPE_CHECKING:
    from regard.nn.init import Init
    from regard.nn.linear import Linear
    from regard.nn.position.base import Position

Role = Literal[
    "query", "key", "value", "attend_out", "up", "gate", "down", "router", "head", "embedding", "position", "other"
]

PROJECTIONS = ("query", "key", "value", "attend_out", "up", "gate", "down")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a part is built: sizes from above, its place in the model, and the factories for weights."""

    d_model: int
    heads: int
    d_head: int  # width of a query and a key
    d_value: int
    side: Literal["encoder", "decoder"]
    causal: bool  # a branch must not attend to later tokens
    layer: int  # this block, counted from 0
    depth: int  # blocks in this stack
    encoder_depth: int
    decoder_depth: int
    branches: int  # residual branches in the whole model: DeepNorm, Fixup
    dropout: float
    attention_dropout: float
    activation_dropout: float
    linear_: "Linear"
    init_: "Init"
    sees_ahead: bool = False  # causal except for a prefix, whose tokens attend to all of it
    position: "Position | None" = None  # the stack's, shared by its layers
    positions: Mapping[int, "Position"] = field(default_factory=dict)  # its others, by the number of heads they are for
    nested: bool = False  # inside another branch, which projects the heads of an attention itself
    path: str = ""

    def inside(self, path: str, **changes: Any) -> "Site":
        """The site of the part at `path` within this one."""
        return replace(self, path=join(self.path, path), **changes)

    def error(self, name: str, message: str) -> SpecError:
        """A SpecError about field `name` of the part built here."""
        return SpecError(join(self.path, name), message)

    def require(self, condition: bool, name: str, message: str) -> None:
        """Raise a SpecError about field `name` of the part built here, unless the condition holds."""
        if not condition:
            raise self.error(name, message)

    def linear(self, d_in: int, widths: Mapping[Role, int], *, bias: bool | None = None) -> nn.Module:
        """A projection from d_in to the concatenation of `widths`, each part drawn by its role.

        Every projection in the package is made here, so a linear kind (Fixup, LoRA) or an init is one edit of the spec.
        """
        projection = self.linear_.build(d_in, widths, bias, self)
        projection.row_widths = dict(widths)  # type: ignore[reportAttributeAccessIssue]  # for regard.weights
        return projection

    def parameter(self, *shape: int, role: Role) -> nn.Parameter:
        """A weight of this shape, drawn by its role."""
        weight = torch.empty(*shape)
        self.init_.draw(weight, role, self)
        made = nn.Parameter(weight)
        made.projects = role in PROJECTIONS  # type: ignore[reportAttributeAccessIssue]  # for the optimizer
        return made


def build_optional(spec: Any, site: Site, *sizes: int) -> Any:
    """The module of an optional part; None without one."""
    return None if spec is None else spec.build(site, *sizes)


class Branch(nn.Module):
    """Abstract: a function of the hidden states, (B, T, D) -> (B, T, D)."""

    __call__: Callable[..., Tensor]

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        """The output of the branch, which a residual rule adds to its input x."""

    def start(self, rows: Rows, ctx: Context) -> State | tuple[Any, ...] | None:  # noqa: ARG002
        """The state of one call in a new decoding; None for a branch without state."""
        return None


@runtime_checkable
class Reporting(Protocol):
    """A part with counters in training, such as the tokens that exceed the capacity of an expert."""

    def report(self) -> dict[str, Tensor]:
        """Return the counts by name and reset them. Counts of equal names are summed over the parts."""
        ...
