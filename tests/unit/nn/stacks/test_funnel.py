import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.batch import translation
from regard.errors import DataError, SpecError
from regard.models.build import build
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from regard.models.encoder_only import EncoderOnly, MaskedLM, SentenceClassifier, TokenClassifier
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.cache import Rows
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.pattern import Window
from regard.nn.position.base import AtHeads
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.funnel import Funnel, halved
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace
from regard.presets import preset
from regard.tree import swap, walk
from regard.variants import apply

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
BLOCK = Block((SelfAttention(bias=False), FeedForward(8)), PreNorm(NoNorm()))


def run(stack: Any, x: Tensor, seg: Tensor | None = None, **more: Any) -> Any:
    T = x.shape[1]
    return stack(x, Context(View(Mask(q_seg=seg, k_seg=seg), T, T, CPU), trace=more.pop("trace", None)), **more)


def naive(stack: Any, x: Tensor, groups: tuple[int, ...], slopes: Tensor | None = None) -> Tensor:
    """Return the output for one sequence without padding, head by head and pair by pair (modifications.md 3.16)."""
    P = dict(stack.named_parameters())
    firsts = [sum(groups[:n]) for n in range(1, len(groups))]
    for layer in range(sum(groups)):
        at = f"blocks.{layer}.branches"
        q, k, v = (x @ P[f"{at}.0.branch.qkv.weight"].T).split(12, -1)
        heads = []
        for h in range(3):
            channels = slice(4 * h, 4 * h + 4)
            scores = q[:, channels] @ k[:, channels].T / math.sqrt(4)
            if slopes is not None:
                positions = torch.arange(len(x))  # starts at 0 again after each halving
                scores = scores - slopes[h] * (positions[:, None] - positions).abs()
            heads.append(scores.softmax(-1) @ v[:, channels])
        x = x + torch.cat(heads, -1) @ P[f"{at}.0.branch.output.weight"].T
        if layer in firsts:
            x = torch.stack([x[i : i + 2].mean(0) for i in range(0, len(x), 2)])
        hidden = (x @ P[f"{at}.1.branch.up.weight"].T + P[f"{at}.1.branch.up.bias"]).relu()
        x = x + hidden @ P[f"{at}.1.branch.down.weight"].T + P[f"{at}.1.branch.down.bias"]
    return x


@pytest.mark.parametrize("groups", [(1, 1, 1), (2, 1), (1, 2, 2), (3,)])
@pytest.mark.parametrize("lengths", [(8, 4), (7, 3, 1), (5, 2, 6), (9,)])
@pytest.mark.parametrize("alibi", [False, True])
def test_formula(groups: tuple[int, ...], lengths: tuple[int, ...], alibi: bool, site: MakeSite) -> None:
    stack: Any = Funnel((BLOCK,), groups, ALiBi() if alibi else None).build(site(causal=False, side="encoder"))
    for parameter in stack.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    width = max(lengths)
    seg = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    x = torch.randn(len(lengths), width, 12)  # values of padding must not matter
    out = run(stack, x, None if min(lengths) == width else seg)
    slopes = stack.position.slopes if alibi else None
    for b, length in enumerate(lengths):
        expected = naive(stack, x[b, :length], groups, slopes)
        torch.testing.assert_close(out.x[b, : len(expected)], expected)
        if out.seg is not None:
            assert out.seg[b].tolist() == [1] * len(expected) + [0] * (out.x.shape[1] - len(expected))
    if min(lengths) == width:
        assert out.seg is None


def test_means_of_pairs() -> None:
    x = torch.arange(1.0, 11.0).reshape(2, 5, 1)
    seg = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    y, halved_seg = halved(x, seg)
    assert y.squeeze(-1).tolist() == [[1.5, 3.0, 0.0], [6.5, 8.5, 10.0]]
    assert halved_seg is not None
    assert halved_seg.tolist() == [[1, 1, 0], [1, 1, 1]]
    y, halved_seg = halved(x, None)
    assert y.squeeze(-1).tolist() == [[1.5, 3.5, 5.0], [6.5, 8.5, 10.0]]
    assert halved_seg is None


def test_gradients_reach_real_tokens_only() -> None:
    x = torch.randn(1, 5, 3, requires_grad=True)
    halved(x, torch.tensor([[1, 1, 1, 0, 0]]))[0].sum().backward()
    assert x.grad is not None
    assert x.grad[0, :, 0].tolist() == [0.5, 0.5, 1.0, 0.0, 0.0]


def test_length_halves_after_the_first_branch_of_a_group(site: MakeSite) -> None:
    """In a later group, the first attention still reads all tokens; the next ones read half."""
    trace = Trace()
    stack = Funnel((BLOCK,), (2, 2, 1), attention_pattern=Window(2)).build(site(causal=False, side="encoder"))
    run(stack, torch.randn(1, 12, 12), trace=trace)
    recorded = trace.weights["encoder.self"]
    assert [tuple(weights.shape[2:]) for weights in recorded] == [(12, 12), (12, 12), (12, 12), (6, 6), (6, 6)]
    for weights in recorded:
        positions = torch.arange(weights.shape[-1])
        near = (positions[:, None] - positions).abs() < 2
        assert torch.equal(weights[0, 0] > 0, near)


