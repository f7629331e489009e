"""Pruned models have the outputs of the whole model with heads switched off, and fewer parameters."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard import build, from_record, to_record
from regard.errors import SpecError
from regard.inspection.importance import head_values, importance_by_gradient
from regard.inspection.interventions import Head, all_heads, head_counts, scaled_heads, switched_off
from regard.inspection.pruning import least_important, pruned
from regard.models.base import Generator, Model, ModelSpec
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.parallel import Parallel
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.synthesizer import Synthesizer
from regard.nn.branches.weighted import Weighted
from regard.nn.norm import LayerNorm
from regard.nn.position.additive import Injected
from regard.nn.position.base import AtHeads, Position
from regard.nn.position.bias import ALiBi, DistanceBias, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.nn.stacks.universal import Universal
from regard.testing import laws, tiny
from regard.tree import swap

BLOCK = Block((SelfAttention(), FeedForward(24)))


def positioned(position: Position) -> ModelSpec:
    return swap(tiny.encoder_decoder(), Plain, lambda stack: replace(stack, position=position))


def with_layer_positions(position: Position) -> ModelSpec:
    return swap(tiny.encoder_decoder(), SelfAttention, lambda _: SelfAttention(position=position))


SPECS: dict[str, ModelSpec] = {
    "encoder_decoder": tiny.encoder_decoder(3),
    "decoder_only": tiny.decoder_only(),
    "prefix_lm": tiny.prefix_lm(),
    "masked_lm": tiny.encoder_only(),
    "narang": tiny.narang(),
    "sizes": swap(
        swap(
            tiny.encoder_decoder(), CrossAttention, lambda _: CrossAttention(heads=3, d_head=5, d_value=7, bias=False)
        ),
        SelfAttention,
        lambda _: SelfAttention(d_value=6, query_key_norm=RMSNorm()),
    ),
    "query_key": swap(tiny.encoder_decoder(), SelfAttention, lambda _: SelfAttention(tied="query_key")),
    "key_value": swap(tiny.encoder_decoder(), SelfAttention, lambda _: SelfAttention(tied="key_value")),
    "normed": swap(tiny.decoder_only(), SelfAttention, lambda _: SelfAttention(query_key_norm=LayerNorm())),
    **{
        position.kind: positioned(position) for position in (T5Bias(8, 16), ALiBi(), DistanceBias(3), Rotary(), Shaw(3))
    },
    **{f"layer_{position.kind}": with_layer_positions(position) for position in (T5Bias(8, 16), ALiBi(), Shaw(3))},
    "funnel": replace(tiny.encoder_decoder(), encoder=Funnel((BLOCK,), (1, 2))),
    "parallel": replace(
        tiny.decoder_only(), decoder=Plain((Block((Parallel((SelfAttention(), FeedForward(24))),)),), 2)
    ),
}
# Layer 0 loses one head, layer 1 loses others, and further layers lose none.
LOST = {0: (1,), 1: (0, 2)}


def heads_to_remove(model: Model) -> list[Head]:
    return [head for head in all_heads(model) if head.head in LOST.get(head.layer, ())]


def check(model: Model, heads: list[Head], batch: Any) -> Model:
    """Prune, check parameters and outputs, and return the pruned model."""
    smaller = pruned(model, heads)
    with scaled_heads(model, switched_off(heads)):
        expected = laws.answers(model, batch)
    torch.testing.assert_close(laws.answers(smaller, batch), expected, atol=1e-10, rtol=1e-10)
    assert size(smaller) < size(model)
    for kind, counts in head_counts(model).items():
        left = [H - sum(head[:2] == (kind, n) for head in heads) for n, H in enumerate(counts)]
        assert head_counts(smaller)[kind] == left
    return smaller


def size(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SPECS)
def test_a_pruned_model_equals_the_model_with_heads_switched_off(name: str) -> None:
    spec = SPECS[name]
    model = laws.Subject(spec).own_model()
    batch = tiny.collate(spec, tiny.examples(spec, 3))
    smaller = check(model, heads_to_remove(model), batch)
    again = build(from_record(to_record(smaller.spec)), init=False).double().eval()
    again.load_state_dict(smaller.state_dict())
    assert torch.equal(laws.answers(again, batch), laws.answers(smaller, batch))


@pytest.mark.parametrize("name", ["encoder_decoder", "alibi", "t5_bias", "layer_t5_bias"])
def test_a_pruned_model_can_be_pruned_again(name: str) -> None:
    spec = SPECS[name]
    model = laws.Subject(spec).own_model()
    batch = tiny.collate(spec, tiny.examples(spec, 3))
    smaller = check(model, heads_to_remove(model), batch)
    check(smaller, [Head("encoder.self", 0, 1), Head("decoder.self", 0, 0)], batch)


@pytest.mark.parametrize("name", ["encoder_decoder", "alibi"])
def test_a_pruned_model_decodes_and_has_the_kernels_of_fast(name: str) -> None:
    model = laws.Subject(SPECS[name]).own_model()
    spec = pruned(model, heads_to_remove(model)).spec
    subject = laws.Subject(spec)
    assert isinstance(subject.model(), Generator)
    for law in (laws.beams, laws.fast_law):
        law(subject)


def test_whole_groups_with_common_keys_and_values_are_removed() -> None:
    spec = swap(tiny.encoder_decoder(), SelfAttention, lambda _: SelfAttention(kv_heads=2))
    model = laws.Subject(spec).own_model()
    batch = tiny.collate(spec, tiny.examples(spec, 3))
    smaller = check(model, [Head("encoder.self", 1, 0), Head("encoder.self", 1, 1)], batch)
    stack: Any = smaller.spec
    assert stack.encoder.pattern[1].branches[0].kv_heads == 1
    with pytest.raises(SpecError, match=r"layer 1 of encoder.self: head 1, 2 shares? keys and values.*all 2 heads"):
        pruned(model, [Head("encoder.self", 1, 1), Head("encoder.self", 1, 2)])


def test_parameters_of_a_head_are_its_rows_and_columns() -> None:
    model = build(tiny.encoder_decoder())
    smaller = pruned(model, [Head("decoder.cross", 1, 3)])
    assert size(model) - size(smaller) == 4 * 16 * 4 + 3 * 4  # W_q, W_k, W_v, W_o; biases of q, k, v
    for name, tensor in smaller.state_dict().items():
        whole = model.state_dict()[name]
        assert tensor.shape == whole.shape or name.startswith("decoder.blocks.1.branches.1")


def test_the_whole_model_remains_as_it_was() -> None:
    model = build(tiny.encoder_decoder())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    smaller = pruned(model, [Head("decoder.cross", 1, 3)])
    with torch.no_grad():
        for parameter in smaller.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def weighted() -> ModelSpec:
    block = Block((Weighted(SelfAttention(output=False), FeedForward(24)),))
    return replace(tiny.encoder_decoder(), encoder=Plain((block,), 2))


REFUSED: dict[str, tuple[Callable[[], ModelSpec], str]] = {
    "recurrent": (tiny.recurrent, "DecoderMissing|only heads of self_attention"),
    "synthesizer": (
        lambda: swap(tiny.decoder_only(), SelfAttention, lambda _: Synthesizer(max_len=32)),
        "is Synthesizer; only heads of self_attention and cross_attention",
    ),
    "weighted": (weighted, "other projections"),
    "injected": (lambda: positioned(Injected()), "'injected' is not made of heads"),
    "albert": (
        lambda: replace(tiny.encoder_decoder(), encoder=Plain((BLOCK,), 3, unique=1)),
        "layer 0 of encoder.self shares its parameters",
    ),
    "universal": (
        lambda: replace(tiny.encoder_decoder(), encoder=Universal(BLOCK, before=1, steps=2, after=1)),
        "shares its parameters",
    ),
    "at_heads": (
        lambda: replace(
            tiny.encoder_decoder(),
            encoder=Plain(
                (BLOCK, Block((SelfAttention(heads=2), FeedForward(24)))),
                2,
                position=ALiBi(),
                positions=(AtHeads(2, ALiBi()),),
            ),
        ),
        "depend on the numbers of heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_pruned_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    model = build(make())
    with pytest.raises(SpecError, match=message):
        pruned(model, [all_heads(model)[0]])


def test_a_layer_keeps_a_head() -> None:
    model = build(tiny.encoder_decoder())
    with pytest.raises(SpecError, match=r"layer 1 of encoder.self would have no head left"):
        pruned(model, [Head("encoder.self", 1, head) for head in range(4)])
    with pytest.raises(SpecError, match=r"no head encoder.self:2.0"):
        pruned(model, [Head("encoder.self", 2, 0)])


def test_the_least_important_heads_are_chosen() -> None:
    model = build(tiny.encoder_decoder())
    importance = {kind: [torch.arange(4.0) + 10 * n for n in range(2)] for kind in head_counts(model)}
    chosen = least_important(model, importance, 0.25)
    assert chosen == sorted(Head(kind, 0, head) for kind in importance for head in (0, 1))
    chosen = least_important(model, importance, 0.75)  # one head of every layer remains
    assert chosen == sorted(Head(kind, n, head) for kind in importance for n in (0, 1) for head in (0, 1, 2))
    with pytest.raises(SpecError, match=r"at most 18 of 24 heads"):
        least_important(model, importance, 0.9)
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(SpecError, match="between 0 and 1"):
            least_important(model, importance, share)
    with pytest.raises(SpecError, match="larger share"):
        least_important(model, importance, 0.01)


def test_groups_are_chosen_by_the_sum_of_their_importance() -> None:
    model = build(swap(tiny.decoder_only(), SelfAttention, lambda _: SelfAttention(kv_heads=2)))
    importance = {"decoder.self": [torch.tensor([0.0, 9.0, 3.0, 3.0]), torch.tensor([4.0, 4.0, 5.0, 5.0])]}
    assert least_important(model, importance, 0.25) == [Head("decoder.self", 0, 2), Head("decoder.self", 0, 3)]


def test_unimportant_heads_have_small_gradients() -> None:
    """A head whose columns of W_o are almost 0 is the first to be removed."""
    spec = tiny.encoder_decoder()
    model: Any = laws.Subject(spec).own_model()
    with torch.no_grad():
        model.decoder.blocks[1].branches[1].branch.output.weight[:, 8:12] *= 1e-6
    importance = importance_by_gradient(model, [tiny.collate(spec, tiny.examples(spec, 4))])
    assert next(iter(head_values(importance))) == Head("decoder.cross", 1, 2)
