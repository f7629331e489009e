"""Everything that one forward pass computes for one text: attention, routing, hidden states and predictions."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import Batch, require_data
from regard.data.tokenizer import Tokenizer
from regard.inspection import render
from regard.inspection.description import as_record, described
from regard.inspection.logit_lens import LensLayer, head_of, lens_states
from regard.inspection.matrix import Axes, Matrix, head_of_layer, layer_of
from regard.inspection.predictions import Prediction, predictions
from regard.inspection.record import evaluation
from regard.inspection.saving import save
from regard.inspection.selection import LIMIT, Budget, Selection, SelectiveTrace
from regard.inspection.sides import Sides, only_row
from regard.inspection.words import joined
from regard.models.base import Classifier, Generator, LanguageModel, Model
from regard.models.encoder_only import MaskedLMModel
from regard.models.hidden_states import recorded_states

UNKNOWN = -1  # label of a token that no token is known to follow
AGREES = 1e-4  # largest difference of probabilities that is rounding


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts, or values of a memory, that one layer chose for each token: K of `total` per head, and weights."""

    chosen: Int[Tensor, "T H K"]
    weights: Float[Tensor, "T H K"]
    total: int


@dataclass(frozen=True, repr=False, eq=False)
class Recording:
    """The recording of one text. Dicts are keyed by "encoder" and "decoder", or by the kind of attention.

    `tokens` and `ids` are what each side reads, and `words` has the index of the word of every token.
    `attention["decoder.cross"][n]` is (heads, queries, keys) of layer `layers["decoder.cross"][n]`.
    `routing["encoder.experts"]` has the chosen experts, and `routing["encoder.memory"]` the chosen product keys.
    `states["decoder"]` are the input of the first layer and the outputs of all layers, and `norms` their L2 norms.
    `predictions` has the distribution of the next token at every position, and `logit_lens` has it for every layer. The
    states of a ByteNet encoder include the positions after the source; a funnel has fewer states than tokens. If only
    some queries are recorded, `queries["decoder.cross"]` is (first, last + 1). `notes` has a sentence for each thing
    that could not be recorded.
    """

    tokens: Mapping[str, Sequence[str]]
    words: Mapping[str, Sequence[int]]
    ids: Mapping[str, Sequence[int]]
    attention: Mapping[str, Sequence[Float[Tensor, "_H _T _S"]]]
    routing: Mapping[str, Sequence[Routing]]
    states: Mapping[str, Sequence[Float[Tensor, "_T _D"]]]
    norms: Mapping[str, Sequence[Float[Tensor, " _T"]]]
    predictions: Sequence[Prediction]
    logit_lens: Sequence[LensLayer]
    layers: Mapping[str, Sequence[int]]
    notes: Sequence[str] = ()
    queries: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def weights(self, kind: str, layer: int = -1, head: int | None = None) -> Float[Tensor, "T S"]:
        """Return the attention weights of one head, or the mean of all heads. Layers and heads are counted from 0."""
        return head_of_layer(layer_of(self.attention, self.layers, kind, layer), head)

    def by_word(self, kind: str, layer: int = -1, head: int | None = None) -> Float[Tensor, "W V"]:
        """Return attention between words: the sum over the subwords of a key, the mean over those of a query."""
        return self.axes.by_word(kind, self.weights(kind, layer, head))

    def matrix(self, kind: str, layer: int = -1, head: int | None = None, words: bool = False) -> Matrix:
        """Return the attention weights of one head (None: the mean of all), with labels, by token or by word."""
        weights = self.weights(kind, layer, head)
        rows, columns = self.axes.labels(kind, weights, words)
        return Matrix(rows, columns, self.axes.by_word(kind, weights) if words else weights)

    @property
    def axes(self) -> Axes:
        """The tokens and words to which the rows and columns of attention matrices belong."""
        return Axes(self.tokens, self.words, self.queries)

    def to_words(self) -> "Recording":
        """Return a recording of the attention between words. Its tokens are words, and it has nothing else."""
        return Recording(
            tokens={side: joined(tokens, self.words[side]) for side, tokens in self.tokens.items()},
            words={side: list(range(words[-1] + 1)) for side, words in self.words.items()},
            ids={},
            attention={k: [self.axes.by_word(k, x) for x in layers] for k, layers in self.attention.items()},
            routing={},
            states={},
            norms={},
            predictions=(),
            logit_lens=(),
            layers={kind: self.layers[kind] for kind in self.attention},
            notes=self.notes,
            queries={kind: self._word_range(kind) for kind in self.queries},
        )

    def _word_range(self, kind: str) -> tuple[int, int]:
        """Return (first, end): the range of the words whose queries are recorded."""
        words = self.words[kind.partition(".")[0]][slice(*self.queries[kind])]
        return words[0], words[-1] + 1

    def draw(
        self, kind: str | None = None, layer: int = -1, head: int | None = None, words: bool = False, width: int = 80
    ) -> str:
        """Return one attention matrix drawn as text, with one row per query and one column per key.

        `kind` is a key of `attention`, by default the last one. If `head` is None, the mean over all heads is drawn.
        """
        found = self.matrix(self.kind_of(kind), layer, head, words)
        return render.terminal(found.weights.cpu(), found.rows, found.columns, width)

    def save(
        self,
        path: str | os.PathLike[str],
        kind: str | None = None,
        layer: int | None = None,
        head: int | None = None,
        words: bool = False,
    ) -> None:
        """Write attention to a PNG or SVG picture, or the recording to a JSON file, depending on the suffix of `path`.

        `kind`, by default the last one, and `layer` select the attention. A picture has one matrix if a layer and a
        head are given, and otherwise a grid: a row per layer, a column per head. Pictures need matplotlib. A JSON file
        has all heads, and if neither kind nor layer is given, all attention.
        """
        save(self, Path(path), kind, layer, head, words)

    def kind_of(self, kind: str | None) -> str:
        """Return the kind of attention, by default the last one that is recorded."""
        return next(iter([*self.attention][-1:]), "") if kind is None else kind

    def to_dict(self, states: bool = False) -> dict[str, Any]:
        """Return the recording as a dict for JSON. Numbers are rounded to 4 significant digits.

        Hidden states are left out, because they are large, unless `states` is True; their norms are in the dict.
        """
        return as_record(self, states)

    def __repr__(self) -> str:
        return described(self)


