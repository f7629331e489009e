"""Attention kernels. `attend` uses the fastest kernel that computes the result exactly.

Packed batch rows on CUDA use our Triton kernel ("segments"), flash attention over concatenated segments ("varlen") or
FlexAttention ("flex"). Sparse attention patterns in long sequences use "varlen", "flex", or "chunked", which calls
torch's kernel for the visible tiles. Everything else uses torch's `scaled_dot_product_attention` ("sdpa"). For position
terms that "sdpa" does not support, elementary operations are used ("reference").
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import KernelError, nearest
from regard.fast.beam_cache import BeamCache, BeamMask, BeamView, SharedRows
from regard.fast.chunked_attention import chunked_attention
from regard.fast.flex import flex_attention
from regard.fast.tiles import density, in_order
from regard.models.baselines.attention_score import ProductScoreModule
from regard.models.baselines.convs2s import ConvS2SAttention
from regard.nn.attention import cached, merge_heads, mix, repeat_heads, scores, visible
from regard.nn.attention_heads import attention_weights
from regard.nn.branches.compressed_attention import CompressedAttentionModule
from regard.nn.branches.cross_attention import CrossAttentionModule
from regard.nn.branches.linformer import LinformerModule
from regard.nn.branches.parameter_free_attention import ParameterFreeAttentionModule
from regard.nn.branches.self_attention import SelfAttentionModule
from regard.nn.branches.synthesizer import SynthesizerPlusModule
from regard.nn.cache import KVCache, Rows
from regard.nn.mask import Context, Mask, View
from regard.nn.pattern import Window
from regard.nn.position.base import position_bias
from regard.nn.precision import HALVES
from regard.nn.ring_cache import Cache

TRITON = find_spec("triton") is not None  # Triton comes with the CUDA builds of torch for Linux
SHORT = 512  # the largest number of tokens in a short row or segment
LARGE = 2**20  # the smallest number of scores for which a sparse kernel is faster than one with a mask
DENSE = 0.3  # the largest share of visible tiles for which a sparse kernel is faster
HUGE = 2**26  # number of scores from which a mask tensor would be too large: 8,192 x 8,192
GRID = 65_535  # CUDA's limit for the number of programs along the second axis of a kernel
_forced: list[str] = []  # kernels that `use` forces, innermost last; a plain list, because torch.compile can read it
_log = logging.getLogger("regard.attention")
_logged: set[str] = set()


def has_kernels(x: Tensor) -> bool:
    """Return whether our Triton kernels are used for x: on a GPU, in bfloat16, and with gradients enabled.

    GPUs without bfloat16 do not support Triton either. Decoding has no gradients, and uses torch's operators, which are
    faster to launch.
    """
    return TRITON and x.is_cuda and x.dtype == torch.bfloat16 and torch.is_grad_enabled()


class Call(NamedTuple):
    """The arguments of a call of `attend`."""

    q: Float[Tensor, "B H T K"]
    k: Float[Tensor, "B G S K"]
    v: Float[Tensor, "B G S V"]
    view: View
    scale: float
    dropout: float
    qkv: Float[Tensor, "B T 3 H K"] | None = None  # the fused projection, if q, k and v are slices of it


@contextmanager
def use(name: str) -> Iterator[None]:
    """Context manager that makes `attend` use the kernel `name` in all threads, for tests and comparisons."""
    if name not in KERNELS:
        raise KernelError(f"unknown kernel {name!r}; {nearest(name, KERNELS)}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def forced() -> str | None:
    """Return the name of the kernel that `use` forces, or None outside of `use`."""
    return _forced[-1] if _forced else None


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    view: View,
    *,
    scale: float,
    dropout: float = 0.0,
    qkv: Float[Tensor, "B T 3 H K"] | None = None,
) -> Float[Tensor, "B H T V"]:
    """Return softmax(scale * q k' + position terms) v over the visible keys, computed by the fastest kernel.

    `dropout` is the dropout probability of the attention weights. `qkv` is the fused projection, if q, k and v are
    slices of it.
    """
    call = Call(q, k, v, view, scale, dropout, qkv)
    if torch.compiler.is_compiling() and may_skip_tiles(view):
        return _attend_outside_graph(call)
    return KERNELS[choose(call)](call)


@torch.compiler.disable(
    reason="tiles of an attention_pattern are chosen outside of the graph; leave out fullgraph=True"
)
def _attend_outside_graph(call: Call) -> Float[Tensor, "B H T V"]:
    """Compute `attend` outside of the graphs of torch.compile, which does not trace this function.

    The choice of a sparse kernel cannot be traced. A mask of T x S elements could be traced, but would be far slower.
    """
    return KERNELS[choose(call)](call)


def choose(call: Call) -> str:
    """Return the name of the kernel for these arguments: the one that `use` forces, or the fastest exact kernel."""
    name = forced()
    if name is not None:
        reason = refusal(name, call)
        if reason is not None:
            raise KernelError(f"kernel {name!r} refused: {reason}")
        return name
    terms = call.view.terms
    if terms is not None and terms.context is not None:
        chosen = "reference"
    else:
        chosen = next((name for name in _candidates(call) if refusal(name, call) is None), "sdpa")
    _log_cost(chosen, call)
    return chosen


def _candidates(call: Call) -> tuple[str, ...]:
    """Return the names of the kernels that may be faster than "sdpa" for these arguments, fastest first."""
    view, on_gpu = call.view, call.q.is_cuda
    if is_sparse(view):
        return _for_patterns(call)
    if on_gpu and is_huge(view):
        return ("varlen", "flex")
    return _for_packed(view) if on_gpu and view.mask.packed else ()


def is_sparse(view: View) -> bool:
    """Return whether a pattern hides so many keys of a long sequence that a sparse kernel is faster than "sdpa"."""
    pattern = view.mask.attention_pattern
    if pattern is None or view.T * view.S < LARGE or torch.compiler.is_compiling():
        return False
    if pattern.needs_order and not in_order(view.mask):
        return False
    return density(pattern, view.mask.causal, view.T, view.S) <= DENSE


def _for_patterns(call: Call) -> tuple[str, ...]:
    """Return the names of the kernels for a sparse pattern in a long sequence, fastest first.

    The "flex" kernel is compiled for each shape, which takes many seconds. So "flex" comes before "chunked" only in
    training on rows of one shape: packed rows, and rows without padding.
    """
    mask = call.view.mask
    if not call.q.is_cuda:
        return ("chunked",)
    one_shape = torch.is_grad_enabled() and (mask.packed or mask.k_seg is None)
    return ("varlen", "flex", "chunked") if one_shape else ("varlen", "chunked", "flex")


def is_huge(view: View) -> bool:
    """Return whether a pattern or a prefix would need a mask of T x S elements that is too large to be stored."""
    needs_mask = view.mask.attention_pattern is not None or view.mask.prefix is not None
    return needs_mask and view.T * view.S >= HUGE and not torch.compiler.is_compiling()


def may_skip_tiles(view: View) -> bool:
    """Return whether `is_sparse` or `is_huge` may be true. torch.compile can trace this function."""
    # An exported program is one graph. While torch.compile traces, torch 2.11 says that it exports, too.
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return False
    scores, mask = view.T * view.S, view.mask
    return scores >= (HUGE if mask.attention_pattern is None else LARGE) and (
        mask.attention_pattern is not None or mask.prefix is not None
    )


def _log_cost(chosen: str, call: Call) -> None:
    """Log a message if the chosen kernel is slow or needs much memory. Each message is logged only once."""
    view, pattern = call.view, call.view.mask.attention_pattern
    setting = "input_attention='full'" if pattern is None else f"attention_pattern={pattern.kind!r}"
    if chosen in ("sdpa", "reference") and is_huge(view):
        sentence = (
            f"attention over {view.T:,} x {view.S:,} tokens with {setting} needs a mask with an element for each pair, "
            f"because {_why_no_tiles(call)}"
        )
    elif chosen == "chunked" and call.q.is_cuda and call.dropout > 0.0:
        sentence = (
            f"{setting} with attention dropout is computed without a CUDA graph and by a slower kernel; "
            "set attention_dropout=0 for the faster one"
        )
    else:
        return
    if sentence not in _logged:
        _logged.add(sentence)
        _log.warning(sentence)


def _why_no_tiles(call: Call) -> str:
    """Return the reason why no kernel that skips hidden tiles can be used for these arguments."""
    terms = call.view.terms
    if terms is not None and (terms.context is not None or terms.content is not None or terms.bias is not None):
        return "the position scheme adds scores that no such kernel computes; set position to another one"
    if not call.q.is_cuda:
        return "on a CPU tiles are skipped only if more than two thirds of the keys are hidden; use a GPU"
    if call.dropout > 0.0:
        return "attention dropout needs it here; set attention_dropout=0"
    return "no kernel that skips tiles supports this mask; use a shorter sequence"


def _for_packed(view: View) -> tuple[str, ...]:
    """Return the names of the kernels for packed batch rows on CUDA, fastest first.

    The "varlen" kernel works in blocks of 128 queries, so a sentence of 26 tokens uses only a fifth of a block. For
    short rows, even "sdpa" with a dense mask is faster than "varlen".
    """
    if view.T <= SHORT:
        return ("segments",)
    longest = view.mask.longest or view.T
    return ("segments", "varlen", "flex") if longest <= SHORT else ("varlen", "segments", "flex")


def refusal(name: str, call: Call) -> str | None:  # noqa: PLR0911  # one return per reason
    """Return the reason why the kernel `name` cannot compute these arguments exactly, or None if it can."""
    if name == "reference":
        return None
    q, v, view, terms = call.q, call.v, call.view, call.view.terms
    if terms is not None and terms.context is not None:
        return "position terms that act on the values need the attention weights; use 'reference'"
    if name == "sdpa":
        return None
    if name == "segments":
        return _no_segments(call)
    if name == "chunked":
        return _no_chunks(call)
    if call.dropout > 0.0:
        return f"{name} has no attention dropout; set attention_dropout=0 or use 'sdpa'"
    if name == "flex":
        if terms is not None and terms.content is not None:
            return "flex does not support position terms that depend on the query; use 'sdpa' or 'reference'"
        if not q.is_cuda and torch.is_grad_enabled() and (q.requires_grad or v.requires_grad):
            return "flex has no backward pass on the CPU; use 'sdpa'"
        return None
    mask = view.mask
    if not q.is_cuda or q.dtype not in HALVES:
        return f"varlen needs CUDA and half precision, not {q.device.type} and {q.dtype}; use 'sdpa'"
    if terms is not None and (has_bias(view) or terms.content is not None):
        return "varlen does not support a bias; use 'flex' or 'sdpa'"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"varlen needs d_k = d_v, a multiple of 8 up to 256, not {q.shape[-1]} and {v.shape[-1]}"
    if mask.strict or mask.prefix is not None or isinstance(mask, BeamMask):
        return "varlen does not support strict, prefix or beam masks; use 'flex' or 'sdpa'"
    if mask.causal and (mask.start or view.T != view.S):
        return "varlen is causal over whole sequences only, not over a cache; use 'sdpa'"
    pattern = mask.attention_pattern
    # The kernel aligns the last query with the last key.
    if pattern is not None and not (isinstance(pattern, Window) and view.T == view.S):
        return f"varlen supports only windows over as many keys as queries, not {pattern.kind}; use 'flex' or 'sdpa'"
    return None


def _no_chunks(call: Call) -> str | None:
    """Return the reason why the kernel "chunked" cannot compute these arguments, or None if it can."""
    terms = call.view.terms
    if terms is not None and (terms.bias is not None or terms.content is not None):
        return "chunked supports a bias only as a function of the distance; use 'sdpa' or 'reference'"
    if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "chunked reads the mask on the host, which a CUDA graph cannot; use 'flex'"
    if isinstance(call.view.mask, BeamMask):
        return "chunked does not support a cache that beams share; use 'sdpa'"
    return None


def _no_segments(call: Call) -> str | None:  # noqa: PLR0911  # one return per reason
    """Return the reason why the kernel "segments" cannot compute these arguments, or None if it can."""
    q, v, view, mask, terms = call.q, call.v, call.view, call.view.mask, call.view.terms
    if not TRITON:
        return "Triton is not installed; use 'sdpa'"
    if not q.is_cuda or q.dtype != torch.bfloat16:  # GPUs without bfloat16 lack Triton, too
        return f"segments needs CUDA and bfloat16, not {q.device.type} and {q.dtype}; use 'sdpa'"
    if not mask.packed or mask.q_seg is None or mask.k_seg is None:
        return "segments is for packed rows; use 'sdpa'"
    if terms is not None and (has_bias(view) or terms.content is not None):
        return "segments does not support a bias; use 'flex' or 'sdpa'"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] not in (16, 32, 64, 128):
        return f"segments needs d_k = d_v of 16, 32, 64 or 128, not {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[0] * q.shape[1] > GRID:
        return f"segments supports at most {GRID:,} rows times heads, not {q.shape[0]} * {q.shape[1]}; use 'sdpa'"
    if mask.strict or mask.prefix is not None or isinstance(mask, BeamMask) or mask.attention_pattern is not None:
        return "segments does not support strict, prefix, sparse or beam masks; use 'flex' or 'sdpa'"
    if mask.causal and (mask.start or view.T != view.S):
        return "segments is causal over whole rows only, not over a cache; use 'sdpa'"
    return None


def sdpa(call: Call) -> Float[Tensor, "B H T V"]:
    """Return attention computed by torch's `scaled_dot_product_attention`.

    The mask is additive if torch would otherwise convert a boolean mask in every layer.
    """
    q, k, v, view, scale, dropout, _ = call
    terms, mask = view.terms, view.mask
    converts = q.is_cuda or (q.is_cpu and not torch.is_grad_enabled())  # torch would convert a boolean mask
    by_position = terms is None or (terms.content is None and not has_bias(view))
    if by_position and converts and not is_causal_only(view):
        lowered, causal = additive(view, q.dtype), False
    else:
        lowered, causal = additive_or_visible(q, view, scale)
    # For a query without visible keys, torch returns zeros on a CPU, but some CUDA kernels have NaN gradients. On CUDA,
    # a query without visible keys therefore attends to all keys, and its output is set to zero.
    empty = cached(view.shared, "empty", lambda: empty_rows(view)) if q.is_cuda and may_hide_all(mask) else None
    if empty is not None and lowered is not None:
        cache = view.lowered if terms is None or terms.content is None else {}  # content terms belong to one layer
        lowered = cached(cache, ("without empty rows", lowered.dtype), partial(lowered.masked_fill, empty, 0.0))
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(
        q, k, v, lowered, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return y if empty is None else y.masked_fill(empty, 0.0)


def additive(view: View, dtype: torch.dtype) -> Tensor | None:
    """Return an additive mask: the position bias, and -inf at hidden keys. If there is neither, return None."""
    return cached(view.lowered, ("additive", dtype), lambda: _additive(view, dtype))


def _additive(view: View, dtype: torch.dtype) -> Tensor | None:
    shown = visible(view)
    bias = position_bias(view)
    if bias is not None:
        bias = bias.to(dtype)
    if shown is None:
        return bias
    total = torch.zeros(shown.shape, dtype=dtype, device=shown.device) if bias is None else bias
    return total.masked_fill(~shown, -torch.inf)


def additive_or_visible(q: Float[Tensor, "B H T K"], view: View, scale: float) -> tuple[Tensor | None, bool]:
    """Return (mask, is_causal), the arguments of torch's `scaled_dot_product_attention`.

    The mask is additive if there is a position bias, and boolean otherwise. It is None if torch's causal mask is
    enough.
    """
    terms = view.terms
    if terms is not None and terms.content is not None:
        rest, content = additive(view, q.dtype), terms.content(q) * scale
        return content if rest is None else content + rest, False
    if has_bias(view):
        return additive(view, q.dtype), False
    return (None, True) if is_causal_only(view) else (visible(view), False)


def has_bias(view: View) -> bool:
    """Return whether the position scheme adds a bias to the scores."""
    return view.terms is not None and (view.terms.bias is not None or view.terms.by_distance is not None)


def is_causal_only(view: View) -> bool:
    """Return whether torch's causal mask is enough. It also hides padding at the end of a row from real tokens."""
    mask = view.mask
    aligned = mask.start == 0 and mask.q_pos is None and mask.k_pos is None and view.T == view.S
    irregular = mask.strict or mask.packed or mask.prefix is not None or mask.attention_pattern is not None
    return mask.causal and aligned and not irregular and not isinstance(mask, BeamMask)


def may_hide_all(mask: Mask) -> bool:
    """Return whether a query may have no visible key, such as padding or the first query of a strict causal mask."""
    pattern = mask.attention_pattern
    bidirectional = not mask.causal or mask.prefix is not None  # then padding is hidden from padding
    if pattern is not None and (pattern.may_hide_all or (mask.k_seg is not None and bidirectional)):
        return True
    return mask.packed or (mask.causal and mask.strict)


def empty_rows(view: View) -> Tensor:
    """Return a mask (b, 1, t, 1) of the queries that have no visible key."""
    shown = visible(view)
    assert shown is not None
    return ~shown.any(-1, keepdim=True)


def reference(call: Call) -> Float[Tensor, "B H T V"]:
    """Return attention computed by elementary operations, for any mask, any position term and any precision."""
    return mix(scores(call.q, call.k, call.view, call.scale), call.v, call.view, dropout=call.dropout)


def flex(call: Call) -> Float[Tensor, "B H T V"]:
    """Return attention computed by FlexAttention, which skips the tiles that are hidden."""
    return flex_attention(call.q, call.k, call.v, call.view, call.scale)


def chunked(call: Call) -> Float[Tensor, "B H T V"]:
    """Return attention computed by torch's kernel over the visible tiles."""
    return chunked_attention(call.q, call.k, call.v, call.view, call.scale, call.dropout)


def varlen(call: Call) -> Float[Tensor, "B H T V"]:
    """Return flash attention over the concatenated segments of all rows. Only pairs in a segment are computed."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  # needs a CUDA build on some versions

    q, k, v, view, scale, *_ = call
    B, H, T, _ = q.shape
    mask = view.mask
    q_ends, k_ends, hidden = cached(view.shared, ("lengths", B), lambda: _lengths(view, B))
    distance = -1 if mask.attention_pattern is None else mask.attention_pattern.size - 1  # type: ignore[reportAttributeAccessIssue]
    flat_q, flat_k, flat_v = (
        x.transpose(1, 2).flatten(0, 1) for x in (q, repeat_heads(k, H), repeat_heads(v, H))
    )  # (B*T, H, K)
    y = varlen_attn(
        flat_q,
        flat_k,
        flat_v,
        q_ends,
        k_ends,
        mask.longest or T,
        mask.longest or view.S,
        scale=scale,
        window_size=(distance, 0 if mask.causal else distance),
    )
    y = cast(Tensor, y).unflatten(0, (B, T))  # varlen_attn returns a tuple only if its arguments request one
    # The kernel lets padded queries attend to padded keys; by definition their output is zero.
    return (y if hidden is None else y.masked_fill(hidden, 0.0)).transpose(1, 2)


def segments(call: Call) -> Float[Tensor, "B H T V"]:
    """Return attention for packed rows, computed by our Triton kernel, which needs no mask and supports dropout."""
    from regard.fast import packed_attention  # noqa: PLC0415  # needs Triton

    q, k, v, view, scale, dropout, qkv = call
    mask, H = view.mask, q.shape[1]
    assert mask.q_seg is not None
    assert mask.k_seg is not None
    # Positions increase along a segment, so the kernel compares the indices of tokens in the row instead.
    layout = cached(view.shared, "layout", partial(packed_attention.lay_out, mask.q_seg, mask.k_seg, mask.causal))
    return packed_attention.attend(q, repeat_heads(k, H), repeat_heads(v, H), layout, scale, dropout, qkv)


def _lengths(view: View, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    q_ends, k_ends = cumulative_lengths(view.mask, view.T, view.S, rows, view.device)
    hidden = None if view.mask.q_seg is None else (view.mask.q_seg == 0)[:, :, None, None]
    return q_ends, k_ends, hidden


KERNELS: dict[str, Callable[[Call], Tensor]] = {
    "sdpa": sdpa,
    "segments": segments,
    "varlen": varlen,
    "flex": flex,
    "chunked": chunked,
    "reference": reference,
}


def cumulative_lengths(
    mask: Mask, T: int, S: int, rows: int, device: torch.device
) -> tuple[Int[Tensor, " r"], Int[Tensor, " r"]]:
    """Return the cumulative lengths of all segments in all rows, for queries and for keys: the input of varlen kernels.

    Segments must be numbered 1, 2, ... along a row, with padding (0) last and the same numbers in query and key rows.
    The results have a fixed size: missing segments have length 0. Padding is split into segments of at most
    `mask.longest` tokens, because a kernel computes only the first `mask.longest` outputs of a segment.
    """
    chunk = mask.longest or max(T, S)
    chunks = -(-max(T, S) // chunk)

    def cumulative(seg: Tensor | None, width: int) -> Int[Tensor, " r"]:
        if seg is None:
            seg = torch.ones(rows, width, dtype=torch.int64, device=device)
        slots = mask.segments + chunks
        padding = seg == 0
        slot = torch.where(padding, mask.segments + (padding.cumsum(1) - 1) // chunk, seg.long() - 1)
        slot = slot + slots * torch.arange(rows, device=device)[:, None]
        ones = torch.ones_like(slot, dtype=torch.int32).flatten()
        counts = torch.zeros(rows * slots + 1, dtype=torch.int32, device=device)
        return counts.scatter_add(0, slot.flatten() + 1, ones).cumsum(0, dtype=torch.int32)

    return cumulative(mask.q_seg, T), cumulative(mask.k_seg, S)


class FastSelfAttention(SelfAttentionModule):
    """Self-attention computed by the fastest kernel. In beam search, the beams of a source share one KV cache."""

    def forward(
        self, x: Float[Tensor, "B T D"], ctx: Context, state: Cache | BeamCache | None = None
    ) -> Float[Tensor, "B T W"]:
        if not isinstance(state, BeamCache):
            return self.attend_over(x, self.view(ctx.own), ctx, state)
        assert isinstance(ctx.own, BeamView)
        assert ctx.own.beams is not None
        # The tokens of all beams of a source form one batch row, so that the shared keys are never copied.
        together = x.unflatten(0, (-1, state.beams)).flatten(1, 2)
        return self.attend_over(together, self.view(ctx.own.beams), ctx, state).reshape(*x.shape[:2], -1)

    def attend_over(
        self, x: Float[Tensor, "B T D"], view: View, ctx: Context, state: Cache | BeamCache | None
    ) -> Float[Tensor, "B T W"]:
        """Return self-attention of the tokens in x to each other and to the cached tokens, if a KV cache is given."""
        qkv = self.qkv(x)
        q, k, v = self.split(qkv, view)
        if state is not None:
            k, v, view = state.append(k, v, view)
        if ctx.trace is not None and ctx.trace.wants(self.name, (*q.shape[:3], k.shape[2])):
            ctx.trace.add(self.name, self.weights(q, k, view, state, ctx.trace.rows))
        whole = state is None and has_kernels(x) and self.is_fused(view)
        fused = qkv.unflatten(-1, (3, self.heads, -1)) if whole else None
        y = attend(q, k, v, view, scale=self.scale, dropout=self.dropout if self.training else 0.0, qkv=fused)
        return self.output(merge_heads(y))

    def is_fused(self, view: View) -> bool:
        """Return whether the kernel can read queries, keys and values directly from the fused projection.

        All must have equal shapes, and no rotation, offset or norm may be applied between projection and attention.
        """
        rotated = view.terms is not None and (view.terms.rotation is not None or view.terms.offset is not None)
        unnormed = isinstance(self.query_norm, nn.Identity)
        equal = len(self.widths) == 3 and len(set(self.widths)) == 1  # two widths: a tied projection
        return not rotated and unnormed and self.kv_heads == self.heads and equal

    def weights(self, q: Tensor, k: Tensor, view: View, state: Cache | BeamCache | None, rows: slice | None) -> Tensor:
        """Return the attention weights of every batch row, for the queries `rows`, to be recorded in a trace."""
        weights = attention_weights(q, k, view, self.scale, rows)
        if not isinstance(state, BeamCache):
            return weights
        assert view.mask.k_pos is not None
        return state.apart(weights, view.mask.k_pos)

    def start(self, rows: Rows, ctx: Context) -> Cache | BeamCache:  # type: ignore[reportIncompatibleMethodOverride]
        cache = super().start(rows, ctx)
        # A ring cache is bounded, so each beam keeps its own. A shared cache would store every token.
        return BeamCache(rows) if isinstance(rows, SharedRows) and isinstance(cache, KVCache) else cache


class FastCrossAttention(CrossAttentionModule):
    """Cross-attention computed by the fastest kernel."""

    attend = staticmethod(attend)


class FastLinformer(LinformerModule):
    """Linformer attention (to linear combinations of keys and values), computed by the fastest kernel."""

    attend = staticmethod(attend)


class FastParameterFreeAttention(ParameterFreeAttentionModule):
    """Self-attention without parameters, computed by the fastest kernel."""

    attend = staticmethod(attend)


class FastCompressedAttention(CompressedAttentionModule):
    """Memory-compressed attention computed by the fastest kernel, without a T x S mask if groups are regular.

    Let c be the stride. Let s be 1 if the attention is inclusive, and otherwise 0. In a causal row with a sink, the
    query at position i = c * m - s + r, with 0 <= r < c, attends to the first m + 1 keys. For a fixed r, this is causal
    attention with one query per group. So each head is split into c heads, one for each r, with T / c queries and keys.
    """

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S V"],
        view: View,
        *,
        scale: float,
        dropout: float = 0.0,
    ) -> Float[Tensor, "B H T V"]:
        if not self.is_regular(view):
            return attend(q, k, v, view, scale=scale, dropout=dropout)
        c, H, early = self.stride, q.shape[1], int(self.inclusive)
        q = F.pad(q, (0, 0, early, view.S * c - view.T - early))
        q = q.unflatten(2, (view.S, c)).transpose(2, 3).flatten(1, 2)  # (B, H * c, S, K)
        k, v = repeat_heads(k, H * c), repeat_heads(v, H * c)
        causal = cached(view.shared, "causal groups", lambda: View(Mask(causal=True), view.S, view.S, view.device))
        y = attend(q, k, v, causal, scale=scale, dropout=dropout)
        y = y.unflatten(1, (H, c)).transpose(2, 3).flatten(2, 3)
        return y[:, :, early : early + view.T]

    def is_regular(self, view: View) -> bool:
        """Return whether attention is causal with a sink, and every row is one text with groups of `stride` tokens."""
        mask = view.mask
        whole = mask.start == 0 and mask.q_pos is None and mask.prefix is None and not mask.packed
        keys = -(-(view.T + int(self.inclusive)) // self.stride)
        return mask.causal and whole and self.has_sink and keys == view.S


class FastSynthesizerPlus(SynthesizerPlusModule):
    """Attention with synthesized scores as a bias, computed by the fastest kernel."""

    attend = staticmethod(attend)


class FastProductScore(ProductScoreModule):
    """Dot-product attention of a recurrent decoder, computed by the fastest kernel."""

    attend = staticmethod(attend)


class FastConvS2SAttention(ConvS2SAttention):
    """Attention of a ConvS2S decoder, computed by the fastest kernel."""

    attend = staticmethod(attend)
