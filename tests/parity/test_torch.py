"""torch's own layers and losses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import EncoderDecoder, Trace, build
from regard.batch import pad
from regard.fast import attention as kernels
from regard.fast import cross_entropy
from regard.fast.install import install
from regard.models.build import site_of
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.activation import Activation
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.core import Site
from regard.nn.init import Normal
from regard.nn.linear import Dense
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.norm import LayerNorm
from regard.nn.residual import PostNorm, PreNorm, Residual
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Embeddings
from regard.weights import Input, rows

from .copying import close, copy_all, randomise

pytestmark = pytest.mark.usefixtures("float64")
D, H, HIDDEN, T, S = 24, 4, 40, 6, 7
TARGET = pad([[1] * 6, [1] * 4, [1]])[1]  # which of T tokens are real, in rows of unequal length
SOURCE = pad([[1] * 3, [1] * 7, [1] * 5])[1]


def stream(tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(TARGET), tokens, D, generator=generator).requires_grad_()


def view(queries: int, keys: Tensor | int, causal: bool = False) -> View:
    """Return the view of `queries` queries over keys; `keys` is either their segments or their number."""
    seg, width = (keys, keys.shape[1]) if isinstance(keys, Tensor) else (None, keys)
    return View(Mask(causal=causal, k_seg=seg), queries, width, torch.device("cpu"))


def site(bias: bool = True) -> Site:
    spec = EncoderDecoder(d_model=D, heads=H, linear=Dense(bias))
    return site_of(spec, Normal(), "decoder", causal=False, depths=(1, 1), branches=5)


def same(ours: Tensor, theirs: Tensor, inputs: list[Tensor], real: Tensor | None = None) -> None:
    """Assert that outputs agree where `real` is not 0, and gradients with respect to the inputs everywhere."""
    close(ours, theirs, real=real)
    generator = torch.Generator().manual_seed(9)
    direction = torch.randn(ours.shape, generator=generator)
    direction = direction if real is None else direction * (real != 0)[..., None]
    gradients = [torch.autograd.grad((y * direction).sum(), inputs, retain_graph=True) for y in (ours, theirs)]
    for our, their in zip(*gradients, strict=True):
        assert their.abs().sum() > 0
        close(our, their)


KERNELS = pytest.mark.parametrize("kernel", ["sdpa", "reference"])


@KERNELS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_self_attention(bias: bool, padded: bool, causal: bool, kernel: str) -> None:
    theirs = nn.MultiheadAttention(D, H, bias=bias, batch_first=True)
    randomise(theirs)
    ours = SelfAttention().build(site(bias))
    copy_all(ours, theirs, {"qkv": "in_proj_{}", "output": "out_proj"})
    x = stream(T, 1)
    hidden = {
        "key_padding_mask": TARGET == 0 if padded else None,
        "attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1) if causal else None,
    }
    expected, _ = theirs(x, x, x, need_weights=False, **hidden)
    install(ours)
    with kernels.use(kernel):
        output = ours(x, Context(view(T, TARGET if padded else T, causal)))
    same(output, expected, [x], TARGET if padded else None)


@KERNELS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_cross_attention(bias: bool, padded: bool, kernel: str) -> None:
    theirs = nn.MultiheadAttention(D, H, bias=bias, batch_first=True)
    randomise(theirs)
    ours = CrossAttention().build(site(bias))
    copy_all(ours, theirs, {"query": rows("in_proj_{}", 0, D), "kv": rows("in_proj_{}", D), "output": "out_proj"})
    x, memory = stream(T, 1), stream(S, 2)
    expected, _ = theirs(x, memory, memory, key_padding_mask=SOURCE == 0 if padded else None, need_weights=False)
    memory_view = view(T, SOURCE if padded else S)
    install(ours)
    with kernels.use(kernel):
        output = ours(x, Context(view(T, T), memory_view, Memory((memory,), memory_view.mask.k_seg)))
    same(output, expected, [x, memory])


def test_attention_weights_in_a_trace() -> None:
    theirs = nn.MultiheadAttention(D, H, batch_first=True)
    randomise(theirs)
    ours = SelfAttention().build(site())
    copy_all(ours, theirs, {"qkv": "in_proj_{}", "output": "out_proj"})
    x, trace = stream(T, 1), Trace()
    _, expected = theirs(x, x, x, key_padding_mask=TARGET == 0, average_attn_weights=False)
    ours(x, Context(view(T, TARGET), trace=trace))
    close(trace.weights["decoder.self"][0], expected)


def layers(decoder: bool, at: str = "", prefix: str = "") -> dict[str, Input]:
    """Return the mapping for all layers of the encoder or the decoder."""
    our, their, last = f"{at}blocks.*.branches", f"{prefix}layers.*", 2 if decoder else 1
    mapping: dict[str, Input] = {
        f"{our}.0.branch.qkv": f"{their}.self_attn.in_proj_{{}}",
        f"{our}.0.branch.output": f"{their}.self_attn.out_proj",
        f"{our}.{last}.branch.up": f"{their}.linear1",
        f"{our}.{last}.branch.down": f"{their}.linear2",
    }
    mapping |= {f"{our}.{n}.norm": f"{their}.norm{n + 1}" for n in range(last + 1)}
    if decoder:
        mapping[f"{our}.1.branch.query"] = rows(f"{their}.multihead_attn.in_proj_{{}}", 0, D)
        mapping[f"{our}.1.branch.kv"] = rows(f"{their}.multihead_attn.in_proj_{{}}", D)
        mapping[f"{our}.1.branch.output"] = f"{their}.multihead_attn.out_proj"
    return mapping


def model(first: bool, activation: Activation, depths: tuple[int, int]) -> EncoderDecoderModel:
    residual: Residual = (PreNorm if first else PostNorm)(LayerNorm(eps=0.01))
    attention, feedforward = SelfAttention(), FeedForward(HIDDEN, activation)
    spec = EncoderDecoder(
        vocab=3,
        d_model=D,
        heads=H,
        encoder=Plain((Block((attention, feedforward), residual),), depths[0]),
        decoder=Plain((Block((attention, CrossAttention(), feedforward), residual),), depths[1]),
    )
    built = build(spec)
    assert isinstance(built, EncoderDecoderModel)
    return built.eval()


STYLES = pytest.mark.parametrize(
    ("first", "activation"), [(False, "relu"), (False, "gelu"), (True, "relu"), (True, "gelu")]
)


def layer_options(first: bool, activation: Activation) -> dict[str, Any]:
    functions = {"relu": F.relu, "gelu": F.gelu}
    return {
        "d_model": D,
        "nhead": H,
        "dim_feedforward": HIDDEN,
        "activation": functions[activation],
        "norm_first": first,
        "layer_norm_eps": 0.01,  # large, so that a wrong eps changes the result
        "batch_first": True,
    }


@STYLES
def test_encoder_layer(first: bool, activation: Activation) -> None:
    layer = nn.TransformerEncoderLayer(**layer_options(first, activation))
    theirs = nn.ModuleDict({"layers": nn.ModuleList([layer])}).eval()
    randomise(theirs)
    stack = model(first, activation, (1, 1)).encoder
    stack.end = nn.Identity()  # a lone layer has no norm after it
    copy_all(stack, theirs, layers(decoder=False))
    x = stream(S, 1)
    expected = layer(x, src_key_padding_mask=SOURCE == 0)
    same(stack(x, Context(view(S, SOURCE))).x, expected, [x], SOURCE)


@STYLES
def test_decoder_layer(first: bool, activation: Activation) -> None:
    layer = nn.TransformerDecoderLayer(**layer_options(first, activation))
    theirs = nn.ModuleDict({"layers": nn.ModuleList([layer])}).eval()
    randomise(theirs)
    stack = model(first, activation, (1, 1)).decoder
    stack.end = nn.Identity()
    copy_all(stack, theirs, layers(decoder=True))
    x, memory = stream(T, 1), stream(S, 2)
    expected = layer(
        x,
        memory,
        tgt_mask=torch.ones(T, T, dtype=torch.bool).triu(1),
        tgt_key_padding_mask=TARGET == 0,
        memory_key_padding_mask=SOURCE == 0,
    )
    ctx = Context(view(T, TARGET, causal=True), view(T, SOURCE), Memory((memory,), SOURCE))
    same(stack(x, ctx).x, expected, [x, memory], TARGET)


@STYLES
def test_encoder(first: bool, activation: Activation) -> None:
    layer = nn.TransformerEncoderLayer(**layer_options(first, activation))
    norm = nn.LayerNorm(D, eps=0.01) if first else None
    theirs = nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False).eval()
    randomise(theirs)
    stack = model(first, activation, (3, 1)).encoder
    copy_all(stack, theirs, layers(decoder=False) | ({"end": "norm"} if first else {}))
    x = stream(S, 1)
    expected = theirs(x, src_key_padding_mask=SOURCE == 0)
    same(stack(x, Context(view(S, SOURCE))).x, expected, [x], SOURCE)


class Pair(nn.Module):
    """Both sides of nn.Transformer, with a final norm on each side only if the layers begin with one."""

    def __init__(self, first: bool, activation: Activation, depths: tuple[int, int]) -> None:
        super().__init__()
        options = layer_options(first, activation)
        self.whole = nn.Transformer(num_encoder_layers=depths[0], num_decoder_layers=depths[1], **options)
        if not first:
            self.whole.encoder.norm = self.whole.decoder.norm = None


@STYLES
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")  # nn.Transformer has no option for it
def test_transformer(first: bool, activation: Activation) -> None:
    depths = (2, 3)
    theirs = Pair(first, activation, depths).eval()
    randomise(theirs)
    built = model(first, activation, depths)
    ours = nn.ModuleDict({"encoder": built.encoder, "decoder": built.decoder})
    mapping = layers(False, "encoder.", "whole.encoder.") | layers(True, "decoder.", "whole.decoder.")
    ends: dict[str, Input] = {f"{side}.end": f"whole.{side}.norm" for side in ("encoder", "decoder")}
    copy_all(ours, theirs, mapping | ends if first else mapping)
    source, target = stream(S, 1), stream(T, 2)
    expected = theirs.whole(
        source,
        target,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(T),
        src_key_padding_mask=torch.zeros(SOURCE.shape).masked_fill(SOURCE == 0, -torch.inf),
        tgt_key_padding_mask=torch.zeros(TARGET.shape).masked_fill(TARGET == 0, -torch.inf),
        memory_key_padding_mask=torch.zeros(SOURCE.shape).masked_fill(SOURCE == 0, -torch.inf),
    )
    memory = built.encoder(source, Context(view(S, SOURCE))).x
    ctx = Context(view(T, TARGET, causal=True), view(T, SOURCE), Memory((memory,), SOURCE))
    same(built.decoder(target, ctx).x, expected, [source, target], TARGET)


@pytest.mark.parametrize("root", ["inside", "outside"])
@pytest.mark.parametrize("gain", ["vector", "scalar", "none"])
def test_layer_norm(gain: str, root: str) -> None:
    eps = 0.1
    spec = LayerNorm(gain=gain, eps=eps, root=root)  # type: ignore[reportArgumentType]
    ours = spec.build(site())
    randomise(ours)
    x = 0.5 * stream(T, 1)
    if root == "inside":
        normed = F.layer_norm(x, (D,), eps=eps)
    else:
        normed = (x - x.mean(-1, keepdim=True)) / (x.std(-1, correction=0, keepdim=True) + eps)
    weights = dict(ours.named_parameters())
    same(ours(x), normed if gain == "none" else normed * weights["weight"] + weights["bias"], [x])


def test_rms_norm() -> None:
    theirs = nn.RMSNorm(D, eps=0.1)
    randomise(theirs)
    ours = RMSNorm(eps=0.1).build(site())
    copy_all(ours, theirs, {"weight": "weight"})
    x = 0.5 * stream(T, 1)
    same(ours(x), theirs(x), [x])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("z", [0.0, 0.01])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [None, 1, 4, 1000])  # None: the plain form
def test_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, rows: int | None, label_smoothing: float, z: float, bias: bool
) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda *_: rows)
    N, V = 11, 17
    generator = torch.Generator().manual_seed(3)
    table = Embeddings().build(V, D, site())
    head = Softmax(scaled=True, bias=bias, label_smoothing=label_smoothing, z_loss=z).build(V, site())
    randomise(head)
    if rows:
        install(head)
    h = torch.randn(N, D, generator=generator).requires_grad_()
    labels = torch.randint(V, (N,), generator=generator)
    weights = torch.rand(N, generator=generator)
    learned = [h, *table.parameters(), *head.parameters()]
    matrix = learned[1]

    logits = h * D**-0.5 @ matrix.T + (learned[2] if bias else 0.0)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    expected = (weights * (losses + z * logits.logsumexp(-1).square())).sum()
    scored = head.score(h, labels, weights, table)
    close(scored.objective, expected)
    close(scored.nll, (weights * F.cross_entropy(logits, labels, reduction="none")).sum())
    for our, their in zip(
        torch.autograd.grad(3 * scored.objective, learned), torch.autograd.grad(3 * expected, learned), strict=True
    ):
        close(our, their)
    close(head.log_probs(h, table), logits.log_softmax(-1))

    evaluated = head.eval().score(h, labels, weights, table)
    close(evaluated.objective, scored.nll)
