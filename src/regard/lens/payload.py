"""The JSON document that the lens page draws: recorded tensors, tokens, predictions, beam tree and positions."""

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.data.tokenizer import Tokenizer
from regard.decoding.stopping import Scoring
from regard.inspection.position_maps import position_maps
from regard.inspection.predictions import Prediction
from regard.inspection.recording import Recording, Routing
from regard.inspection.words import word_indices
from regard.lens.decode import Read, beam_search
from regard.lens.request import LensRequest

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel

SENT = 1_500_000  # numbers of hidden states in one answer
SHOWN = 10  # hypotheses in the table of a beam search
FEWEST, MOST = 32, 96  # positions of the heat maps of position schemes


def payload(
    run: "TrainedModel", request: LensRequest, read: Read, recording: Recording, warnings: Sequence[str]
) -> dict[str, Any]:
    """Return the JSON document for a recording."""
    tokens = {side: _side(recording, side, run) for side in recording.tokens}
    longest = max(map(len, tokens.values()), default=FEWEST)
    states, notes = _states(recording)
    return {
        "task": run.command,
        "text": request.text,
        "attention": {kind: [packed(x) for x in layers] for kind, layers in recording.attention.items()},
        "routing": {kind: [packed(_dense(x)) for x in layers] for kind, layers in recording.routing.items()},
        "states": states,
        "norms": {side: [packed(x) for x in layers] for side, layers in recording.norms.items()},
        "positions": _positions(run, min(MOST, max(FEWEST, longest))),
        "notes": [*warnings, *recording.notes, *notes],
        "tokens": tokens,
    } | (_classes(recording) if run.command == "classify" else _output(run, read, recording, tokens))


