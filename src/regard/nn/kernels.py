"""The one door to attention kernels.

A branch says what it wants (`attend`); `choose` picks a kernel that computes exactly that, or refuses with the reason.
A mask and its position terms are lowered to what the kernel takes on first use, and the layers of a stack share that.

An empty row (a query that sees no key) gives a zero context on every kernel.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, NamedTuple, cast, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import flex_attention as flexible

from regard.errors import KernelError, nearest
from regard.nn.core import HALVES, TRITON, View, drop, widen
from regard.nn.pattern import Window

Scale = float | Literal["sqrt", "none"]
SHORT = 512  # tokens of a row or a segment
GRID = 65_535  # programs of a kernel along its second axis, which CUDA limits
_forced: list[str] = []  # what `use` asks for, innermost last; a plain list, because torch.compile can read it


class Call(NamedTuple):
    """What a branch asks of a kernel."""

    q: Float[Tensor, "B H T K"]
    k: Float[Tensor, "B G S K"]
    v: Float[Tensor, "B G S V"]
    view: View
    scale: float
    dropout: float
    joint: Float[Tensor, "B T 3 H K"] | None = None  # q, k and v, where they lie side by side


def factor(scale: Scale, d_head: int) -> float:
    """What scores are multiplied by: 1 / sqrt(d_head), 1, or a number."""
    if scale == "sqrt":
        return 1.0 / math.sqrt(d_head)
    return 1.0 if scale == "none" else float(scale)


@contextmanager
def use(name: str) -> Iterator[None]:
    """Force a kernel inside the block, in all threads: for tests, for double precision, for comparisons."""
    if name not in KERNELS:
        raise KernelError(f"unknown kernel {name!r}; {nearest(name, KERNELS)}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def forced() -> str | None:
    """What `use` asks for here."""
    return _forced[-1] if _forced else None


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    view: View,
    *,
    scale: float,
    dropout: float = 0.0,
    joint: Float[Tensor, "B T 3 H K"] | None = None,
) -> Float[Tensor, "B H T V"]:
    """softmax(scale * q k' + terms, over visible keys) v, with dropout on the weights.

    `joint` is said by who has q, k and v side by side and changed nothing in them: a kernel may take them together.
    """
    call = Call(q, k, v, view, scale, dropout, joint)
    return KERNELS[choose(call)](call)


def choose(call: Call) -> str:
    """The kernel for this call: the forced one, or the fastest that can compute it. Refuses, never approximates."""
    asked = forced()
    if asked is not None:
        reason = refusal(asked, call)
        if reason is not None:
            raise KernelError(f"kernel {asked!r} refused: {reason}")
        return asked
    terms = call.view.terms
    if terms is not None and terms.context is not None:
        return "reference"
    if call.q.is_cuda and call.view.mask.packed:
        return next((name for name in _for_packed(call.view) if refusal(name, call) is None), "sdpa")
    return "sdpa"


def _for_packed(view: View) -> tuple[str, ...]:
    """The kernels for packed rows on CUDA, fastest first.

    A varlen kernel works in blocks of 128 queries, of which a sentence of 26 tokens fills a fifth; in short rows even
    a dense mask is cheaper.
    """
    if view.T <= SHORT:
        return ("segments",)
    longest = view.mask.longest or view.T
    return ("segments", "varlen", "flex") if longest <= SHORT else ("varlen", "segments", "flex")


def refusal(name: str, call: Call) -> str | None:  # noqa: PLR0911  # one return per reason reads best
    """Why kernel `name` cannot compute this call exactly, or None if it can."""
    if name == "reference":
        return None
    q, v, view, terms = call.q, call.v, call.view, call.view.terms
    if terms is not None and terms.context is not None:
        return "position terms that act on the values need the weights themselves; use 'reference'"
    if name == "sdpa":
        return None
    if name == "segments":
        return _no_segments(call)
    if call.dropout > 0.0:
        return f"{name} has no attention dropout; set attention_dropout=0 or use 'sdpa'"
    if name == "flex":
        if terms is not None and terms.content is not None:
            return "content terms are not lowered for flex; use 'sdpa' or 'reference'"
        if not q.is_cuda and torch.is_grad_enabled() and (q.requires_grad or v.requires_grad):
            return "flex has no backward pass on the CPU; use 'sdpa'"
        return None
    mask = view.mask
    if not q.is_cuda or q.dtype not in HALVES:
        return f"varlen needs CUDA and half precision, not {q.device.type} and {q.dtype}; use 'sdpa'"
    if terms is not None and (terms.bias is not None or terms.content is not None):
        return "varlen takes no bias; use 'flex' or 'sdpa'"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"varlen needs d_k = d_v, a multiple of 8 up to 256, not {q.shape[-1]} and {v.shape[-1]}"
    if mask.strict or mask.prefix is not None or mask.shown is not None:
        return "varlen knows no strict or prefix mask, nor one of beams; use 'flex' or 'sdpa'"
    if mask.causal and (mask.start or view.T != view.S):
        return "varlen is causal over whole sequences only, not over a cache; use 'sdpa'"
    if mask.attention_pattern is not None and not isinstance(mask.attention_pattern, Window):
        return f"varlen knows windows only, not {mask.attention_pattern.kind}; use 'flex' or 'sdpa'"
    return None


def _no_segments(call: Call) -> str | None:  # noqa: PLR0911  # one return per reason reads best
    """Why the kernel of segments cannot compute this call."""
    q, v, view, mask, terms = call.q, call.v, call.view, call.view.mask, call.view.terms
    if not TRITON:
        return "Triton is not installed; use 'sdpa'"
    if not q.is_cuda or q.dtype != torch.bfloat16:  # GPUs without it are also without Triton
        return f"segments needs CUDA and bfloat16, not {q.device.type} and {q.dtype}; use 'sdpa'"
    if not mask.packed or mask.q_seg is None or mask.k_seg is None:
        return "segments is for packed rows; use 'sdpa'"
    if terms is not None and (terms.bias is not None or terms.content is not None):
        return "segments takes no bias; use 'flex' or 'sdpa'"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] not in (16, 32, 64, 128):
        return f"segments needs d_k = d_v of 16, 32, 64 or 128, not {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[0] * q.shape[1] > GRID:
        return f"segments takes at most {GRID:,} rows times heads, not {q.shape[0]} * {q.shape[1]}; use 'sdpa'"
    if mask.strict or mask.prefix is not None or mask.shown is not None or mask.attention_pattern is not None:
        return "segments knows no strict, prefix or sparse mask, nor one of beams; use 'flex' or 'sdpa'"
    if mask.causal and (mask.start or view.T != view.S):
        return "segments is causal over whole rows only, not over a cache; use 'sdpa'"
    return None


def once(made: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """`make()`, remembered on a view: the layers of a stack lower their mask once."""
    if key not in made:
        made[key] = make()
    return made[key]


def visible(view: View) -> Tensor | None:
    """The dense visibility (b, 1, t, S), or None if every key is visible."""
    return once(view.shared, "dense", lambda: view.mask.dense(view.T, view.S, view.device))


def additive(view: View, dtype: torch.dtype) -> Tensor | None:
    """Bias and mask as one tensor to be added to the scores, or None if there is nothing to add."""
    return once(view.lowered, ("additive", dtype), lambda: _additive(view, dtype))


def _additive(view: View, dtype: torch.dtype) -> Tensor | None:
    seen = visible(view)
    bias = None if view.terms is None else view.terms.bias
    if bias is not None:
        bias = bias.to(dtype)
        return bias if seen is None else bias.masked_fill(~seen, -torch.inf)
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def sdpa(call: Call) -> Float[Tensor, "B H T V"]:
    """torch's scaled_dot_product_attention; the default everywhere."""
    q, k, v, view, scale, dropout, _ = call
    terms, plain = view.terms, view.mask.is_plain(view.T, view.S)
    if terms is not None and terms.content is not None:
        rest = additive(view, q.dtype)
        scores = terms.content(q) * scale
        mask, plain = (scores if rest is None else scores + rest), False
    elif terms is not None and terms.bias is not None:
        mask, plain = additive(view, q.dtype), False
    elif plain:
        mask = None
    else:  # a kernel would make numbers of the truth values anew in every layer
        numbers = q.is_cuda or (q.is_cpu and not torch.is_grad_enabled())
        mask = additive(view, q.dtype) if numbers else visible(view)
    # On a CPU an empty row comes out as zeros; CUDA kernels disagree, and some give NaN gradients. There it sees all.
    empty = once(view.shared, "empty", lambda: _empty(view)) if q.is_cuda and view.mask.may_hide_all() else None
    if empty is not None and mask is not None:
        kept = (
            view.lowered if terms is None or terms.content is None else {}
        )  # scores of content are those of one layer
        mask = once(kept, ("seeing", mask.dtype), partial(mask.masked_fill, empty, 0.0))
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout, is_causal=plain, scale=scale, enable_gqa=grouped
    )
    return y if empty is None else y.masked_fill(empty, 0.0)


