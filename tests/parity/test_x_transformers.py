"""x-transformers: stacks with the modifications that both libraries have, several at a time."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import x_transformers
from torch import Tensor, nn

from regard import EncoderDecoder, build
from regard.batch import pad
from regard.fast import attention as kernels
from regard.fast.install import install
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.pattern import Window
from regard.nn.position.base import Position
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.residual import PostNorm, PreNorm, Residual
from regard.nn.rms_norm import RMSNorm
from regard.nn.sandwich import Sandwich
from regard.nn.scale_norm import ScaleNorm
from regard.nn.stacks.base import Stack
from regard.nn.stacks.plain import Plain
from regard.weights import Input, Source, computed, copy_from, rows

from .copying import close, randomise

D, K, T, S = 24, 8, 9, 7
TARGET = pad([[1] * 9, [1] * 5, [1]])[1]
SOURCE = pad([[1] * 3, [1] * 7, [1] * 5])[1]


@dataclass(frozen=True)
class Case:
    """Our description of a stack, and their options for the same stack."""

    theirs: dict[str, Any]
    position: Position
    residual: type[Residual]
    norm: Norm
    feedforward: FeedForward
    depth: int = 3
    heads: int = 4
    kv_heads: int | None = None
    query_key_norm: Norm = NoNorm()
    attention_pattern: Window | None = None
    unique: int | None = None
    cross: bool = False

    @property
    def causal(self) -> bool:
        return self.attention_pattern is not None or self.cross

    def build(self) -> Stack:
        attention = SelfAttention(kv_heads=self.kv_heads, query_key_norm=self.query_key_norm, bias=False)
        cross = CrossAttention(kv_heads=self.kv_heads, bias=False)
        branches: tuple[BranchSpec, ...] = (attention, *((cross,) if self.cross else ()), self.feedforward)
        residual = self.residual(norm=self.norm)  # type: ignore[reportCallIssue]  # each of them has one
        stack = Plain((Block(branches, residual),), self.depth, self.unique, self.position, self.attention_pattern)
        spec = EncoderDecoder(vocab=3, d_model=D, heads=self.heads, d_head=K)
        model = build(replace(spec, decoder=stack) if self.causal else replace(spec, encoder=stack))
        assert isinstance(model, EncoderDecoderModel)
        return (model.decoder if self.causal else model.encoder).eval()


CASES = {
    "rotary, window, grouped queries, normalised queries and keys, RMSNorm, SwiGLU": Case(
        {
            "rotary_pos_emb": True,
            "rotary_emb_dim": K,
            "attn_kv_heads": 2,
            "attn_qk_rmsnorm": True,
            "attn_max_attend_past": 2,
            "use_rmsnorm": True,
            "ff_glu": True,
            "ff_swish": True,
        },
        Rotary(),
        PreNorm,
        RMSNorm(eps=0.0),
        FeedForward(4 * D, "swish", gated=True),
        kv_heads=2,
        query_key_norm=RMSNorm(eps=0.0),
        attention_pattern=Window(3),
    ),
    "ALiBi with a head count that is no power of two, post-norm, ScaleNorm": Case(
        {"alibi_pos_bias": True, "pre_norm": False, "use_scalenorm": True},
        ALiBi(),
        PostNorm,
        ScaleNorm(),
        FeedForward(4 * D, "gelu"),
        heads=6,
    ),
    "T5 bias, sandwich norm, two blocks twice, squared ReLU": Case(
        {
            "rel_pos_bias": True,
            "rel_pos_num_buckets": 4,
            "rel_pos_max_distance": 6,
            "sandwich_norm": True,
            "depth": 2,
            "layers_execute_order": (0, 1, 2, 3, 0, 1, 2, 3),
            "ff_relu_squared": True,
        },
        T5Bias(4, 6),
        Sandwich,
        LayerNorm(bias=False),
        FeedForward(4 * D, "squared_relu"),
        depth=4,
        unique=2,
    ),
    "cross-attention, one key-value head, ALiBi": Case(
        {"cross_attend": True, "attn_one_kv_head": True, "alibi_pos_bias": True},
        ALiBi(),
        PreNorm,
        LayerNorm(bias=False),
        FeedForward(4 * D, "gelu"),
        kv_heads=1,
        cross=True,
    ),
    "one block three times, GLU, T5 bias": Case(
        {
            "cross_attend": True,
            "weight_tie_layers": True,
            "rel_pos_bias": True,
            "rel_pos_num_buckets": 4,
            "rel_pos_max_distance": 6,
            "ff_glu": True,
            "ff_custom_activation": nn.Sigmoid(),
        },
        T5Bias(4, 6),
        PreNorm,
        LayerNorm(bias=False),
        FeedForward(4 * D, "sigmoid", gated=True),
        unique=1,
        cross=True,
    ),
}


def peer(case: Case, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return their stack."""
    kind = x_transformers.Decoder if case.causal else x_transformers.Encoder
    with monkeypatch.context() as patch:
        # They compute rotations and softmaxes always in float32.
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(torch, "float32", torch.float64)
        options = {"depth": case.depth, "heads": case.heads, "attn_dim_head": K, "verbose": False}
        theirs = kind(dim=D, **options | case.theirs).eval()
    randomise(theirs)
    for name, gain in theirs.named_parameters():
        if "_rmsnorm.gamma" in name:
            gain.data[:] = gain.data[0].clone()  # they have one per head, we one for all
    return theirs


