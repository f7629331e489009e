import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.batch import translation
from regard.errors import SpecError
from regard.models.build import build, count
from regard.models.decoder_only import DecoderOnly
from regard.models.decoding import flat
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.cache import KVCache, Rows, StaticKV
from regard.nn.core import Branch, Site
from regard.nn.gated_residual import GatedRecurrent
from regard.nn.init import T5Init
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.norm import LayerNorm, NoNorm
from regard.nn.pattern import Window
from regard.nn.position.base import AtHeads
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.stacks.plain import Plain
from regard.nn.stacks.universal import Universal, UniversalACT
from regard.nn.trace import Trace
from regard.presets import preset
from regard.training.optim import is_table
from regard.tree import swap, walk
from regard.variants import apply

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")
KINDS = (Universal, UniversalACT)


@dataclass(frozen=True, slots=True)
class Spy(BranchSpec):
    """tanh(x A) of the mean over visible tokens. Records the state and memory of each call."""

    kind = "spy"

    def build(self, site: Site) -> Branch:
        return _Spy(site)


class _Spy(Branch):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(12, 12) / 3)
        self.site, self.calls = site, []

    def forward(self, x: Tensor, ctx: Context, state: Any = None) -> Tensor:
        memory = None if ctx.memory is None else ctx.memory.x[0][0, 0, 0].item()
        self.calls.append((state, memory))
        visible = ctx.own.mask.dense(ctx.own.T, ctx.own.S, CPU)
        weights = torch.ones(1, 1, ctx.own.T, ctx.own.S) if visible is None else visible.double()
        weights = (weights / weights.sum(-1, keepdim=True))[:, 0].expand(-1, ctx.own.T, -1)
        return (weights @ x @ self.matrix).tanh()

    def start(self, rows: Rows, ctx: Context) -> KVCache:
        return KVCache(rows)


BLOCK = Block((Spy(),), PreNorm(NoNorm()))


def f(x: Tensor, matrix: Tensor, real: int) -> Tensor:
    """Return the output of the residual branch with `Spy` for one sequence, whose first `real` tokens are real."""
    return torch.stack([x[t] + (x[:real].mean(0) @ matrix).tanh() for t in range(len(x))])


def run(stack: Any, x: Tensor, seg: Tensor | None = None, **more: Any) -> Any:
    view = View(Mask(q_seg=seg, k_seg=seg), x.shape[1], x.shape[1], CPU)
    return stack(x, Context(view, view, **more), keep=True)


def test_one_block_is_applied_repeatedly(site: MakeSite) -> None:
    stack: Any = Universal(BLOCK, 1, 3, 2).build(site(causal=False))
    x = torch.randn(2, 4, 12)
    seg = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    out = run(stack, x, seg)
    matrix, e = stack.blocks[0].branches[0].branch.matrix, stack.steps.position
    assert e.shape == (3, 12)
    for b, real in ((0, 4), (1, 2)):
        y = f(x[b], matrix, real)
        for n in range(3):
            y = f(y + math.sqrt(12) * e[n], matrix, real)
        y = f(f(y, matrix, real), matrix, real)
        torch.testing.assert_close(out.x[b, :real], y[:real])
    assert len(out.layers) == 7
    assert torch.equal(out.layers[0], x)
    assert torch.equal(out.layers[-1], out.x)
    assert out.seg is seg
    assert sum(p.numel() for p in stack.parameters()) == 12 * 12 + 3 * 12


def halting(stack: Any, x: Tensor, real: int) -> tuple[list[list[Tensor]], list[int], list[Tensor], Tensor]:
    """Return (states, N, R, outputs) of Graves 2016 for one sequence, token by token."""
    matrix, e = stack.blocks[0].branches[0].branch.matrix, stack.steps.position
    state, steps = list(x), len(e)
    states: list[list[Tensor]] = [[] for _ in state]
    probabilities: list[list[Tensor]] = [[] for _ in state]
    done: dict[int, int] = {}
    for n in range(steps):
        new = f(torch.stack(state) + math.sqrt(12) * e[n], matrix, real)
        for t in range(len(state)):
            if t in done:
                continue
            state[t] = new[t]
            states[t].append(new[t])
            probabilities[t].append(torch.sigmoid(stack.halt[0] @ new[t] + stack.halt_bias[0]))
            if sum(probabilities[t]) > 1 - 0.3 or n == steps - 1:
                done[t] = n + 1
    remainders = [1 - sum(p[:-1], torch.zeros(())) for p in probabilities]
    outputs = [
        sum((w * s for w, s in zip([*p[:-1], R], s_, strict=True)), torch.zeros(12))
        for p, R, s_ in zip(probabilities, remainders, states, strict=True)
    ]
    return states, [done[t] for t in range(len(state))], remainders, torch.stack(outputs)


