"""Limit the attention of a trained language model to the last tokens, with the same weights."""

from dataclasses import replace

from regard import fast
from regard.errors import SpecError
from regard.models.base import Model, ModelSpec
from regard.models.build import build
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.parameter_free_attention import ParameterFreeAttention
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.pattern import AttentionPattern, Window
from regard.tree import replace_at, swap, walk

WINDOWED = (SelfAttention, ParameterFreeAttention)


def with_weights(spec: ModelSpec, model: Model, plain: bool = False) -> Model:
    """Return a model that is built from `spec`, with a copy of the weights of another model.

    With `plain`, it is the readable form of the model, without the faster kernels of `regard.fast`.
    """
    new = build(spec, init=False)
    new.load_state_dict(model.state_dict())
    new.to(next(model.parameters()).device).eval()
    if not plain:
        fast.install(new)
    return new


def with_window(spec: ModelSpec, size: int) -> ModelSpec:
    """Return the spec of a decoder-only model with the pattern `Window(size)` in every attention layer.

    A layer that has a narrower window already keeps it. Other layers, such as recurrent ones, are not changed.
    """
    attending = [part for part in walk(spec) if isinstance(part, BranchSpec) and part.attends]
    if not attending:
        raise SpecError(
            "--windows", f"this {spec.kind!r} model has no attention that could be limited to a window; leave it out"
        )
    for part in attending:
        if not isinstance(part, WINDOWED):
            raise SpecError(
                "--windows",
                f"{part.kind!r} layers have no attention pattern, so no window can limit them; leave it out",
            )
    stack: AttentionPattern | None = getattr(getattr(spec, "decoder", None), "attention_pattern", None)

    def narrowed(layer: SelfAttention | ParameterFreeAttention) -> SelfAttention | ParameterFreeAttention:
        own = layer.attention_pattern or stack
        if own is not None and not isinstance(own, Window):
            raise SpecError(
                "--windows",
                f"the model has the attention pattern {own.kind!r}, which a window would replace instead of limiting "
                "it; leave it out",
            )
        return replace(layer, attention_pattern=Window(size if own is None else min(size, own.size)))

    if stack is not None:  # a stack pattern that no layer uses is refused
        spec = replace_at(spec, "decoder.attention_pattern", None)
    for kind in WINDOWED:
        spec = swap(spec, kind, narrowed)
    return spec