def _empty(view: View) -> Tensor:
    seen = visible(view)
    assert seen is not None
    return ~seen.any(-1, keepdim=True)


def reference(call: Call) -> Float[Tensor, "B H T V"]:
    """The formula, step by step: any mask, any term, any precision."""
    q, k, v, view, scale, dropout, _ = call
    return mix(scores(q, k, view, scale), v, view, dropout=dropout)


def scores(q: Tensor, k: Tensor, view: View, scale: float) -> Float[Tensor, "B H T S"]:
    """scale * (q k' + content term), before bias and mask."""
    raw = q @ spread(k, q.shape[1]).transpose(-1, -2)
    if view.terms is not None and view.terms.content is not None:
        raw = raw + view.terms.content(q)
    return raw * scale


def mix(
    scores: Float[Tensor, "B H T S"], v: Float[Tensor, "B G S V"], view: View, *, dropout: float = 0.0
) -> Float[Tensor, "B H T V"]:
    """softmax(scores + bias, over visible keys) v, for branches whose scores are not q k'."""
    weights = drop(normalise(scores, view), dropout, True)
    context = weights.to(v.dtype) @ spread(v, scores.shape[1])
    if view.terms is not None and view.terms.context is not None:
        context = context + view.terms.context(weights).to(v.dtype)
    return context


