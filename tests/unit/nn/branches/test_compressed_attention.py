"""Memory-compressed attention, compared with its formula, with full attention, and with its own decoding steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import fast
from regard.batch import pack
from regard.bench.live_memory import peak_bytes
from regard.errors import SpecError
from regard.models.decoder_only import DecoderOnly
from regard.nn.block import Block
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.cache import Rows
from regard.nn.compressed_cache import CompressedCache
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.nn.pattern import Window
from regard.nn.position.base import AtHeads
from regard.nn.position.bias import ALiBi
from regard.nn.position.rotary import Rotary
from regard.nn.stacks.plain import Plain
from regard.nn.trace import Trace

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
CAUSAL = {
    "paper": CompressedAttention(),
    "inclusive null mean": CompressedAttention(2, "mean", "null", inclusive=True),
    "max": CompressedAttention(4, "max", scale=0.3),
    "grouped": CompressedAttention(heads=4, kv_heads=2, d_head=3, d_value=5, bias=False),
    "inclusive": CompressedAttention(inclusive=True, output=False),
    "stride 1": CompressedAttention(1, sink="null"),
    "no sink": CompressedAttention(1, sink="none", inclusive=True),
}
ENCODER = {
    **{name: spec for name, spec in CAUSAL.items() if not spec.inclusive},
    "null mean": CompressedAttention(2, "mean", "null"),
    "no sink": CompressedAttention(sink="none"),
}


def branch_of(spec: CompressedAttention, site: Site) -> Any:
    branch: Any = spec.build(site)
    for parameter in branch.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    return branch.eval()


def context(mask: Mask, T: int, **more: Any) -> Context:
    return Context(View(mask, T, T, CPU), **more)


def project(x: Tensor, linear: Any) -> Tensor:
    return x @ linear.weight.T + (0.0 if linear.bias is None else linear.bias)


def compressed(branch: Any, spec: CompressedAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key and the value of the group with the keys k (n, G * K) and the values v, n <= stride."""
    if spec.compression == "mean":
        return k.mean(0), v.mean(0)
    if spec.compression == "max":
        return k.max(0).values, v.max(0).values
    results = []
    for x, linear in ((k, branch.compress.key), (v, branch.compress.value)):
        total = torch.zeros(x.shape[1]) if linear.bias is None else linear.bias
        for i, token in enumerate(x):  # tokens that are missing at the end of a text are zeros
            total = total + linear.weight[:, i * x.shape[1] : (i + 1) * x.shape[1]] @ token
        results.append(total)
    return results[0], results[1]


def by_hand(branch: Any, spec: CompressedAttention, x: Tensor, causal: bool, prefix: int = 0) -> Tensor:
    """Return the output for one text (T, D), query by query. In a prefix LM, all tokens attend to the prefix."""
    H, G, (GK, GV), c, T = branch.heads, branch.kv_heads, branch.widths, spec.stride, len(x)
    K, V = GK // G, GV // G
    q, k, v = project(x, branch.qkv).split((H * K, GK, GV), -1)
    scale = {"sqrt": 1 / math.sqrt(K), "none": 1.0}.get(spec.scale, spec.scale)  # type: ignore[reportArgumentType]
    rows = []
    for i in range(T):
        keys = []
        if spec.sink != "none":
            keys.append((k[0], v[0]) if spec.sink == "first" else branch.null.split((GK, GV)))
        for first in range(0, T, c):
            last = first + c - 1
            past = last <= i if spec.inclusive else last < i
            if not causal or past or last < prefix:
                keys.append(compressed(branch, spec, k[first : last + 1], v[first : last + 1]))
        heads = []
        for h in range(H):
            g = h // (H // G)
            scores = [scale * (key[g * K : (g + 1) * K] @ q[i, h * K : (h + 1) * K]) for key, _ in keys]
            weights = torch.stack(scores).softmax(0)
            heads.append(sum(w * value[g * V : (g + 1) * V] for w, (_, value) in zip(weights, keys, strict=True)))
        rows.append(torch.cat(heads))
    y = torch.stack(rows)
    return project(y, branch.output) if spec.output else y


