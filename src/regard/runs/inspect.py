"""Recordings of a trained model for one text: attention, hidden states and predictions, with the tokens of the text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch, require_data
from regard.data.token_store import Table
from regard.errors import DataError, SpecError, nearest
from regard.inference.text import Output
from regard.inspection import render
from regard.inspection.recording import UNKNOWN, Recording, record
from regard.inspection.saving import check_path
from regard.inspection.selection import KINDS, LIMIT
from regard.runs.inference import load_one, load_runs
from regard.runs.options import LoadOptions, accepts
from regard.runs.trained_model import TrainedModel

Tokens = Mapping[str, Sequence[str]]


@dataclass(frozen=True, repr=False)
class Attention:
    """The attention weights for one text: for each kind of attention, one tensor (heads, queries, keys) per layer.

    For example, `weights["decoder.cross"][2]` has the weights of cross-attention in the third layer of the decoder.
    `tokens["encoder"]` and `tokens["decoder"]` are the tokens that the encoder and the decoder read.
    """

    tokens: Tokens
    weights: Mapping[str, Sequence[Tensor]]

    def draw(self, kind: str | None = None, layer: int = -1, head: int | None = None, width: int = 100) -> str:
        """Return the attention matrix of one layer drawn as text, with one row per query and one column per key.

        `kind` is a key of `weights`, by default the last one. If `head` is None, the mean over all heads is drawn. Keys
        that are not tokens, such as the groups of compressed attention, are numbered from 1.
        """
        kind = kind or list(self.weights)[-1]
        if kind not in self.weights:
            raise SpecError("kind", f"there is no {kind!r} attention; {nearest(kind, self.weights)}")
        weights = self.weights[kind][layer]
        side = kind.partition(".")[0]
        matrix = weights.mean(0) if head is None else weights[head]
        keys = self.tokens["encoder" if kind.endswith(".cross") else side]
        if kind.endswith(".mixtures") or matrix.shape[1] != len(keys):  # Linformer, compressed groups
            keys = [str(number + 1) for number in range(matrix.shape[1])]
        return render.terminal(matrix.cpu(), self.tokens[side], keys, width)

    def __repr__(self) -> str:
        sizes = {
            kind: f"{len(layers)} layers of {' x '.join(map(str, layers[-1].shape))} (heads x queries x keys)"
            for kind, layers in self.weights.items()
        }
        return _described("Attention", self.tokens, sizes or {"weights": "none: the model has no attention"})


@dataclass(frozen=True, repr=False)
class HiddenStates:
    """The hidden states for one text, as lists of tensors of shape (tokens, width), keyed by `encoder` and `decoder`.

    The first tensor in a list is the input of the first layer. The others are the outputs of the layers, in order.
    """

    tokens: Tokens
    states: Mapping[str, Sequence[Tensor]]

    def __repr__(self) -> str:
        sizes = {
            f"{side} states": f"{len(layers)} of {' x '.join(map(str, layers[-1].shape))} (tokens x width)"
            for side, layers in self.states.items()
        }
        return _described("HiddenStates", self.tokens, sizes)


def _described(title: str, tokens: Tokens, sizes: Mapping[str, str]) -> str:
    lines = {**{f"{side} tokens": " ".join(names) for side, names in tokens.items()}, **sizes}
    return "\n".join([title, *(f"  {name:<16} {text}" for name, text in lines.items())])


@accepts(LoadOptions, load_runs)
def inspect(
    run: str | Path | TrainedModel,
    text: str,
    target: str | None = None,
    *,
    top: int = 5,
    keep: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    queries: slice | None = None,
    limit: int = LIMIT,
    **options: Unpack[LoadOptions],
) -> Recording:
    """Return what a model computes for a text: attention, routing, hidden states, predictions and logit lens.

        recording = regard.inspect("runs/mine", "How are you?")
        print(recording.draw("decoder.cross", layer=2, words=True))

    `run` is a run folder, loaded with `options`, or a `TrainedModel`. The decoder of a translation model reads
    `target`, by default the model's own translation of the text. `top` is the number of alternatives at each position.
    `keep` selects parts ("attention", "routing", "states", "norms", "predictions", "logit_lens") or kinds of attention,
    such as "decoder.cross". `layers` selects layers of attention and routing, counted from 0. `queries` selects the
    tokens whose attention is recorded, such as slice(-10, None) for the last 10. By default, everything is recorded. If
    weights and states need more than `limit` bytes, an error is raised before they are allocated.
    """
    loaded = load_one(run, "inspect", **options)
    labels = loaded.objective.labels if loaded.objective.labelled else ()
    chosen: dict[str, Any] = {"top": top, "keep": keep, "layers": layers, "queries": queries, "limit": limit}
    return record(loaded.model, batch_of(loaded, text, target), tokenizers=loaded.tokenizers, labels=labels, **chosen)


@accepts(LoadOptions, load_runs)
def attention(
    run: str | Path | TrainedModel,
    text: str,
    target: str | None = None,
    *,
    kind: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    words: bool = False,
    out: str | Path | None = None,
    **options: Unpack[LoadOptions],
) -> Recording:
    """Return the attention for a text, and write it to the PNG, SVG or JSON file `out` if one is given.

        regard.attention("runs/mine", "How are you?", out="attention.svg")
        print(regard.attention("runs/mine", "How are you?").draw("decoder.cross", layer=2))

    `kind`, such as "decoder.cross", `layer` and `head` (counted from 0) select what is drawn. Without layer and head, a
    picture has a row per layer and a column per head. `words` joins the subwords of each word. The other parameters are
    those of `regard.inspect`.
    """
    if kind is not None and "." not in kind:
        raise SpecError("kind", f"there is no {kind!r} attention; {nearest(kind, KINDS)}")
    if out is not None:
        check_path(Path(out))
    keep, layers = [kind or "attention"], None if layer is None else [layer]
    recording = inspect(run, text, target, keep=keep, layers=layers, **options)
    if not recording.attention:
        raise DataError("this model has no attention; regard.inspect records its states and predictions")
    recording.weights(recording.kind_of(kind), -1 if layer is None else layer, head)  # raises an error if missing
    if out is not None:
        recording.save(out, kind, layer, head, words)
    return recording


def batch_of(run: TrainedModel, text: str, target: str | None = None) -> Batch:
    """Return the batch of one row for a text. A translation model reads `target`, by default its own translation."""
    if run.command == "translate":
        return batch_of_output(run, run.translations(text)[0]) if target is None else run.batch([(text, target)])
    if target is not None:
        raise DataError(f"target: {run.path} reads a single text, and no target; leave it out")
    if run.command == "generate":  # one row, where `run.batch` would make several of a long text
        ids = [*run.begin, *run.tokenizer.encode(text)]
        require_data(bool(ids), "text: is empty; give at least one word")
        return Batch(torch.tensor([ids])).to(run.device)
    table = Table({run.objective.columns[0]: run.objective.inputs([text], run.tokenizers)})
    table = run.objective.limit(table, run.recipe.data.longest).table  # as `run.classify` does
    return run.objective.item(table.columns, [np.zeros(1, np.int64)]).batch.to(run.device)


def batch_of_output(run: TrainedModel, output: Output) -> Batch:
    """Return the batch in which a translation model reads the token ids of its own output, and those of the source."""
    require_data(bool(output.read), "text: is empty, and the model does not read empty texts; give at least one word")
    begin, end = run.tokenizer.bos, run.tokenizer.eos if output.ended else UNKNOWN
    target, labels = torch.tensor([[begin, *output.ids]]), torch.tensor([[*output.ids, end]])
    return Batch(target, labels, source=torch.tensor([output.read])).to(run.device)
