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
from regard.weights import Input, copy_from, rows

from .copying import close, randomise

D, H, HIDDEN, T, S = 16, 4, 24, 6, 8
TARGET = pad([[1] * 6, [1] * 3, [1]])[1]
SOURCE = pad([[1] * 5, [1] * 8, [1] * 2])[1]

pytestmark = pytest.mark.usefixtures("float64")


def mapping(last: int) -> dict[str, Input]:
    """Map our weights to theirs; `last` is the index of the feed-forward branch. All branches get the same scalar."""
    names: dict[str, Input] = {
        "branches.*.alpha": "resweight",
        "branches.0.branch.qkv": "self_attn.in_proj_{}",
        "branches.0.branch.output": "self_attn.out_proj",
        f"branches.{last}.branch.up": "linear1",
        f"branches.{last}.branch.down": "linear2",
    }
    if last == 2:
        names["branches.1.branch.query"] = rows("multihead_attn.in_proj_{}", 0, D)
        names["branches.1.branch.kv"] = rows("multihead_attn.in_proj_{}", D)
        names["branches.1.branch.output"] = "multihead_attn.out_proj"
    return names


def test_encoder_and_decoder() -> None:
    ours = build(apply("rezero", tiny.encoder_decoder())).eval()
    assert isinstance(ours, EncoderDecoderModel)
    kinds: tuple[Any, Any] = RZTXEncoderLayer, RZTXDecoderLayer
    encoder, decoder = (
        nn.ModuleList(kind(D, H, HIDDEN, dropout=0.0).double() for _ in range(2)).eval() for kind in kinds
    )
    for stack, peers, last in ((ours.encoder, encoder, 1), (ours.decoder, decoder, 2)):
        randomise(peers, seed=last)
        for block, peer in zip(stack.blocks, peers, strict=True):  # type: ignore[reportArgumentType]
            copy_from(block, mapping(last), peer)
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
    expected_memory, expected_output = theirs(source)
    memory = ours.encoder(source, Context(View(Mask(q_seg=SOURCE, k_seg=SOURCE), S, S, device))).x
    close(memory, expected_memory, real=SOURCE)
    own = View(Mask(causal=True, q_seg=TARGET, k_seg=TARGET), T, T, device)
    ctx = Context(own, View(Mask(k_seg=SOURCE), T, S, device), Memory((memory,), SOURCE))
    close(ours.decoder(target, ctx).x, expected_output, real=TARGET)
