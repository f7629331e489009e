"""Scale the outputs of single attention heads of a model, or switch heads off, for as long as a context lasts.

The parameters and the code of the model stay the same: the factors are applied to the input of the output projection
W_o, which is the concatenation of the heads. This holds in one pass and in decoding, and with every attention kernel.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import SpecError, nearest
from regard.models.base import Generator, Model
from regard.models.baselines.attention_score import AttentionScoreModule
from regard.models.baselines.convs2s import ConvS2SAttention
from regard.models.baselines.rnn import CROSS, OWN, RecurrentDecoderModule
from regard.nn.branches.compressed_attention import CompressedAttentionModule
from regard.nn.branches.cross_attention import CrossAttentionModule
from regard.nn.branches.linformer import LinformerModule
from regard.nn.branches.parameter_free_attention import ParameterFreeAttentionModule
from regard.nn.branches.self_attention import SelfAttentionModule
from regard.nn.branches.synthesizer import SynthesizerBranch
from regard.nn.stacks.base import Stack

PROJECTED = (  # attention modules that pass their concatenated heads to the module `output`
    SelfAttentionModule,
    CrossAttentionModule,
    LinformerModule,
    CompressedAttentionModule,
    SynthesizerBranch,
    ConvS2SAttention,
)
SIDES = ("encoder", "decoder")


class Head(NamedTuple):
    """One attention head. `kind` is a key of the recorded attention weights; layers and heads are counted from 0."""

    kind: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.layer}.{self.head}"

    @classmethod
    def parse(cls, text: str) -> "Head":
        """Return the head that a text such as `decoder.cross:2.0` (layer 2, head 0) denotes."""
        kind, _, numbers = text.strip().rpartition(":")
        layer, _, head = numbers.partition(".")
        if not (kind and layer.isdecimal() and head.isdecimal()):
            raise SpecError("heads", f"{text!r} is not a head; write kind:layer.head, such as decoder.cross:2.0")
        return cls(kind, int(layer), int(head))


Factors = Mapping[str, Mapping[tuple[int, int], float] | Float[Tensor, "L H"] | Sequence[Float[Tensor, "*b H"]]]


class AttentionLayer(NamedTuple):
    """An attention layer: one application of an attention module. Layers that share parameters have equal modules."""

    module: nn.Module
    heads: int


def attention_layers(model: Model) -> dict[str, list[AttentionLayer]]:
    """Return the attention layers of a model by kind, in the order in which their weights are recorded.

    Kinds are `encoder.self`, `decoder.self`, `decoder.cross` and `encoder.mixtures`. A model without attention gives
    {}. Linear attention (`gated_delta`) has no attention weights and is not listed.
    """
    layers: dict[str, list[AttentionLayer]] = {}
    for side in SIDES:
        for module in _applied(getattr(model, side, None)):
            if isinstance(module, RecurrentDecoderModule):
                for kind, score in ((CROSS, module.cross), (OWN, module.own)):
                    if score is not None:
                        layers[kind] = [AttentionLayer(score, score.heads)]
            elif isinstance(module, (*PROJECTED, ParameterFreeAttentionModule)):
                layers.setdefault(module.name, []).append(AttentionLayer(module, _heads(module)))
    return layers


def head_counts(model: Model) -> dict[str, list[int]]:
    """Return the number of heads of every attention layer by kind, such as {"encoder.self": [4, 4]}."""
    return {kind: [layer.heads for layer in layers] for kind, layers in attention_layers(model).items()}


def all_heads(model: Model) -> list[Head]:
    """Return every attention head of a model, in order of kind, layer and head."""
    counts = head_counts(model).items()
    return [Head(kind, layer, head) for kind, each in counts for layer, H in enumerate(each) for head in range(H)]


def check_heads(model: Model, heads: Iterable[Head | tuple[str, int, int]]) -> None:
    """Raise a SpecError if the model lacks one of the heads."""
    layers = attention_layers(model)
    for head in heads:
        _check_kind(head[0], layers)
        _check_head(Head(*head), layers[head[0]])


def _check_kind(kind: str, layers: Mapping[str, Sequence[AttentionLayer]]) -> None:
    if kind not in layers:
        known = nearest(kind, layers) if layers else "this model has no attention heads"
        raise SpecError("heads", f"there is no {kind!r} attention; {known}")


def _check_head(head: Head, layers: Sequence[AttentionLayer]) -> None:
    if not (0 <= head.layer < len(layers) and 0 <= head.head < layers[head.layer].heads):
        counts = ", ".join(str(layer.heads) for layer in layers)
        raise SpecError(
            "heads",
            f"there is no head {head}: the numbers of heads of the {len(layers)} layers are {counts}, and layers and "
            "heads are counted from 0",
        )


def switched_off(heads: Iterable[Head | tuple[str, int, int]]) -> Factors:
    """Return factors for `scaled_heads` that switch the given heads off."""
    factors: dict[str, dict[tuple[int, int], float]] = {}
    for kind, layer, head in heads:
        factors.setdefault(kind, {})[layer, head] = 0.0
    return factors


@contextmanager
def scaled_heads(model: Model, factors: Factors) -> Iterator[None]:
    """Context manager that multiplies the outputs of attention heads by factors, before the output projection W_o.

    `factors` has, for each kind of attention, a mapping from (layer, head) to a factor, a tensor (layers, heads), or
    one tensor (heads,) per layer. In one pass, the tensors may be (rows, heads), for factors of each batch row. A
    factor of 0 switches the head off, and a factor of 1 changes nothing. Gradients flow to the tensors. The factors
    apply in one pass and in every kind of decoding; encode and decode a text in the same context. On a GPU, beam
    search runs step by step in the meantime. Contexts can be nested, and their factors are multiplied. At the end, the
    model is as it was before, even after an exception.

    The context changes the modules of this model object: it has no effect on worker processes (`workers=`) and other
    engines (`engine="ctranslate2"`), which have their own copies. Do not use the model in another thread meanwhile.
    """
    layers = attention_layers(model)
    scales = {kind: _per_layer(kind, given, layers) for kind, given in factors.items()}
    with ExitStack() as stack:
        if isinstance(model, Generator):  # captured CUDA graphs would replay decoding steps without the factors
            stack.enter_context(temporary_attribute(model, "device_search", None))
        for kind, each in scales.items():
            for module, heads, own in _by_module(layers[kind], each):
                scale = HeadScale(heads, own)
                stack.enter_context(_applied_to(module, scale))
                stack.callback(_part(model, kind).register_forward_pre_hook(scale.restart).remove)
        yield


class HeadScale:
    """Multiply the heads of an attention module by the factors of the current layer.

    A module whose parameters several layers share is called once per layer in each pass through its stack.
    """

    def __init__(self, heads: int, factors: Sequence[Float[Tensor, "*b H"] | None]) -> None:
        self.heads, self.factors, self.calls = heads, factors, 0

    def restart(self, *_: Any) -> None:
        """Begin a new pass: the next call is that of the first layer."""
        self.calls = 0

    def __call__(self, y: Float[Tensor, "*n W"]) -> Float[Tensor, "*n W"]:
        """Return the concatenated heads `y`, each times its factor."""
        factor = self.factors[self.calls % len(self.factors)]
        self.calls += 1
        if factor is None:
            return y
        factor = factor.to(y.device, y.dtype)[..., None, :, None]  # (..., 1, H, 1)
        return (y.unflatten(-1, (self.heads, -1)) * factor).flatten(-2)

    def of_contexts(self, y: Float[Tensor, "B H T V"]) -> Float[Tensor, "B H T V"]:
        """Return the context vectors `y` of a recurrent decoder, each times the factor of its head."""
        (factor,) = self.factors
        return y if factor is None else y * factor.to(y.device, y.dtype)[..., None, None]


def _applied(part: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the modules of an encoder or decoder in the order of a forward pass; shared layers are repeated."""
    for module in () if part is None else part.modules():
        if isinstance(module, Stack):
            blocks: Any = module.blocks
            plan = getattr(module, "plan", None) or [
                i % len(blocks) for i in range(getattr(module, "calls", len(blocks)))
            ]
            yield from (inner for index in plan for inner in blocks[index].modules())
            return
    yield from () if part is None else part.modules()


