"""Linformer, compared with its formula, with each way of sharing its projections along the length."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import DataError, SpecError
from regard.models.build import build, count
from regard.models.cost import cost
from regard.models.encoder_only import EncoderOnly, MaskedLM
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.nn.pattern import Window
from regard.nn.position.additive import Injected
from regard.nn.position.base import AtHeads
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace
from regard.tree import edit
from tests.unit.nn.branches.random_branch import branch_of

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
T, D, MAX, RANK = 5, 12, 8, 3
SEG = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
FAR = torch.tensor([[0, 2, 3, 5, 7], [1, 2, 4, 6, 7]])
MASKS = {
    "everything": Mask(),
    "padded": Mask(q_seg=SEG, k_seg=SEG),
    "given positions": Mask(q_pos=FAR, k_pos=FAR, longest=MAX),
}
SPECS = {
    "separate": Linformer(max_len=MAX, rank=RANK, sharing="none"),
    "heads": Linformer(max_len=MAX, rank=RANK),
    "key and value": Linformer(max_len=MAX, rank=RANK, sharing="key_value"),
    "grouped, separate": Linformer(heads=4, kv_heads=2, d_value=5, max_len=MAX, rank=RANK, sharing="none"),
    "one key-value head": Linformer(kv_heads=1, d_head=6, max_len=MAX, rank=MAX, scale=0.3, bias=False),
}


def context(mask: Mask, T: int = T, **more: Any) -> Context:
    return Context(View(mask, T, T, CPU), **more)


def by_hand(branch: Any, spec: Linformer, x: Tensor, mask: Mask) -> Tensor:
    """concat_h(softmax(scale q_h (E k_g)') F v_g) W_o, mixture by mixture and head by head, with g = h // (H / G)."""
    H, G = branch.heads, branch.kv_heads
    K, V = branch.widths[0] // H, branch.widths[2] // G
    E = branch.key_mixtures.weight
    F = E if spec.sharing == "key_value" else branch.value_mixtures.weight
    q, k, v = branch.qkv(x).split(branch.widths, -1)
    scale = 1 / math.sqrt(K) if spec.scale == "sqrt" else spec.scale
    rows = []
    for b in range(len(x)):
        real = [t for t in range(T) if mask.k_seg is None or mask.k_seg[b, t] != 0]
        heads = []
        for h in range(H):
            g = h // (H // G)
            e, f = (matrix[g if spec.sharing == "none" else 0] for matrix in (E, F))
            at = {t: t if mask.k_pos is None else int(mask.k_pos[b, t]) for t in real}
            keys = [sum(e[r, at[t]] * k[b, t, K * g : K * g + K] for t in real) for r in range(spec.rank)]
            values = [sum(f[r, at[t]] * v[b, t, V * g : V * g + V] for t in real) for r in range(spec.rank)]
            scores = scale * q[b, :, K * h : K * h + K] @ torch.stack(keys).T  # type: ignore[reportArgumentType]
            heads.append(scores.softmax(-1) @ torch.stack(values))  # type: ignore[reportArgumentType]
        rows.append(torch.cat(heads, -1))
    return branch.output(torch.stack(rows))


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_by_formula(spec: Linformer, mask: Mask, site: MakeSite) -> None:
    branch, x = branch_of(spec, site(side="encoder", causal=False)), torch.randn(2, T, D)
    torch.testing.assert_close(branch(x, context(mask)), by_hand(branch, spec, x, mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("sharing", "matrices"), [("none", 2 * 3), ("heads", 2), ("key_value", 1), ("layers", 0)])
def test_number_of_projections_along_the_length(sharing: Any, matrices: int, site: MakeSite) -> None:
    branch = Linformer(max_len=MAX, rank=RANK, sharing=sharing).build(site(causal=False))
    attention = SelfAttention().build(site())
    sizes = [sum(p.numel() for p in module.parameters()) for module in (branch, attention)]
    assert sizes[0] - sizes[1] == matrices * RANK * MAX


def test_with_the_identity_for_e_and_f_it_is_self_attention(site: MakeSite) -> None:
    spec = Linformer(max_len=T, rank=T)
    branch, x = branch_of(spec, site(causal=False)), torch.randn(2, T, D)
    attention: Any = SelfAttention().build(site(causal=False))
    for name in ("qkv", "output"):
        getattr(attention, name).load_state_dict(getattr(branch, name).state_dict())
    for mixtures in (branch.key_mixtures, branch.value_mixtures):
        nn.init.eye_(mixtures.weight[0])
    trace = Trace()
    output = branch(x, context(Mask(), trace=trace))
    torch.testing.assert_close(output, attention(x, context(Mask(), trace=trace)), rtol=0, atol=1e-12)
    torch.testing.assert_close(trace.weights["decoder.mixtures"], trace.weights["decoder.self"])


def test_a_padded_row_equals_the_row_alone(site: MakeSite) -> None:
    branch, x = branch_of(SPECS["separate"], site(causal=False)), torch.randn(2, T, D)
    padded = branch(x, context(MASKS["padded"]))
    for b, length in ((0, 4), (1, 2)):
        alone = branch(x[b : b + 1, :length], context(Mask(), length))
        torch.testing.assert_close(padded[b : b + 1, :length], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", [Rotary(), Injected()], ids=repr)
def test_positions_that_act_on_queries_keys_and_values(position: Any, site: MakeSite) -> None:
    """Keys are rotated, or position vectors added, before they are mixed."""
    place = site(causal=False, position=position)
    branch, x = branch_of(SPECS["heads"], place), torch.randn(2, T, D)
    view = View(Mask(), T, T, CPU)
    view = view.with_terms(position.build(place)(view))
    q, k, v = (view.shift(part) for part in branch.qkv(x).chunk(3, -1))
    q, k = (view.rotate(part.unflatten(-1, (3, 4)).transpose(1, 2)) for part in (q, k))
    E, F = branch.key_mixtures.weight[0, :, :T], branch.value_mixtures.weight[0, :, :T]
    values = F @ v.unflatten(-1, (3, 4)).transpose(1, 2)
    heads = (q @ (E @ k).transpose(-1, -2) / 2).softmax(-1) @ values
    expected = branch.output(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(branch(x, Context(view)), expected, rtol=0, atol=1e-12)


def test_attention_dropout_in_training_only(site: MakeSite) -> None:
    branch, x = branch_of(SPECS["heads"], site(causal=False, attention_dropout=0.5)), torch.randn(2, T, D)
    assert not torch.equal(branch(x, context(Mask())), branch(x, context(Mask())))
    branch.eval()
    assert torch.equal(branch(x, context(Mask())), branch(x, context(Mask())))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"causal": True}, "a token would depend on later ones; use it in an encoder"),
        ({"attention_pattern": Window(2)}, "the attention pattern 'window' hides tokens"),
        ({"position": T5Bias()}, "'t5_bias' position adds scores for pairs of tokens"),
        ({"positions": {3: ALiBi()}}, "'alibi' position adds scores"),
        ({"position": Shaw()}, "'shaw' position adds scores"),
    ],
)
def test_what_needs_single_keys_is_refused_when_built(changes: dict[str, Any], words: str, site: MakeSite) -> None:
    with pytest.raises(SpecError, match=words) as raised:
        Linformer().build(site(**{"causal": False, "path": "encoder.pattern[0].branches[0]", **changes}))
    assert raised.value.path == "encoder.pattern[0].branches[0].kind"


def test_a_position_that_does_not_fit_the_heads_is_refused(site: MakeSite) -> None:
    with pytest.raises(SpecError, match="is 6, but the stack's 'rotary' position is for 4"):
        Linformer(d_head=6).build(site(causal=False, position=Rotary()))


def test_packed_rows_patterns_and_long_sequences_are_refused(site: MakeSite) -> None:
    branch = branch_of(SPECS["heads"], site(causal=False, path="encoder"))
    with pytest.raises(DataError, match="packed: a Linformer would mix tokens of different texts"):
        branch(torch.randn(2, T, D), context(Mask(q_seg=SEG, k_seg=SEG, packed=True)))
    with pytest.raises(SpecError, match="the attention pattern 'window' hides tokens"):
        branch(torch.randn(2, T, D), context(Mask(attention_pattern=Window(2))))
    with pytest.raises(SpecError, match=r"^encoder\.max_len: a sequence of 9 tokens exceeds the 8 positions"):
        branch(torch.randn(2, 9, D), context(Mask(), 9))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 9, "max_len": 8}, "^rank: 9 mixtures of 8 positions shorten nothing"),
        ({"rank": 0}, "^rank: must be at least 1"),
        ({"max_len": 0}, "^max_len: must be at least 1"),
        ({"heads": 0}, "^heads: must be at least 1"),
    ],
)
def test_sizes_out_of_range_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Linformer(**fields)


