"""Classes that all parts use: `Site` (where a part is built) and `Branch` (the interface of a branch)."""

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
    """Where a part is built: the sizes set by the model, the path in the spec, and the factories for weights."""

    d_model: int
    heads: int
    d_head: int  # width of a query and a key
    d_value: int
    side: Literal["encoder", "decoder"]
    causal: bool  # whether branches must not attend to later tokens
    layer: int  # index of the current block, from 0
    depth: int  # number of blocks in the current stack
    encoder_depth: int
    decoder_depth: int
    branches: int  # number of residual branches in the whole model, for Fixup
    dropout: float
    attention_dropout: float
    activation_dropout: float
    linear_: "Linear"
    init_: "Init"
    sees_ahead: bool = False  # whether tokens of a prefix attend to the whole prefix, in a causal stack
    position: "Position | None" = None  # position scheme shared by the layers of the stack
    positions: Mapping[int, "Position"] = field(default_factory=dict)  # schemes keyed by number of heads
    nested: bool = False  # whether an outer branch projects the attention heads
    path: str = ""

    def inside(self, path: str, **changes: Any) -> "Site":
        """Return the site of the part at `path` within this part."""
        return replace(self, path=join(self.path, path), **changes)

    def error(self, name: str, message: str) -> SpecError:
        """Return a `SpecError` about the field `name` of the part built here."""
        return SpecError(join(self.path, name), message)

    def require(self, condition: bool, name: str, message: str) -> None:
        """Raise a `SpecError` about the field `name` of the part built here, unless `condition` is true."""
        if not condition:
            raise self.error(name, message)

    def linear(self, d_in: int, widths: Mapping[Role, int], *, bias: bool | None = None) -> nn.Module:
        """Return a projection from d_in to the concatenation of `widths`. Each part is initialised by role.

        All projections are built here, so one field of the spec changes the linear map (Fixup, LoRA) or the init.
        """
        projection = self.linear_.build(d_in, widths, bias, self)
        projection.row_widths = dict(widths)  # type: ignore[reportAttributeAccessIssue]  # for regard.weights
        return projection

    def parameter(self, *shape: int, role: Role) -> nn.Parameter:
        """Return a weight of this shape, initialised by role."""
        weight = torch.empty(*shape)
        self.init_.draw(weight, role, self)
        made = nn.Parameter(weight)
        made.projects = role in PROJECTIONS  # type: ignore[reportAttributeAccessIssue]  # for the optimizer
        return made


def build_optional(spec: Any, site: Site, *sizes: int) -> Any:
    """Return the module built from `spec`, or None if `spec` is None."""
    return None if spec is None else spec.build(site, *sizes)


class Branch(nn.Module):
    """Abstract: a module that maps the hidden states (B, T, D) to an output of the same shape."""

    __call__: Callable[..., Tensor]

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        """Return the output of the branch. A residual rule combines it with x."""

    def start(self, rows: Rows, ctx: Context) -> State | tuple[Any, ...] | None:  # noqa: ARG002
        """Return the state for one call at the start of a decoding session, or None for a branch without state."""
        return None


@runtime_checkable
class Reporting(Protocol):
    """Interface: a part that counts events in training, such as tokens that exceed the capacity of an expert."""

    def report(self) -> dict[str, Tensor]:
        """Return the counts, keyed by name, and reset them. Counts with the same name are summed over all parts."""
        ...
