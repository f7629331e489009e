"""A recording as a dict for JSON, and as one screen of text."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.inspection.predictions import Prediction

if TYPE_CHECKING:
    from regard.inspection.recording import Recording, Routing

DIGITS = 4  # significant digits of numbers in JSON
WIDTH = 80


def as_record(recording: "Recording", states: bool) -> dict[str, Any]:
    """Return a recording as a dict of lists, numbers and strings, with hidden states if `states`."""
    made: dict[str, Any] = {
        "tokens": {side: list(tokens) for side, tokens in recording.tokens.items()},
        "words": {side: list(words) for side, words in recording.words.items()},
        "ids": {side: list(ids) for side, ids in recording.ids.items()},
        "layers": {kind: list(numbers) for kind, numbers in recording.layers.items()},
        "queries": {kind: list(found) for kind, found in recording.queries.items()},
        "attention": {kind: [rounded(x) for x in layers] for kind, layers in recording.attention.items()},
        "routing": {kind: [_routing(x) for x in layers] for kind, layers in recording.routing.items()},
        "norms": {side: [rounded(x) for x in layers] for side, layers in recording.norms.items()},
        "predictions": [_prediction(x) for x in recording.predictions],
        "logit_lens": [
            {"layer": layer.layer, "predictions": [_prediction(x) for x in layer.predictions]}
            for layer in recording.logit_lens
        ],
        "notes": list(recording.notes),
    }
    if states:
        made["states"] = {side: [rounded(x) for x in layers] for side, layers in recording.states.items()}
    return made


def rounded(x: Any) -> Any:
    """Return numbers, or a tensor as nested lists, rounded to 4 significant digits."""
    if isinstance(x, Tensor):
        return rounded(x.detach().double().tolist())
    if isinstance(x, list):
        return [rounded(each) for each in x]
    return float(f"{x:.{DIGITS}g}")


def _routing(routing: "Routing") -> dict[str, Any]:
    return {"chosen": routing.chosen.tolist(), "weights": rounded(routing.weights), "total": routing.total}


def _prediction(prediction: Prediction) -> dict[str, Any]:
    probability = prediction.probability
    return {
        "position": prediction.position,
        "id": prediction.id,
        "token": prediction.token,
        "probability": None if probability is None else rounded(probability),
        "rank": prediction.rank,
        "alternatives": [[id_, token, rounded(p)] for id_, token, p in prediction.alternatives],
    }


def described(recording: "Recording") -> str:
    """Return one line for each part of a recording, with its sizes."""
    lines = {f"{side} tokens": f"{len(names)}: {' '.join(names)}" for side, names in recording.tokens.items()}
    for kind, layers in recording.attention.items():
        lines[kind] = f"{_layers(layers)} of {_sizes(layers[-1])} (heads x queries x keys)"
    if not recording.attention:
        lines["attention"] = "none"
    for kind, routes in recording.routing.items():
        lines[kind] = f"{_layers(routes)}, {routes[-1].chosen.shape[-1]} of {routes[-1].total} per token and head"
    for side, layers in recording.states.items():
        lines[f"{side} states"] = f"{len(layers)} of {_sizes(layers[-1])} (tokens x width)"
    known = [p.probability for p in recording.predictions if p.probability is not None]
    if known:
        lines["predictions"] = f"{len(recording.predictions)}, mean probability {sum(known) / len(known):.3f}"
    if recording.logit_lens:
        lines["logit lens"] = f"{len(recording.logit_lens)} layers"
    lines |= {f"note {number}": note for number, note in enumerate(recording.notes, start=1)}
    return "\n".join(["Recording", *(_cut(f"  {name:<17} {text}") for name, text in lines.items())])


def _layers(layers: Any) -> str:
    return f"{len(layers)} layer{'s' * (len(layers) != 1)}"


def _sizes(x: Tensor) -> str:
    return " x ".join(map(str, x.shape))


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
