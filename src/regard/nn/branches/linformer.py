"""Linformer: self-attention to a fixed number of learned mixtures of the keys and values."""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import DataError
from regard.nn.attention import active, attend, merge_heads, split_heads
from regard.nn.attention_heads import Scale, attention_site, attention_weights, check_sizes, factor, output_projection
from regard.nn.branches.base import BranchSpec
from regard.nn.checks import MOST_CHANNELS, check_count, require
from regard.nn.core import Branch, Role, Site
from regard.nn.mask import Context, Mask, View
from regard.nn.position.base import check_shared_sizes


@dataclass(frozen=True, slots=True)
class LengthProjection:
    """A learned linear map along the length of a sequence, from at most `max_len` positions to `rank` vectors."""

    rank: int
    max_len: int

    def build(self, site: Site, heads: int = 1) -> "LengthProjectionModule":
        """Build the map with separate weights for each of `heads` heads. If `heads` is 1, all heads share weights."""
        return LengthProjectionModule(self, heads, site)


@dataclass(frozen=True, slots=True)
class Linformer(BranchSpec):
    """Linformer (Wang et al. 2020): self-attention in linear time, concat_h(softmax(scale * q_h (E k_h)') F v_h) W_o.

    E and F are learned matrices of `rank` x `max_len`, so every row of E k_h is a mixture of the keys at all positions.
    For T tokens, time and memory are proportional to T * rank. Keys and values at padding are set to zero before they
    are mixed. A sequence of T < `max_len` tokens uses the first T columns of E and F. A sequence of more than
    `max_len` tokens raises an error.

    `sharing` sets which matrices are equal. With "none", each key-value head of each layer has its own E and F. With
    "heads", the heads of a layer share E and F. With "key_value", E and F of a layer are also equal. With "layers", all
    layers of the stack share one matrix E = F. The branch cannot be causal, because every mixture contains later
    tokens.
    """

    kind = "linformer"
    attends = True
    packs = False
    ordered = True  # the weights of a mixture belong to positions
    heads: int | None = None  # None: as in the model, here and in the next three fields
    kv_heads: int | None = None
    d_head: int | None = None
    d_value: int | None = None
    max_len: int = 512
    rank: int = 128
    sharing: Literal["none", "heads", "key_value", "layers"] = "heads"
    scale: Scale = "sqrt"
    bias: bool | None = None  # None: the default of the model's linear layers

    def check(self) -> None:
        check_sizes(self)
        check_count("max_len", self.max_len, MOST_CHANNELS)
        check_count("rank", self.rank)
        require(
            self.rank <= self.max_len,
            "rank",
            f"{self.rank} mixtures of {self.max_len} positions shorten nothing; choose a rank of at most max_len",
        )

    def shared(self) -> LengthProjection | None:
        return LengthProjection(self.rank, self.max_len) if self.sharing == "layers" else None

    def build(self, site: Site) -> Branch:
        site.require(
            not site.causal,
            "kind",
            "a Linformer mixes the keys of all positions, so a token would depend on later ones; use it in an encoder",
        )
        pattern = site.attention_pattern
        if pattern is not None:
            raise site.error("kind", _no_pattern(pattern.kind))
        own, kv_heads = attention_site(self, site)
        position = site.positions.get(own.heads, site.position)
        if position is not None and position.scores_pairs:
            raise site.error(
                "kind",
                f"the stack's {position.kind!r} position adds scores for pairs of tokens, but a Linformer has mixtures "
                "of keys instead of tokens; use rotary, injected or positions at the input",
            )
        check_shared_sizes(None, site, own, kv_heads)
        return LinformerModule(self, own, kv_heads)


def _no_pattern(kind: str) -> str:
    return (
        f"the attention pattern {kind!r} hides tokens, but the keys of a Linformer are mixtures of all tokens; set the "
        "pattern on other attention branches, or leave it out"
    )


