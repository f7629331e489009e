"""Beam search and sampling as Hugging Face does them: Marian and Llama with copied weights, token for token."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard.batch import Batch, pad
from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, SpecialTokens
from regard.decoding.sample import Sample
from regard.decoding.search import find

from .test_huggingface import llama, marian, marian_model, marian_spec, sentences

hub: Any = transformers
START, EOS = 0, 2  # Marian begins with padding
ENDS = SpecialTokens(START, EOS, START)
RULES = {"huggingface": False, "huggingface_early": True, "huggingface_never": "never"}


def models(seed: int, eos: float) -> tuple[Any, Any]:
    """Return (theirs, ours): Marian with large feed-forward weights, so that it does not repeat one token forever."""
    torch.manual_seed(seed)
    theirs = marian(scaled=False)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".fc" in name and name.endswith("weight"):
                parameter.copy_(0.8 * torch.randn_like(parameter))
        theirs.final_logits_bias[0, START] = -1e4  # we never generate it
        theirs.final_logits_bias[0, EOS] += eos
    return theirs, marian_model(theirs, marian_spec(scaled=False))


def texts(sequences: Tensor, begin: int = 1) -> list[tuple[tuple[int, ...], bool]]:
    """Return (ids without start, end and padding, whether the row ended) for each of their rows."""
    result = []
    for row in sequences[:, begin:].tolist():
        ended = EOS in row
        ids = row[: row.index(EOS)] if ended else row
        while ids and ids[-1] == START:
            ids.pop()
        result.append((tuple(ids), ended))
    return result


def same(ours: list[list[Hypothesis]], theirs: Any, begin: int = 1) -> list[tuple[tuple[int, ...], bool]]:
    hypotheses, expected = [h for row in ours for h in row], texts(theirs.sequences, begin)
    assert [(h.ids, h.ended) for h in hypotheses] == expected
    if getattr(theirs, "sequences_scores", None) is not None:
        scores = torch.tensor([h.score for h in hypotheses])
        torch.testing.assert_close(scores, theirs.sequences_scores.to(scores), rtol=1e-5, atol=1e-5)
    return expected


def generate(theirs: Any, source: Tensor, seg: Tensor, steps: int, **options: Any) -> Any:
    return theirs.generate(
        source,
        attention_mask=seg,
        max_new_tokens=steps,
        eos_token_id=EOS,
        pad_token_id=START,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


@pytest.mark.parametrize("stopping", RULES)
@pytest.mark.parametrize(("seed", "eos"), [(0, 1.6), (3, 3.0)])
def test_marian_beams(seed: int, eos: float, stopping: Any) -> None:
    outputs = set()
    theirs, ours = models(seed, eos)
    source, seg = sentences([9, 4, 1, 7, 12, 3], seed=seed)
    batch = Batch(source[:, :1], source=source, source_seg=seg)
    settings = (
        (2, 1, 0.0, 9),
        (2, 2, 1.0, 9),
        (5, 5, 0.0, 6),
        (5, 1, 0.6, 14),
        (5, 5, 1.0, 9),
        (5, 2, 2.0, 14),
        (3, 3, -1.0, 8),
    )
    for beams, n_best, alpha, steps in settings:
        options = {"num_beams": beams, "length_penalty": alpha, "early_stopping": RULES[stopping]}
        expected = generate(theirs, source, seg, steps, num_return_sequences=n_best, **options)
        search = Beam(beams, n_best, "mean", alpha, stopping=stopping)
        outputs.update(same(find(ours, batch, search, ENDS, Limits(max_len=steps)), expected))
    assert len(outputs) > 35
    assert len({len(ids) for ids, ended in outputs if ended}) > 3


@pytest.mark.parametrize(("seed", "eos"), [(0, 1.6), (3, 3.0)])
def test_marian_greedy(seed: int, eos: float) -> None:
    theirs, ours = models(seed, eos)
    source, seg = sentences([9, 4, 1, 7, 12, 3], seed=seed)
    for steps in (1, 5, 14):
        expected = generate(theirs, source, seg, steps, num_beams=1)
        batch = Batch(source[:, :1], source=source, source_seg=seg)
        same(find(ours, batch, Beam(1, stopping="huggingface"), ENDS, Limits(max_len=steps)), expected)


def test_marian_rules() -> None:
    """Their processors ban tokens after the softmax, as we do: scores stay the model's own."""
    theirs, ours = models(3, 3.0)
    source, seg = sentences([9, 4, 1, 7, 12, 3])
    batch = Batch(source[:, :1], source=source, source_seg=seg)
    free = find(ours, batch, Beam(4, stopping="huggingface"), ENDS, Limits(max_len=12))
    often = max((token for (h,) in free for token in h.ids), key=[t for (h,) in free for t in h.ids].count)
    for theirs_options, limits, rules in (
        ({"min_new_tokens": 5}, Limits(5, 12), TokenConstraints()),
        ({"no_repeat_ngram_size": 2}, Limits(max_len=12), TokenConstraints(no_repeat=2)),
        ({"bad_words_ids": [[often], [5, 6]]}, Limits(max_len=12), TokenConstraints(banned=((often,), (5, 6)))),
    ):
        expected = generate(theirs, source, seg, 12, num_beams=4, **theirs_options)
        results = find(ours, batch, Beam(4, stopping="huggingface"), ENDS, limits, rules)
        same(results, expected)
        assert [row[0].ids for row in results] != [row[0].ids for row in free]


