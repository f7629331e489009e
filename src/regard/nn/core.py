"""Classes shared by all modules: `Site` (model sizes and position of a layer), `Branch` (base class of sublayers)."""

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
    from regard.nn.pattern import AttentionPattern
    from regard.nn.position.base import Position

Role = Literal[
    "query", "key", "value", "attend_out", "up", "gate", "down", "router", "head", "embedding", "position", "other"
]

PROJECTIONS = ("query", "key", "value", "attend_out", "up", "gate", "down")


@dataclass(frozen=True, slots=True)
class Site:
    """What a spec needs to build its module: model sizes, index of the layer, path in the spec, weight factories."""

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
    sees_ahead: bool = False  # whether prefix tokens attend to the whole prefix (prefix LM)
    position: "Position | None" = None  # position scheme shared by the layers of the stack
    positions: Mapping[int, "Position"] = field(default_factory=dict)  # position schemes by number of heads
    attention_pattern: "AttentionPattern | None" = None  # of the stack
    nested: bool = False  # whether an outer branch projects the attention heads
    path: str = ""

    def inside(self, path: str, **changes: Any) -> "Site":
        """Return a copy of this site for a submodule, with `path` appended to the path and the `changes` applied."""
        return replace(self, path=join(self.path, path), **changes)

    def error(self, name: str, message: str) -> SpecError:
        """Return a `SpecError` about the field `name` of the spec at this site. The message begins with the path."""
        return SpecError(join(self.path, name), message)

    def require(self, condition: bool, name: str, message: str) -> None:
        """Check `condition`. If it is false, raise a `SpecError` about the field `name` of the spec at this site."""
        if not condition:
            raise self.error(name, message)

    def linear(self, d_in: int, widths: Mapping[Role, int], *, bias: bool | None = None) -> nn.Module:
        """Return a linear layer from d_in to sum(widths) channels, with separately initialised weights for each role.

        All projections are built here. One field of the model spec can therefore replace all linear layers (Fixup,
        LoRA). Another field can replace their initialisation.
        """
        projection = self.linear_.build(d_in, widths, bias, self)
        projection.row_widths = dict(widths)  # type: ignore[reportAttributeAccessIssue]  # for regard.weights
        return projection

    def parameter(self, *shape: int, role: Role) -> nn.Parameter:
        """Return a parameter of this shape, initialised according to its role (query, embedding, ...)."""
        weight = torch.empty(*shape)
        self.init_.draw(weight, role, self)
        made = nn.Parameter(weight)
        made.projects = role in PROJECTIONS  # type: ignore[reportAttributeAccessIssue]  # for the optimizer
        return made


def build_optional(spec: Any, site: Site, *sizes: int) -> Any:
    """Return the module built from `spec`, or None if `spec` is None."""
    return None if spec is None else spec.build(site, *sizes)


class Branch(nn.Module):
    """Abstract base class of sublayers (attention, feed-forward, ...), which map (B, T, D) to the same shape."""

    __call__: Callable[..., Tensor]

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        """Return the output of the branch, without the residual connection."""

    def start(self, rows: Rows, ctx: Context) -> State | tuple[Any, ...] | None:  # noqa: ARG002
        """Return a new decoding state, such as an empty key-value cache, or None if the branch needs no state."""
        return None


@runtime_checkable
class Reporting(Protocol):
    """Interface of modules that count events in training, such as tokens beyond the capacity of an expert."""

    def report(self) -> dict[str, Tensor]:
        """Return the counts, keyed by name, and reset them. Counts with the same name are summed over all modules."""
        ...