def normalise(scores: Float[Tensor, "B H T S"], view: View) -> Float[Tensor, "B H T S"]:
    """Softmax in at least float32; a row without visible keys gets zeros."""
    wide = widen(scores)
    rest = additive(view, wide.dtype)
    if rest is None:
        return wide.softmax(-1)
    wide = wide + rest
    top = wide.amax(-1, keepdim=True)
    weights = (wide - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0.0, 1.0)


def attention_weights(q: Tensor, k: Tensor, view: View, scale: float) -> Float[Tensor, "B H T S"]:
    """The weights that `attend` uses and does not show: computed beside it for a trace."""
    with torch.no_grad():
        return normalise(scores(q, k, view, scale), view)


def spread(k: Float[Tensor, "B G S K"], heads: int) -> Float[Tensor, "B H S K"]:
    """Key-value heads repeated for the query heads that share them."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)


def flex(call: Call) -> Float[Tensor, "B H T V"]:
    """FlexAttention: the mask as blocks, the bias as a score function. Compiled on CUDA, explicit on the CPU."""
    q, k, v, view, scale, *_ = call
    block_mask = once(view.shared, ("blocks", q.shape[0]), lambda: _blocks(view, q.shape[0]))
    score_mod = None if view.terms is None or view.terms.bias is None else _added(view, view.terms.bias.to(q.dtype))
    kernel = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flexible.flex_attention
    grouped = q.shape[1] != k.shape[1]
    return kernel(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=grouped)


def _added(view: View, bias: Tensor) -> Callable[..., Tensor]:
    per_row = bias.shape[0] > 1
    bias = once(view.lowered, ("bias", bias.dtype), bias.contiguous)

    @no_type_check  # FlexAttention counts the arguments, which a checking wrapper would hide
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b if per_row else 0, h, i, j]

    return score_mod


def _blocks(view: View, rows: int) -> flexible.BlockMask:
    predicate = view.mask.predicate(view.T, view.S, view.device)
    return flexible.create_block_mask(predicate, rows, None, view.T, view.S, device=view.device)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flexible.flex_attention, dynamic=False)


def varlen(call: Call) -> Float[Tensor, "B H T V"]:
    """Flash attention over segments laid end to end: packed rows cost what their segments cost."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  # needs a CUDA build on some versions

    q, k, v, view, scale, *_ = call
    B, H, T, _ = q.shape
    mask = view.mask
    q_ends, k_ends, hidden = once(view.shared, ("lengths", B), lambda: _lengths(view, B))
    far = -1 if mask.attention_pattern is None else mask.attention_pattern.size - 1  # type: ignore[reportAttributeAccessIssue]
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, spread(k, H), spread(v, H)))  # (B*T, H, K)
    y = varlen_attn(
        flat_q,
        flat_k,
        flat_v,
        q_ends,
        k_ends,
        mask.longest or T,
        mask.longest or view.S,
        scale=scale,
        window_size=(far, 0 if mask.causal else far),
    )
    y = cast(Tensor, y).unflatten(0, (B, T))  # a tuple only when asked for
    # Padded queries see the padded keys of their row here, and nothing by definition.
    return (y if hidden is None else y.masked_fill(hidden, 0.0)).transpose(1, 2)


def segments(call: Call) -> Float[Tensor, "B H T V"]:
    """Our own kernel for packed rows: no mask is made, and dropout costs next to nothing."""
    from regard.nn import segments as own  # noqa: PLC0415  # needs Triton

    q, k, v, view, scale, dropout, joint = call
    mask, H = view.mask, q.shape[1]
    assert mask.q_seg is not None
    assert mask.k_seg is not None
    # Positions count along a segment, so that within one the order of the places is that of the positions.
    layout = once(view.shared, "layout", partial(own.lay_out, mask.q_seg, mask.k_seg, mask.causal))
    return own.attend(q, spread(k, H), spread(v, H), layout, scale, dropout, joint)


def _lengths(view: View, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    q_ends, k_ends = view.mask.lengths(view.T, view.S, rows, view.device)
    hidden = None if view.mask.q_seg is None else (view.mask.q_seg == 0)[:, :, None, None]
    return q_ends, k_ends, hidden


KERNELS: dict[str, Callable[[Call], Tensor]] = {
    "sdpa": sdpa,
    "segments": segments,
    "varlen": varlen,
    "flex": flex,
    "reference": reference,
}
