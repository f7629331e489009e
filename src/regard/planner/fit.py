"""Fit a model and its batches to a text: vocabulary sizes, number of classes, maximum length, packing."""

from typing import Any

from regard.data.batching import Batching, Buckets, Packing
from regard.data.objectives import Objective
from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.models.baselines.bytenet import ByteNet
from regard.models.baselines.convs2s import ConvS2S
from regard.models.baselines.rnn import Recurrent
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, SentenceClassifier
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.synthesizer import Synthesizer
from regard.nn.position.additive import Learned
from regard.nn.stacks.base import StackSpec
from regard.tree import get_at, leaves, walk


def packs(model: ModelSpec, objective: Objective) -> bool:
    """Return whether texts can be packed. They cannot if texts have labels, or if the model shortens or mixes rows."""
    if not objective.packs or objective.stream:
        return False
    parts = list(walk(model))
    shortened = any(isinstance(part, StackSpec) and part.shortens for part in parts)
    return not shortened and all(part.packs for part in parts if isinstance(part, BranchSpec | ModelSpec))


def packed(batching: Batching, longest: int) -> Packing:
    """Return packed batching with the batch size of `batching`. A row is long enough for `longest` tokens."""
    tokens, length = getattr(batching, "tokens", None) or 0, max(128, -(-longest // 8) * 8)
    return Packing(max(tokens, length), length)


def padded(batching: Batching) -> Batching:
    """Return padded batching with the batch size of `batching`, one example per row, for evaluation."""
    return Buckets(getattr(batching, "tokens", None))


def fitted(
    model: ModelSpec, objective: Objective, vocabulary: dict[str, int], longest: int, joint: bool = True
) -> dict[str, Any]:
    """Return edits (path -> value) that fit a model to the vocabulary sizes, the labels and the longest text.

    `joint` is true if source and target have the same tokenizer. Otherwise source and target have separate embedding
    tables, even if the vocabularies have the same size.
    """
    source, target = vocabulary.get("source"), vocabulary.get("target")
    changes: dict[str, Any] = {"vocab": next(iter(vocabulary.values()))} if vocabulary else {}
    if isinstance(model, DecoderOnlyTranslator) and not joint:
        raise SpecError("kind", "a decoder-only translator has a single tokenizer; leave data.joint at true")
    if isinstance(model, EncoderDecoder | ConvS2S | ByteNet | Recurrent) and (source != target or not joint):
        changes["target_vocab"] = target
        changes["sharing.source_target"] = False
    if isinstance(model, EncoderOnly) and objective.labelled:
        classes = len(objective.labels)
        if isinstance(model.task, SentenceClassifier):
            changes["task.classes"] = classes
        else:
            changes["task"] = {"kind": "sentence_classifier", "classes": classes}
    changes |= objective.model_changes()
    longest = 2 * longest if isinstance(model, DecoderOnlyTranslator) else longest
    if isinstance(getattr(getattr(model, "input", None), "position", None), Learned):
        changes["input.position.max_len"] = longest
    for path, value in leaves(model):
        holder = path.removesuffix(".max_len")
        if holder != path and isinstance(get_at(model, holder), Synthesizer | Linformer) and value < longest:
            changes[path] = longest
    return changes
