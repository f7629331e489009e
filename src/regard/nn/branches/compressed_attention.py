"""Memory-compressed attention, which compresses groups of keys and values before attention."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.nn.attention import active, attend, cached, merge_heads, split_heads
from regard.nn.attention_heads import Scale, attention_site, attention_weights, check_sizes, factor, output_projection
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import Rows
from regard.nn.checks import MOST_TAPS, check_count
from regard.nn.compressed_cache import CompressedCache
from regard.nn.core import Branch, Role, Site
from regard.nn.mask import Context, Mask, View


@dataclass(frozen=True, slots=True)
class CompressedAttention(BranchSpec):
    """Memory-compressed attention (Liu et al. 2018): self-attention to one key and value per group of `stride` tokens.

    The keys and values of each head are projected from x and then compressed. Group g has the tokens g * c, ..., g * c
    + c - 1 of a text, with c = `stride`. The compression is either the mean or maximum of each channel, or a
    convolution over all heads with kernel size and stride c: k_g = sum_i k_(g * c + i) A_i + a and v_g =
    sum_i v_(g * c + i) B_i + b. Queries are not compressed.

    In a causal stack, a query attends to the groups that end before the query. If `inclusive`, it also attends to a
    group that ends at the query. No group ends before the first queries, so all queries also attend to a sink: the
    uncompressed first token ("first", as in the code of the paper) or a learned key and value ("null"). Tokens after
    the last complete group are in no group. In an encoder, queries attend to all groups, and the last group of a text
    may have fewer tokens. In a convolution, missing tokens are zeros. In a mean or maximum, they are left out.

    A compressed key has no position of its own, so positions must be added to the input. The code of the paper differs:
    it applies one convolution to x, before the projections.
    """

    kind = "compressed_attention"
    attends = True
    masked = False
    ordered = True
    stride: int = 3
    compression: Literal["convolution", "mean", "max"] = "convolution"
    sink: Literal["first", "null", "none"] = "first"
    inclusive: bool = False  # whether a causal query attends to a group that ends at the query itself
    heads: int | None = None  # None: as in the model, here and in the next three fields
    kv_heads: int | None = None
    d_head: int | None = None
    d_value: int | None = None
    scale: Scale = "sqrt"
    output: bool = True  # whether there is an output projection W_o
    bias: bool | None = None  # of projections and convolutions; None: the default of the model's linear layers

    def check(self) -> None:
        check_sizes(self)
        check_count("stride", self.stride, MOST_TAPS)

    def build(self, site: Site) -> Branch:
        own, kv_heads = attention_site(self, site)
        position = site.position or next(iter(site.positions.values()), None)
        if position is not None:
            raise site.error(
                "kind",
                f"a compressed key has no position of its own, so the stack's {position.kind!r} position cannot apply "
                "to it; add positions to the input, or give each self_attention of the stack a position of its own",
            )
        site.require(
            site.causal or not self.inclusive,
            "inclusive",
            "queries of an encoder attend to all groups, so it would have no effect; set it to false",
        )
        site.require(
            not site.causal or self.sink != "none" or (self.stride == 1 and self.inclusive),
            "sink",
            "without a sink, the first queries of a causal stack have no key; use 'first' or 'null', or stride=1 with "
            "inclusive=true",
        )
        return CompressedAttentionModule(self, own, kv_heads)


class CompressedAttentionModule(Branch):
    """Memory-compressed attention. The rows of `qkv.weight` are those of W_q, W_k and W_v, each ordered by head."""

    attend = staticmethod(attend)  # regard.fast installs faster kernels here

    def __init__(self, spec: CompressedAttention, site: Site, kv_heads: int) -> None:
        super().__init__()
        H, K, V = site.heads, site.d_head, site.d_value
        self.heads, self.kv_heads, self.stride, self.inclusive = H, kv_heads, spec.stride, spec.inclusive
        widths: dict[Role, int] = {"query": H * K, "key": kv_heads * K, "value": kv_heads * V}
        self.widths = (kv_heads * K, kv_heads * V)  # channels of keys and of values
        self.qkv = site.linear(site.d_model, widths, bias=spec.bias)
        if spec.compression == "convolution":
            self.compress = GroupConvolution(spec, self.widths, site)
        else:
            self.compress = GroupPooling(spec.compression)
        self.has_sink = spec.sink != "none"
        self.null = nn.Parameter(torch.zeros(sum(self.widths))) if spec.sink == "null" else None  # key and value
        self.output = output_projection(site, spec.output, spec.bias)
        self.scale, self.dropout = factor(spec.scale, K), site.attention_dropout
        self.name = f"{site.side}.self"

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: CompressedCache | None = None
    ) -> Float[Tensor, "B T W"]:
        layout = self.layout(ctx.own)
        qkv, width = self.qkv(x), sum(self.widths)
        q, kv = qkv[..., :-width], qkv[..., -width:]
        entries = self.compressed(kv, layout) if state is None else state.append(kv)[:, : layout.view.S]
        k, v = entries.split_with_sizes(self.widths, -1)
        q, k, v = split_heads(q, self.heads), split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        if ctx.trace is not None and ctx.trace.wants(self.name, (*q.shape[:3], k.shape[2])):
            ctx.trace.add(self.name, attention_weights(q, k, layout.view, self.scale, ctx.trace.rows))
        y = self.attend(q, k, v, layout.view, scale=self.scale, dropout=active(self.dropout, self.training))
        return self.output(merge_heads(y))

    def layout(self, view: View) -> "Layout":
        """Return the groups of all batch rows. The result is cached for other layers with the same groups."""
        lay_out = lay_out_packed if view.mask.packed else lay_out_rows
        key = ("groups", self.stride, self.inclusive, self.has_sink)
        return cached(view.shared, key, lambda: lay_out(view, self.stride, self.inclusive, self.has_sink))

    def compressed(self, kv: Float[Tensor, "B T W"], layout: "Layout") -> Float[Tensor, "B S W"]:
        """Return the sink and the compressed keys and values of all groups."""
        if layout.tokens is not None:  # packed rows: groups begin at different positions in each row
            assert layout.is_group is not None
            entries = self.compress(_take(kv, layout.tokens.flatten(1)).unflatten(1, (-1, self.stride)), layout.real)
            sink = _take(kv, layout.tokens[:, :, 0]) if self.null is None else self.null.to(kv.dtype)
            return torch.where(layout.is_group[:, :, None], entries, sink)
        n = layout.view.S - self.has_sink
        # In a causal stack, tokens after the last complete group are dropped; in an encoder, zeros complete the group.
        whole = F.pad(kv, (0, 0, 0, n * self.stride - kv.shape[1]))
        entries = self.compress(whole.unflatten(1, (n, self.stride)), layout.real)
        if not self.has_sink:
            return entries
        sink = kv[:, :1] if self.null is None else self.null.to(kv.dtype).expand(kv.shape[0], 1, -1)
        return torch.cat((sink, entries), 1)

    def start(self, rows: Rows, ctx: Context) -> CompressedCache:  # noqa: ARG002
        return CompressedCache(rows, self.stride, self.compress, self.has_sink, self.null)


class GroupConvolution(nn.Module):
    """Convolutions of keys and of values with kernel size and stride c: sum_i x_(g * c + i) A_i + a.

    The rows of a weight are output channels. The columns are the input channels of token 0, 1, ... of the group.
    """

    def __init__(self, spec: CompressedAttention, widths: tuple[int, int], site: Site) -> None:
        super().__init__()
        self.widths = widths  # channels of keys and of values
        self.key = site.linear(spec.stride * widths[0], {"key": widths[0]}, bias=spec.bias)
        self.value = site.linear(spec.stride * widths[1], {"value": widths[1]}, bias=spec.bias)

    def forward(
        self, kv: Float[Tensor, "B N c W"], real: Bool[Tensor, "#B N c"] | None = None
    ) -> Float[Tensor, "B N W"]:
        if real is not None:
            kv = kv.masked_fill(~real[..., None], 0.0)
        k, v = kv.split_with_sizes(self.widths, -1)
        return torch.cat((self.key(k.flatten(2)), self.value(v.flatten(2))), -1)


class GroupPooling(nn.Module):
    """The mean or the maximum of each channel over the tokens of a group that are not padding."""

    def __init__(self, compression: Literal["mean", "max"]) -> None:
        super().__init__()
        self.compression = compression

    def forward(
        self, kv: Float[Tensor, "B N c W"], real: Bool[Tensor, "#B N c"] | None = None
    ) -> Float[Tensor, "B N W"]:
        if real is None:
            return kv.mean(2) if self.compression == "mean" else kv.amax(2)
        real = real[..., None]
        if self.compression == "mean":
            return kv.masked_fill(~real, 0.0).sum(2) / real.sum(2).clamp(min=1)
        most = kv.masked_fill(~real, -torch.inf).amax(2)
        return most.masked_fill(~real.any(2), 0.0)  # finite, also in groups that are only padding


class Layout(NamedTuple):
    """The groups of all batch rows. The keys of `view` are the entries: the sink and the groups of each text.

    In packed rows, `tokens` are the indices of the c tokens of each entry. For a sink, only the first index is used.
    """

    view: View
    real: Bool[Tensor, "b N c"] | None = None  # True for the tokens of a group that exist; None if all exist
    tokens: Int[Tensor, "B S c"] | None = None
    is_group: Bool[Tensor, "B S"] | None = None  # True for a group, False for a sink


def lay_out_rows(view: View, stride: int, inclusive: bool, sink: bool) -> Layout:
    """Return the groups of rows with one text each. Group g has the tokens g * stride, ..., g * stride + stride - 1.

    In the mask, the position of a key is the position of the first query that attends to the key. If `inclusive`, this
    is the last token of the group, otherwise the token after the group.
    """
    mask, S, device = view.mask, view.S, view.device
    if not mask.causal:
        n = -(-S // stride)  # the last group may be incomplete
    elif mask.prefix is None and not inclusive:
        n = (S - 1) // stride  # no query attends to a group that ends at the last token
    else:
        n = S // stride
    at = stride * torch.arange(1, n + 1, device=device) - int(inclusive)
    # Outside decoding, `k_pos` may hold positions that are not indices in the row. Groups are made by index.
    q_pos = mask.q_pos if mask.k_pos is None else None
    prefix, k_seg, real = mask.prefix if mask.causal else None, None, None
    if prefix is not None:
        whole = prefix[:, : n * stride].unflatten(1, (n, stride)).all(2)
        prefix = F.pad(whole, (int(sink), 0), value=True)
    if not mask.causal and (mask.k_seg is not None or n * stride > S):
        seg = torch.ones(1, S, dtype=torch.int64, device=device) if mask.k_seg is None else mask.k_seg
        real = F.pad(seg != 0, (0, n * stride - S)).unflatten(1, (n, stride))
        k_seg = None if mask.k_seg is None else F.pad(seg[:, ::stride], (int(sink), 0), value=1)
    lowered = Mask(
        # A single query attends to all of its groups, unless batch rows have different lengths.
        causal=mask.causal and (view.T > 1 or q_pos is not None or prefix is not None),
        start=mask.start,
        q_pos=q_pos,
        k_pos=F.pad(at, (int(sink), 0))[None],
        q_seg=mask.q_seg,
        k_seg=k_seg,
        prefix=prefix,
    )
    return Layout(View(lowered, view.T, n + sink, device), real)


def lay_out_packed(view: View, stride: int, inclusive: bool, sink: bool) -> Layout:
    """Return the groups of packed rows. In each text (segment), groups are counted from the first token of the text.

    The entries of a row are ordered by text. The sink of a text precedes its groups. All rows have the largest possible
    number of entries. The last entries of a row may be unused (segment 0).
    """
    mask, T, device = view.mask, view.T, view.device
    seg, index = mask.q_seg, torch.arange(T, device=device)
    assert seg is not None
    first = F.pad(seg[:, 1:] != seg[:, :-1], (1, 0), value=True)
    rank = index - torch.where(first, index, 0).cummax(1).values  # index of the token in its text
    later = index[:, None] + torch.arange(stride, device=device)
    together = (seg[:, later.clamp(max=T - 1)] == seg[:, :, None]) & (later < T)  # (B, T, c)
    begins = (seg != 0) & (rank % stride == 0)
    begins = begins & together[:, :, -1] if mask.causal else begins
    # Each token may begin two entries: a sink, then a group.
    entry = torch.stack(((seg != 0) & first & sink, begins), 2).flatten(1)
    most = T // stride if mask.causal else (T + mask.segments * (stride - 1)) // stride
    order = (~entry).to(torch.uint8).argsort(dim=1, stable=True)[:, : most + mask.segments * sink]
    token, is_group, used = order // 2, order % 2 == 1, entry.gather(1, order)
    tokens = (token[:, :, None] + torch.arange(stride, device=device)).clamp(max=T - 1)
    prefix = None
    if mask.causal:
        # The mask has a prefix even if the model is not a prefix LM. Some kernels for packed rows take the index of a
        # key for its position, which is wrong here. They do not support a prefix, so they are not chosen.
        prefix = ~is_group
        if mask.prefix is not None:
            prefix = prefix | mask.prefix.gather(1, tokens.flatten(1)).view_as(tokens).all(2)
    lowered = Mask(
        causal=mask.causal,
        k_pos=token + is_group * (stride - int(inclusive)),
        q_seg=seg,
        k_seg=seg.gather(1, token) * used,
        packed=True,
        prefix=prefix,
        segments=mask.segments,
        longest=None if mask.longest is None else mask.longest + sink,
    )
    real = None if mask.causal else together.gather(1, token[:, :, None].expand(-1, -1, stride))
    return Layout(View(lowered, T, order.shape[1], device), real, tokens, is_group)


def _take(kv: Float[Tensor, "B T W"], index: Int[Tensor, "B n"]) -> Float[Tensor, "B n W"]:
    return kv.gather(1, index[:, :, None].expand(-1, -1, kv.shape[2]))
