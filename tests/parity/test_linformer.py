"""PyPI linformer with copied weights: its matrices are shared by the heads, and optionally by keys and values too."""

from typing import Any

import pytest
import torch
from linformer import Linformer as Theirs
from linformer import LinformerSelfAttention
from torch import Tensor, nn

from regard import build
from regard.models.encoder_only import EncoderOnly, MaskedLM
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.linformer import Linformer
from regard.nn.mask import Context, Mask, View
from regard.nn.norm import LayerNorm
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.testing import tiny
from regard.weights import Input, computed, copy_from

from .copying import close, randomise

D, HEADS, MAX, RANK, B, DEPTH = 12, 3, 9, 4, 2, 3
pytestmark = pytest.mark.usefixtures("float64")


def stack_of(branch: Linformer) -> Any:
    block = Block((branch, FeedForward(4 * D, "gelu")), PreNorm(LayerNorm(eps=1e-5)))
    spec = EncoderOnly(
        MaskedLM(), vocab=tiny.VOCAB, d_model=D, heads=HEADS, dropout=0.0, encoder=Plain((block,), DEPTH)
    )
    return build(spec).encoder.stack  # type: ignore[reportAttributeAccessIssue]


def along_length(matrix: Input) -> Input:
    """Their (n, k) is our (1, k, n)."""
    return computed(lambda tensor: tensor.T[None], matrix)


def attention(branch: Linformer, ours: str, theirs: str) -> dict[str, Input]:
    """Return the mapping of one layer. Theirs has only a bias at the output, and with `share_kv`, values are keys."""
    shared = branch.sharing in ("key_value", "layers")
    kv = "to_k" if shared else "to_v"
    width = (branch.d_head or D // HEADS) * (branch.kv_heads or HEADS)
    mapping: dict[str, Input] = {
        f"{ours}.query.weight": f"{theirs}.to_q.weight",
        f"{ours}.key.weight": f"{theirs}.to_k.weight",
        f"{ours}.value.weight": f"{theirs}.{kv}.weight",
        f"{ours}.query.bias": torch.zeros((branch.d_head or D // HEADS) * HEADS),
        f"{ours}.key.bias": torch.zeros(width),
        f"{ours}.value.bias": torch.zeros(width),
        f"{ours}.output": f"{theirs}.to_out",
    }
    if branch.sharing != "layers":
        mapping[f"{ours}.key_mixtures.weight"] = along_length(f"{theirs}.proj_k")
    if not shared:
        mapping[f"{ours}.value_mixtures.weight"] = along_length(f"{theirs}.proj_v")
    return mapping


def same(ours: Any, theirs: Any, length: int) -> None:
    """Compare outputs and the gradients at the input."""
    x = torch.randn(B, length, D)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs: list[Tensor] = [
        ours(inputs[0], Context(View(Mask(), length, length, torch.device("cpu")))),
        theirs(inputs[1]),
    ]
    outputs[0] = getattr(outputs[0], "x", outputs[0])
    close(outputs[0], outputs[1])
    probe = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad((output * probe).sum(), x)[0] for output, x in zip(outputs, inputs, strict=True)]
    close(gradients[0], gradients[1])


@pytest.mark.parametrize("length", [MAX, 5])
@pytest.mark.parametrize(
    "branch",
    [
        Linformer(max_len=MAX, rank=RANK),
        Linformer(max_len=MAX, rank=RANK, kv_heads=1, d_head=5),
        Linformer(max_len=MAX, rank=RANK, sharing="key_value"),
    ],
    ids=["heads", "one key-value head", "key_value"],
)
def test_attention(branch: Linformer, length: int) -> None:
    ours = stack_of(branch).blocks[0].branches[0].branch
    options: dict[str, Any] = {"dim_head": branch.d_head, "one_kv_head": branch.kv_heads == 1}
    theirs = LinformerSelfAttention(D, MAX, RANK, HEADS, share_kv=branch.sharing == "key_value", **options).eval()
    randomise(theirs, 1.0)
    copy_from(nn.ModuleDict({"a": ours}), attention(branch, "a", "b"), nn.ModuleDict({"b": theirs}))
    same(ours, theirs, length)


@pytest.mark.parametrize("sharing", ["heads", "key_value", "layers"])
def test_encoder(sharing: Any) -> None:
    """A stack; theirs shares one matrix between layers if each layer holds the same parameter."""
    branch = Linformer(max_len=MAX, rank=RANK, sharing=sharing)
    ours, theirs = stack_of(branch), Theirs(D, MAX, DEPTH, RANK, HEADS, share_kv=sharing != "heads").eval()
    randomise(theirs, 0.5)
    if sharing == "layers":
        for layer in theirs.net.layers:  # type: ignore[reportGeneralTypeIssues]
            layer[0].fn.proj_k = theirs.net.layers[0][0].fn.proj_k  # type: ignore[reportIndexIssue]
    mapping = attention(branch, "blocks.*.branches.0.branch", "net.layers.*.0.fn")
    mapping |= {
        "blocks.*.branches.0.norm": "net.layers.*.0.norm",
        "blocks.*.branches.1.branch.up": "net.layers.*.1.fn.w1",
        "blocks.*.branches.1.branch.down": "net.layers.*.1.fn.w2",
        "blocks.*.branches.1.norm": "net.layers.*.1.norm",
    }
    if sharing == "layers":
        mapping["shared.linformer.weight"] = along_length("net.layers.0.0.fn.proj_k")
    ours.end = nn.Identity()  # theirs has no norm after the last layer
    copy_from(ours, mapping, theirs)
    for length in (MAX, 5):
        same(ours, theirs, length)
