"""The logit lens: the prediction that the model's head computes from the hidden state of every layer.

Nostalgebraist 2020. The final norm and the head are applied to each layer, as if it were the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from regard.inspection.predictions import Prediction
from regard.models.base import LanguageModel, Model
from regard.models.baselines.bytenet import ByteNetModel
from regard.models.baselines.convs2s import ConvS2SModel
from regard.models.encoder_only import EncoderBody, MaskedLMModel, TokenClassifierModel
from regard.nn.stacks.base import Stack


@dataclass(frozen=True, slots=True)
class LensLayer:
    """Predictions from a hidden state. State 0 is the input of layer 0, state n the output of layer n - 1."""

    layer: int
    predictions: tuple[Prediction, ...]


def head_of(model: Model) -> Callable[[Float[Tensor, "n D"]], Float[Tensor, "n V"]] | None:
    """Return the function from the model's last hidden states to log-probabilities, or None if it has no such head."""
    if isinstance(model, LanguageModel):
        return lambda h: model.head.log_probs(h, model.tables.get("output"))
    if isinstance(model, MaskedLMModel):
        return lambda h: model.head.log_probs(h, model.table())
    if isinstance(model, TokenClassifierModel):
        return lambda h: model.classes(h).log_softmax(-1)
    return None


def readout(model: Model) -> Callable[[Float[Tensor, "B T D"]], Float[Tensor, "B T D"]]:
    """Return the function that the model applies between the output of its last block and the head."""
    if isinstance(model, MaskedLMModel):
        end = _end(model.encoder)
        return lambda x: model.norm(model.activate(model.transform(end(x))))
    if isinstance(model, ByteNetModel):
        return model.norm
    if isinstance(model, ConvS2SModel):
        return model.decoder.leave
    return _end(getattr(model, "decoder", None) or getattr(model, "encoder", None))


def _end(body: nn.Module | None) -> Callable[[Tensor], Tensor]:
    """Return the final norm of a stack, or the identity."""
    stack = body.stack if isinstance(body, EncoderBody) else body
    norm = getattr(stack, "end", None) if isinstance(stack, Stack) else None
    return nn.Identity() if norm is None else norm


def lens_states(
    model: Model, states: Sequence[Float[Tensor, "T _D"]]
) -> tuple[list[tuple[int, Float[Tensor, "T _E"]]], list[str]]:
    """Return (layer, input of the head) for every layer of matching width, and a sentence for each one left out.

    The last of `states` of a stack is the output of its final norm, to which the norm is not applied again.
    """
    normed = isinstance(_stack_of(model), Stack)
    width, between = states[-1].shape[-1], readout(model)
    made, left_out = [], []
    for layer, x in enumerate(states):
        if x.shape[-1] != width:
            name = f"layer {layer - 1}" if layer else "the input of the first layer"
            left_out.append(
                f"the logit lens leaves out {name}, whose width {x.shape[-1]} is not the {width} of the last"
            )
        elif normed and layer == len(states) - 1:
            made.append((layer, _after_stack(model)(x[None])[0]))
        else:
            made.append((layer, between(x[None])[0]))
    return made, left_out


def _stack_of(model: Model) -> nn.Module | None:
    body = getattr(model, "decoder", None) or getattr(model, "encoder", None)
    return body.stack if isinstance(body, EncoderBody) else body


def _after_stack(model: Model) -> Callable[[Tensor], Tensor]:
    """Return what the model applies between the output of the stack, with its final norm, and the head."""
    if isinstance(model, MaskedLMModel):
        return lambda x: model.norm(model.activate(model.transform(x)))
    return nn.Identity()