def mapping(case: Case) -> dict[str, Input]:
    """Return the mapping from our names to their weights."""
    # Rotary positions: they rotate neighbouring channels, we rotate channels half a head apart.
    halves = torch.arange(K).view(-1, 2).T.flatten() if isinstance(case.position, Rotary) else torch.arange(K)
    # Query heads that share a key-value head stand next to each other here, and are spread out there.
    order = torch.arange(case.heads).view(-1, case.kv_heads or case.heads).T.flatten()
    factor = math.sqrt(D) if isinstance(case.norm, ScaleNorm) else 1.0
    gain = "g" if isinstance(case.norm, ScaleNorm | RMSNorm) else "gamma"
    names: dict[str, Input] = {}

    def norm(to: str, name: str) -> None:
        names[f"{to}.weight"] = computed(lambda weight: (weight + 1) * factor, f"{name}.{gain}")

    def turned(name: str, heads: Tensor) -> Source:
        return computed(lambda weight: weight.unflatten(0, (-1, K))[heads][:, halves].flatten(0, 1), name)

    def attention(to: str, name: str) -> None:
        names[f"{to}.query.weight"] = turned(f"{name}.to_q.weight", order)
        names[f"{to}.key.weight"] = turned(f"{name}.to_k.weight", torch.arange(case.kv_heads or case.heads))
        names[f"{to}.value.weight"] = f"{name}.to_v.weight"
        names[f"{to}.output.weight"] = computed(
            lambda weight: weight.unflatten(1, (-1, K))[:, order].flatten(1), f"{name}.to_out.weight"
        )
        if not isinstance(case.query_key_norm, NoNorm):
            for ours, their in (("query_norm", "q_rmsnorm"), ("key_norm", "k_rmsnorm")):
                names[f"{to}.{ours}.weight"] = computed(lambda g: g[0, 0, halves] + 1, f"{name}.{their}.gamma")

    def feedforward(to: str, name: str) -> None:
        if case.feedforward.gated:
            half = case.feedforward.d_hidden or 0
            names[f"{to}.up"], names[f"{to}.gate"] = (
                rows(f"{name}.ff.0.proj", 0, half),
                rows(f"{name}.ff.0.proj", half),
            )
        else:
            names[f"{to}.up"] = f"{name}.ff.0.0"
        names[f"{to}.down"] = f"{name}.ff.2"

    size = 3 if case.cross else 2
    for n in range(size * (case.unique or case.depth)):
        to, name = f"blocks.{n // size}.branches.{n % size}", f"layers.{n}"
        norm(f"{to}.norm", f"{name}.0.{2 if case.residual is PostNorm else 0}")
        if case.residual is Sandwich:
            norm(f"{to}.after", f"{name}.0.1")
        if n % size == size - 1:
            feedforward(f"{to}.branch", f"{name}.1")
        else:
            attention(f"{to}.branch", f"{name}.1")
    if case.residual is not PostNorm:
        norm("end", "final_norm")
    if isinstance(case.position, T5Bias):
        table = "rel_pos.relative_attention_bias.weight"
        names["position.weight"] = computed(lambda bias: bias.T * math.sqrt(K), table)
    return names


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_stack(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    theirs, ours = peer(case, monkeypatch), case.build()
    copy_from(ours, mapping(case), theirs)
    generator = torch.Generator().manual_seed(1)
    x, memory = (torch.randn(3, length, D, generator=generator) for length in (T, S))
    cross_inputs = {"context": memory, "context_mask": SOURCE == 1} if case.cross else {}
    expected = theirs(x, mask=TARGET == 1, **cross_inputs)
    device = torch.device("cpu")
    ctx = Context(View(Mask(causal=case.causal, q_seg=TARGET, k_seg=TARGET), T, T, device))
    if case.cross:
        ctx = Context(ctx.own, View(Mask(k_seg=SOURCE), T, S, device), Memory((memory,), SOURCE))
    install(ours)
    with kernels.use(kernel):
        close(ours(x, ctx).x, expected, real=TARGET)
