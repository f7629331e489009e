"""Former names of spec kinds, fields and values, which old recipes and runs contain.

`regard.tree` replaces a former name by its current name when it reads a spec from JSON or edits a field of a spec.
"""

from collections.abc import Mapping
from typing import Any

KINDS = {
    "joined": "decoder_only_translator",
    "from_source": "encoder_state",
    "from_nothing": "constant_state",
    "undrawn": "uninitialized",
}

_OPTIMIZER = {"rate": "learning_rate", "decay": "weight_decay"}
_STACK = {"sight": "attention_pattern"}
_HEAD = {"smoothing": "label_smoothing", "z": "z_loss"}
_DECODER_ONLY = {"visibility": "input_attention"}

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
    "decoder_only": _DECODER_ONLY,
    "decoder_only_translator": _DECODER_ONLY,
    "recurrent_decoder": {"opening": "initial_state", "asks": "query", "feeding": "input_feeding"},
    "recurrent_encoder": {"reading": "direction"},
}

# kind of a spec -> field -> former value -> current value
VALUES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "decoder_only": {"input_attention": {"prefix": "full"}},
    "decoder_only_translator": {"input_attention": {"prefix": "full"}},
    "recurrent_decoder": {"input_feeding": {"found": "context"}},
}

_FORMER_KINDS = {new: old for old, new in KINDS.items()}


def current_kind(kind: str) -> str:
    """Return the current name of a kind of spec; `kind` may be a former name."""
    return KINDS.get(kind, kind)


def current_field(kind: str, name: str) -> str:
    """Return the current name of a field, given the kind of the spec; `name` may be a former name."""
    return FIELDS.get(kind, {}).get(name, name)


def current_value(kind: str, field: str, value: Any) -> Any:
    """Return the current form of the value of a field, given the kind of the spec; `value` may be a former value."""
    known = VALUES.get(kind, {}).get(field, {})
    return known.get(value, value) if isinstance(value, str) else value


def former(record: Any) -> Any:
    """Return a JSON value with current names replaced by former names, so that its hash is as in former versions."""
    if isinstance(record, list):
        return [former(item) for item in record]
    if not isinstance(record, Mapping):
        return record
    kind = record.get("kind")
    if not isinstance(kind, str):
        return {key: former(value) for key, value in record.items()}
    old_fields = {new: old for old, new in FIELDS.get(kind, {}).items()}
    old_values = {field: {new: old for old, new in each.items()} for field, each in VALUES.get(kind, {}).items()}
    renamed = {}
    for field, value in record.items():
        values = old_values.get(field, {})
        renamed[old_fields.get(field, field)] = values.get(value, value) if isinstance(value, str) else former(value)
    return renamed | {"kind": _FORMER_KINDS.get(kind, kind)}
