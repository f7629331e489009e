"""The attention weights and hidden states that a trained model computes for one text, with the tokens of the text."""

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


def attention(run: "TrainedModel", text: str, target: str | None = None) -> Attention:
    """Return the attention weights for a text; see `TrainedModel.attention`."""
    batch, tokens, lengths = _batch(run, text, target)
    weights = {
        kind: [_cut(layer[0], (-2,) if kind.endswith(".mixtures") else (-2, -1), batch, lengths) for layer in layers]
        for kind, layers in record.attention(run.model, batch).items()
    }
    return Attention(tokens, weights)


def hidden_states(run: "TrainedModel", text: str, target: str | None = None) -> HiddenStates:
    """Return the hidden states for a text; see `TrainedModel.hidden_states`."""
    batch, tokens, lengths = _batch(run, text, target)
    states = {
        side: [_cut(layer[0], (-2,), batch, lengths) for layer in layers]
        for side, layers in record.hidden_states(run.model, batch).items()
    }
    return HiddenStates(tokens, states)


def _batch(run: "TrainedModel", text: str, target: str | None) -> tuple[Batch, Tokens, dict[str, int]]:
    """Return the batch for one text, its tokens, and the numbers of source and target tokens."""
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
    """Return `x` without the padding at the end of each dimension in `dims`."""
    full = {batch.target.shape[1]: lengths["target"]}
    if batch.source is not None:
        full |= {batch.source.shape[1]: lengths["source"]}
    for dim in dims:
        x = x.narrow(dim, 0, full.get(x.shape[dim], x.shape[dim]))
    return x
