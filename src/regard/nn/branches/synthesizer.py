"""Synthesizers (Tay et al. 2021): self-attention whose learned scores replace or supplement query-key products."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.attention import active, attend, merge_heads, mix, softmax, split_heads
from regard.nn.attention_heads import Scale, attention_weights, factor, output_projection
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import ActivationCache, KVCache, Rows
from regard.nn.checks import MOST_CHANNELS, MOST_HEADS, check_count
from regard.nn.core import Branch, Role, Site, build_optional
from regard.nn.mask import Context, View
from regard.nn.position.base import Position, add_bias
from regard.nn.terms import Terms
from regard.tree import Spec


class Scores(Spec):
    """Abstract base class of specs for synthesizer scores, which depend on the query token or only on positions."""

    __slots__ = ()
    reads_query: ClassVar[bool] = False  # whether the scores are a function of the attention's queries

    @abstractmethod
    def build(self, max_len: int, site: Site) -> "ScoresModule":
        """Build a module that computes, for every head, the scores of up to `max_len` positions."""


class ScoresModule(nn.Module):
    """Abstract base class of modules that compute synthesizer scores."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, q: Tensor | None, view: View) -> Tensor: ...

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T D"], q: Float[Tensor, "B H T K"] | None, view: View
    ) -> Float[Tensor, "b H T S"]:
        """Return the scores of S keys for T queries, before position bias and mask."""


@dataclass(frozen=True, slots=True)
class DenseScores(Scores):
    """Dense synthesizer of Narang et al. 2021: scores relu(q_i) P for query q_i. Heads share P (d_head x max_len)."""

    kind = "dense_scores"
    reads_query = True

    def build(self, max_len: int, site: Site) -> ScoresModule:
        return DenseScoresModule(max_len, site)


class DenseScoresModule(ScoresModule):
    def __init__(self, max_len: int, site: Site) -> None:
        super().__init__()
        self.weight = site.parameter(max_len, site.d_head, role="key")

    def forward(
        self,
        x: Float[Tensor, "B T D"],  # noqa: ARG002
        q: Float[Tensor, "B H T K"] | None,
        view: View,
    ) -> Float[Tensor, "b H T S"]:
        assert q is not None
        return _at_keys(q.relu() @ self.weight[: _bound(view)].T, view)


@dataclass(frozen=True, slots=True)
class TwoLayerScores(Scores):
    """Dense synthesizer of Tay et al. 2021: scores relu(x_i A + a) P + p for token x_i, with parameters per head."""

    kind = "two_layer_scores"

    def build(self, max_len: int, site: Site) -> ScoresModule:
        return TwoLayerScoresModule(max_len, site)


class TwoLayerScoresModule(ScoresModule):
    def __init__(self, max_len: int, site: Site) -> None:
        super().__init__()
        self.heads = site.heads
        self.first = site.linear(site.d_model, {"query": site.heads * site.d_head}, bias=True)
        heads = [site.parameter(max_len, site.d_head, role="key").detach() for _ in range(site.heads)]
        self.weight = nn.Parameter(torch.stack(heads))  # initialised with the fan-in and fan-out of one head
        self.bias = nn.Parameter(torch.zeros(site.heads, max_len))
        self.bias.projects = False  # type: ignore[reportAttributeAccessIssue]  # a bias, although it has two axes

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        q: Float[Tensor, "B H T K"] | None,  # noqa: ARG002
        view: View,
    ) -> Float[Tensor, "b H T S"]:
        hidden, n = split_heads(self.first(x), self.heads).relu(), _bound(view)
        return _at_keys(hidden @ self.weight[:, :n].transpose(1, 2) + self.bias[:, None, :n], view)


@dataclass(frozen=True, slots=True)
class RandomScores(Scores):
    """Random synthesizer of Tay et al. 2021: the score of key j for query i in head h is a parameter R_h[i, j]."""

    kind = "random_scores"

    def build(self, max_len: int, site: Site) -> ScoresModule:
        return RandomScoresModule(max_len, site)


class RandomScoresModule(ScoresModule):
    def __init__(self, max_len: int, site: Site) -> None:
        super().__init__()
        self.weight = site.parameter(site.heads, max_len, max_len, role="position")

    def forward(
        self,
        x: Float[Tensor, "B T D"],  # noqa: ARG002
        q: Float[Tensor, "B H T K"] | None,  # noqa: ARG002
        view: View,
    ) -> Float[Tensor, "b H T S"]:
        return _at_keys(_at_queries(self.weight[:, :, : _bound(view)], view), view)