def test_blocks_are_tiled_over_all_groups(site: MakeSite) -> None:
    second = Block((SelfAttention(), FeedForward(6), FeedForward(7)), PostNorm())
    spec = Funnel((BLOCK, second), (2, 1))
    assert (spec.blocks(), spec.residual_branches()) == (3, 2 + 3 + 2)
    assert [len(block.branches) for block in spec.build(site(causal=False)).blocks] == [2, 3, 2]  # type: ignore[reportArgumentType, reportAttributeAccessIssue]
    assert isinstance(Funnel((second,), (1, 1)).build(site(causal=False)).end, nn.Identity)
    assert isinstance(
        replace(spec, pattern=(replace(BLOCK, residual=PreNorm()),)).build(site(causal=False)).end, nn.LayerNorm
    )


def test_decoders_are_refused(site: MakeSite) -> None:
    with pytest.raises(SpecError, match=r"^decoder\.kind: a funnel pools neighbouring tokens, so a token would depend"):
        Funnel((BLOCK,)).build(site(path="decoder"))
    stack = Funnel((BLOCK,)).build(site(path="encoder", causal=False))
    view = Context(View(Mask(), 3, 3, CPU))
    for call in (
        lambda: stack(torch.randn(1, 3, 12), view, []),
        lambda: stack.start(Rows(torch.zeros(1, dtype=torch.int64), 3), view),
    ):
        with pytest.raises(SpecError, match=r"^encoder\.kind: .*cannot decode"):
            call()


def test_packed_rows_are_refused() -> None:
    model = build(small("funnel"))
    with pytest.raises(DataError, match=r"^packed: a funnel would pool tokens of different texts"):
        model.loss(translation([([5, 6, 7], [8, 9]), ([4], [5])], packed=True))


def test_keep_returns_layers_of_different_lengths(site: MakeSite) -> None:
    stack = Funnel((BLOCK,), (1, 1)).build(site(path="encoder", causal=False))
    assert [layer.shape[1] for layer in run(stack, torch.randn(1, 4, 12), keep=True).layers] == [4, 4, 2]
    single_group = Funnel((BLOCK,), (3,)).build(site(causal=False))
    x = torch.randn(1, 4, 12)
    out = run(single_group, x, keep=True)
    assert len(out.layers) == 4
    assert torch.equal(out.layers[0], x)
    assert torch.equal(out.layers[-1], out.x)
    plain = Plain((BLOCK,), 3).build(site(causal=False))
    plain.load_state_dict(single_group.state_dict())
    assert torch.equal(run(plain, x).x, out.x)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"pattern": ()}, "pattern"),
        ({"layers": ()}, "layers"),
        ({"layers": (2, 0)}, "layers"),
        ({"positions": (AtHeads(2, ALiBi()),) * 2}, "positions"),
    ],
)
def test_refusals(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        Funnel(**{"pattern": (BLOCK,), **fields})
    assert raised.value.path == path


def small(*names: str, depth: int = 3) -> EncoderDecoder:
    spec: Any = preset("narang_base", vocab=20, d_model=16, heads=2)
    spec = swap(spec, Plain, lambda stack: replace(stack, depth=depth))
    spec = swap(spec, FeedForward, lambda branch: replace(branch, d_hidden=24))
    for name in names:
        spec = apply(name, spec)
    return spec


def test_the_memory_has_a_quarter_of_the_length() -> None:
    model = build(small("funnel"), seed=1)
    assert isinstance(model, EncoderDecoderModel)
    memory = model.encode(translation([([5] * 9, [8, 9]), ([4] * 4, [5]), ([3], [5])], source_end=()))
    assert memory.x[0].shape == (3, 3, 16)
    assert memory.seg is not None
    assert memory.seg.tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]


def test_the_variant_of_the_base_of_narang_et_al() -> None:
    changed: Any = apply("funnel", preset("narang_base"))
    assert (changed.encoder.layers, changed.encoder.position) == ((4, 4, 4), T5Bias())
    assert {type(part) for part in walk(changed.encoder) if isinstance(part, Norm)} - {NoNorm} == {RMSNorm}
    assert {type(part) for part in walk(changed.decoder) if isinstance(part, Norm)} - {NoNorm} == {LayerNorm}
    assert changed.encoder.pattern[0].residual.norm == RMSNorm(1e-6)


@pytest.mark.parametrize(("depth", "layers"), [(2, (1, 1)), (3, (1, 1, 1)), (8, (3, 3, 2)), (24, (8, 8, 8))])
def test_groups_scale_with_the_depth(depth: int, layers: tuple[int, ...]) -> None:
    changed: Any = small("funnel", depth=depth)
    assert changed.encoder.layers == layers
    assert changed.decoder.depth == depth


def test_bases_unsuitable_for_a_funnel_are_refused() -> None:
    for message, spec in (
        ("^a funnel needs a model with an encoder", preset("gpt2_small")),
        (r"^encoder\.depth: a funnel needs at least 2 layers", small(depth=1)),
        ("^encoder: must be a plain stack without shared layers for a funnel", small("block_sharing")),
        ("^encoder: must be a plain stack without shared layers for a funnel", small("universal")),
        (r"^bridge: 'transparent' needs layers of equal length", small("transparent")),
        ("changes nothing", small("funnel")),
    ):
        with pytest.raises(SpecError, match=message):
            apply("funnel", spec)


@pytest.mark.parametrize("task", [MaskedLM(), TokenClassifier(3)], ids=lambda task: task.kind)
def test_token_tasks_refuse_a_funnel(task: Any) -> None:
    base = preset("bert_base")
    assert isinstance(base, EncoderOnly)
    with pytest.raises(SpecError, match=r"^encoder: 'funnel' leaves fewer vectors than tokens"):
        build(apply("funnel", replace(base, task=task)), device="meta")
    assert build(apply("funnel", replace(base, task=SentenceClassifier(3))), device="meta")
