"""Multi-head self-attention."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from regard.nn.attention import active, attend, merge_heads, split_heads
from regard.nn.attention_heads import Scale, attention_weights, check_sizes, factor, output_projection, own_site, tying
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import Rows
from regard.nn.core import Branch, Site, build_optional
from regard.nn.mask import Context, View
from regard.nn.norm import NoNorm, Norm
from regard.nn.pattern import AttentionPattern
from regard.nn.position.base import Position
from regard.nn.ring_cache import Cache, kv_cache


@dataclass(frozen=True, slots=True)
class SelfAttention(BranchSpec):
    """Self-attention (Vaswani et al. 2017): concat_h(softmax(scale * q_h k_h') v_h) W_o with q, k, v projected from x.

    If `kv_heads` is below `heads`, query heads share key-value heads: grouped-query attention (Ainslie et al. 2023).
    `query_key_norm` normalises the queries and keys of each head (Henry et al. 2020). `tied` leaves out a projection.
    With "key_value", W_v = W_k. With "query_key", W_k = W_q, so scores are symmetric before positions and norms.
    """

    kind = "self_attention"
    attends = True
    heads: int | None = None  # None: as in the model, here and in the next three fields
    kv_heads: int | None = None
    d_head: int | None = None
    d_value: int | None = None
    scale: Scale = "sqrt"
    query_key_norm: Norm = NoNorm()
    output: bool = True  # whether there is a W_o; CS 182 and USC 467 have none
    bias: bool | None = None  # None: the default of the model's linear layers
    position: Position | None = None  # of this layer; None: that of the stack
    attention_pattern: AttentionPattern | None = None  # of this layer; None: that of the stack
    tied: Literal["none", "query_key", "key_value"] = "none"

    def check(self) -> None:
        check_sizes(self)

    def build(self, site: Site) -> Branch:
        return SelfAttentionModule(self, *own_site(self, site))


class SelfAttentionModule(Branch):
    """Multi-head self-attention. `qkv.weight` has the rows of W_q, W_k and W_v (unless tied), each ordered by head."""

    attend = staticmethod(attend)  # regard.fast installs faster kernels here

    def __init__(self, spec: SelfAttention, site: Site, kv_heads: int) -> None:
        super().__init__()
        H, K, V = site.heads, site.d_head, site.d_value
        self.heads, self.kv_heads = H, kv_heads
        widths, self.parts = tying(spec.tied, {"query": H * K, "key": kv_heads * K, "value": kv_heads * V})
        self.widths = tuple(widths.values())
        self.qkv = site.linear(site.d_model, widths, bias=spec.bias)
        self.query_norm = spec.query_key_norm.build(site.inside("query_key_norm"), K)
        self.key_norm = spec.query_key_norm.build(site.inside("query_key_norm"), K)
        self.output = output_projection(site, spec.output, spec.bias)
        self.position = build_optional(spec.position, site.inside("position"))
        self.scale, self.dropout = factor(spec.scale, K), site.attention_dropout
        self.name, self.attention_pattern = f"{site.side}.self", spec.attention_pattern

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: Cache | None = None) -> Float[Tensor, "B T W"]:
        view = self.view(ctx.own)
        q, k, v = self.split(self.qkv(x), view)
        if state is not None:
            k, v, view = state.append(k, v, view)
        if ctx.trace is not None and ctx.trace.wants(self.name, (*q.shape[:3], k.shape[2])):
            ctx.trace.add(self.name, attention_weights(q, k, view, self.scale, ctx.trace.rows))
        y = self.attend(q, k, v, view, scale=self.scale, dropout=active(self.dropout, self.training))
        return self.output(merge_heads(y))

    def split(
        self, qkv: Float[Tensor, "B T W"], view: View
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B G T K"], Float[Tensor, "B G T V"]]:
        """Return q, k and v: the fused projection split by head, with query-key norm and position scheme applied."""
        parts = [view.shift(part) for part in qkv.split_with_sizes(self.widths, -1)]
        q, k, v = (parts[i] for i in self.parts)
        q = view.rotate(self.query_norm(split_heads(q, self.heads)))
        k = view.rotate(self.key_norm(split_heads(k, self.kv_heads)))
        return q, k, split_heads(v, self.kv_heads)

    def view(self, stack: View) -> View:
        """Return the view of the stack. An attention pattern or position scheme of this layer replaces the stack's."""
        view = stack.by_heads.get(self.heads, stack) if self.position is None else stack
        if self.attention_pattern is not None:
            view = view.with_mask(attention_pattern=self.attention_pattern)
        return view if self.position is None else view.with_terms(self.position(view))

    def start(self, rows: Rows, ctx: Context) -> Cache:
        return kv_cache(rows, self.view(ctx.own))