@dataclass(frozen=True, slots=True)
class FactorisedScores(Scores):
    """Factorised random synthesizer of Tay et al. 2021: scores R1 R2', with two max_len x rank parameters per head.

    In the released code of Narang et al. 2021, both factors are indexed by the keys, so that all queries have the same
    scores. This class follows the paper and has the same number of parameters.
    """

    kind = "factorised_scores"
    rank: int = 16

    def check(self) -> None:
        check_count("rank", self.rank)

    def build(self, max_len: int, site: Site) -> ScoresModule:
        return FactorisedScoresModule(max_len, self.rank, site)


class FactorisedScoresModule(ScoresModule):
    def __init__(self, max_len: int, rank: int, site: Site) -> None:
        super().__init__()
        self.queries = site.parameter(site.heads, max_len, rank, role="position")
        self.keys = site.parameter(site.heads, max_len, rank, role="position")

    def forward(
        self,
        x: Float[Tensor, "B T D"],  # noqa: ARG002
        q: Float[Tensor, "B H T K"] | None,  # noqa: ARG002
        view: View,
    ) -> Float[Tensor, "b H T S"]:
        return _at_keys(_at_queries(self.queries, view) @ self.keys[:, : _bound(view)].transpose(1, 2), view)


def _bound(view: View) -> int:
    """Return an upper bound of all positions, without a device sync."""
    return view.mask.bound(view.S)


def _at_queries(table: Float[Tensor, "H n W"], view: View) -> Float[Tensor, "b H T W"]:
    """Return the vectors of `table` (H, n, W) at the positions of the T queries."""
    mask = view.mask
    if mask.q_pos is None:
        # A copy, because a FLOP counter cannot follow a module that returns a view of its weights.
        return table[None, :, mask.start : mask.start + view.T].clone()
    return table[:, mask.q_pos].transpose(0, 1)


def _at_keys(scores: Float[Tensor, "b H T n"], view: View) -> Float[Tensor, "c H T S"]:
    """Return the scores at the positions of the S keys, given the scores of positions 0 .. n - 1."""
    if view.mask.k_pos is None:
        return scores
    return scores.take_along_dim(view.mask.k_pos[:, None, None, :], -1)


@dataclass(frozen=True, slots=True)
class Synthesizer(BranchSpec):
    """Synthesizer of Tay et al. 2021: concat_h(softmax(scores_h) v_h) W_o, with scores that are not products q.k.

    `mix` combines the scores with query-key products: "alone" uses only the scores, without keys. "plus" uses scale *
    q.k + scores. "alpha" uses (1 - a) * scale * q.k + a * scores, with a learned a that starts at 1/2. Sequences may
    have at most `max_len` tokens. A position scheme may add a bias.
    """

    kind = "synthesizer"
    attends = True
    ordered = True
    scores: Scores = DenseScores()
    mix: Literal["alone", "plus", "alpha"] = "alone"
    heads: int | None = None  # None: as in the model, here and in d_head
    d_head: int | None = None
    max_len: int = 512
    scale: Scale = "sqrt"  # of q.k, unless `mix` is "alone"
    bias: bool | None = None  # None: the default of the model's linear layers
    position: Position | None = None  # of this layer; None: that of the stack

    def check(self) -> None:
        for name, most in (("heads", MOST_HEADS), ("d_head", MOST_CHANNELS), ("max_len", MOST_CHANNELS)):
            check_count(name, getattr(self, name), most)
        check_position(self.position)

    def build(self, site: Site) -> Branch:
        heads, d_head = self.heads or site.heads, self.d_head or site.d_head
        if self.position is None:
            shared = site.positions.get(heads, site.position)
            check_position(shared, site.path)
            made_for = heads if heads in site.positions else site.heads
            if shared is not None and made_for != heads and "heads" in shared.shaped_by:
                raise site.error(
                    "heads",
                    f"is {heads}, but the stack's {shared.kind!r} position is for {made_for} heads; give this "
                    f"attention its own position, or add one for {heads} heads to `positions` of the stack",
                )
        own = site.inside("", heads=heads, d_head=d_head, d_value=d_head)
        return (SynthesizerModule if self.mix == "alone" else SynthesizerPlusModule)(self, own)