def check(branch: Any, spec: CompressedAttention, lengths: Sequence[int], mask: Mask, prefix: Sequence[int]) -> None:
    """Check outputs and gradients of a batch with the texts of these lengths, each in its row or all in one row."""
    width = mask.q_seg.shape[1] if mask.q_seg is not None else lengths[0]
    B = 1 if mask.packed else len(lengths)
    x = torch.randn(B, width, 12)
    begins = [0] * B if not mask.packed else [sum(lengths[:n]) for n in range(len(lengths))]
    y = branch(x, context(mask, width))
    actual, expected = [], []
    for n, length in enumerate(lengths):
        row, begin = (0, begins[n]) if mask.packed else (n, 0)
        actual.append(y[row, begin : begin + length])
        expected.append(by_hand(branch, spec, x[row, begin : begin + length], mask.causal, prefix[n]))
    torch.testing.assert_close(torch.cat(actual), torch.cat(expected), rtol=0, atol=1e-12)
    if not mask.packed or mask.prefix is not None:  # packed rows have every kind of group
        return
    parameters = list(branch.parameters())
    gradients = torch.autograd.grad(torch.cat(actual).square().sum(), parameters, materialize_grads=True)
    naive = torch.autograd.grad(torch.cat(expected).square().sum(), parameters, materialize_grads=True)
    torch.testing.assert_close(gradients, naive, rtol=0, atol=1e-8)


LENGTHS = [11, 3, 5, 1]


def padded(causal: bool, extra: int = 0, prefix: Sequence[int] | None = None) -> Mask:
    index = torch.arange(LENGTHS[0] + extra)
    seg = (index < torch.tensor(LENGTHS)[:, None]).long()
    pre = None if prefix is None else index < torch.tensor(prefix)[:, None]
    return Mask(causal=causal, q_seg=seg, k_seg=seg, prefix=pre)


def packed(causal: bool, extra: int = 0, prefix: Sequence[int] | None = None) -> Mask:
    _, seg, pos = pack([[[0] * length for length in LENGTHS]], sum(LENGTHS) + extra)
    pre = None
    if prefix is not None:
        pre = (pos < torch.tensor([0, *prefix])[seg]) & (seg != 0)
    segments = len(LENGTHS) + 1  # one more than there are
    return Mask(
        causal=causal,
        q_pos=pos,
        k_pos=pos,
        q_seg=seg,
        k_seg=seg,
        packed=True,
        prefix=pre,
        segments=segments,
        longest=11,
    )


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("arrange", [padded, packed])
@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_texts_of_any_length_by_formula(arrange: Callable[..., Mask], causal: bool, extra: int, site: MakeSite) -> None:
    for spec in (CAUSAL if causal else ENCODER).values():
        branch = branch_of(spec, site(causal=causal))
        check(branch, spec, LENGTHS, arrange(causal, extra), [0] * 4)


@pytest.mark.parametrize("arrange", [padded, packed])
def test_prefix_by_formula(arrange: Callable[..., Mask], site: MakeSite) -> None:
    prefix = [7, 3, 4, 1]
    for spec in CAUSAL.values():
        check(branch_of(spec, site()), spec, LENGTHS, arrange(True, prefix=prefix), prefix)


def test_groups_are_made_by_index_and_not_by_position(site: MakeSite) -> None:
    spec, pos = CAUSAL["paper"], 2 * torch.arange(8)[None]
    check(branch_of(spec, site()), spec, [8], Mask(causal=True, q_pos=pos, k_pos=pos), [0])


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_with_stride_1_it_is_full_attention(causal: bool, site: MakeSite) -> None:
    x = torch.randn(4, 11, 12)
    attention: Any = branch_of(SelfAttention(kv_heads=1), site(causal=causal))  # type: ignore[reportArgumentType]
    for compression in ("convolution", "mean", "max"):
        spec = CompressedAttention(1, compression, "none", inclusive=causal, kv_heads=1)
        branch = branch_of(spec, site(causal=causal))
        if compression == "convolution":
            for linear in (branch.compress.key, branch.compress.value):
                linear.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
        state = attention.state_dict()
        branch.load_state_dict(state, strict=False)
        for mask in (Mask(causal=causal), padded(causal)):
            real = torch.ones(4, 11, dtype=torch.bool) if mask.q_seg is None else mask.q_seg != 0
            actual, expected = branch(x, context(mask, 11)), attention(x, context(mask, 11))
            torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["paper", "inclusive"])
