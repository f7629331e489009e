"""The words that all parts share: Site, Terms, View, Context, Memory, Trace, Branch."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import SpecError, join
from regard.nn.mask import Mask
from regard.nn.state import Rows, State

if TYPE_CHECKING:
    from regard.nn.init import Init
    from regard.nn.linear import Linear
    from regard.nn.position.base import Position

Role = Literal[
    "query", "key", "value", "attend_out", "up", "gate", "down", "router", "head", "embedding", "position", "other"
]

HALVES = (torch.float16, torch.bfloat16)
TRITON = find_spec("triton") is not None  # for kernels of our own; it comes with the CUDA builds of torch for Linux

# What is built or run one after the other: a misprint of some more digits is refused instead of never ending.
MOST_BLOCKS = 4096  # in a stack; DeepNet has 1,000
MOST_HEADS = 4096
MOST_TAPS = 2**16 - 1  # of a convolution
MOST_EXPERTS = 2**16
MOST_CHANNELS = 2**20

PROJECTIONS = ("query", "key", "value", "attend_out", "up", "gate", "down")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a part is built: sizes from above, its place in the model, and the factories for weights."""

    d_model: int
    heads: int
    d_head: int  # width of a query and a key
    d_value: int
    side: Literal["encoder", "decoder"]
    causal: bool  # a branch may not look at later tokens
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
    sees_ahead: bool = False  # though causal, tokens see later ones of a prefix
    position: "Position | None" = None  # the stack's, shared by its layers
    positions: Mapping[int, "Position"] = field(default_factory=dict)  # its others, by the number of heads they are for
    held: bool = False  # inside another branch, which takes the heads of an attention as they are
    path: str = ""

    def inside(self, path: str, **changes: Any) -> "Site":
        """The site of a part that stands at `path` within this one."""
        return replace(self, path=join(self.path, path), **changes)

    def error(self, name: str, message: str) -> SpecError:
        """A complaint about field `name` of the part built here."""
        return SpecError(join(self.path, name), message)

    def linear(self, d_in: int, widths: Mapping[Role, int], *, bias: bool | None = None) -> nn.Module:
        """A projection from d_in to the concatenation of `widths`, each part drawn by its role.

        Every projection in the package is made here, so a linear kind (Fixup, LoRA) or an init is one edit of the spec.
        """
        return self.linear_.build(d_in, widths, bias, self)

    def parameter(self, *shape: int, role: Role) -> nn.Parameter:
        """A weight of this shape, drawn by its role."""
        weight = torch.empty(*shape)
        self.init_.draw(weight, role, self)
        made = nn.Parameter(weight)
        made.projects = role in PROJECTIONS  # type: ignore[reportAttributeAccessIssue]  # for the optimizer
        return made


@dataclass(frozen=True, slots=True)
class Terms:
    """What positions contribute to attention. Everything a position scheme does is one of these."""

    rotation: tuple[Tensor, Tensor] | None = None  # cos, sin (b, 1, T, K): turns queries and keys
    offset: Float[Tensor, "b T W"] | None = None  # added to queries, keys and values
    bias: Float[Tensor, "b H T S"] | None = None  # added to the scores, whatever the content
    content: Callable[[Tensor], Tensor] | None = None  # scores that depend on the query: (B, H, T, K) -> (B, H, T, S)
    context: Callable[[Tensor], Tensor] | None = None  # values that depend on distance: weights -> (B, H, T, V)

    @property
    def changes(self) -> bool:
        """Whether queries, keys or values are no longer what was projected."""
        return self.rotation is not None or self.offset is not None