def check_position(position: Position | None, path: str = "") -> None:
    """Raise a `SpecError` if a position scheme acts on queries and keys, because a synthesizer may have none."""
    if position is not None and "d_head" in position.shaped_by:
        raise SpecError(
            f"{path}.position".lstrip("."),
            f"a synthesizer can add a bias to its scores, but {position.kind!r} acts on queries and keys; use t5_bias, "
            "alibi or positions at the input",
        )


class SynthesizerBranch(Branch):
    """Abstract base class of synthesizer modules, with or without query-key products."""

    def __init__(self, spec: Synthesizer, site: Site) -> None:
        super().__init__()
        self.heads, self.max_len, self.site = site.heads, spec.max_len, site
        self.scores = spec.scores.build(spec.max_len, site.inside("scores"))
        self.output = output_projection(site, True, spec.bias)
        self.position = build_optional(spec.position, site.inside("position"))
        self.dropout = site.attention_dropout
        self.name = f"{site.side}.self"

    def view(self, ctx: Context) -> View:
        """Return the mask of the stack, with the position bias of this layer or, by default, of the stack."""
        stack = ctx.own
        view = (
            stack.by_heads.get(self.heads, stack) if self.position is None else stack.with_terms(self.position(stack))
        )
        if _bound(view) > self.max_len:
            raise self.site.error(
                "max_len", f"a sequence of {_bound(view)} tokens exceeds the {self.max_len} positions with scores"
            )
        return view


class SynthesizerModule(SynthesizerBranch):
    def __init__(self, spec: Synthesizer, site: Site) -> None:
        super().__init__(spec, site)
        width = site.heads * site.d_head
        widths: dict[Role, int] = {"query": width} if spec.scores.reads_query else {}
        widths["value"] = width
        self.widths = tuple(widths.values())
        self.project = site.linear(site.d_model, widths, bias=spec.bias)

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: ActivationCache | None = None
    ) -> Float[Tensor, "B T D"]:
        view = self.view(ctx)
        *query, v = self.project(x).split(self.widths, -1)
        scores = self.scores(x, split_heads(query[0], self.heads) if query else None, view)
        scores = scores.expand(x.shape[0], -1, -1, -1)  # masks and dropout differ between batch rows
        v = split_heads(v if state is None else state.append(v), self.heads)
        if ctx.trace is not None and ctx.trace.wants(self.name, (*scores.shape[:3], v.shape[2])):
            ctx.trace.add(self.name, softmax(scores.detach(), view).detach())
        y = mix(scores, v, view, dropout=active(self.dropout, self.training))
        return self.output(merge_heads(y))

    def start(self, rows: Rows, ctx: Context) -> ActivationCache:  # noqa: ARG002
        return ActivationCache(rows)


class SynthesizerPlusModule(SynthesizerBranch):
    attend = staticmethod(attend)  # regard.fast installs faster kernels here

    def __init__(self, spec: Synthesizer, site: Site) -> None:
        super().__init__(spec, site)
        width = site.heads * site.d_head
        self.qkv = site.linear(site.d_model, {"query": width, "key": width, "value": width}, bias=spec.bias)
        self.scale = factor(spec.scale, site.d_head)
        self.alpha = nn.Parameter(torch.zeros(())) if spec.mix == "alpha" else None

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: KVCache | None = None) -> Float[Tensor, "B T D"]:
        view = self.view(ctx)
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        scores = self.scores(x, q, view)
        if self.alpha is not None:
            share = self.alpha.sigmoid()
            q, scores = (1.0 - share) * q, share * scores
        view = _with_scores(view, scores)
        if state is not None:
            k, v, view = state.append(k, v, view)
        if ctx.trace is not None and ctx.trace.wants(self.name, (*q.shape[:3], k.shape[2])):
            ctx.trace.add(self.name, attention_weights(q, k, view, self.scale, ctx.trace.rows))
        y = self.attend(q, k, v, view, scale=self.scale, dropout=active(self.dropout, self.training))
        return self.output(merge_heads(y))

    def start(self, rows: Rows, ctx: Context) -> KVCache:  # noqa: ARG002
        return KVCache(rows)


def _with_scores(view: View, scores: Float[Tensor, "b H T S"]) -> View:
    """Return a copy of the view with `scores` added to the attention bias."""
    return view.with_terms(replace(view.terms or Terms(), bias=add_bias(scores, view), by_distance=None))
