"""Scaled dot-product attention under a mask: softmax(scale q k' + bias) v.

Every attention of the package goes through `attend`, by torch's kernel ("sdpa") or by the formula itself ("reference").
`regard.fast` computes the same with other kernels. A query that sees no key gets a zero context on all of them.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.errors import KernelError, nearest
from regard.nn.mask import View
from regard.nn.precision import widen

Scale = float | Literal["sqrt", "none"]
KERNELS = ("sdpa", "reference")
_forced: list[str] = []  # the kernels that `use` forces, innermost last; a plain list, which torch.compile can read


def split_heads(x: Float[Tensor, "B T W"], heads: int) -> Float[Tensor, "B H T K"]:
    """(B, T, H * K) -> (B, H, T, K)."""
    B, T, W = x.shape
    return x.view(B, T, heads, W // heads).transpose(1, 2)


def merge_heads(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B T W"]:
    """(B, H, T, K) -> (B, T, H * K)."""
    return x.transpose(1, 2).flatten(2)


def factor(scale: Scale, d_head: int) -> float:
    """The factor of the scores: 1 / sqrt(d_head), 1, or a number."""
    return {"sqrt": 1.0 / math.sqrt(d_head), "none": 1.0}[scale] if isinstance(scale, str) else float(scale)


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    view: View,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T V"]:
    """softmax(scale * q k' + terms, over visible keys) v, with dropout on the weights."""
    needs_weights = view.terms is not None and view.terms.context is not None
    if needs_weights or forced() == "reference":
        return mix(scores(q, k, view, scale), v, view, dropout=dropout)
    refuse_unknown(forced(), KERNELS)
    mask, causal = additive_or_visible(q, view, scale)
    empty = once(view.shared, "empty", lambda: empty_rows(view)) if view.mask.may_hide_all() else None
    if empty is not None and mask is not None:  # kernels disagree about a query without keys: let it see all of them
        mask = mask.masked_fill(empty, True if mask.dtype == torch.bool else 0.0)
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return y if empty is None else y.masked_fill(empty, 0.0)


def additive_or_visible(q: Float[Tensor, "B H T K"], view: View, scale: float) -> tuple[Tensor | None, bool]:
    """The mask of torch's kernel, and whether it is the causal one: numbers to add where there is a bias, else bool."""
    terms = view.terms
    if terms is not None and terms.content is not None:
        rest, content = additive(view, q.dtype), terms.content(q) * scale
        return content if rest is None else content + rest, False
    if terms is not None and terms.bias is not None:
        return additive(view, q.dtype), False
    return (None, True) if view.mask.is_causal_only(view.T, view.S) else (visible(view), False)


def scores(q: Tensor, k: Tensor, view: View, scale: float) -> Float[Tensor, "B H T S"]:
    """scale * (q k' + content term), before bias and mask."""
    raw = q @ repeat_heads(k, q.shape[1]).transpose(-1, -2)
    if view.terms is not None and view.terms.content is not None:
        raw = raw + view.terms.content(q)
    return raw * scale


def mix(
    scores: Float[Tensor, "B H T S"], v: Float[Tensor, "B G S V"], view: View, *, dropout: float = 0.0
) -> Float[Tensor, "B H T V"]:
    """softmax(scores + bias, over visible keys) v: the formula, for any mask, term and precision."""
    weights = F.dropout(softmax(scores, view), dropout)
    context = weights.to(v.dtype) @ repeat_heads(v, scores.shape[1])
    if view.terms is not None and view.terms.context is not None:
        context = context + view.terms.context(weights).to(v.dtype)
    return context


def softmax(scores: Float[Tensor, "B H T S"], view: View) -> Float[Tensor, "B H T S"]:
    """Softmax over visible keys in at least float32; a row without visible keys gets zeros."""
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
    """The weights that `attend` applies, computed beside it for a trace."""
    with torch.no_grad():
        return softmax(scores(q, k, view, scale), view)


def repeat_heads(k: Float[Tensor, "B G S K"], heads: int) -> Float[Tensor, "B H S K"]:
    """Key-value heads repeated for the query heads that share them."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)


def once(made: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """`make()`, cached on a view: the layers of a stack turn their mask into a tensor once."""
    if key not in made:
        made[key] = make()
    return made[key]


def visible(view: View) -> Tensor | None:
    """The visibility of every pair (b, 1, t, S), or None if nothing is hidden."""
    return once(view.shared, "dense", lambda: view.mask.dense(view.T, view.S, view.device))


def additive(view: View, dtype: torch.dtype) -> Tensor | None:
    """Bias and mask as one tensor to add to the scores, or None if there is nothing to add."""
    return once(view.lowered, ("additive", dtype), lambda: _additive(view, dtype))


def _additive(view: View, dtype: torch.dtype) -> Tensor | None:
    shown = visible(view)
    bias = None if view.terms is None or view.terms.bias is None else view.terms.bias.to(dtype)
    if shown is None:
        return bias
    added = torch.zeros(shown.shape, dtype=dtype, device=shown.device) if bias is None else bias
    return added.masked_fill(~shown, -torch.inf)


def empty_rows(view: View) -> Tensor:
    """Which queries see no key at all, (b, 1, t, 1)."""
    shown = visible(view)
    assert shown is not None
    return ~shown.any(-1, keepdim=True)


@contextmanager
def use(name: str, known: Collection[str] = KERNELS) -> Iterator[None]:
    """Force a kernel inside the block, in all threads: for tests, double precision and comparisons."""
    if name not in known:
        raise KernelError(f"unknown kernel {name!r}; {nearest(name, known)}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def forced() -> str | None:
    """The kernel that `use` forces here."""
    return _forced[-1] if _forced else None


def refuse_unknown(name: str | None, known: Collection[str]) -> None:
    """Refuse a forced kernel that is not at hand here."""
    if name is not None and name not in known:
        raise KernelError(f"kernel {name!r} is one of regard.fast; call regard.fast.install(model) first")