@pytest.mark.parametrize("stopping", RULES)
def test_llama_beams_over_ragged_prompts(stopping: Any) -> None:
    """Their prompts are padded on the left, ours on the right; the prompt does not count towards the length."""
    theirs, ours = llama()
    prompts = [row[:n] for row, n in zip(sentences([6, 2, 4, 3])[0].tolist(), (6, 2, 4, 3), strict=True)]
    left = torch.tensor([[0] * (6 - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (6 - len(row)) + [1] * len(row) for row in prompts])
    ids, seg = pad(prompts)
    common = [ids for ids, _ in texts(generate(theirs, left, mask, 8, num_beams=1).sequences, 6)]
    eos = common[0][2]  # a token that one row generates early
    for beams, alpha in ((1, 1.0), (2, 1.0), (4, 0.5)):
        more = {"length_penalty": alpha, "early_stopping": RULES[stopping]} if beams > 1 else {}
        expected = theirs.generate(
            left,
            attention_mask=mask,
            max_new_tokens=8,
            eos_token_id=eos,
            pad_token_id=0,
            do_sample=False,
            num_beams=beams,
            num_return_sequences=beams,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )
        search = Beam(beams, beams, "mean", alpha, stopping=stopping)
        results = find(ours, Batch(ids, target_seg=seg), search, SpecialTokens(eos, eos, eos), Limits(max_len=8))
        hypotheses = [h for row in results for h in row]
        for hypothesis, row in zip(hypotheses, expected.sequences[:, 6:].tolist(), strict=True):
            assert list(hypothesis.ids) == (row[: row.index(eos)] if eos in row else row)
            assert hypothesis.ended == (eos in row)
        assert {h.ended for h in hypotheses} == {True, False}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_k": 99},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_distributions_are_cut_as_in_transformers(settings: dict[str, Any]) -> None:
    log_probs = (3 * torch.randn(50, 20)).log_softmax(-1)
    log_probs[3, :4] = -torch.inf  # banned
    log_probs[5, 6] = log_probs[5, 7]  # a tie
    spec = Sample(**settings)
    theirs = hub.LogitsProcessorList([hub.TemperatureLogitsWarper(spec.temperature)])
    if spec.top_k:
        theirs.append(hub.TopKLogitsWarper(spec.top_k))
    if spec.top_p < 1:
        theirs.append(hub.TopPLogitsWarper(spec.top_p))
    if spec.min_p:
        theirs.append(hub.MinPLogitsWarper(spec.min_p))
    expected = theirs(torch.zeros(50, 1, dtype=torch.int64), log_probs.clone())
    torch.testing.assert_close(spec.warped(log_probs), expected)
    assert (settings in ({}, {"top_k": 99})) == torch.equal(expected, log_probs)
