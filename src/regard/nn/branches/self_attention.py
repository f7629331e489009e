"""Self-attention."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from regard.nn.branches.base import BranchSpec, attention_site, check_sizes, merge_heads, output_projection, split_heads
from regard.nn.core import Branch, Context, Site, Trace, View, own_kernels
from regard.nn.kernels import Scale, attend, attention_weights, factor
from regard.nn.norm import NoNorm, Norm
from regard.nn.position.base import Position, places
from regard.nn.position.rotary import rotate
from regard.nn.state import BeamCache, KVCache, Rows


@dataclass(frozen=True, slots=True)
class SelfAttention(BranchSpec):
    """Vaswani et al. 2017: concat_h(softmax(scale q_h k_h') v_h) W_o over the tokens of the stream itself.

    `kv_heads` below `heads` shares each key-value head among several query heads (Ainslie et al. 2023; 1 is
    multi-query, Shazeer 2019). `query_key_norm` normalises each head's queries and keys (Henry et al. 2020).
    """

    kind = "self_attention"
    looks = True
    heads: int | None = None  # None: the model's, as for the three below
    kv_heads: int | None = None
    d_head: int | None = None
    d_value: int | None = None
    scale: Scale = "sqrt"
    query_key_norm: Norm = NoNorm()
    output: bool = True  # W_o; CS 182 and USC 467 have none
    bias: bool | None = None  # None: as the model's linear slot says
    position: Position | None = None  # this layer's own, instead of the stack's

    def check(self) -> None:
        check_sizes(self)

    def build(self, site: Site) -> Branch:
        own, groups = attention_site(self, site)
        shared = site.positions.get(own.heads, site.position)
        if self.position is not None and "kv_heads" in self.position.shaped_by and groups != own.heads:
            raise site.error(
                "kv_heads", f"{self.position.kind!r} treats queries and keys alike, but {groups} is not {own.heads}"
            )
        if self.position is None and shared is not None:
            sizes = {"heads": own.heads, "kv_heads": groups, "d_head": own.d_head, "d_value": own.d_value}
            heads = own.heads if own.heads in site.positions else site.heads
            stack = {"heads": heads, "kv_heads": heads, "d_head": site.d_head, "d_value": site.d_value}
            for name in shared.shaped_by:
                if sizes[name] != stack[name]:
                    raise site.error(
                        name,
                        f"{sizes[name]} differs from the stack's {stack[name]}, for which its {shared.kind!r} position "
                        "is made; give this attention a position of its own or none to the stack",
                    )
        return _SelfAttention(self, own, groups)


class _SelfAttention(Branch):
    def __init__(self, spec: SelfAttention, site: Site, groups: int) -> None:
        super().__init__()
        H, K, V = site.heads, site.d_head, site.d_value
        self.heads, self.groups = H, groups
        self.alike = groups == H and K == V and isinstance(spec.query_key_norm, NoNorm)
        self.widths = (H * K, groups * K, groups * V)
        self.qkv = site.linear(site.d_model, {"query": H * K, "key": groups * K, "value": groups * V}, bias=spec.bias)
        self.query_norm = spec.query_key_norm.build(site.inside("query_key_norm"), K)
        self.key_norm = spec.query_key_norm.build(site.inside("query_key_norm"), K)
        self.output = output_projection(site, spec.output, spec.bias)
        self.position = None if spec.position is None else spec.position.build(site.inside("position"))
        self.scale = factor(spec.scale, K)
        self.dropout = site.attention_dropout
        self.name = f"{site.side}.self"

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: KVCache | BeamCache | None = None
    ) -> Float[Tensor, "B T W"]:
        if not isinstance(state, BeamCache):
            return self.look(x, ctx.own, ctx.trace, state)
        # The beams of one source ask as if they were more tokens of one row, so its keys are never copied.
        assert ctx.own.beams is not None
        together = x.unflatten(0, (-1, state.beams)).flatten(1, 2)
        return self.look(together, ctx.own.beams, ctx.trace, state).reshape(*x.shape[:2], -1)

    def look(
        self, x: Float[Tensor, "B T D"], stack: View, trace: Trace | None, state: KVCache | BeamCache | None
    ) -> Float[Tensor, "B T W"]:
        """Attention of the stream to itself and to its past, as the stack's view says."""
        view = stack.at(self.heads) if self.position is None else self.own_view(stack)
        qkv = self.qkv(x)
        q, k, v = qkv.split_with_sizes(self.widths, -1)
        if view.terms is not None and view.terms.offset is not None:
            q, k, v = q + view.terms.offset, k + view.terms.offset, v + view.terms.offset
        q, k, v = split_heads(q, self.heads), split_heads(k, self.groups), split_heads(v, self.groups)
        q, k = self.query_norm(q), self.key_norm(k)
        if view.terms is not None and view.terms.rotation is not None:
            q, k = rotate(q, view.terms.rotation), rotate(k, view.terms.rotation)
        if state is not None:
            k, v = state.append(k, v)
        if trace is not None:
            weights = attention_weights(q, k, view, self.scale)
            if isinstance(state, BeamCache):
                assert view.mask.k_pos is not None
                weights = state.apart(weights, view.mask.k_pos)
            trace.add(self.name, weights)
        changed = state is not None or (view.terms is not None and view.terms.changes)
        joint = qkv.unflatten(-1, (3, self.heads, -1)) if self.alike and own_kernels(x) and not changed else None
        y = attend(q, k, v, view, scale=self.scale, dropout=self.dropout if self.training else 0.0, joint=joint)
        return self.output(merge_heads(y))

    def own_view(self, stack: View) -> View:
        """The stack's view with this layer's position instead of the stack's."""
        assert self.position is not None
        return stack.with_terms(self.position(places(stack)))

    def start(self, rows: Rows, ctx: Context) -> KVCache | BeamCache:  # noqa: ARG002
        return KVCache(rows) if rows.paths is None else BeamCache(rows)
