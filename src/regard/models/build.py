"""Build models from specs, count parameters, and check the sizes that all model families have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from regard.errors import SpecError
from regard.models.base import Model, ModelSpec
from regard.nn.checks import MOST_CHANNELS, MOST_HEADS, check_count, check_rate, require
from regard.nn.core import Site
from regard.nn.init import Init, Uninitialized


def build(spec: ModelSpec, device: torch.device | str | None = None, seed: int = 0, init: bool = True) -> Model:
    """Return the model that `spec` describes. The same seed gives the same weights on every device.

    `device="meta"` builds the model without allocating memory, for example to count parameters. `init=False` leaves the
    weights uninitialised, so that other weights can be loaded.
    """
    not_whole = f"{type(spec).__name__} is not the spec of a whole model; use a preset or a model family"
    require(isinstance(spec, ModelSpec), "", not_whole)
    unset = "'uninitialized' leaves the weights uninitialised; to load weights, use build(spec, init=False)"
    require(not isinstance(spec.init, Uninitialized), "init", unset)
    if device is not None and torch.device(device).type == "meta":
        with torch.device("meta"), _memory_errors_as_spec_errors():
            return spec.build(Uninitialized())
    with seeded(seed), _memory_errors_as_spec_errors():  # on the CPU, because each device has its own generator
        model = spec.build(spec.init if init else Uninitialized())
    return model.to(device=device)


@contextmanager
def _memory_errors_as_spec_errors() -> Iterator[None]:
    """Context manager that raises SpecError if a weight does not fit into memory or has a size that overflows."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        about = str(error).lower()
        if isinstance(error, RuntimeError | TypeError) and "allocate memory" not in about and "overflow" not in about:
            raise
        problem = "a model of these sizes is too large for any memory"
        raise SpecError("", f"{problem}; make its widths, tables or depth smaller") from None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager that seeds the CPU's global random number generator and restores its state at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def count(spec: ModelSpec) -> int:
    """Return the exact number of parameters of the model that `spec` describes."""
    return sum(parameter.numel() for parameter in build(spec, device="meta").parameters())


def check_sizes(spec: Any) -> None:
    """Raise an error for an invalid size or dropout rate, or if the number of heads does not divide `d_model`."""
    for name, most in (("d_model", MOST_CHANNELS), ("heads", MOST_HEADS), ("d_head", MOST_CHANNELS)):
        check_count(name, getattr(spec, name), most)
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        check_rate(name, getattr(spec, name))
    require(
        spec.d_head is not None or spec.d_model % spec.heads == 0,
        "heads",
        f"{spec.heads} heads do not divide d_model {spec.d_model}; choose a divisor or set d_head",
    )


def check_vocab(name: str, vocab: int | None) -> None:
    """Raise an error about the field `name` if the vocabulary size `vocab` is outside [1, 2^31]."""
    require(vocab is None or 1 <= vocab <= 2**31, name, f"must lie between 1 and 2^31, not {vocab}")


def site_of(
    spec: ModelSpec,
    init: Init,
    side: Literal["encoder", "decoder"],
    *,
    causal: bool,
    depths: tuple[int, int],
    branches: int,
) -> Site:
    """Return the `Site` (sizes, dropout rates and initialisation) of the encoder or decoder.

    The stack derives the site of each layer from this site. A family without heads has 1 head. A family without
    attention dropout or activation dropout has a rate of 0.
    """
    heads = getattr(spec, "heads", 1)
    d_head = getattr(spec, "d_head", None) or spec.d_model // heads
    return Site(
        d_model=spec.d_model,
        heads=heads,
        d_head=d_head,
        d_value=d_head,
        side=side,
        causal=causal,
        layer=0,
        depth={"encoder": depths[0], "decoder": depths[1]}[side],
        encoder_depth=depths[0],
        decoder_depth=depths[1],
        branches=branches,
        dropout=spec.dropout,
        attention_dropout=getattr(spec, "attention_dropout", 0.0),
        activation_dropout=getattr(spec, "activation_dropout", 0.0),
        linear_=spec.linear,
        init_=init,
    )
