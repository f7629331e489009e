from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, MaskedLM
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain

SIZES: dict[str, Any] = {"vocab": 11, "d_model": 8, "heads": 2, "dropout": 0.0}


@pytest.fixture
def pair() -> Callable[..., EncoderDecoder]:
    """A tiny encoder-decoder; fields can be overridden."""
    encoder = Plain((Block((SelfAttention(), FeedForward(12))),), 2)
    decoder = Plain((Block((SelfAttention(), CrossAttention(), FeedForward(12))),), 2)
    return lambda **changes: replace(EncoderDecoder(**SIZES, encoder=encoder, decoder=decoder), **changes)


@pytest.fixture
def decoder() -> Callable[..., DecoderOnly]:
    """A tiny decoder-only model; fields can be overridden."""
    stack = Plain((Block((SelfAttention(), FeedForward(12)), PreNorm()),), 2)
    return lambda **changes: replace(DecoderOnly(**SIZES, decoder=stack), **changes)


@pytest.fixture
def encoder() -> Callable[..., EncoderOnly]:
    """A tiny encoder-only model; fields can be overridden."""
    stack = Plain((Block((SelfAttention(), FeedForward(12))),), 2)
    return lambda **changes: replace(EncoderOnly(task=MaskedLM(), **SIZES, encoder=stack), **changes)


@pytest.fixture
def perturbed() -> Callable[[Any], Any]:
    """Return a function that perturbs all weights of a model, so that initial zeros and ones hide no fault."""

    def perturb(model: Any) -> Any:
        for parameter in model.parameters():
            nn.init.normal_(parameter, parameter.mean().item(), 0.3)
        return model.eval()

    return perturb
