"""The JSON document that the lens page draws: recorded tensors, tokens, predictions, beam tree and positions."""

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.data.tokenizer import Tokenizer
from regard.inspection.position_maps import position_maps
from regard.lens.decode import Decoded

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel


def packed(x: Tensor) -> dict[str, Any]:
    """Return a tensor as JSON: its shape, and its values as little-endian float32 in base64."""
    values = x.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4")
    return {"shape": list(x.shape), "data": base64.b64encode(values.tobytes()).decode("ascii")}


def number(value: float) -> float | None:
    """Return a number that JSON can store: None for infinity and NaN."""
    return value if math.isfinite(value) else None


def tokens_json(ids: Sequence[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the id and the text of every token, and the index of the word that it belongs to."""
    control = {tokenizer.pad, tokenizer.bos, tokenizer.eos}
    listed, word, alone = [], -1, True
    for token, text in zip(ids, tokenizer.tokens(ids), strict=True):
        special = token in control
        word += special or alone or tokenizer.starts_word(token)
        alone = special
        listed.append({"id": token, "text": text, "word": word, "special": special})
    return listed


def hypotheses_json(decoded: Decoded, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the hypotheses of a search, best first."""
    return [
        {
            "text": tokenizer.decode(list(each.ids)),
            "ids": list(each.ids),
            "score": number(each.score),
            "log_prob": number(each.log_prob),
            "ended": each.ended,
        }
        for each in decoded.hypotheses
    ]


def tree_json(decoded: Decoded, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the nodes of a beam tree; `rank` is the rank of the finished hypothesis at a node, counted from 0."""
    tree, scoring = decoded.tree, decoded.search.scoring
    paths = [tree.path(each.ids, each.ended) for each in decoded.hypotheses]
    ranks = {path[-1]: rank for rank, path in reversed([*enumerate(paths)]) if path}
    best = set(paths[0]) if paths else set()
    texts = tokenizer.tokens([max(node.token, 0) for node in tree.nodes])
    return [
        {
            "parent": node.parent,
            "id": node.token,
            "special": node.ended,
            "text": text if node.parent is not None else "",
            "probability": math.exp(node.log_prob),
            "log_prob": number(node.total),
            "score": number(scoring.score(node.total, node.length)),
            "ended": node.ended,
            "rank": ranks.get(i),
            "best": i in best,
        }
        for i, (node, text) in enumerate(zip(tree.nodes, texts, strict=True))
    ]


def positions_json(run: "TrainedModel", length: int) -> list[dict[str, Any]]:
    """Return the position schemes of a model for `length` positions."""
    names = ("vectors", "similarity", "bias")
    return [
        {"module": each.module, "scheme": each.scheme}
        | {name: packed(x) for name in names if (x := getattr(each, name)) is not None}
        for each in position_maps(run.model, length)
    ]