def adaptive(site: Site, steps: int = 5, before: int = 0, after: int = 0) -> Any:
    stack: Any = UniversalACT(BLOCK, before, steps, after, epsilon=0.3, ponder=0.5).build(site)
    nn.init.normal_(stack.halt, 0.0, 0.5)
    nn.init.constant_(stack.halt_bias, -1.0)
    nn.init.normal_(stack.steps.position, 0.0, 0.2)
    return stack


def test_halting_by_formula(site: MakeSite) -> None:
    stack = adaptive(site(causal=False), 3)
    x = torch.randn(2, 6, 12, requires_grad=True)
    seg = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    losses: list[Tensor] = []
    out = run(stack, x, seg, losses=losses)
    counts, cost, tokens = [], torch.zeros(()), 0
    expected = []
    for b, real in ((0, 6), (1, 3)):
        _, steps, remainders, outputs = halting(stack, x[b], real)
        torch.testing.assert_close(out.x[b, :real], outputs[:real])
        expected.append(outputs[:real])
        counts += steps[:real]
        cost = cost + sum(N + R for N, R in zip(steps[:real], remainders[:real], strict=True))
        tokens += real
    assert set(counts) == {1, 2, 3}, "the example should have tokens that halt at different steps"
    (loss,) = losses
    torch.testing.assert_close(loss, 0.5 * cost / tokens)
    assert len(out.layers) == 4
    parameters = [x, *stack.parameters()]
    gradients = torch.autograd.grad(out.x[seg != 0].square().sum() + loss, parameters, retain_graph=True)
    expected_gradients = torch.autograd.grad(torch.cat(expected).square().sum() + 0.5 * cost / tokens, parameters)
    for a, b in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_halted_states_do_not_change(site: MakeSite) -> None:
    stack = adaptive(site(causal=False))
    x = torch.randn(1, 6, 12)
    out = run(stack, x)
    states, steps, _, _ = halting(stack, x[0], 6)
    for t in range(6):
        for n in range(4):
            torch.testing.assert_close(out.layers[n + 1][0, t], states[t][min(n, steps[t] - 1)])
    assert run(stack, x, losses=None) is not None


def test_a_token_that_halts_at_once_takes_one_step(site: MakeSite) -> None:
    fixed: Any = Universal(BLOCK, 1, 1, 2).build(site(causal=False))
    act = adaptive(site(causal=False), 5, 1, 2)
    nn.init.constant_(act.halt_bias, 50.0)
    weights = {name: value for name, value in act.state_dict().items() if "halt" not in name}
    fixed.load_state_dict(weights | {"steps.position": weights["steps.position"][:1]})
    x, losses = torch.randn(2, 4, 12), []
    torch.testing.assert_close(run(act, x, losses=losses).x, run(fixed, x).x)
    assert losses[0].item() == pytest.approx(0.5 * (1 + 1))