@dataclass(frozen=True, slots=True)
class View:
    """One set of queries looking at one set of keys: the mask and the position terms.

    `lowered` holds what kernels made of it, `shared` what they made of its mask alone. Both are filled on first use, so
    the layers of a stack share one lowering; layers with position terms of their own still share that of the mask.
    """

    mask: Mask
    T: int
    S: int
    device: torch.device
    terms: Terms | None = None
    lowered: dict[Any, Any] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)
    others: Mapping[int, "View"] = field(default_factory=dict)  # the same pairs for attentions of so many heads
    beams: "View | None" = None  # the same where the beams of a source are one row, for a cache that they share

    def with_terms(self, terms: Terms | None) -> "View":
        """The same pairs with other position terms."""
        return replace(self, terms=terms, lowered={}, others={})

    def at(self, heads: int) -> "View":
        """The view of an attention with so many heads."""
        return self.others.get(heads, self)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decoder sees of its encoder."""

    x: tuple[Float[Tensor, "b S D"], ...]  # one for all blocks, or one per decoder call
    seg: Int[Tensor, "b S"] | None = None


class Trace:
    """Attention weights recorded beside the fast path: `weights["decoder.cross"][n]` belongs to the n-th call.

    In a decoding the calls of every step follow each other, each for the rows as they stood at that step.
    """

    def __init__(self) -> None:
        self.weights: dict[str, list[Tensor]] = {}

    def add(self, name: str, weights: Float[Tensor, "B H T S"]) -> None:
        """Record one call."""
        self.weights.setdefault(name, []).append(weights)


@dataclass(frozen=True, slots=True)
class Context:
    """What a forward pass knows beyond the stream. Built once per stack; five fields, no more."""

    own: View
    cross: View | None = None
    memory: Memory | None = None
    losses: list[Tensor] | None = None  # auxiliary losses: a list while training, else None
    trace: Trace | None = None  # None costs nothing

    def block(self, call: int) -> "Context":
        """The context of one call; differs only if every block has a memory of its own."""
        if self.memory is None or len(self.memory.x) == 1:
            return self
        return replace(self, memory=replace(self.memory, x=(self.memory.x[call],)))


class Branch(nn.Module):
    """Abstract: a function on the stream, (B, T, D) -> (B, T, D)."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, ctx: Context, state: Any = None) -> Tensor: ...

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Any = None) -> Float[Tensor, "B T D"]:
        """Read the stream and return what is to be joined to it."""

    def start(self, rows: Rows, ctx: Context) -> State | tuple[Any, ...] | None:  # noqa: ARG002
        """The state of one call in a new decoding; None if there is nothing to remember."""
        return None


@runtime_checkable
class Reporting(Protocol):
    """A part that counts something while it trains: tokens that an expert had no room for."""

    def report(self) -> dict[str, Tensor]:
        """The counts since the last report, by name; they begin anew. Equal names of several parts are added up."""
        ...


def check_count(name: str, count: int, most: int, least: int = 1) -> None:
    """Refuse a number of parts or channels that is too small to build, or too large to be meant."""
    if count < least:
        raise SpecError(name, f"must be at least {least}, not {count}")
    if count > most:
        raise SpecError(name, f"must be at most {most:,}, not {count:,}")


def widen(x: Tensor) -> Tensor:
    """At least float32: squares, exponentials and sums do not fit in half precision."""
    return x.float() if x.dtype in HALVES else x


def stream(x: Tensor) -> Tensor:
    """The stream as it is kept: where autocast makes products in bfloat16, in bfloat16 too.

    Norms and sums take as long as what they read and write is large. float16 is too narrow for a sum of many branches.
    """
    if x.is_cuda and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16:
        return x.bfloat16()
    return x


def own_kernels(x: Tensor) -> bool:
    """Whether kernels of our own are there for x: on a GPU, in bfloat16, and where gradients are wanted.

    GPUs without bfloat16 are also without Triton. An operator of ours takes the host longer to call than one of
    torch's, so steps of decoding do without.
    """
    return TRITON and x.is_cuda and x.dtype == torch.bfloat16 and torch.is_grad_enabled()


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast inside: for scores whose close calls decide where a token goes."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def drop(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout as a function: a module at p = 0 costs more than the composition of a whole block."""
    if not training or p <= 0.0:
        return x
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        kept = round((1 - p) * CHANCES)
        if 0 < kept < CHANCES:
            return x * _kept(x, kept)
    return nn.functional.dropout(x, p, True)


CHANCES = 2**16


@torch.no_grad()
def _kept(x: Tensor, kept: int) -> Tensor:
    """For each element 1 / probability or 0, where the probability to be kept is `kept` in 65,536.

    torch draws a float for every element, which takes a fifth of the time that a small model spends outside of matrix
    products. Here 64 random bits decide about four elements. The probability is rounded to 1 / 65,536; the mean is
    exact, because what is kept is divided by the rounded one.
    """
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64)
    bits.random_(torch.iinfo(torch.int64).min, None)  # all 64 bits; without bounds the sign would always be 0
    short = bits.view(torch.int16)[: x.numel()].view(x.shape)
    mask = torch.empty(x.shape, dtype=x.dtype)
    return torch.lt(short, kept - CHANCES // 2, out=mask).mul_(CHANCES / kept)