def test_an_output_depends_on_no_later_token_and_on_all_groups_before(name: str, site: MakeSite) -> None:
    spec, T = CAUSAL[name], 9
    branch, x = branch_of(spec, site()), torch.randn(1, T, 12, requires_grad=True)
    y = branch(x, context(Mask(causal=True), T))
    for t in range(T):
        (gradient,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        depends = {s for s in range(T) if bool(gradient[0, s].any())}
        groups = (t + spec.inclusive) // 3
        # With the sink as the only key, the output is its value, whatever the query.
        assert depends == ({0, t} | set(range(3 * groups)) if groups else {0})


def session(branch: Any, B: int, max_len: int, static: bool) -> tuple[Rows, CompressedCache, Callable[..., Tensor]]:
    rows = Rows(torch.zeros(B, dtype=torch.int64), max_len, uniform=not static, static=static)
    cache = branch.start(rows, context(Mask(), 1))

    def advance(x: Tensor, counts: Tensor | None = None) -> Tensor:
        T = x.shape[1]
        rows.claim(T, counts)
        y = branch(x, Context(rows.view(T)), cache)
        rows.advance(T, counts)
        return y

    return rows, cache, advance


@pytest.mark.parametrize("spec", CAUSAL.values(), ids=list(CAUSAL))
def test_the_first_tokens_of_a_text_have_the_outputs_of_the_whole_text(
    spec: CompressedAttention, site: MakeSite
) -> None:
    branch, x = branch_of(spec, site()), torch.randn(2, 20, 12)
    whole = branch(x, context(Mask(causal=True), 20))
    for T in range(1, 20):
        torch.testing.assert_close(branch(x[:, :T], context(Mask(causal=True), T)), whole[:, :T], rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["paper", "inclusive null mean", "max", "no sink"])
def test_a_prompt_of_any_length_continued_token_by_token_equals_one_pass(
    name: str, static: bool, site: MakeSite
) -> None:
    spec = CAUSAL[name]
    branch, x = branch_of(spec, site()), torch.randn(1, 20, 12)
    whole = branch(x, context(Mask(causal=True), 20))
    for cut in range(1, 21):
        _, _, advance = session(branch, 1, 20, static)
        steps = [advance(x[:, :cut]), *(advance(x[:, t : t + 1]) for t in range(cut, min(20, cut + spec.stride)))]
        y = torch.cat(steps, 1)
        torch.testing.assert_close(y, whole[:, : y.shape[1]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("steps", [[1] * 20, [4, 1, 7, 2, 3, 3], [3, 3, 3, 11], [2, 2, 2, 14]])
def test_a_text_may_be_cut_anywhere(steps: list[int], static: bool, site: MakeSite) -> None:
    for name in ("paper", "inclusive", "stride 1"):
        branch, x = branch_of(CAUSAL[name], site()), torch.randn(2, 20, 12)
        _, _, advance = session(branch, 2, 20, static)
        y = torch.cat([advance(part) for part in x.split(steps, 1)], 1)
        torch.testing.assert_close(y, branch(x, context(Mask(causal=True), 20)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["paper", "inclusive null mean", "max", "no sink"])
def test_rows_of_different_lengths_reorder_restart_and_keep(name: str, static: bool, site: MakeSite) -> None:
    branch = branch_of(CAUSAL[name], site())
    texts = torch.randn(3, 17, 12)
    read = [0, 0, 0]

    def expect(y: Tensor, taken: Sequence[int]) -> None:
        for b, count in enumerate(taken):
            whole = branch(texts[b : b + 1], context(Mask(causal=True), 17))[0, read[b] : read[b] + count]
            torch.testing.assert_close(y[b, :count], whole, rtol=0, atol=1e-12)
            read[b] += count

    rows, cache, advance = session(branch, 3, 40, static)
    for counts in ([4, 1, 3], [1, 1, 1], [2, 5, 1], [1, 3, 1], [1, 1, 1], [1, 1, 1]):
        x = torch.full((3, max(counts), 12), 1e3)
        for b, count in enumerate(counts):
            x[b, :count] = texts[b, read[b] : read[b] + count]
        expect(advance(x, torch.tensor(counts) if max(counts) > 1 else None), counts)
    assert cache.entries is not None
    address, parent = cache.entries.data_ptr(), [2, 0, 0]
    rows.reorder(torch.tensor(parent))
    cache.reorder(torch.tensor(parent))
    assert cache.entries.data_ptr() == address  # a captured CUDA graph reads the same memory
    texts, read = texts[parent], [read[b] for b in parent]
    for _ in range(3):
        expect(advance(torch.stack([texts[b, read[b] : read[b] + 1] for b in range(3)])), [1, 1, 1])
    if static:
        rows.restart(torch.tensor([1]))
        texts, read = torch.cat((texts[:1], torch.randn(1, 17, 12), texts[2:])), [read[0], 0, read[2]]
    else:
        kept = torch.tensor([2, 1])
        cache.keep(kept, kept)
        rows.keep(kept)
        texts, read = texts[kept], [read[2], read[1]]
    for _ in range(4):
        expect(advance(torch.stack([texts[b, read[b] : read[b] + 1] for b in range(len(read))])), [1] * len(read))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("n", [6, 7, 8])
def test_beams_of_equal_length_reorder(n: int, static: bool, site: MakeSite) -> None:
    branch, x, parent = branch_of(CAUSAL["paper"], site()), torch.randn(3, 10, 12), torch.tensor([1, 2, 1])
    rows, cache, advance = session(branch, 3, 10, static)
    advance(x[:, :n])
    rows.reorder(parent)
    cache.reorder(parent)
    texts = torch.cat((x[parent, :n], x[:, n:]), 1)
    y = torch.cat([advance(texts[:, t : t + 1]) for t in range(n, 10)], 1)
    torch.testing.assert_close(y, branch(texts, context(Mask(causal=True), 10))[:, n:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", CAUSAL.values(), ids=list(CAUSAL))
def test_size_of_the_cache(spec: CompressedAttention, site: MakeSite) -> None:
    """The cache has one entry per group and one for the sink; the carry has at most stride - 1 tokens."""
    branch, c, B, max_len = branch_of(spec, site()), spec.stride, 2, 25
    _, cache, advance = session(branch, B, max_len, static=False)
    width, sink = sum(branch.widths), int(spec.sink != "none")
    for n in range(1, 24):
        advance(torch.randn(B, 1, 12))
        assert cache.entries is not None
        assert cache.carry is not None
        size = sum(tensor.numel() * tensor.element_size() for tensor in (cache.entries, cache.carry))
        assert size == 8 * B * width * (sink + math.ceil(max_len / c) + c - 1)
        # Entries of later groups have not been written.
        assert int(cache.entries[:, sink:].flatten(2).any(2).sum(1).max()) == n // c
    if spec == CAUSAL["paper"]:
        assert sink + 23 // c == 8


def test_a_trace_records_the_weights_of_the_sink_and_the_groups(site: MakeSite) -> None:
    branch, trace, x = branch_of(CAUSAL["paper"], site()), Trace(), torch.randn(2, 7, 12)
    traced = branch(x, context(Mask(causal=True), 7, trace=trace))
    assert torch.equal(traced, branch(x, context(Mask(causal=True), 7)))
    (weights,) = trace.weights["decoder.self"]
    assert weights.shape == (2, 3, 7, 1 + 2)
    visible = torch.tensor([[1, 0, 0]] * 3 + [[1, 1, 0]] * 3 + [[1, 1, 1]], dtype=torch.bool)
    assert torch.equal(weights != 0, visible.expand(2, 3, -1, -1))


def test_layers_with_the_same_groups_share_masks(site: MakeSite) -> None:
    ctx, x = context(Mask(causal=True), 7), torch.randn(2, 7, 12)
    for spec in (CAUSAL["paper"], CompressedAttention(sink="null"), CompressedAttention(2)):
        branch_of(spec, site())(x, ctx)
    assert len(ctx.own.shared) == 2


@pytest.mark.parametrize("name", ["paper", "stride 1"])
def test_masks_of_packed_rows_have_the_keys_ordered_by_text(name: str, site: MakeSite) -> None:
    """Kernels for packed rows require segments in order, then padding, and the length of the longest segment."""
    branch = branch_of(ENCODER[name], site(causal=False))
    view = branch.layout(View(packed(False), sum(LENGTHS), sum(LENGTHS), CPU)).view
    seg, c = view.mask.k_seg, branch.stride
    counts = [1 + math.ceil(length / c) for length in LENGTHS]
    assert seg[0, : sum(counts)].tolist() == [n + 1 for n, count in enumerate(counts) for _ in range(count)]
    assert not seg[0, sum(counts) :].any()
    assert view.mask.longest >= max(counts)


def language_model(stack: dict[str, Any], *branches: Any) -> DecoderOnly:
    block = Block((*(branches or (CompressedAttention(),)), FeedForward(24)))
    return DecoderOnly(vocab=9, d_model=12, heads=3, decoder=Plain((block,), 2, **stack))


@pytest.mark.parametrize(
    ("stack", "path", "message"),
    [
        ({"position": Rotary()}, "decoder.pattern[0].branches[0].kind", "stack's 'rotary' position cannot apply"),
        ({"positions": (AtHeads(3, ALiBi()),)}, "decoder.pattern[0].branches[0].kind", "stack's 'alibi' position"),
        ({"attention_pattern": Window(3)}, "attention_pattern", "'compressed_attention' has no such mask"),
        ({"strict": True}, "strict", "'compressed_attention' has no such mask"),
    ],
)
def test_options_of_the_stack_that_cannot_apply_are_refused(
    stack: dict[str, Any], path: str, message: str, site: MakeSite
) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        language_model(stack).decoder.build(site(path="decoder"))
    assert raised.value.path == path


def test_self_attention_beside_it_may_have_a_pattern_and_a_position(site: MakeSite) -> None:
    local = SelfAttention(attention_pattern=Window(3), position=ALiBi())
    stack = language_model({}, local, CompressedAttention()).decoder.build(site())
    assert stack(torch.randn(1, 5, 12), context(Mask(causal=True), 5)).x.shape == (1, 5, 12)


@pytest.mark.parametrize(
    ("spec", "causal", "name", "message"),
    [
        (CompressedAttention(sink="none"), True, "sink", "the first queries of a causal stack have no key"),
        (CompressedAttention(1, sink="none"), True, "sink", "the first queries of a causal stack have no key"),
        (CompressedAttention(sink="none", inclusive=True), True, "sink", "the first queries of a causal stack"),
        (CompressedAttention(inclusive=True), False, "inclusive", "would have no effect"),
        (CompressedAttention(kv_heads=2), True, "kv_heads", "do not divide 3 heads"),
    ],
)
def test_invalid_specs_are_refused(
    spec: CompressedAttention, causal: bool, name: str, message: str, site: MakeSite
) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        spec.build(site(causal=causal, path="decoder"))
    assert raised.value.path == f"decoder.{name}"


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match="stride: must be at least 1, not 0"):
        CompressedAttention(0)
    with pytest.raises(SpecError, match="heads: must be at least 1, not 0"):
        replace(CompressedAttention(), heads=0)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("T", [1, 2, 7, 12])
def test_fast_form_equals_the_formula_with_gradients(name: str, T: int, site: MakeSite) -> None:
    branch = branch_of(CAUSAL[name], site(causal=True))
    x, weights = torch.randn(2, T, 12), torch.randn(2, T, 20)
    results = []
    for install in (fast.install, fast.remove):
        install(holder := nn.ModuleList([branch]))
        leaf = x.clone().requires_grad_()
        y = holder[0](leaf, context(Mask(causal=True), T))
        (y * weights[..., : y.shape[2]]).sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in branch.parameters() if p.grad is not None)])
        branch.zero_grad()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["paper", "inclusive null mean"])
def test_fast_form_builds_no_mask_of_length_squared(name: str, site: MakeSite) -> None:
    holder = nn.ModuleList([branch_of(CAUSAL[name], site(causal=True))])
    fast.install(holder)
    peaks = []
    for T in (1024, 2048):
        x = torch.randn(1, T, 12, requires_grad=True)
        peaks.append(peak_bytes(lambda x=x, T=T: holder[0](x, context(Mask(causal=True), T)).sum().backward(), CPU))
    assert peaks[1] < 2.1 * peaks[0]
