"""Self-attention without parameters: the tokens are their own queries, keys and values."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from regard.nn.attention import active, attend, merge_heads, split_heads
from regard.nn.attention_heads import Scale, attention_weights, check_pattern, factor
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import Rows
from regard.nn.checks import MOST_HEADS, check_count
from regard.nn.core import Branch, Site, build_optional
from regard.nn.mask import Context, View
from regard.nn.pattern import AttentionPattern
from regard.nn.position.base import Position, check_shared_sizes
from regard.nn.ring_cache import Cache, kv_cache


@dataclass(frozen=True, slots=True)
class ParameterFreeAttention(BranchSpec):
    """Dot-product self-attention without parameters, softmax(scale * X X') X, as introduced in lectures.

    Every output is a weighted mean of the tokens it attends to. If all tokens have the same norm, as after a layer norm
    without gain and bias, each token attends most to itself. If `heads` is above 1, the channels are divided among the
    heads: concat_h(softmax(scale * X_h X_h') X_h).
    """

    kind = "parameter_free_attention"
    attends = True
    heads: int = 1
    scale: Scale = "none"
    position: Position | None = None  # position scheme of this layer; None: the stack's position scheme
    attention_pattern: AttentionPattern | None = None  # pattern of this layer; None: the stack's pattern

    def check(self) -> None:
        check_count("heads", self.heads, MOST_HEADS)

    def build(self, site: Site) -> Branch:
        D, H = site.d_model, self.heads
        site.require(D % H == 0, "heads", f"{H} heads do not divide d_model {D}; choose a divisor")
        own = site.inside("", heads=H, d_head=D // H, d_value=D // H)
        check_pattern(self.attention_pattern, site)
        check_shared_sizes(self.position, site, own, H)
        return ParameterFreeAttentionModule(self, own)


class ParameterFreeAttentionModule(Branch):
    attend = staticmethod(attend)  # regard.fast installs faster kernels here

    def __init__(self, spec: ParameterFreeAttention, site: Site) -> None:
        super().__init__()
        self.heads = site.heads
        self.position = build_optional(spec.position, site.inside("position"))
        self.scale, self.dropout = factor(spec.scale, site.d_head), site.attention_dropout
        self.name, self.attention_pattern = f"{site.side}.self", spec.attention_pattern

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Cache | None = None) -> Float[Tensor, "B T D"]:
        view = self.view(ctx.own)
        v = split_heads(view.shift(x), self.heads)
        q = k = view.rotate(v)
        if state is not None:
            k, v, view = state.append(k, v, view)
        if ctx.trace is not None and ctx.trace.wants(self.name, (*q.shape[:3], k.shape[2])):
            ctx.trace.add(self.name, attention_weights(q, k, view, self.scale, ctx.trace.rows))
        y = self.attend(q, k, v, view, scale=self.scale, dropout=active(self.dropout, self.training))
        return merge_heads(y)

    def view(self, stack: View) -> View:
        """Return the stack's mask and position terms, changed by this layer's own pattern or position scheme if set."""
        view = stack.by_heads.get(self.heads, stack) if self.position is None else stack
        if self.attention_pattern is not None:
            view = view.with_mask(attention_pattern=self.attention_pattern)
        return view if self.position is None else view.with_terms(self.position(view))

    def start(self, rows: Rows, ctx: Context) -> Cache:
        return kv_cache(rows, self.view(ctx.own))