def record(  # noqa: PLR0913  # the parts of one recording
    model: Model,
    batch: Batch,
    *,
    tokenizers: Mapping[str, Tokenizer] | None = None,
    labels: Sequence[str] = (),
    row: int = 0,
    top: int = 5,
    keep: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    queries: slice | None = None,
    limit: int = LIMIT,
) -> Recording:
    """Return the recording of one row of a batch, without its padding. The outputs of the model do not change.

    `tokenizers` ("source" and "target", or one under any name) convert ids to tokens and words; without them, the ids
    themselves are shown. `labels` are the names of the classes of a classifier. `keep` selects parts: "attention",
    "routing", "states", "norms", "predictions", "logit_lens", or kinds of attention such as "decoder.cross". `layers`
    selects layers of attention and routing, counted from 0. `queries` selects the tokens whose attention is recorded,
    such as slice(-10, None) for the last 10. Above `limit` bytes of weights and states, an error is raised before they
    are allocated.
    """
    require_data(top >= 1, f"top: must be at least 1, not {top}")
    selection = Selection.of(keep, layers, queries)
    one = only_row(batch, row)
    sides = Sides.of(model, one, tokenizers or {}, labels)
    with evaluation(model):
        output, trace, states = _forward(model, one, selection, limit)
        trace.check()
        predicted, lens, notes = _predictions(model, one, output, states, selection, sides, top)
    kept = {side: list(layers) for side, layers in states.items()} if "states" in selection.parts else {}
    norms = {side: [x.norm(dim=-1) for x in layers] for side, layers in states.items()}
    return Recording(
        tokens=sides.tokens,
        words=sides.words,
        ids=sides.ids,
        attention={kind: [weights[0] for weights in layers] for kind, layers in trace.weights.items()},
        routing={k: [Routing(r.chosen[0], r.weights[0], r.total) for r in v] for k, v in trace.routes.items()},
        states=kept,
        norms=norms if "norms" in selection.parts else {},
        predictions=predicted,
        logit_lens=lens,
        layers=trace.layers,
        notes=notes,
        queries=trace.queries,
    )


