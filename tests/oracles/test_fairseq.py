"""Positions and Transformer layers (encoder, decoder, pre- and post-norm) equal fairseq's with the same weights."""

from argparse import Namespace

import pytest
import torch
from fairseq.modules import SinusoidalPositionalEmbedding, TransformerDecoderLayer, TransformerEncoderLayer

from regard.models.build import build
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Sinusoidal
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.stacks.plain import Plain
from regard.weights import Input, cat, copy_from

pytestmark = pytest.mark.oracle

D, H, F, T, S = 16, 4, 24, 5, 6


def test_sinusoids_equal_fairseq() -> None:
    """fairseq divides by d/2 - 1, puts sines before cosines and starts counting after the padding index."""
    theirs = SinusoidalPositionalEmbedding.get_embedding(50, D, padding_idx=None)
    ours = Sinusoidal(denominator="span", layout="halves").table(50, D)
    torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=2e-6)
    ids = torch.full((1, 7), 5)
    layer = SinusoidalPositionalEmbedding(D, padding_idx=1, init_size=20)
    table = Sinusoidal(denominator="span", layout="halves", offset=2).table(7, D)
    torch.testing.assert_close(table.float()[None], layer(ids), rtol=0, atol=2e-6)


def arguments(pre: bool) -> Namespace:
    sides = {"embed_dim": D, "ffn_embed_dim": F, "attention_heads": H, "normalize_before": pre}
    both = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sides.items()}
    return Namespace(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, activation_fn="relu", **both)


def mapping(decoder: bool) -> dict[str, Input]:
    """Return fairseq's weight names of a layer, keyed by ours."""
    last = 2 if decoder else 1
    names: dict[str, Input] = {
        "branches.0.branch.qkv": cat(*(f"self_attn.{x}_proj" for x in "qkv")),
        "branches.0.branch.output": "self_attn.out_proj",
        "branches.0.norm": "self_attn_layer_norm",
        f"branches.{last}.branch.up": "fc1",
        f"branches.{last}.branch.down": "fc2",
        f"branches.{last}.norm": "final_layer_norm",
    }
    if decoder:
        names |= {
            "branches.1.branch.query": "encoder_attn.q_proj",
            "branches.1.branch.kv": cat(*(f"encoder_attn.{x}_proj" for x in "kv")),
            "branches.1.branch.output": "encoder_attn.out_proj",
            "branches.1.norm": "encoder_attn_layer_norm",
        }
    return names


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_layer_equals_fairseq(side: str, pre: bool) -> None:
    torch.manual_seed(0)
    rule = PreNorm() if pre else PostNorm()
    spec = EncoderDecoder(
        vocab=9,
        d_model=D,
        heads=H,
        dropout=0.0,
        encoder=Plain((Block((SelfAttention(), FeedForward(F)), rule),), 1),
        decoder=Plain((Block((SelfAttention(), CrossAttention(), FeedForward(F)), rule),), 1),
    )
    model = build(spec).double().eval()
    theirs = (TransformerEncoderLayer if side == "encoder" else TransformerDecoderLayer)(arguments(pre)).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = getattr(model, side).blocks[0]
    copy_from(ours, mapping(side == "decoder"), theirs)
    x, memory = torch.randn(2, T, D, dtype=torch.float64), torch.randn(2, S, D, dtype=torch.float64)
    device = torch.device("cpu")
    hidden = torch.tensor([[False] * 4 + [True], [False] * 5])
    seg, memory_hidden = (~hidden).long(), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.no_grad():
        if side == "encoder":
            expected = theirs(x.transpose(0, 1), hidden).transpose(0, 1)
            actual = ours(x, Context(View(Mask(q_seg=seg, k_seg=seg), T, T, device)))
        else:
            future = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
            expected = theirs(
                x.transpose(0, 1), memory.transpose(0, 1), memory_hidden, self_attn_mask=future
            )[0].transpose(0, 1)  # fmt: skip
            cross = View(Mask(k_seg=(~memory_hidden).long()), T, S, device)
            actual = ours(x, Context(View(Mask(causal=True), T, T, device), cross, Memory((memory,))))
    real = ~hidden if side == "encoder" else torch.ones_like(hidden)
    # With a mask, fairseq always computes the softmax in float32.
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-9 if side == "encoder" else 1e-6)
