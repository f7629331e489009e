"""Cross-attention: attention of a decoder to the encoder output."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from regard.nn.attention import active, attend, merge_heads, split_heads
from regard.nn.attention_heads import (
    Scale,
    attention_site,
    attention_weights,
    beams_apart,
    beams_together,
    check_sizes,
    factor,
    output_projection,
)
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import Rows, StaticKV
from regard.nn.core import Branch, Site
from regard.nn.mask import Context
from regard.nn.norm import NoNorm, Norm


@dataclass(frozen=True, slots=True)
class CrossAttention(BranchSpec):
    """Cross-attention: queries are projected from x, keys and values from the encoder output.

    It uses no position scheme. In decoding, keys and values are computed once per source.
    """

    kind = "cross_attention"
    heads: int | None = None
    kv_heads: int | None = None
    d_head: int | None = None
    d_value: int | None = None
    scale: Scale = "sqrt"
    query_key_norm: Norm = NoNorm()
    output: bool = True
    bias: bool | None = None

    def check(self) -> None:
        check_sizes(self)

    def build(self, site: Site) -> Branch:
        site.require(
            site.side == "decoder" and site.encoder_depth > 0,
            "kind",
            "cross-attention needs an encoder to attend to; use it in an encoder-decoder's decoder",
        )
        return CrossAttentionModule(self, *attention_site(self, site))


class CrossAttentionModule(Branch):
    """Multi-head cross-attention. The rows of `kv.weight` are those of W_k, then those of W_v, each ordered by head."""

    attend = staticmethod(attend)  # regard.fast installs faster kernels here

    def __init__(self, spec: CrossAttention, site: Site, kv_heads: int) -> None:
        super().__init__()
        H, K, V = site.heads, site.d_head, site.d_value
        self.heads, self.kv_heads = H, kv_heads
        self.widths = (kv_heads * K, kv_heads * V)
        self.query = site.linear(site.d_model, {"query": H * K}, bias=spec.bias)
        self.kv = site.linear(site.d_model, {"key": kv_heads * K, "value": kv_heads * V}, bias=spec.bias)
        self.query_norm = spec.query_key_norm.build(site.inside("query_key_norm"), K)
        self.key_norm = spec.query_key_norm.build(site.inside("query_key_norm"), K)
        self.output = output_projection(site, spec.output, spec.bias)
        self.scale = factor(spec.scale, K)
        self.dropout = site.attention_dropout
        self.name = f"{site.side}.cross"

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: StaticKV | None = None) -> Float[Tensor, "B T W"]:
        assert ctx.cross is not None
        B, T, _ = x.shape
        k, v = (state.keys, state.values) if state is not None else self.keys_and_values(ctx)
        beams = B // k.shape[0]
        q = beams_together(self.query_norm(split_heads(self.query(x), self.heads)), beams)
        if ctx.trace is not None and ctx.trace.wants(self.name, (*q.shape[:3], k.shape[2])):
            weights = attention_weights(q, k, ctx.cross, self.scale, ctx.trace.rows)
            ctx.trace.add(self.name, beams_apart(weights, beams, T))
        y = self.attend(q, k, v, ctx.cross, scale=self.scale, dropout=active(self.dropout, self.training))
        return self.output(merge_heads(beams_apart(y, beams, T)))

    def keys_and_values(self, ctx: Context) -> tuple[Float[Tensor, "b G S K"], Float[Tensor, "b G S V"]]:
        """Return the keys and values, which are projected from the encoder output."""
        assert ctx.memory is not None
        k, v = self.kv(ctx.memory.x[0]).split(self.widths, -1)
        return self.key_norm(split_heads(k, self.kv_heads)), split_heads(v, self.kv_heads)

    def start(self, rows: Rows, ctx: Context) -> StaticKV:  # noqa: ARG002
        return StaticKV(*self.keys_and_values(ctx))