def _forward(
    model: Model, batch: Batch, selection: Selection, limit: int
) -> tuple[Tensor, SelectiveTrace, dict[str, list[Float[Tensor, "_T _D"]]]]:
    """Run the model once. Return the input of its head (or its scores), the trace, and the hidden states."""
    budget = Budget(limit)
    size = torch.promote_types(next(model.parameters()).dtype, torch.float32).itemsize
    trace = SelectiveTrace(selection, budget, size)

    def claim(x: Tensor, number: int, side: str) -> None:
        budget.claim((number, *x.shape), x.element_size(), f"the hidden states of the {side}")

    call: Callable[..., Tensor] = model.hidden if isinstance(model, LanguageModel | MaskedLMModel) else model
    if not selection.parts & {"states", "norms", "logit_lens"}:
        return call(batch, trace=trace), trace, {}
    with recorded_states(model, claim) as states:
        output = call(batch, trace=trace)
    return output, trace, {side: [x[0] for x in layers] for side, layers in states.items()}


def _predictions(
    model: Model,
    batch: Batch,
    output: Tensor,
    states: Mapping[str, Sequence[Tensor]],
    selection: Selection,
    sides: Sides,
    top: int,
) -> tuple[tuple[Prediction, ...], list[LensLayer], list[str]]:
    """Return the predictions, the logit lens, and the notes on layers that are left out."""
    parts, head = selection.parts & {"predictions", "logit_lens"}, head_of(model)
    if not parts:
        return (), [], []
    if head is None:
        notes = ["the model has no head for every token, so it has no logit lens"] if "logit_lens" in parts else []
        if not isinstance(model, Classifier):
            return (), [], notes
        made = predictions(lambda x: x.log_softmax(-1), output, [int(output[0].argmax())], [None], sides.names, top)
        return (made if "predictions" in parts else ()), [], notes
    side = "decoder" if "decoder" in sides.tokens else "encoder"
    first = len(sides.tokens[side]) - batch.target.shape[1]
    positions = list(range(first, len(sides.tokens[side])))
    following = following_ids(model, batch)
    if isinstance(model, Classifier):
        best = output[0].argmax(-1).tolist()
        made = predictions(lambda x: x.log_softmax(-1), output[0], best, positions, sides.names, top)
    else:
        made = predictions(head, output[0], following, positions, sides.names, top)
    lens, notes = [], []
    if "logit_lens" in parts:
        final = [p.id if p.id is not None else p.alternatives[0].id for p in made]
        inputs, notes = lens_states(model, [x[first:] for x in states[side]])
        lens = [LensLayer(n, predictions(head, x, final, positions, sides.names, top)) for n, x in inputs]
        notes += _difference(made, lens)
    return (made if "predictions" in parts else ()), lens, notes


def following_ids(model: Model, batch: Batch) -> list[int | None]:
    """Return the token that is read after each target position: its label, or else the next token of the target."""
    if batch.labels is not None and batch.labels.dim() == 2:
        return [label if label >= 0 else None for label in batch.labels[0].tolist()]
    if batch.target.is_floating_point():
        return [None] * batch.target.shape[1]
    ids = batch.target[0].tolist()
    return [*ids[1:], None] if isinstance(model, Generator) else ids


def _difference(made: Sequence[Prediction], lens: Sequence[LensLayer]) -> list[str]:
    """Return a note if the last layer of the logit lens is not the prediction of the model."""
    if not lens:
        return []
    last = lens[-1].predictions
    apart = max(
        abs(a.alternatives[0].probability - b.alternatives[0].probability) for a, b in zip(made, last, strict=True)
    )
    if apart <= AGREES:
        return []
    return ["the logit lens of the last layer is not the prediction: the model combines its output with more"]