class LengthProjectionModule(nn.Module):
    """Multiply `weight` by x along the length of x. Vectors at padding are set to zero first."""

    def __init__(self, spec: LengthProjection, heads: int, site: Site) -> None:
        super().__init__()
        matrices = [site.parameter(spec.rank, spec.max_len, role="other").detach() for _ in range(heads)]
        self.weight = nn.Parameter(torch.stack(matrices))  # initialised with the fan-in and fan-out of one head
        self.weight.projects = False  # type: ignore[reportAttributeAccessIssue]  # acts on positions, not on channels

    def forward(self, x: Float[Tensor, "B G T K"], mask: Mask) -> Float[Tensor, "B G r K"]:
        if mask.k_seg is not None:
            x = x.masked_fill((mask.k_seg == 0)[:, None, :, None], 0.0)
        # The columns of `weight` at the positions of the tokens, (b, g, r, T) with b = 1 or B and g = 1 or G.
        columns = self.weight[None, :, :, : x.shape[2]]
        if mask.k_pos is not None:
            columns = self.weight[:, :, mask.k_pos].movedim(2, 0)
        return torch.einsum("bgrt,bgtk->bgrk", columns, x)


class LinformerModule(Branch):
    attend = staticmethod(attend)  # regard.fast installs faster kernels here

    def __init__(self, spec: Linformer, site: Site, kv_heads: int) -> None:
        super().__init__()
        H, K, V = site.heads, site.d_head, site.d_value
        self.heads, self.kv_heads, self.rank, self.max_len = H, kv_heads, spec.rank, spec.max_len
        widths: dict[Role, int] = {"query": H * K, "key": kv_heads * K, "value": kv_heads * V}
        self.widths = tuple(widths.values())
        self.qkv = site.linear(site.d_model, widths, bias=spec.bias)
        projection, separate = LengthProjection(spec.rank, spec.max_len), kv_heads if spec.sharing == "none" else 1
        self.key_mixtures = None if spec.sharing == "layers" else projection.build(site, separate)  # E
        self.value_mixtures = projection.build(site, separate) if spec.sharing in ("none", "heads") else None  # F
        self.output = output_projection(site, True, spec.bias)
        self.scale, self.dropout = factor(spec.scale, K), site.attention_dropout
        self.name, self.site = f"{site.side}.mixtures", site

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context, state: None = None) -> Float[Tensor, "B T D"]:  # noqa: ARG002
        view = ctx.own.by_heads.get(self.heads, ctx.own)
        self.check(view)
        q, k, v = map(view.shift, self.qkv(x).split_with_sizes(self.widths, -1))
        q, k = view.rotate(split_heads(q, self.heads)), view.rotate(split_heads(k, self.kv_heads))
        mix_keys = self.shared(ctx) if self.key_mixtures is None else self.key_mixtures
        mix_values = mix_keys if self.value_mixtures is None else self.value_mixtures
        k, v = mix_keys(k, view.mask), mix_values(split_heads(v, self.kv_heads), view.mask)
        mixtures = View(Mask(), view.T, self.rank, view.device)  # every query attends to every mixture
        if ctx.trace is not None and ctx.trace.wants(self.name, (*q.shape[:3], k.shape[2])):
            ctx.trace.add(self.name, attention_weights(q, k, mixtures, self.scale, ctx.trace.rows))
        y = self.attend(q, k, v, mixtures, scale=self.scale, dropout=active(self.dropout, self.training))
        return self.output(merge_heads(y))

    def check(self, view: View) -> None:
        """Raise an error for packed rows, an attention pattern, or a sequence that is longer than `max_len`."""
        mask, longest = view.mask, view.mask.bound(view.S)
        if mask.packed:
            raise DataError("packed: a Linformer would mix tokens of different texts; use padded batches")
        if mask.attention_pattern is not None:
            raise self.site.error("kind", _no_pattern(mask.attention_pattern.kind))
        if longest > self.max_len:
            raise self.site.error(
                "max_len", f"a sequence of {longest} tokens exceeds the {self.max_len} positions; set a larger max_len"
            )

    def shared(self, ctx: Context) -> LengthProjectionModule:
        """Return the projection that all layers of the stack share."""
        if ctx.shared is None:
            raise self.site.error("sharing", "this stack has no modules that its layers share; use 'key_value' instead")
        return cast(LengthProjectionModule, ctx.shared[Linformer.kind])
