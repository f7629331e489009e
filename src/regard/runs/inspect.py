"""What a trained model computes for one text: attention weights and hidden states, with the tokens they belong to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from regard.batch import Batch
from regard.errors import SpecError, nearest
from regard.inspection import record, render

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel

Tokens = Mapping[str, Sequence[str]]


@dataclass(frozen=True, repr=False)
class Attention:
    """The attention weights of one text: of `decoder.cross` in layer 2, `weights["decoder.cross"][2]`, (H, T, S).

    `tokens["encoder"]` and `tokens["decoder"]` name its positions; `repr` lists what there is, `draw` shows a matrix.
    """

    tokens: Tokens
    weights: Mapping[str, Sequence[Tensor]]

    def draw(self, kind: str | None = None, layer: int = -1, head: int | None = None, width: int = 100) -> str:
        """A matrix as text, queries in rows: of one head, or the mean of all; by default of the last kind recorded."""
        kind = kind or list(self.weights)[-1]
        if kind not in self.weights:
            raise SpecError("kind", f"there is no {kind!r} attention; {nearest(kind, self.weights)}")
        weights = self.weights[kind][layer]
        side = kind.partition(".")[0]
        keys = "encoder" if kind.endswith(".cross") else side
        matrix = weights.mean(0) if head is None else weights[head]
        return render.terminal(matrix.cpu(), self.tokens[side], self.tokens[keys], width)

    def __repr__(self) -> str:
        sizes = {
            kind: f"{len(layers)} layers of {' x '.join(map(str, layers[-1].shape))} (heads x queries x keys)"
            for kind, layers in self.weights.items()
        }
        return _described("Attention", self.tokens, sizes or {"weights": "none: the model has no attention"})


@dataclass(frozen=True, repr=False)
class HiddenStates:
    """The hidden states of one text: the input of the first layer, then the output of each, (T, D), by side."""

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


def attention(run: "TrainedModel", text: str, target: str | None = None) -> Attention:
    """The attention weights of a text; a translator's decoder reads `target`, or the translation of the text."""
    batch, tokens, lengths = _batch(run, text, target)
    weights = {
        kind: [_cut(layer[0], (-2, -1), batch, lengths) for layer in layers]
        for kind, layers in record.attention(run.model, batch).items()
    }
    return Attention(tokens, weights)


def hidden_states(run: "TrainedModel", text: str, target: str | None = None) -> HiddenStates:
    """The hidden states of a text; a translator's decoder reads `target`, or the translation of the text."""
    batch, tokens, lengths = _batch(run, text, target)
    states = {
        side: [_cut(layer[0], (-2,), batch, lengths) for layer in layers]
        for side, layers in record.hidden_states(run.model, batch).items()
    }
    return HiddenStates(tokens, states)


def _batch(run: "TrainedModel", text: str, target: str | None) -> tuple[Batch, Tokens, dict[str, int]]:
    """A batch of one row, the names of its tokens by side of the model, and how many of a side are no padding."""
    if run.command == "generate":
        batch = run.batch([text])
    else:
        if run.command == "classify":
            columns = {"text": run.objective.inputs([text], run.tokenizers)}
        else:
            pair = (text, run.translate(text) if target is None else target)
            columns = run.objective.table([pair], run.tokenizers).columns
        batch = run.objective.item(columns, [np.zeros(1, np.int64)]).batch.to(run.device)
    lengths = {"target": _real(batch.target_seg, batch.target)}
    names = run.tokenizer.tokens(batch.target[0, : lengths["target"]].tolist())
    if batch.source is None:
        return batch, {side: names for side in ("encoder", "decoder") if hasattr(run.model, side)}, lengths
    lengths["source"] = _real(batch.source_seg, batch.source)
    tokenizer = run.tokenizers.get("source", run.tokenizer)
    source = tokenizer.tokens(batch.source[0, : lengths["source"]].tolist())
    if hasattr(run.model, "encoder"):
        return batch, {"encoder": source, "decoder": names}, lengths
    return batch, {"decoder": [*source, *names]}, lengths


def _real(segments: Tensor | None, ids: Tensor) -> int:
    return ids.shape[1] if segments is None else int((segments[0] > 0).sum())


def _cut(x: Tensor, dims: Sequence[int], batch: Batch, lengths: Mapping[str, int]) -> Tensor:
    """Without the padding at the end of each of `dims`."""
    full = {batch.target.shape[1]: lengths["target"]}
    if batch.source is not None:
        full |= {batch.source.shape[1]: lengths["source"]}
    for dim in dims:
        x = x.narrow(dim, 0, full.get(x.shape[dim], x.shape[dim]))
    return x