def model(*branches: Linformer, **stack: Any) -> EncoderOnly:
    pattern = tuple(Block((branch, FeedForward(8))) for branch in branches)
    return EncoderOnly(MaskedLM(), vocab=11, d_model=D, heads=3, dropout=0.0, encoder=Plain(pattern, depth=4, **stack))


LAYERS = Linformer(max_len=MAX, rank=RANK, sharing="layers")


def test_layers_share_one_projection_that_is_stored_once() -> None:
    spec = model(LAYERS)
    built: Any = build(spec, seed=1).double()
    names = [name for name in built.state_dict() if "mixtures" in name or "shared" in name]
    assert names == ["encoder.stack.shared.linformer.weight"]
    assert count(spec) == count(model(Linformer(max_len=MAX, rank=RANK, sharing="key_value"))) - 3 * RANK * MAX
    x = torch.randn(2, T, D)
    stack, copied = built.encoder.stack, copy.deepcopy(built.encoder.stack)
    before = stack(x, context(Mask())).x
    with torch.no_grad():
        copied.shared["linformer"].weight.zero_()  # a copy has a matrix of its own, which all its layers use
    assert torch.equal(stack(x, context(Mask())).x, before)
    zero = copied(x, context(Mask())).x
    for block in copied.blocks:
        block.branches[0].branch.qkv.weight.data.mul_(2.0)
    torch.testing.assert_close(copied(x, context(Mask())).x, zero)
    own: Any = build(model(Linformer(max_len=MAX, rank=RANK, sharing="key_value"))).double()
    separate = own.encoder.stack
    weights = {name: tensor for name, tensor in stack.state_dict().items() if "shared" not in name}
    weights |= {f"blocks.{i}.branches.0.branch.key_mixtures.weight": stack.shared["linformer"].weight for i in range(4)}
    separate.load_state_dict(weights)
    torch.testing.assert_close(separate(x, context(Mask())).x, before, rtol=0, atol=1e-12)


