"""Universal Transformers: one block, applied repeatedly."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.block import Block, BlockModule, state_at
from regard.nn.cache import Rows, StaticKV
from regard.nn.checks import MOST_BLOCKS, check_count, check_not_negative, require
from regard.nn.core import Site
from regard.nn.mask import Context
from regard.nn.pattern import AttentionPattern
from regard.nn.position.base import AtHeads, Position
from regard.nn.precision import widen
from regard.nn.stacks.base import Stack, StackOut, StackSpec, check_stack, shared_modules, shared_positions, stack_site


@dataclass(frozen=True, slots=True)
class Universal(StackSpec):
    """One block, applied `before` + `steps` + `after` times with the same weights. Dehghani et al. 2019.

    Before the n-th of the `steps` applications in the middle, sqrt(d_model) * e_n is added to the hidden states. The
    vector e_n is a learned embedding of step n. As in Narang et al. 2021, the number of steps is fixed, and position
    embeddings are not added at each step.
    """

    kind = "universal"
    block: Block
    before: int = 2
    steps: int = 24
    after: int = 2
    position: Position | None = None  # shared by all applications
    positions: tuple[AtHeads, ...] = ()
    attention_pattern: AttentionPattern | None = None
    strict: bool = False

    def check(self) -> None:
        _check(self)

    def blocks(self) -> int:
        return self.before + self.steps + self.after

    def block_of(self, call: int) -> Block:  # noqa: ARG002
        return self.block

    def build(self, site: Site) -> Stack:
        return UniversalModule(self, stack_site(self, site))


@dataclass(frozen=True, slots=True)
class UniversalACT(StackSpec):
    """`Universal` with adaptive computation time (Graves 2016, Dehghani et al. 2019): each token halts on its own.

    After step n, a token with state s_n has the halting probability p_n = sigmoid(w s_n + b). This token halts at the
    first step N with p_1 + ... + p_N > 1 - epsilon, or at the last step. The output for the token is p_1 * s_1 + ... +
    p_(N-1) * s_(N-1) + R * s_N with R = 1 - p_1 - ... - p_(N-1), and its state remains s_N. The mean of `ponder` * (N +
    R) over the tokens of a batch is added to the training loss. Gradient accumulation weights batches by their numbers
    of labels, so it differs from one large batch.

    All steps are computed, because shapes must not depend on data. Differs from the code of Dehghani et al., where
    p_n depends on s_(n-1), the states of halted tokens continue to change, and the output is an interpolation.
    """

    kind = "universal_act"
    block: Block
    before: int = 2
    steps: int = 24  # largest number of steps
    after: int = 2
    epsilon: float = 0.01
    ponder: float = 0.01
    position: Position | None = None
    positions: tuple[AtHeads, ...] = ()
    attention_pattern: AttentionPattern | None = None
    strict: bool = False

    def check(self) -> None:
        _check(self)
        require(0.0 < self.epsilon < 1.0, "epsilon", f"must lie between 0 and 1, not {self.epsilon}")
        check_not_negative("ponder", self.ponder)

    def blocks(self) -> int:
        return self.before + self.steps + self.after

    def block_of(self, call: int) -> Block:  # noqa: ARG002
        return self.block

    def build(self, site: Site) -> Stack:
        return UniversalACTModule(self, stack_site(self, site))


def _check(spec: Universal | UniversalACT) -> None:
    for name, least in (("before", 0), ("steps", 1), ("after", 0)):
        check_count(name, getattr(spec, name), MOST_BLOCKS, least)
    check_stack(spec, (spec.block,))


class UniversalStack(Stack):
    """Abstract base class of universal stacks. Subclasses implement the recurrent steps in `recur`."""

    def __init__(self, spec: Universal | UniversalACT, site: Site) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([spec.block.build(site.inside("block"))])
        self.steps = StepEmbeddings(spec.steps, site)
        self.position, self.positions = shared_positions(spec.position, spec.positions, site)
        self.shared = shared_modules(spec, site)
        self.end = spec.block.rules()[-1].end(site.inside("block.residual"))
        self.first, self.last = spec.before, spec.before + spec.steps  # range of the recurrent steps
        self.calls = spec.blocks()
        self.attention_pattern, self.strict = spec.attention_pattern, spec.strict

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None = None, keep: bool = False
    ) -> StackOut:
        ctx = self.context(ctx)
        layers = [x] if keep else None
        for call in range(self.first):
            x = self.call(x, call, ctx, state)
            note(layers, x)
        x = self.recur(x, ctx, state, layers)
        for call in range(self.last, self.calls):
            x = self.call(x, call, ctx, state)
            note(layers, x)
        x = self.end(x)
        return StackOut(x, ctx.own.mask.q_seg, (*layers[:-1], x) if layers is not None else ())

    @abstractmethod
    def recur(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None, layers: list[Tensor] | None
    ) -> Float[Tensor, "B T D"]:
        """Return the hidden states after the recurrent steps. If `layers` is given, append the states of each step."""

    def call(self, x: Tensor, call: int, ctx: Context, state: list[Any] | None) -> Float[Tensor, "B T D"]:
        """Return the output of the block, with the decoding state of application number `call`."""
        return self.blocks[0](x, ctx.block(call), state_at(state, call))

    def step(self, x: Tensor, n: int, ctx: Context, state: list[Any] | None) -> Float[Tensor, "B T D"]:
        """Return the output of recurrent step n: the block applied to x plus the embedding of the step."""
        return self.call(x + self.steps(n), self.first + n, ctx, state)

    def context(self, ctx: Context) -> Context:
        """Return `ctx` with the attention pattern, the position terms and the shared modules of this stack."""
        view = ctx.own.with_mask(attention_pattern=self.attention_pattern, strict=self.strict)
        return replace(ctx, own=view.with_positions(self.position, self.positions), shared=self.shared)

    def start(self, rows: Rows, ctx: Context) -> list[Any]:
        ctx = self.context(ctx)
        block: Any = self.blocks[0]
        assert isinstance(block, BlockModule)
        first = block.start(rows, ctx.block(0))
        if ctx.memory is not None and len(ctx.memory.x) > 1:
            return [first, *(block.start(rows, ctx.block(call)) for call in range(1, self.calls))]

        def repeated(branch: Any, state: Any) -> Any:
            # All applications project the same memory with the same weights, so they share the keys and values.
            return replace(state) if isinstance(state, StaticKV) else branch.start(rows, ctx)

        rest = [tuple(map(repeated, block.branches, first)) for _ in range(1, self.calls)]
        return [first, *rest]


class StepEmbeddings(nn.Module):
    """A learned embedding for each recurrent step, scaled by sqrt(d_model)."""

    def __init__(self, steps: int, site: Site) -> None:
        super().__init__()
        self.position = site.parameter(steps, site.d_model, role="position")
        self.factor = site.d_model**0.5

    def forward(self, n: int) -> Float[Tensor, " D"]:
        return self.factor * self.position[n]


class UniversalModule(UniversalStack):
    def recur(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None, layers: list[Tensor] | None
    ) -> Float[Tensor, "B T D"]:
        for n in range(self.last - self.first):
            x = self.step(x, n, ctx, state)
            note(layers, x)
        return x


class UniversalACTModule(UniversalStack):
    def __init__(self, spec: UniversalACT, site: Site) -> None:
        super().__init__(spec, site)
        self.halt = site.parameter(1, site.d_model, role="other")
        # As in Graves 2016: with a bias of 1, an untrained model halts after about two steps.
        self.halt_bias = nn.Parameter(torch.ones(1))
        self.threshold, self.ponder = 1.0 - spec.epsilon, spec.ponder

    def recur(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: list[Any] | None, layers: list[Tensor] | None
    ) -> Float[Tensor, "B T D"]:
        steps = self.last - self.first
        mean = torch.zeros_like(widen(x))
        running = torch.ones(*x.shape[:2], 1, dtype=torch.bool, device=x.device)
        spent, taken, remainder = (torch.zeros_like(mean[..., :1]) for _ in range(3))
        for n in range(steps):
            x = torch.where(running, self.step(x, n, ctx, state), x)
            p = widen(x @ self.halt.T + self.halt_bias).sigmoid()
            halts = running & (spent + p > self.threshold) if n + 1 < steps else running
            rest = torch.where(halts, 1.0 - spent, 0.0)
            share = torch.where(running & ~halts, p, rest)
            mean = mean + share * x
            spent, taken, remainder = spent + share, taken + running, remainder + rest
            running = running & ~halts
            note(layers, x)
        if ctx.losses is not None:
            ctx.losses.append(self.ponder * _mean(taken + remainder, ctx))
        y = mean.type_as(x)
        if layers is not None:
            layers[-1] = y
        return y


def note(layers: list[Tensor] | None, x: Float[Tensor, "B T D"]) -> None:
    """Append the hidden states x to `layers`, if given."""
    if layers is not None:
        layers.append(x)


def _mean(cost: Float[Tensor, "B T 1"], ctx: Context) -> Float[Tensor, ""]:
    """Return the mean cost over real tokens."""
    seg = ctx.own.mask.q_seg
    if seg is None:
        return cost.mean()
    real = (seg != 0)[:, :, None]
    return (cost * real).sum() / real.sum().clamp(min=1)
