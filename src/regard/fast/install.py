"""Replace modules of a model by faster implementations, as listed in `REPLACEMENTS`, and restore them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.fast import prepacked
from regard.fast.attention import (
    FastCompressedAttention,
    FastConvS2SAttention,
    FastCrossAttention,
    FastLinformer,
    FastParameterFreeAttention,
    FastProductScore,
    FastSelfAttention,
    FastSynthesizerPlus,
)
from regard.fast.beam_cache import shared_rows
from regard.fast.cross_entropy import FusedAdaptiveSoftmax, FusedMixture, FusedSoftmax
from regard.fast.dropout import BitDropout
from regard.fast.encode import LengthGroupedEncoder
from regard.fast.fused import (
    FastLayerNorm,
    FastLectureNorm,
    FastPartialRMSNorm,
    FastRMSNorm,
    FastScaleNorm,
    FastTokens,
    FusedFeedForward,
    FusedPostNorm,
)
from regard.fast.gated_delta import ChunkedGatedDelta
from regard.fast.recurrent import FusedElman, FusedGRU, FusedLSTM
from regard.models.base import Generator
from regard.models.baselines.attention_score import ProductScoreModule
from regard.models.baselines.convs2s import ConvS2SAttention
from regard.models.baselines.weight_norm import NormedRows
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.activation import ACTIVATIONS
from regard.nn.branches.compressed_attention import CompressedAttentionModule
from regard.nn.branches.cross_attention import CrossAttentionModule
from regard.nn.branches.feedforward import FeedForwardModule
from regard.nn.branches.gated_delta import GatedDeltaModule
from regard.nn.branches.linformer import LinformerModule
from regard.nn.branches.parameter_free_attention import ParameterFreeAttentionModule
from regard.nn.branches.self_attention import SelfAttentionModule
from regard.nn.branches.synthesizer import SynthesizerPlusModule
from regard.nn.embedding import TokensModule
from regard.nn.layer_norm import LayerNormModule
from regard.nn.linear import Projection
from regard.nn.recurrent import ElmanModule, GRUModule, LSTMModule
from regard.nn.residual import PostNormModule
from regard.nn.rms_norm import PartialRMSNormModule
from regard.nn.scale_norm import ScaleNormModule
from regard.nn.vocab.adaptive import AdaptiveSoftmaxModule
from regard.nn.vocab.mixture import MixtureOfSoftmaxesModule
from regard.nn.vocab.softmax import SoftmaxModule
from regard.nn.vocab.tables import EmbeddingsModule


class Replacement(NamedTuple):
    """A module class `plain` and its faster replacement `fast`, which has the same parameters."""

    plain: type[nn.Module]
    fast: type[nn.Module]
    applies: Callable[[Any], bool] = lambda _: True


# A new kernel needs a file in regard.fast and a line here.
REPLACEMENTS = (
    Replacement(SelfAttentionModule, FastSelfAttention),
    Replacement(CrossAttentionModule, FastCrossAttention),
    Replacement(LinformerModule, FastLinformer),
    Replacement(ParameterFreeAttentionModule, FastParameterFreeAttention),
    Replacement(CompressedAttentionModule, FastCompressedAttention),
    Replacement(SynthesizerPlusModule, FastSynthesizerPlus),
    Replacement(ProductScoreModule, FastProductScore),
    Replacement(ConvS2SAttention, FastConvS2SAttention),
    Replacement(FeedForwardModule, FusedFeedForward, lambda module: module.activate is ACTIVATIONS["relu"]),
    Replacement(PostNormModule, FusedPostNorm),
    Replacement(nn.LayerNorm, FastLayerNorm),
    Replacement(nn.RMSNorm, FastRMSNorm),
    Replacement(LayerNormModule, FastLectureNorm),
    Replacement(PartialRMSNormModule, FastPartialRMSNorm),
    Replacement(ScaleNormModule, FastScaleNorm),
    Replacement(TokensModule, FastTokens),
    Replacement(nn.Dropout, BitDropout),
    Replacement(ElmanModule, FusedElman),
    Replacement(GRUModule, FusedGRU),
    Replacement(LSTMModule, FusedLSTM),
    Replacement(GatedDeltaModule, ChunkedGatedDelta),
    Replacement(SoftmaxModule, FusedSoftmax),
    Replacement(AdaptiveSoftmaxModule, FusedAdaptiveSoftmax),
    Replacement(MixtureOfSoftmaxesModule, FusedMixture),
    Replacement(EncoderDecoderModel, LengthGroupedEncoder),
)
# Replacements only for weights that are no longer trained.
PREPACKED = (
    Replacement(Projection, prepacked.PrepackedLinear),
    Replacement(EmbeddingsModule, prepacked.PrepackedEmbeddings),
    Replacement(NormedRows, prepacked.CachedRows),
)


def install(
    model: nn.Module, device: torch.device | str | None = None, *, fixed: bool = False, mapped: bool = False
) -> None:
    """Replace modules by faster implementations for `device` (default: the device of the weights), in place.

    Parameters, their names and the spec of the model stay the same. A copy of the model has the faster modules, too.
    Call `install` again after moving the model to another device, or when training of its weights begins or ends.

    If `fixed`, the weights are no longer trained. Weights that every decoding step reads may then be prepacked (copied
    to a faster memory layout). Weights that change nevertheless are prepacked again. If `mapped`, the weights are in a
    memory-mapped file, where torch does not detect a change through `.data`.
    """
    remove(model)
    on = torch.device(device or next((weight.device for weight in model.parameters()), "cpu"))
    for module in model.modules():
        replace(module, REPLACEMENTS)
    if isinstance(model, Generator):
        model.new_rows = shared_rows  # type: ignore[reportAttributeAccessIssue]
        model.device_search = _device_search() if on.type == "cuda" else None
    if fixed and on.type == "cpu" and prepacked.available():
        for module in _read_at_every_step(model):
            replace(module, PREPACKED)
            if isinstance(module, prepacked.Prepacked):
                module.prepacked = prepacked.PrepackedWeight(mapped)
            if isinstance(module, prepacked.CachedRows):
                module.cached = prepacked.CachedProduct()


def remove(model: nn.Module) -> None:
    """Restore the original modules of a model, in place."""
    plain = {fast: plain for plain, fast, _ in (*REPLACEMENTS, *PREPACKED)}
    for module in model.modules():
        if type(module) in plain:
            module.__class__ = plain[type(module)]
            for name in ("prepacked", "cached"):
                module.__dict__.pop(name, None)
    for name in ("new_rows", "device_search"):
        model.__dict__.pop(name, None)


def replace(module: nn.Module, table: Iterable[Replacement]) -> None:
    """Change the class of a module, in place, if `table` has a replacement for it."""
    for plain, fast, applies in table:
        if type(module) is plain and applies(module):
            module.__class__ = fast
            return


def _read_at_every_step(model: nn.Module) -> Iterable[nn.Module]:
    """Yield the modules whose weights every decoding step reads. The encoder is left out, because it runs only once."""
    for name, part in model.named_children():
        if name != "encoder":
            for module in part.modules():
                weight = getattr(module, "weight", getattr(module, "direction", None))
                if isinstance(weight, torch.Tensor) and weight.is_cpu and not weight.is_inference():
                    yield module


def _device_search() -> Any:
    from regard.fast.beam_search import DeviceSearch  # noqa: PLC0415  # needed on a GPU only

    return DeviceSearch