def test_a_shared_projection_has_one_size() -> None:
    with pytest.raises(
        SpecError, match=r"^encoder: the 'linformer' layers of this stack share one module, but one has"
    ):
        build(model(LAYERS, Linformer(max_len=MAX, rank=2, sharing="layers")))
    build(model(LAYERS, Linformer(heads=2, max_len=MAX, rank=RANK, sharing="layers")), device="meta")
    build(model(LAYERS, Linformer(max_len=MAX, rank=2)), device="meta")


def test_without_a_stack_sharing_between_layers_is_refused(site: MakeSite) -> None:
    branch = LAYERS.build(site(causal=False, path="encoder"))
    with pytest.raises(SpecError, match=r"^encoder\.sharing: this stack has no modules that its layers share"):
        branch(torch.randn(2, T, D), context(Mask()))


def test_the_pattern_and_the_position_of_the_stack_are_refused_by_path() -> None:
    for field, value in (
        ("attention_pattern", Window(2)),
        ("position", ALiBi()),
        ("positions", (AtHeads(3, ALiBi()),)),
    ):
        with pytest.raises(SpecError) as raised:
            build(model(LAYERS, **{field: value}))
        assert raised.value.path == "encoder.pattern[0].branches[0].kind"


def test_flops_grow_linearly_with_the_length() -> None:
    """C74: T * rank pairs instead of T * T, for every way of sharing."""
    spec = model(Linformer(max_len=4096, rank=16))
    assert cost(spec, 4096).flops_per_token == cost(spec, 512).flops_per_token
    shared = edit(spec, {"encoder.pattern[0].branches[0].sharing": "layers"})
    assert cost(shared, 4096).flops_per_token == cost(spec, 4096).flops_per_token
    full = edit(spec, {"encoder.pattern[0].branches[0]": SelfAttention()})
    assert cost(full, 4096).flops_per_token > 4 * cost(full, 512).flops_per_token
