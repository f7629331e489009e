"""Scaled attention heads: equal to scaled rows of W_o, in one pass and in decoding, and gone at the end."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import build, fast
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.search import find
from regard.errors import SpecError
from regard.inspection.interventions import Head, all_heads, attention_layers, head_counts, scaled_heads, switched_off
from regard.inspection.record import attention, evaluation
from regard.models.base import LanguageModel, Model, ModelSpec
from regard.models.baselines.attention_score import AdditiveScore, DotScore, GeneralScore
from regard.models.baselines.rnn import RecurrentDecoder, RecurrentModel
from regard.models.baselines.weight_norm import WeightNormModule
from regard.nn.block import Block
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.parameter_free_attention import ParameterFreeAttention
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.synthesizer import Synthesizer
from regard.nn.branches.weighted import Weighted
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.nn.stacks.universal import Universal, UniversalACT
from regard.testing import laws, tiny
from regard.tree import swap

BLOCK = Block((SelfAttention(), FeedForward(24)))
SPECS: dict[str, ModelSpec] = {
    **tiny.families(),
    "grouped": swap(tiny.encoder_decoder(), SelfAttention, lambda _: SelfAttention(kv_heads=2)),
    "own_value_width": swap(tiny.encoder_decoder(), CrossAttention, lambda _: CrossAttention(heads=2, d_value=5)),
    "general": tiny.recurrent(RecurrentDecoder(attention=GeneralScore())),
    "dot": tiny.recurrent(RecurrentDecoder(attention=AdditiveScore(), self_attention=DotScore())),
    "linformer": replace(tiny.encoder_decoder(), encoder=Plain((Block((Linformer(max_len=32, rank=4),)), BLOCK), 2)),
    "compressed": swap(tiny.decoder_only(), SelfAttention, lambda _: CompressedAttention()),
    "synthesizer": swap(tiny.decoder_only(), SelfAttention, lambda _: Synthesizer(max_len=32)),
    "synthesizer_plus": swap(tiny.decoder_only(), SelfAttention, lambda _: Synthesizer(max_len=32, mix="plus")),
    "parameter_free": swap(tiny.decoder_only(), SelfAttention, lambda _: ParameterFreeAttention(heads=4)),
    "weighted": replace(
        tiny.encoder_decoder(),
        encoder=Plain((Block((Weighted(SelfAttention(output=False), FeedForward(24)),)),), 2),
    ),
    "funnel": replace(tiny.encoder_decoder(), encoder=Funnel((BLOCK,), (1, 2))),
    "albert": replace(tiny.encoder_decoder(), encoder=Plain((BLOCK,), 3, unique=1)),
    "universal": replace(tiny.encoder_decoder(), encoder=Universal(BLOCK, before=1, steps=2, after=1)),
    "universal_act": replace(tiny.decoder_only(), decoder=UniversalACT(BLOCK, before=0, steps=3, after=1)),
}
WITH_HEADS = [name for name in SPECS if name != "bytenet"]
WRITERS = [name for name in WITH_HEADS if not name.endswith(("lm", "classifier")) or name == "prefix_lm"]


def noisy(spec: ModelSpec, quick: bool = False) -> Model:
    """Build a model with noise on every weight, with the kernels of `regard.fast` if `quick`."""
    model = laws.Subject(spec).own_model()
    if quick:
        fast.install(model, fixed=True)
    return model


def batch_for(spec: ModelSpec) -> Any:
    return tiny.collate(spec, tiny.examples(spec, 3))


def random_factors(model: Model, seed: int = 3) -> dict[str, list[Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return {k: [torch.rand(H, generator=rng) for H in each] for k, each in head_counts(model).items()}


def half_off(model: Model) -> Any:
    return switched_off(all_heads(model)[::2])


def outputs(model: Model, spec: ModelSpec) -> Tensor:
    return laws.answers(model, batch_for(spec))


@pytest.mark.parametrize("name", SPECS)
def test_layers_and_heads_are_those_of_the_recorded_weights(name: str) -> None:
    model = noisy(SPECS[name])
    recorded = attention(model, batch_for(SPECS[name]))
    assert head_counts(model) == {kind: [w.shape[1] for w in layers] for kind, layers in recorded.items()}
    assert bool(recorded) == (name in WITH_HEADS)


@pytest.mark.parametrize("quick", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize("name", WITH_HEADS)
def test_a_factor_of_one_changes_no_bit(name: str, quick: bool) -> None:
    model = noisy(SPECS[name], quick)
    before = outputs(model, SPECS[name])
    with scaled_heads(model, {kind: torch.ones(len(H), H[0]) for kind, H in head_counts(model).items()}):
        assert torch.equal(outputs(model, SPECS[name]), before)


def scaled_copy(model: Model, factors: dict[str, list[Tensor]]) -> Model:
    """Return a copy in which the columns of W_o (the weights that read head h) are multiplied by the factor of h."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        if isinstance(model, RecurrentModel):
            columns = [
                f[:, None].expand(-1, score.width // len(f)).flatten()
                for score, (f,) in zip(
                    filter(None, (model.decoder.cross, model.decoder.own)), factors.values(), strict=True
                )
            ]
            model.decoder.joint.weight[:, -sum(map(len, columns)) :] *= torch.cat(columns)  # type: ignore
            return model
        for kind, layers in attention_layers(model).items():
            for (module, H), factor in zip(layers, factors[kind], strict=True):
                output: Any = module.output
                if isinstance(output, WeightNormModule):  # of ConvS2S, which has one head
                    output.rows.length.mul_(factor)
                    continue
                weight = output.weight
                weight *= factor.repeat_interleave(weight.shape[1] // H)
    return model


UNSHARED = [n for n in WITH_HEADS if n not in ("weighted", "parameter_free", "albert", "universal", "universal_act")]


@pytest.mark.parametrize("quick", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize("name", UNSHARED)
def test_factors_have_the_effect_of_scaled_columns_of_the_output_projection(name: str, quick: bool) -> None:
    plain, model = noisy(SPECS[name]), noisy(SPECS[name], quick)
    factors = random_factors(model)
    naive = scaled_copy(plain, factors)
    with scaled_heads(model, factors):
        result = outputs(model, SPECS[name])
    torch.testing.assert_close(result, outputs(naive, SPECS[name]), atol=1e-10, rtol=1e-10)
    assert not torch.allclose(result, outputs(plain, SPECS[name]), atol=1e-6)


def test_heads_without_an_output_projection_are_scaled() -> None:
    for name in ("weighted", "parameter_free"):
        model = noisy(SPECS[name])
        kind = "encoder.self" if name == "weighted" else "decoder.self"
        module = attention_layers(model)[kind][0].module
        seen: list[Tensor] = []

        def record(*call: Any, seen: list[Tensor] = seen) -> None:
            seen.append(call[-1].unflatten(-1, (4, -1)))

        hook = module.register_forward_hook(record)
        outputs(model, SPECS[name])
        hook.remove()
        with scaled_heads(model, {kind: {(0, 1): 0.25}}):
            hook = module.register_forward_hook(record)  # runs after the hooks of the context
            outputs(model, SPECS[name])
            hook.remove()
        assert torch.equal(seen[1][:, :, 1], 0.25 * seen[0][:, :, 1])
        assert torch.equal(seen[1][:, :, [0, 2, 3]], seen[0][:, :, [0, 2, 3]])


@pytest.mark.parametrize("name", ["albert", "universal"])
def test_layers_with_shared_parameters_have_factors_of_their_own(name: str) -> None:
    model = noisy(SPECS[name])
    module: Any = attention_layers(model)["encoder.self"][0].module
    layers = head_counts(model)["encoder.self"]
    for layer in range(len(layers)):
        inputs: list[Tensor] = []
        with scaled_heads(model, {"encoder.self": {(layer, 2): 0.0}}):
            hook = module.output.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs.append(x[0]))
            outputs(model, SPECS[name])
            hook.remove()
        off = [bool((x.unflatten(-1, (4, -1))[:, :, 2] == 0.0).all()) for x in inputs]
        assert off == [n == layer for n in range(len(layers))]


def test_all_heads_off_equal_an_output_projection_of_zeros() -> None:
    spec = SPECS["encoder_decoder"]
    model = noisy(spec)
    zeroed = copy.deepcopy(model)
    for layers in attention_layers(zeroed).values():
        for layer in layers:
            torch.nn.init.zeros_(layer.module.output.weight)  # type: ignore[reportArgumentType]
    with scaled_heads(model, switched_off(all_heads(model))):
        torch.testing.assert_close(outputs(model, spec), outputs(zeroed, spec), atol=1e-12, rtol=1e-12)


@dataclass(frozen=True)
class Intervened(laws.Subject):
    """A subject of the laws whose model is given."""

    given: Any = None

    def model(self, dtype: torch.dtype = torch.float64) -> Model:
        return self.given


@pytest.mark.parametrize(
    ("name", "quick"), [("encoder_decoder", False), ("general", False), *((name, True) for name in WRITERS)]
)
def test_decoding_with_heads_off_equals_one_pass_with_heads_off(name: str, quick: bool) -> None:
    model = noisy(SPECS[name], quick)
    subject = Intervened(SPECS[name], given=model)
    with scaled_heads(model, half_off(model)):
        for law in (laws.beams,) if quick else (laws.steps, laws.beams):
            law(subject)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["encoder_decoder", "general", "convs2s", "albert"])
def test_search_results_have_the_scores_of_one_pass_with_heads_off(name: str, beams: int) -> None:
    spec = SPECS[name]
    results = []
    for quick in (False, True):
        model = noisy(spec, quick)
        assert isinstance(model, LanguageModel)
        batch = batch_for(spec)
        with evaluation(model), scaled_heads(model, half_off(model)):
            found = find(model, batch, Beam(beams, beams, "none"), SpecialTokens(1, 2, 0), Limits(max_len=6))
            for row, hypotheses in enumerate(found):
                for hypothesis in hypotheses:
                    ids = torch.tensor([[1, *hypothesis.ids, *([2] if hypothesis.ended else [])]])
                    one = replace(
                        batch,
                        target=ids[:, :-1],
                        target_seg=torch.ones_like(ids[:, :-1]),
                        source=batch.source[row : row + 1],
                        source_seg=batch.source_seg[row : row + 1],
                        labels=None,
                        weights=None,
                    )
                    scores = model.log_probs(one)[0].gather(1, ids[0, 1:, None]).sum()
                    assert float(scores) == pytest.approx(hypothesis.score, abs=1e-8)
        results.append([[h.ids for h in hypotheses] for hypotheses in found])
        with evaluation(model):
            usual = find(model, batch, Beam(beams, beams, "none"), SpecialTokens(1, 2, 0), Limits(max_len=6))
        assert [[h.score for h in hypotheses] for hypotheses in usual] != [[h.score for h in hs] for hs in found]
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["encoder_decoder", "general", "parameter_free"])
def test_the_model_is_restored_after_an_exception(name: str) -> None:
    model = noisy(SPECS[name], quick=True)
    before = outputs(model, SPECS[name])
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    def fail() -> None:
        with scaled_heads(model, half_off(model)):
            assert not torch.equal(outputs(model, SPECS[name]), before)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(outputs(model, SPECS[name]), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_an_exception_within_a_pass_does_not_shift_the_layers_of_the_next() -> None:
    model = noisy(SPECS["albert"])
    factors = {"encoder.self": {(1, 0): 0.0}}
    with scaled_heads(model, factors):
        expected = outputs(model, SPECS["albert"])
        end: Any = model.encoder.blocks[0].branches[1]  # type: ignore[reportIndexIssue]

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        hook = end.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            outputs(model, SPECS["albert"])
        hook.remove()
        assert torch.equal(outputs(model, SPECS["albert"]), expected)


@pytest.mark.parametrize("name", ["encoder_decoder", "general"])
def test_nested_factors_are_multiplied(name: str) -> None:
    model = noisy(SPECS[name])
    first, second = random_factors(model, 1), random_factors(model, 2)
    both = {kind: [a * b for a, b in zip(first[kind], second[kind], strict=True)] for kind in first}
    with scaled_heads(model, both):
        expected = outputs(model, SPECS[name])
    with scaled_heads(model, first), scaled_heads(model, second):
        torch.testing.assert_close(outputs(model, SPECS[name]), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["encoder_decoder", "general", "albert"])
def test_gradients_flow_to_the_factors(name: str) -> None:
    spec = SPECS[name]
    model, batch = noisy(spec), batch_for(spec)
    kind = list(head_counts(model))[-1]
    gates = torch.ones(len(head_counts(model)[kind]), head_counts(model)[kind][0], requires_grad=True)

    def loss(at: Any) -> Tensor:
        with scaled_heads(model, {kind: at}):
            return model.loss(batch).total

    (gradient,) = torch.autograd.grad(loss(gates), gates)
    step = 1e-6
    up, down = ({(0, 1): 1.0 + sign * step} for sign in (1, -1))
    assert float(gradient[0, 1]) == pytest.approx(float((loss(up) - loss(down)).detach()) / (2 * step), rel=1e-4)


def test_captured_searches_are_not_used_meanwhile() -> None:
    model: Any = noisy(SPECS["encoder_decoder"], quick=True)
    model.device_search = "captured"
    with scaled_heads(model, half_off(model)):
        assert model.device_search is None
    assert model.device_search == "captured"


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"decoder.crss": {(0, 0): 0.0}}, r"no 'decoder.crss' attention.*decoder.cross"),
        ({"decoder.cross": {(2, 0): 0.0}}, r"no head decoder.cross:2.0.*4, 4.*counted from 0"),
        ({"decoder.cross": {(0, 4): 0.0}}, r"no head decoder.cross:0.4"),
        ({"decoder.cross": {(0, 0): float("nan")}}, "finite"),
        ({"decoder.cross": torch.ones(3, 4)}, "one factor per layer and head"),
        ({"decoder.cross": torch.ones(2, 3)}, "one factor per layer and head"),
    ],
)
def test_unusable_factors_give_a_sentence(factors: Any, message: str) -> None:
    model = build(SPECS["encoder_decoder"])
    with pytest.raises(SpecError, match=message), scaled_heads(model, factors):
        pass
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_attention_is_refused() -> None:
    with (
        pytest.raises(SpecError, match="no attention heads"),
        scaled_heads(build(SPECS["bytenet"]), half("decoder.self")),
    ):
        pass


def half(kind: str) -> Any:
    return {kind: {(0, 0): 0.5}}


def test_heads_are_written_as_kind_layer_and_head() -> None:
    assert Head.parse("decoder.cross:2.0") == Head("decoder.cross", 2, 0)
    assert str(Head("encoder.self", 0, 3)) == "encoder.self:0.3"
    for wrong in ("decoder.cross", "decoder.cross:2", ":1.2", "decoder.cross:a.b", "decoder.cross:-1.0"):
        with pytest.raises(SpecError, match="not a head"):
            Head.parse(wrong)