def _heads(module: nn.Module) -> int:
    return int(getattr(module, "heads", 1))  # ConvS2S has one head


def _part(model: Model, kind: str) -> nn.Module:
    return getattr(model, kind.partition(".")[0])


def _by_module(
    layers: Sequence[AttentionLayer], factors: Sequence[Tensor | None]
) -> Iterator[tuple[nn.Module, int, list[Tensor | None]]]:
    """Yield each module that has factors, with its number of heads and the factors of all its layers."""
    for module in dict.fromkeys(layer.module for layer in layers):
        own = [factor for layer, factor in zip(layers, factors, strict=True) if layer.module is module]
        if any(factor is not None for factor in own):
            yield module, _heads(module), own


@contextmanager
def _applied_to(module: nn.Module, scale: HeadScale) -> Iterator[None]:
    """Context manager that applies `scale` where the heads of an attention module have been computed."""
    if isinstance(module, AttentionScoreModule):
        before: Callable[..., Tensor] | None = module.__dict__.get("context")

        def context(*args: Any) -> Tensor:
            return scale.of_contexts(before(*args) if before else type(module).context(module, *args))

        with temporary_attribute(module, "context", context):
            yield
        return
    if isinstance(module, ParameterFreeAttentionModule):  # has no W_o
        hook: Any = module.register_forward_hook(lambda *call: scale(call[-1]))
    else:
        hook = module.output.register_forward_pre_hook(lambda _, inputs: (scale(inputs[0]),))  # type: ignore[reportCallIssue]
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def temporary_attribute(owner: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Context manager that sets an attribute of one module, and restores it at the end."""
    attributes = owner.__dict__
    had, before = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            del attributes[name]


def _per_layer(kind: str, given: Any, layers: Mapping[str, Sequence[AttentionLayer]]) -> list[Tensor | None]:
    """Return the factors of every layer of one kind, or None for a layer without factors."""
    _check_kind(kind, layers)
    each = layers[kind]
    if not isinstance(given, Mapping):
        return _checked(kind, list(given), each)
    tensors: list[Tensor | None] = [None] * len(each)
    for (layer, head), factor in given.items():
        _check_head(Head(kind, layer, head), each)
        if not math.isfinite(factor):
            raise SpecError(
                "factors", f"the factor of head {Head(kind, layer, head)} is {factor}; give a finite number"
            )
        tensor = tensors[layer]
        if tensor is None:
            tensor = tensors[layer] = torch.ones(each[layer].heads, dtype=torch.float64)
        tensor[head] = factor
    return tensors


def _checked(kind: str, tensors: list[Any], layers: Sequence[AttentionLayer]) -> list[Tensor | None]:
    shapes = [tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__ for tensor in tensors]
    needed = [(layer.heads,) for layer in layers]
    if [shape[-1:] for shape in shapes] != needed or any(len(shape) > 2 for shape in shapes):
        raise SpecError("factors", f"{kind} needs one factor per layer and head, {needed}, not {shapes}")
    return tensors
