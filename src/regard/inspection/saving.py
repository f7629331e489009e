"""Write a recording to a file: a picture of its attention, or JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import DataError, SpecError
from regard.files import replace_text
from regard.inspection import picture
from regard.inspection.matrix import layer_of

if TYPE_CHECKING:
    from regard.inspection.recording import Recording

FORMATS = (*picture.FORMATS, ".json")


def save(
    recording: "Recording", path: Path, kind: str | None, layer: int | None, head: int | None, words: bool
) -> None:
    """Write a recording to a file; see `Recording.save`."""
    check_path(path)
    if words:
        recording = recording.to_words()
    if path.suffix.lower() == ".json":
        if head is not None:
            raise SpecError("head", "a JSON file has all heads of a layer; leave it out")
        _write_json(_only(recording, kind, layer), path)
        return
    kind = recording.kind_of(kind)
    numbers = recording.layers.get(kind, ()) if layer is None else (layer,)
    found = [(number, layer_of(recording.attention, recording.layers, kind, number)) for number in numbers or (0,)]
    if len(found) == 1 and head is not None:
        matrix = recording.matrix(kind, found[0][0], head)
        weights, title = matrix.weights.cpu(), f"{kind}, layer {found[0][0]}, head {head}"
        picture.heat_map(weights, matrix.rows, matrix.columns, path, title)
        return
    panels = []
    for number, weights in found:
        heads = range(weights.shape[0]) if head is None else (head,)
        each = [(h, recording.matrix(kind, number, h)) for h in heads]
        panels.append([(f"layer {number} head {h}", m.weights.cpu(), m.rows, m.columns) for h, m in each])
    picture.grid(panels, path, kind)


def _only(recording: "Recording", kind: str | None, layer: int | None) -> "Recording":
    """Return the recording with the attention of one kind or layer, if they are given."""
    if kind is None and layer is None:
        return recording
    name = recording.kind_of(kind)
    numbers = recording.layers.get(name, ()) if layer is None else (layer,)
    found = [layer_of(recording.attention, recording.layers, name, number) for number in numbers]
    routing = {each: recording.layers[each] for each in recording.routing}
    return replace(recording, attention={name: found}, layers=routing | {name: list(numbers)})


def check_path(path: Path) -> None:
    """Raise an error if a recording cannot be written to a file of this name."""
    if path.suffix.lower() not in FORMATS:
        raise SpecError("out", f"{path}: the ending must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not path.parent.is_dir():
        raise DataError(f"{path.parent} does not exist; create this folder first")


def _write_json(recording: "Recording", path: Path) -> None:
    try:
        replace_text(path, json.dumps(recording.to_dict(), ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from None
