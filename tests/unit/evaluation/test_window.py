"""A trained language model whose attention is limited to a window, with the same weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.batch import Batch
from regard.errors import SpecError
from regard.evaluation.window import with_weights, with_window
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.nn.block import Block
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import GatedDelta
from regard.nn.branches.parameter_free_attention import ParameterFreeAttention
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Tokens
from regard.nn.pattern import Sinks, Window
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain


def language_model(*layers: Any, pattern: Any = None) -> DecoderOnly:
    blocks = tuple(Block((layer, FeedForward(24)), PreNorm()) for layer in layers)
    stack = Plain(blocks, len(blocks), attention_pattern=pattern)
    return DecoderOnly(vocab=29, d_model=16, heads=2, dropout=0.0, input=Tokens(position=None), decoder=stack)


def layers_of(spec: Any) -> list[Any]:
    return [block.branches[0] for block in spec.decoder.pattern]


@torch.no_grad()
@pytest.mark.parametrize("plain", [True, False])
def test_each_token_is_predicted_from_the_last_tokens_alone(plain: bool) -> None:
    model = build(language_model(SelfAttention()), seed=1).eval()
    ids = torch.randint(29, (2, 12), generator=torch.Generator().manual_seed(1))
    limited = with_weights(with_window(model.spec, 4), model, plain)
    logits = limited(Batch(ids))
    for t in range(12):  # one layer without positions: the window is all that the model reads
        expected = model(Batch(ids[:, max(0, t - 3) : t + 1]))[:, -1]
        assert torch.allclose(logits[:, t], expected, atol=1e-10)
    assert not torch.allclose(logits, model(Batch(ids)))


def test_every_attention_layer_is_limited_and_other_layers_stay() -> None:
    spec = language_model(SelfAttention(), GatedDelta(), ParameterFreeAttention())
    limited: Any = with_window(spec, 8)
    assert layers_of(limited) == [
        SelfAttention(attention_pattern=Window(8)), GatedDelta(), ParameterFreeAttention(attention_pattern=Window(8))
    ]  # fmt: skip
    assert replace(limited, decoder=spec.decoder) == spec


def test_a_narrower_window_of_the_model_stays() -> None:
    layers = (SelfAttention(attention_pattern=Window(4)), SelfAttention())
    assert build(with_window(language_model(*layers, pattern=Window(32)), 8), device="meta")
    limited = with_window(language_model(*layers, pattern=Window(32)), 8)
    assert [layer.attention_pattern for layer in layers_of(limited)] == [Window(4), Window(8)]
    limited = with_window(language_model(*layers, pattern=Window(32)), 64)
    assert [layer.attention_pattern for layer in layers_of(limited)] == [Window(4), Window(32)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (language_model(Recurrence()), "this 'decoder_only' model has no attention that could be limited"),
        (
            language_model(SelfAttention(), CompressedAttention()),
            "'compressed_attention' layers have no attention pattern",
        ),
        (
            language_model(SelfAttention(attention_pattern=Sinks(4, 1))),
            "has the attention pattern 'sinks', which a window",
        ),
    ],
)
def test_models_that_no_window_limits_are_refused(spec: DecoderOnly, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        with_window(spec, 8)
