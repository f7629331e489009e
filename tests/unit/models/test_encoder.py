"""A regard encoder inside other PyTorch code."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

import regard
from regard import Batch, DataError, Encoder, SpecError, build
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.models.encoder_only import Pooled, PooledModel
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.norm import LayerNorm
from regard.nn.residual import PreNorm
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.nn.vectors import Vectors
from regard.testing import tiny
from regard.weights import copy_from

B, T, D, H, HIDDEN, V = 3, 7, 12, 3, 20, 29
PADDING = torch.arange(T) >= torch.tensor([T, 4, 1])[:, None]
LAYER = Block((SelfAttention(), FeedForward(HIDDEN)), PreNorm(LayerNorm()))
SPEC = regard.EncoderOnly(Pooled(), vocab=V, d_model=D, heads=H, dropout=0.0, encoder=Plain((LAYER,), 2))


def ids() -> Tensor:
    return torch.randint(1, V, (B, T), generator=torch.Generator().manual_seed(1))


def test_an_encoder_of_vectors_equals_torch() -> None:
    layer = nn.TransformerEncoderLayer(D, H, HIDDEN, 0.0, batch_first=True, norm_first=True)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)
    ours = Encoder(SPEC, embed=False)
    mapping = {
        "stack.blocks.*.branches.0.branch.qkv": "layers.*.self_attn.in_proj_{}",
        "stack.blocks.*.branches.0.branch.output": "layers.*.self_attn.out_proj",
        "stack.blocks.*.branches.0.norm": "layers.*.norm1",
        "stack.blocks.*.branches.1.branch.up": "layers.*.linear1",
        "stack.blocks.*.branches.1.branch.down": "layers.*.linear2",
        "stack.blocks.*.branches.1.norm": "layers.*.norm2",
        "stack.end": "norm",
    }
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    copy_from(ours, mapping, theirs)
    x = torch.randn(B, T, D, requires_grad=True)
    gradients = []
    for encoder in (ours, lambda x, mask: theirs(x, src_key_padding_mask=mask)):
        h = encoder(x, PADDING)
        gradients.append((h[~PADDING], *torch.autograd.grad(h[~PADDING].square().sum(), x)))
    for our, their in zip(*gradients, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-9, atol=1e-9)


def test_an_encoder_of_ids_equals_the_encoder_of_its_model() -> None:
    for spec in (SPEC, tiny.encoder_decoder()):
        model = build(spec, seed=3).eval()
        h = Encoder(spec, seed=3).eval()(ids(), PADDING)
        seg = (~PADDING).long()
        if isinstance(model, EncoderDecoderModel):
            expected = model.encode(Batch(ids()[:, :1], source=ids(), source_seg=seg)).x[0]
        else:
            assert isinstance(model, PooledModel)
            expected = model.encoder(Batch(ids(), target_seg=seg)).x
        torch.testing.assert_close(h[~PADDING], expected[~PADDING], rtol=0, atol=0)


def test_a_model_or_a_trained_run_shares_its_weights() -> None:
    model = build(SPEC)
    run: Any = SimpleNamespace(model=model)
    for source in (model, run):
        encoder = Encoder(source)
        assert {id(p) for p in encoder.parameters()} < {id(p) for p in model.parameters()}
        assert next(name for name, _ in encoder.named_parameters()) == "table.weight"


def test_padding_influences_no_other_position() -> None:
    encoder = Encoder(SPEC).eval()
    other = ids().masked_fill(PADDING, 5)
    torch.testing.assert_close(encoder(ids(), PADDING)[~PADDING], encoder(other, PADDING)[~PADDING])
    torch.testing.assert_close(encoder(ids()[1:2, :4])[0], encoder(ids(), PADDING)[1, :4])


def test_encoder_trains_inside_a_module_of_the_user() -> None:
    classifier = nn.Sequential(Encoder(SPEC), nn.Linear(D, 2))
    loss = nn.functional.cross_entropy(classifier(ids()).flatten(0, 1), torch.zeros(B * T, dtype=torch.int64))
    loss.backward()
    assert all(parameter.grad is not None for parameter in classifier.parameters())
    again = nn.Sequential(Encoder(SPEC, seed=1), nn.Linear(D, 2))
    again.load_state_dict(classifier.state_dict())
    torch.testing.assert_close(again(ids()), classifier(ids()))


def test_an_input_of_vectors_is_projected() -> None:
    encoder = Encoder(regard.replace_at(SPEC, "input", Vectors(5)))
    assert encoder.table is None
    assert encoder(torch.randn(B, T, 5), PADDING).shape == (B, T, D)


@pytest.mark.parametrize(
    ("x", "padding", "message"),
    [
        (torch.ones(B, T), None, r"x"),
        (torch.ones(B, T, D), None, r"^x: this encoder reads token ids \(B, T\), not \(3, 7, 12\) of torch.float"),
        (ids(), PADDING.long(), r"padding_mask"),
        (ids(), PADDING[:, 1:], r"padding_mask"),
        (ids(), PADDING.flip(1), r"^padding_mask: padding \(segment 0\) must be at the end of a row"),
        (ids(), torch.ones(B, T, dtype=torch.bool), r"^padding_mask: row 0 has only padding; leave the row out"),
    ],
)
def test_invalid_input_is_refused(x: Tensor, padding: Any, message: str) -> None:
    with pytest.raises((DataError, TypeCheckError), match=message):
        Encoder(SPEC)(x, padding)


def test_a_model_without_an_encoder_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^'decoder_only' has no encoder for this; use encoder_only"):
        Encoder(tiny.decoder_only())
    with pytest.raises(SpecError, match=r"^encoder: 'funnel' returns fewer vectors than it reads"):
        Encoder(regard.replace_at(SPEC, "encoder", Funnel((LAYER,), (1, 1))))