def test_a_token_that_never_halts_returns_its_last_state(site: MakeSite) -> None:
    fixed: Any = Universal(BLOCK, 1, 5, 2).build(site(causal=False))
    act = adaptive(site(causal=False), 5, 1, 2)
    nn.init.constant_(act.halt_bias, -80.0)
    fixed.load_state_dict({name: value for name, value in act.state_dict().items() if "halt" not in name})
    x, losses = torch.randn(2, 4, 12), []
    torch.testing.assert_close(run(act, x, losses=losses).x, run(fixed, x).x)
    assert losses[0].item() == pytest.approx(0.5 * (5 + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_application_has_a_state_of_its_own(kind: Any, site: MakeSite) -> None:
    stack = kind(BLOCK, 1, 3, 2).build(site())
    rows = Rows(torch.zeros(1, dtype=torch.int64), 4)
    view = View(Mask(causal=True), 3, 3, CPU)
    states = stack.start(rows, Context(view))
    assert len({id(state[0]) for state in states}) == 6
    stack(torch.zeros(1, 3, 12), Context(view), states)
    assert [call[0] for call in stack.blocks[0].branches[0].branch.calls] == [state[0] for state in states]


@pytest.mark.parametrize("kind", KINDS)
def test_each_application_may_have_a_memory_of_its_own(kind: Any, site: MakeSite) -> None:
    stack = kind(BLOCK, 1, 2, 1).build(site())
    memories = tuple(torch.full((1, 2, 12), float(n)) for n in range(4))
    run(stack, torch.zeros(1, 3, 12), memory=Memory(memories))
    assert [call[1] for call in stack.blocks[0].branches[0].branch.calls] == [0, 1, 2, 3]


def test_applications_share_the_keys_of_one_memory(site: MakeSite) -> None:
    block = Block((SelfAttention(), CrossAttention()), PreNorm())
    stack = Universal(block, 1, 3, 2).build(site())
    rows, view = Rows(torch.zeros(2, dtype=torch.int64), 4), View(Mask(), 3, 3, CPU)
    one_memory = stack.start(rows, Context(view, view, Memory((torch.randn(2, 3, 12),))))
    static = [state for state in flat(one_memory) if isinstance(state, StaticKV)]
    assert len({id(state) for state in static}) == 6  # `keep` is called for each of them
    assert len({state.keys.data_ptr() for state in static}) == 1
    for state in static:
        state.keep(torch.tensor([1]), torch.tensor([1]))
    assert {state.keys.shape[0] for state in static} == {1}
    several_memories = stack.start(rows, Context(view, view, Memory(tuple(torch.randn(2, 3, 12) for _ in range(6)))))
    static = [state for state in flat(several_memories) if isinstance(state, StaticKV)]
    assert len({state.keys.data_ptr() for state in static}) == 6


def test_pattern_strict_and_positions_apply_to_every_application(site: MakeSite) -> None:
    block = Block((SelfAttention(),), PreNorm())

    def weights(**more: Any) -> list[Tensor]:
        trace = Trace()
        stack = Universal(block, 0, 2, 0, **more).build(site())
        stack(torch.randn(1, 3, 12), Context(View(Mask(causal=True), 3, 3, CPU), trace=trace))
        return trace.weights["decoder.self"]

    for recorded in weights(attention_pattern=Window(2), strict=True):
        assert (recorded[0, 0] > 0).long().tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert len(weights(position=ALiBi())) == 2
    with pytest.raises(SpecError, match=r"strict: only a causal stack"):
        Universal(block, strict=True).build(site(causal=False))
    two_attentions = Block((SelfAttention(), SelfAttention(6)), PreNorm())
    several = Universal(two_attentions, position=T5Bias(), positions=(AtHeads(6, T5Bias()),)).build(site())
    assert [name for name, _ in several.named_parameters() if "position" in name] == [
        "steps.position",
        "position.weight",
        "positions.6.weight",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_depth_branches_and_final_norm(kind: Any, site: MakeSite) -> None:
    spec = kind(Block((SelfAttention(), FeedForward(8)), PreNorm()), 1, 3, 2)
    assert (spec.blocks(), spec.residual_branches()) == (6, 12)
    assert isinstance(spec.build(site()).end, nn.LayerNorm)
    assert isinstance(replace(spec, block=Block((FeedForward(8),), PostNorm())).build(site()).end, nn.Identity)


def test_step_embeddings_start_with_unit_variance_and_are_a_table(site: MakeSite) -> None:
    stack: Any = Universal(BLOCK, 1, 400, 1).build(site(init_=T5Init()))
    added = torch.stack([stack.steps(n) for n in range(400)])
    assert added.std().item() == pytest.approx(1.0, rel=0.05)
    assert is_table("encoder.steps.position")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"before": -1}, "before"),
        ({"steps": 0}, "steps"),
        ({"after": -1}, "after"),
        ({"positions": (AtHeads(2, ALiBi()),) * 2}, "positions"),
    ],
)
def test_refusals(kind: Any, fields: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        kind(BLOCK, **fields)
    assert raised.value.path == path


@pytest.mark.parametrize("fields", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"ponder": -0.1}])
def test_act_refusals(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as raised:
        UniversalACT(BLOCK, **fields)
    assert raised.value.path == next(iter(fields))


def test_the_variant_of_the_base_of_narang_et_al() -> None:
    changed: Any = apply("universal", preset("narang_base"))
    for stack in (changed.encoder, changed.decoder):
        assert (stack.before, stack.steps, stack.after) == (2, 24, 2)
        assert stack.block.residual == GatedRecurrent(LayerNorm(eps=1e-6))
        assert stack.position == T5Bias()
    assert not changed.sharing.input_output
    assert changed.sharing.source_target
    assert not changed.head.scaled
    act = apply("universal_act", preset("narang_base"))
    assert count(act) == 83_633_664 + 2 * 769


@pytest.mark.parametrize("name", ["universal", "universal_act"])
@pytest.mark.parametrize(("depth", "around"), [(2, 1), (6, 1), (11, 1), (12, 2), (18, 3)])
def test_steps_scale_with_the_depth(name: str, depth: int, around: int) -> None:
    base = swap(preset("gpt2_small"), Plain, lambda stack: replace(stack, depth=depth))
    changed = apply(name, base)
    assert isinstance(changed, DecoderOnly)
    stack: Any = changed.decoder
    assert (stack.before, stack.steps, stack.after) == (around, 2 * depth, around)
    assert not changed.tied


@pytest.mark.parametrize("name", ["universal", "universal_act"])
@pytest.mark.parametrize("base", ["narang_base", "t5_base", "transformer_small", "gpt2_small", "bert_base"])
def test_every_base(name: str, base: str) -> None:
    changed = apply(name, preset(base))
    assert not [part for part in walk(changed) if isinstance(part, Plain)]
    assert build(changed, device="meta")
    with pytest.raises(SpecError, match="changes nothing"):
        apply(name, changed)


def test_bases_unsuitable_for_universal_are_refused() -> None:
    spec = preset("transformer_small")
    assert isinstance(spec, EncoderDecoder)
    assert isinstance(spec.decoder, Plain)
    two = replace(spec, decoder=replace(spec.decoder, pattern=spec.decoder.pattern * 2))
    with pytest.raises(SpecError, match=r"^decoder\.pattern: must have one block"):
        apply("universal", two)
    with pytest.raises(SpecError, match=r"^encoder: is 'universal', but 'universal_act' needs"):
        apply("universal_act", apply("universal", spec))
    with pytest.raises(SpecError, match=r"^encoder\.pattern\[0\]\.residual\[1\]\.kind: is 'no_residual'"):
        apply("universal", preset("sahai"))


def test_decoding_equals_full_pass_with_different_halting_steps() -> None:
    spec: Any = apply("universal_act", preset("narang_base", vocab=20, d_model=16, heads=2))
    spec = swap(spec, FeedForward, lambda branch: replace(branch, d_hidden=24))
    small = {"before": 1, "steps": 5, "after": 1, "epsilon": 0.3}
    spec = swap(spec, UniversalACT, lambda stack: replace(stack, **small))
    model = build(spec, seed=1).double().eval()
    assert isinstance(model, EncoderDecoderModel)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    decoder: Any = model.decoder
    nn.init.constant_(decoder.halt_bias, -0.5)
    batch = translation([([5, 6, 7], [8, 9, 3, 4]), ([4], [5, 5, 6, 7])])
    full = model.log_probs(batch)
    for bias in (50.0, -50.0):  # not all tokens halt at the first step, or at the last
        nn.init.constant_(decoder.halt_bias, bias)
        assert not torch.allclose(model.log_probs(batch), full)
    nn.init.constant_(decoder.halt_bias, -0.5)
    for static in (False, True):
        decoding = model.start(batch, 6, static=static)
        for t in range(5):
            torch.testing.assert_close(model.advance(batch.target[:, t : t + 1], decoding), full[:, t])
