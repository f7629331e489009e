"""PyPI rezero: layers of the paper's authors, in which one scalar serves all branches of a layer. Row 14."""

from typing import Any

import pytest
import torch
from rezero.transformer import RZTXDecoderLayer, RZTXEncoderLayer
from torch import Tensor, nn

from regard import build
from regard.batch import pad
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.testing import tiny
from regard.variants import apply

from .copying import close, randomise

D, H, HIDDEN, T, S = 16, 4, 24, 6, 8
TARGET = pad([[1] * 6, [1] * 3, [1]])[1]
SOURCE = pad([[1] * 5, [1] * 8, [1] * 2])[1]

pytestmark = pytest.mark.usefixtures("float64")


def copied(block: nn.Module, theirs: nn.Module) -> None:
    """Every weight of theirs, and its scalar into each of ours."""
    source, state = theirs.state_dict(), {}
    last = len(block.branches) - 1  # type: ignore[reportArgumentType]
    for n in range(last + 1):
        state[f"branches.{n}.alpha"] = source["resweight"]
    for kind in ("weight", "bias"):
        state[f"branches.0.branch.qkv.{kind}"] = source[f"self_attn.in_proj_{kind}"]
        state[f"branches.0.branch.output.{kind}"] = source[f"self_attn.out_proj.{kind}"]
        state[f"branches.{last}.branch.up.{kind}"] = source[f"linear1.{kind}"]
        state[f"branches.{last}.branch.down.{kind}"] = source[f"linear2.{kind}"]
        if last == 2:
            query, kv = source[f"multihead_attn.in_proj_{kind}"].split((D, 2 * D))
            state[f"branches.1.branch.query.{kind}"], state[f"branches.1.branch.kv.{kind}"] = query, kv
            state[f"branches.1.branch.output.{kind}"] = source[f"multihead_attn.out_proj.{kind}"]
    block.load_state_dict(state)


def test_encoder_and_decoder() -> None:
    ours = build(apply("rezero", tiny.encoder_decoder())).eval()
    assert isinstance(ours, EncoderDecoderModel)
    kinds: tuple[Any, Any] = RZTXEncoderLayer, RZTXDecoderLayer
    encoder, decoder = (
        nn.ModuleList(kind(D, H, HIDDEN, dropout=0.0).double() for _ in range(2)).eval() for kind in kinds
    )
    for stack, peers, seed in ((ours.encoder, encoder, 1), (ours.decoder, decoder, 2)):
        randomise(peers, seed=seed)
        for block, peer in zip(stack.blocks, peers, strict=True):  # type: ignore[reportArgumentType]
            copied(block, peer)
    source, target = torch.randn(3, S, D), torch.randn(3, T, D)

    def theirs(x: Tensor) -> tuple[Tensor, Tensor]:
        memory = x.transpose(0, 1)
        for peer in encoder:
            memory = peer(memory, src_key_padding_mask=SOURCE == 0)
        y, ahead = target.transpose(0, 1), torch.ones(T, T, dtype=torch.bool).triu(1)
        for peer in decoder:
            y = peer(
                y,
                memory,
                tgt_mask=ahead,
                tgt_key_padding_mask=TARGET == 0,
                memory_key_padding_mask=SOURCE == 0,
            )
        return memory.transpose(0, 1), y.transpose(0, 1)

    device = torch.device("cpu")
    expected, said = theirs(source)
    memory = ours.encoder(source, Context(View(Mask(q_seg=SOURCE, k_seg=SOURCE), S, S, device))).x
    close(memory, expected, real=SOURCE)
    own = View(Mask(causal=True, q_seg=TARGET, k_seg=TARGET), T, T, device)
    ctx = Context(own, View(Mask(k_seg=SOURCE), T, S, device), Memory((memory,), SOURCE))
    close(ours.decoder(target, ctx).x, said, real=TARGET)