def _output(run: "TrainedModel", read: Read, recording: Recording, tokens: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the document about an output: its tokens, predictions, score, logit lens and beam tree.

    Position t of the decoder writes token t of `tokens["output"]`. The first `first` of these were not written by the
    model: they belong to a prompt, or to the source in a model with one sequence.
    """
    tokenizer, predictions = run.tokenizer, recording.predictions
    start = predictions[0].position or 0
    ids = [*recording.ids["decoder"][1 : start + 1], *(p.id for p in predictions if p.id is not None)]
    tokens["output"] = tokens_json(ids, tokenizer)
    first = start + read.before - 1
    log_probs = [math.log(p.probability) for p in predictions[first - start :] if p.probability]
    scoring = (read.search or beam_search(run, None)).scoring
    log_prob = read.best.log_prob if read.best else sum(log_probs)
    source = (
        {"side": "encoder", "to": len(tokens["encoder"])} if "encoder" in tokens else {"side": "decoder", "to": start}
    )
    return {
        "output": tokenizer.decode(list(read.ids)),
        "ids": list(read.ids),
        "ended": read.ended,
        "log_prob": number(log_prob),
        "score": number(read.best.score if read.best else scoring.score(log_prob, len(log_probs))),
        "first": first,
        "source": source if run.command == "translate" else None,
        "predictions": [None] * start + [prediction_json(p, tokenizer) for p in predictions],
        "logit_lens": [
            {
                "layer": each.layer,
                "predictions": [None] * start + [prediction_json(p, tokenizer, 3) for p in each.predictions],
            }
            for each in recording.logit_lens
        ],
        "beam": read.search.beam_size if read.search else None,
        "tree": _tree(read, tokenizer),
        "hypotheses": _hypotheses(read, tokenizer),
        "classes": [],
    }


def _classes(recording: Recording) -> dict[str, Any]:
    """Return the part of the document about the classes of a text."""
    alternatives = recording.predictions[0].alternatives
    classes = [{"label": each.token, "probability": each.probability} for each in alternatives]
    empty = {"predictions": [], "logit_lens": [], "tree": [], "hypotheses": []}
    return empty | {"output": classes[0]["label"], "classes": classes, "first": 0}


def packed(x: Tensor) -> dict[str, Any]:
    """Return a tensor as JSON: its shape, and its values as little-endian float32 in base64."""
    values = x.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4")
    return {"shape": list(x.shape), "data": base64.b64encode(values.tobytes()).decode("ascii")}


def number(value: float) -> float | None:
    """Return a number that JSON can store: None for infinity and NaN."""
    return value if math.isfinite(value) else None


def _side(recording: Recording, side: str, run: "TrainedModel") -> list[dict[str, Any]]:
    """Return the tokens that the encoder or the decoder reads."""
    source = run.tokenizers.get("source", run.tokenizer)
    control = {tokenizer.pad for tokenizer in (source, run.tokenizer)}
    control |= {end for tokenizer in (source, run.tokenizer) for end in (tokenizer.bos, tokenizer.eos)}
    rows = zip(recording.ids[side], recording.tokens[side], recording.words[side], strict=True)
    return [{"id": i, "text": text, "word": word, "special": i in control} for i, text, word in rows]


def tokens_json(ids: Sequence[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the id and the text of every token, the index of its word, and whether it is a control token."""
    rows = zip(ids, tokenizer.tokens(ids), word_indices(tokenizer, ids), strict=True)
    return [{"id": i, "text": text, "word": word, "special": special(i, tokenizer)} for i, text, word in rows]


def special(token: int, tokenizer: Tokenizer) -> bool:
    """Return whether a token is bos, eos or padding."""
    return token in {tokenizer.pad, tokenizer.bos, tokenizer.eos}


def prediction_json(prediction: Prediction, tokenizer: Tokenizer, top: int | None = None) -> dict[str, Any]:
    """Return the probability of the token that is read next, and the `top` most probable tokens."""
    return {
        "id": prediction.id,
        "probability": prediction.probability,
        "rank": prediction.rank,
        "alternatives": [
            {"id": i, "text": text, "special": special(i, tokenizer), "probability": probability}
            for i, text, probability in prediction.alternatives[:top]
        ],
    }


def _scores(read: Read) -> tuple[Scoring, list[float]]:
    """Return the scoring of a search, and the score of every node of its tree, without a coverage penalty."""
    assert read.search is not None
    assert read.tree is not None
    scoring = read.search.scoring
    return scoring, [scoring.score(node.total, node.length) for node in read.tree.nodes]


def _tree(read: Read, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the nodes of a beam tree. `best` marks the nodes of the output."""
    if read.tree is None or read.best is None:
        return []
    _, scores = _scores(read)
    nodes, best = read.tree.nodes, set(read.tree.path(read.ids, read.ended))
    texts = tokenizer.tokens([max(node.token, 0) for node in nodes])
    return [
        {
            "parent": node.parent,
            "id": node.token,
            "text": text,
            "special": special(node.token, tokenizer),
            "probability": math.exp(node.log_prob),
            "log_prob": number(node.total),
            "score": number(score),
            "ended": node.ended,
            "best": i in best,
        }
        for i, (node, text, score) in enumerate(zip(nodes, texts, scores, strict=True))
    ]


def _hypotheses(read: Read, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the output, then the other hypotheses of the search that ended, best first."""
    if read.tree is None or read.best is None:
        return []
    _, scores = _scores(read)
    own = read.tree.path(read.ids, read.ended)[-1:]
    ended = [i for i, node in enumerate(read.tree.nodes) if node.ended and [i] != own]
    made = [
        {
            "text": tokenizer.decode(list(read.ids)),
            "log_prob": number(read.best.log_prob),
            "score": number(read.best.score),
            "ended": read.ended,
        }
    ]
    for i in sorted(ended, key=lambda i: -scores[i])[: SHOWN - 1]:
        text = tokenizer.decode(read.tree.tokens(i))
        made.append(
            {"text": text, "log_prob": number(read.tree.nodes[i].total), "score": number(scores[i]), "ended": True}
        )
    return made


def _states(recording: Recording) -> tuple[dict[str, Any], list[str]]:
    """Return the hidden states, or none and a sentence if they are too many."""
    numbers = sum(x.numel() for layers in recording.states.values() for x in layers)
    if numbers > SENT:
        return {}, [f"the hidden states are left out: {numbers:,} numbers are above the limit of {SENT:,} of the page"]
    return {side: [packed(x) for x in layers] for side, layers in recording.states.items()}, []


def _dense(routing: Routing) -> Tensor:
    """Return the weight of every expert for every token: (T, experts), summed over heads."""
    T = routing.chosen.shape[0]
    dense = routing.weights.new_zeros(T, routing.total)
    return dense.scatter_add(1, routing.chosen.reshape(T, -1), routing.weights.reshape(T, -1))


def _positions(run: "TrainedModel", length: int) -> list[dict[str, Any]]:
    """Return the position schemes of a model for `length` positions."""
    names = ("vectors", "similarity", "bias")
    return [
        {"module": each.module, "scheme": each.scheme}
        | {name: packed(x) for name in names if (x := getattr(each, name)) is not None}
        for each in position_maps(run.model, length)
    ]
