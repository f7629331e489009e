"""Prompts read in pieces (`prefill_chunk`), and outputs that are longer than the texts of training."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import fast
from regard.batch import Batch, pad
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.positions import positions
from regard.decoding.sample import Sample
from regard.decoding.search import Search, find
from regard.errors import SpecError
from regard.models.base import LanguageModel
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.convolution import DynamicConv, LightConv
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.noisy_experts import NoisyTopKExperts
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.synthesizer import Synthesizer
from regard.nn.embedding import Tokens
from regard.nn.pattern import Blocks, GlobalTokens, Sinks, Window
from regard.nn.position.additive import Injected, Learned
from regard.nn.position.bias import ALiBi, T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.position.shaw import Shaw
from regard.nn.stacks.plain import Plain
from regard.testing import tiny
from regard.tree import swap
from tests.unit.decoding.known_models import ENDS

LM = tiny.decoder_only()
BARE = replace(LM, input=Tokens(position=None))
POSITIONS = (Rotary(), T5Bias(8, 16), ALiBi(), Shaw(3), Injected())
PROMPTS = [[5, 9, 4, 11, 7, 6, 3], [8, 3, 3], [10, 4, 12, 5, 9]]


def with_position(position: Any) -> DecoderOnly:
    return swap(BARE, Plain, lambda stack: replace(stack, position=position))


def translator(input_attention: Any = "causal") -> DecoderOnlyTranslator:
    return DecoderOnlyTranslator(tiny.VOCAB, 16, 4, input_attention=input_attention, decoder=LM.decoder)


SPECS: dict[str, DecoderOnly] = {
    "sinusoidal": LM,
    "learned": replace(LM, input=Tokens(position=Learned(32))),
    **{position.kind: with_position(position) for position in POSITIONS},
    "window": swap(LM, Plain, lambda stack: replace(stack, attention_pattern=Window(3))),
    **{  # whose caches are rings
        pattern.kind: swap(LM, Plain, lambda stack, pattern=pattern: replace(stack, attention_pattern=pattern))
        for pattern in (Sinks(2, 1), GlobalTokens(1), Blocks(2))
    },
    "compressed_attention": swap(BARE, SelfAttention, lambda _: CompressedAttention()),
    "strict": swap(LM, Plain, lambda stack: replace(stack, strict=True)),
    "grouped": swap(LM, SelfAttention, lambda _: SelfAttention(kv_heads=2)),
    "synthesizer": swap(BARE, SelfAttention, lambda _: Synthesizer(max_len=32)),
    **{
        part.kind: swap(LM, SelfAttention, lambda _, p=part: p) for part in (LightConv(3), DynamicConv(3), Recurrence())
    },
    "noisy_top_k_experts": swap(LM, FeedForward, lambda _: NoisyTopKExperts(5, 2, 6)),
    "translator": translator(),
}


def built(spec: Any, install: bool = False) -> Any:
    model = build(spec, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no two tokens have similar probabilities
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    if install:
        fast.install(model)
    return model


def batch_of(spec: DecoderOnly, prompts: Sequence[Sequence[int]] = PROMPTS) -> Batch:
    ids, seg = pad(prompts)
    return Batch(ids[:, :1], source=ids, source_seg=seg) if spec.reads_source else Batch(ids, target_seg=seg)


def after(model: Any, batch: Batch, cuts: Sequence[int] | None, chunk: int | None, static: bool = False) -> Tensor:
    """Return the log-probabilities after a prompt, which is read up to each of the `cuts`, and after one more token."""
    ids = batch.target
    with torch.no_grad():
        decoding = model.start(batch, ids.shape[1] + 2, static=static, prefill_chunk=chunk)
        seg = batch.target_seg if cuts is None else None  # prompts of one length, if they are cut at the same places
        outputs = [
            model.advance(ids[:, first:last], decoding, seg)
            for first, last in pairwise((0, *(cuts or ()), ids.shape[1]))
        ]
        return torch.stack((outputs[-1], model.advance(ids[:, :1], decoding)))


FAST = ("sinusoidal", "t5_bias", "shaw", "window", "translator")


@pytest.mark.parametrize(
    ("name", "install"),
    [*((name, False) for name in SPECS), *((name, True) for name in FAST)],
)
def test_prompts_read_in_pieces_of_any_length_equal_prompts_read_at_once(name: str, install: bool) -> None:
    """Of different lengths in one batch, so that some prompts end before the last piece."""
    spec = SPECS[name]
    model, batch = built(spec, install), batch_of(spec)
    for static in (False, True):
        whole = after(model, batch, None, None, static)
        for chunk in (1, 3):
            pieces = after(model, batch, None, chunk, static)
            torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-10, msg=f"chunk {chunk}, static {static}")


@pytest.mark.parametrize("name", [name for name in SPECS if name != "translator"])
def test_prompts_cut_at_any_places_equal_prompts_read_at_once(name: str) -> None:
    model, batch = built(SPECS[name]), Batch(torch.randint(3, tiny.VOCAB, (2, 7)))
    whole = after(model, batch, (), None)
    for first in range(1, 7):
        cuts = (first,) if first > 4 else (first, first + 2)
        torch.testing.assert_close(after(model, batch, cuts, None), whole, rtol=0, atol=1e-10)


def test_no_step_reads_more_than_a_piece_and_logits_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths, scored = built(LM), [], []
    step, log_probs = type(model).step, type(model.head).log_probs

    def noted_step(self: Any, ids: Tensor, *rest: Any) -> Tensor:
        widths.append(ids.shape[1])
        return step(self, ids, *rest)

    def noted_log_probs(self: Any, h: Tensor, *rest: Any) -> Tensor:
        scored.append(tuple(h.shape))
        return log_probs(self, h, *rest)

    monkeypatch.setattr(type(model), "step", noted_step)
    monkeypatch.setattr(type(model.head), "log_probs", noted_log_probs)
    find(model, batch_of(LM), Beam(1, prefill_chunk=3), ENDS, Limits(max_len=1))
    assert widths[:3] == [3, 3, 1]
    assert scored[0] == (3, 16)
    assert len(scored) == len(widths) - 2


@pytest.mark.parametrize("install", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize("search", [Beam(1), Beam(3, 2), Sample(n_best=2)], ids=["greedy", "beam", "sample"])
@pytest.mark.parametrize("spec", [LM, translator()], ids=["prompts", "sources"])
def test_searches_have_the_same_outputs(spec: DecoderOnly, search: Search, install: bool) -> None:
    model, batch, limits = built(spec, install), batch_of(spec), Limits(max_len=6)
    whole = find(model, batch, search, ENDS, limits)
    pieces = find(model, batch, replace(search, prefill_chunk=2), ENDS, limits)  # type: ignore[call-arg]
    assert [[each.ids for each in row] for row in pieces] == [[each.ids for each in row] for row in whole]
    for mine, other in zip(chain(*pieces), chain(*whole), strict=True):
        assert mine.log_prob == pytest.approx(other.log_prob, abs=1e-9)


def test_a_prompt_beyond_the_room_of_a_session_is_refused_before_it_is_read() -> None:
    model = built(LM)
    decoding = model.start(Batch(torch.zeros(1, 1, dtype=torch.int64)), 5, prefill_chunk=2)
    with pytest.raises(SpecError, match=r"^max_len: 0 \+ 6 tokens are more than this session's maximum of 5"):
        model.advance(torch.full((1, 6), 5), decoding)
    assert decoding.rows.bound == 0


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (tiny.prefix_lm(), "every token of a prefix attends to the whole prefix"),
        (translator("full"), "every token of a prefix attends to the whole prefix"),
        (tiny.encoder_decoder(), "only a decoder-only model can"),
        (tiny.recurrent(), "only a decoder-only model can"),
    ],
    ids=["prefix", "prefix translator", "encoder-decoder", "recurrent"],
)
def test_a_model_that_reads_its_input_at_once_is_refused(spec: Any, why: str) -> None:
    model = built(spec)
    ids, seg = pad(PROMPTS)
    batch = Batch(ids, source=ids, source_seg=seg) if spec.reads_source else Batch(ids, target_seg=seg)
    for search in (Beam(prefill_chunk=4), Sample(prefill_chunk=4)):
        with pytest.raises(SpecError, match=f"^prefill_chunk: this model cannot read its input in pieces: {why};"):
            find(model, batch, search, ENDS, Limits(max_len=3))


@pytest.mark.parametrize("make", [Beam, Sample])
def test_pieces_have_at_least_one_token(make: Any) -> None:
    with pytest.raises(SpecError, match=r"^prefill_chunk: must be at least 1, not 0"):
        make(prefill_chunk=0)


# -- outputs longer than the texts of training (the sizes 8 and 16 of these position schemes)


@pytest.mark.parametrize("position", [*POSITIONS, None], ids=lambda position: getattr(position, "kind", "sinusoidal"))
def test_generation_goes_on_past_the_trained_length_with_relative_positions(position: Any) -> None:
    """The log-probabilities of a long output are those of one pass over its tokens."""
    spec = LM if position is None else with_position(position)
    model: LanguageModel = built(spec)
    assert positions([model]).count is None
    (output,) = find(model, Batch(torch.tensor([[5, 9]])), Sample(seed=1), ENDS, Limits(30, 30))[0]
    assert len(output.ids) == 30
    with torch.no_grad():
        whole = model.log_probs(Batch(torch.tensor([[5, 9, *output.ids]])))[0, 1:31]
    expected = whole[torch.arange(30), torch.tensor(output.ids)]
    torch.testing.assert_close(torch.tensor(output.token_log_probs[:30]), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("spec", [SPECS["learned"], SPECS["synthesizer"]], ids=["learned", "synthesizer"])
def test_learned_positions_are_refused_at_their_limit(spec: DecoderOnly) -> None:
    model: LanguageModel = built(spec)
    assert positions([model]).count == 32
    prompt = Batch(torch.full((1, 33), 5))
    message = "a sequence of 33 tokens exceeds the 32"
    with pytest.raises(SpecError, match=message):
        find(model, prompt, Beam(1), ENDS, Limits(max_len=1))
    with pytest.raises(SpecError, match=message):
        find(model, prompt, Beam(1, prefill_chunk=8), ENDS, Limits(max_len=1))
    with torch.no_grad():
        decoding = model.start(prompt, 40)
        model.advance(prompt.target[:, :32], decoding)
        with pytest.raises(SpecError, match=message):
            model.advance(prompt.target[:, :1], decoding)
