"""Scaled dot-product attention under a mask: softmax(scale * q k' + bias) v. `regard.fast` has faster kernels."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.nn.mask import View
from regard.nn.position.base import add_bias


def split_heads(x: Float[Tensor, "B T W"], heads: int) -> Float[Tensor, "B H T K"]:
    """Split the channels into heads: (B, T, H * K) -> (B, H, T, K)."""
    B, T, W = x.shape
    return x.view(B, T, heads, W // heads).transpose(1, 2)


def merge_heads(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B T W"]:
    """Concatenate the heads: (B, H, T, K) -> (B, T, H * K)."""
    return x.transpose(1, 2).flatten(2)


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    view: View,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T V"]:
    """Return softmax(scale * q k' + bias) v, with the softmax over visible keys and dropout on its weights."""
    return mix(scores(q, k, view, scale), v, view, dropout=dropout)


def scores(q: Tensor, k: Tensor, view: View, scale: float) -> Float[Tensor, "B H T S"]:
    """Return the scores scale * (q k' + query-dependent position scores), before position bias and mask."""
    raw = q @ repeat_heads(k, q.shape[1]).transpose(-1, -2)
    if view.terms is not None and view.terms.content is not None:
        raw = raw + view.terms.content(q)
    return raw * scale


def mix(
    scores: Float[Tensor, "B H T S"], v: Float[Tensor, "B G S V"], view: View, *, dropout: float = 0.0
) -> Float[Tensor, "B H T V"]:
    """Return softmax(scores + bias) v, with the softmax over visible keys and dropout on its weights."""
    weights = F.dropout(softmax(scores, view), dropout)
    context = weights.to(v.dtype) @ repeat_heads(v, scores.shape[1])
    if view.terms is not None and view.terms.context is not None:
        context = context + view.terms.context(weights).to(v.dtype)
    return context


def softmax(scores: Float[Tensor, "B H T S"], view: View) -> Float[Tensor, "B H T S"]:
    """Return the softmax of scores + bias over visible keys, in at least float32. If none is visible, return zeros."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if view.terms is not None:
        wide = add_bias(wide, view)
    mask = visible(view)
    if mask is None:
        return wide.softmax(-1)
    wide = wide.masked_fill(~mask, -torch.inf)
    top = wide.amax(-1, keepdim=True)
    weights = (wide - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0.0, 1.0)


def active(rate: float, training: bool) -> float:
    """Return the dropout rate to apply: `rate` in training, 0 in evaluation."""
    return rate if training else 0.0


def repeat_heads(k: Float[Tensor, "B G S K"], heads: int) -> Float[Tensor, "B H S K"]:
    """Repeat each key-value head for all query heads that share it (grouped-query attention)."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)


def visible(view: View) -> Tensor | None:
    """Return the mask as a tensor (b, 1, t, S) that is True for visible keys, or None if all keys are visible."""
    return cached(view.shared, "dense", lambda: view.mask.dense(view.T, view.S, view.device))


def cached(cache: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return cache[key]. If the key is missing, store the result of `make()` first."""
    if key not in cache:
        cache[key] = make()
    return cache[key]
