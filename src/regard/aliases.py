"""Former names of kinds and fields, so that old recipes and runs keep working.

`regard.tree` replaces a former name by its current name when it reads a record or edits a path.
"""

from collections.abc import Mapping
from typing import Any

KINDS = {
    "joined": "decoder_only_translator",
    "from_source": "encoder_state",
    "from_nothing": "constant_state",
}

_OPTIMIZER = {"rate": "learning_rate", "decay": "weight_decay"}
_STACK = {"sight": "attention_pattern"}
_HEAD = {"smoothing": "label_smoothing", "z": "z_loss"}

FIELDS: Mapping[str, Mapping[str, str]] = {
    "adafactor": _OPTIMIZER,
    "adamw": _OPTIMIZER,
    "muon": _OPTIMIZER,
    "plain": _STACK,
    "funnel": _STACK,
    "universal": _STACK,
    "universal_act": _STACK,
    "softmax": _HEAD,
    "adaptive_softmax": _HEAD,
    "mixture_of_softmaxes": _HEAD,
    "sentence_classifier": _HEAD,
    "beam": {"beams": "beam_size"},
    "recurrent_decoder": {"opening": "initial_state", "asks": "query", "feeding": "input_feeding"},
    "recurrent_encoder": {"reading": "direction"},
}

_FORMER_KINDS = {new: old for old, new in KINDS.items()}


def current_kind(kind: str) -> str:
    """Return the current name of a kind."""
    return KINDS.get(kind, kind)


def current_field(kind: str, name: str) -> str:
    """Return the current name of a field, given the kind of the part that has the field."""
    return FIELDS.get(kind, {}).get(name, name)


def former(record: Any) -> Any:
    """Return a copy of a record with the former names of all kinds and fields, so that its hash does not change."""
    if isinstance(record, list):
        return [former(item) for item in record]
    if not isinstance(record, Mapping):
        return record
    kind = record.get("kind")
    old = {new: name for name, new in FIELDS.get(kind, {}).items()} if isinstance(kind, str) else {}
    renamed = {old.get(key, key): former(value) for key, value in record.items()}
    return renamed | {"kind": _FORMER_KINDS.get(kind, kind)} if isinstance(kind, str) else renamed
