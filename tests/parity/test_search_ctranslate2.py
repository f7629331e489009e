"""Beam search as CTranslate2 does it, token for token, over the models of test_ctranslate2."""

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.batch import Batch
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.search import find

from .test_ctranslate2 import BOS, EOS, V, engine, model, words
from .test_huggingface import sentences

LENGTHS = [9, 4, 1, 7, 12, 3]


def both(seed: int, eos: float, folder: Path) -> tuple[Any, Any]:
    """Return (ours, theirs): a model that prefers no token and hardly repeats itself, so that outputs differ."""
    ours = model(False, "relu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if ".up." in name or ".down." in name:
                parameter.copy_(0.8 * torch.randn(parameter.shape, generator=generator))
            elif "norm.bias" in name:
                parameter.zero_()
            elif name.startswith("decoder") and ".1.branch.output" in name:
                parameter.mul_(0.2)
            elif "tables" in name:
                parameter.copy_(torch.nn.functional.normalize(torch.randn(parameter.shape, generator=generator)))
        bias = ours.head.get_parameter("bias")
        bias.mul_(0.3)
        bias[[0, BOS]] = -1e4  # we never generate them
        bias[EOS] += eos
    return ours, engine(ours, folder)


def compare(ours: Any, theirs: Any, search: Beam, steps: int, seed: int) -> set[tuple[tuple[int, ...], bool]]:
    source, seg = sentences(LENGTHS, vocab=V, seed=seed)
    rows = [words(row[:n]) for row, n in zip(source.tolist(), LENGTHS, strict=True)]
    expected = theirs.translate_batch(
        rows,
        beam_size=search.beam_size,
        num_hypotheses=search.n_best,
        length_penalty=search.alpha,
        coverage_penalty=search.coverage,
        patience=1,
        max_decoding_length=steps,
        min_decoding_length=0,
        return_scores=True,
    )
    batch = Batch(source[:, :1], source=source, source_seg=seg)
    results = find(ours, batch, search, SpecialTokens(BOS, EOS, 0), Limits(max_len=steps))
    for hypotheses, translated in zip(results, expected, strict=True):
        assert [words(list(h.ids)) for h in hypotheses] == translated.hypotheses
        assert [h.score for h in hypotheses] == pytest.approx(translated.scores, rel=1e-5, abs=1e-5)
    return {(h.ids, h.ended) for row in results for h in row}


@pytest.mark.parametrize(("seed", "eos"), [(1, 1.0), (2, 3.0), (7, 1.0)])
def test_beams(seed: int, eos: float, tmp_path: Path) -> None:
    ours, theirs = both(seed, eos, tmp_path)
    outputs = set()
    for beams in (1, 2, 5):
        for alpha, n_best, steps in ((0.0, 1, 14), (0.0, beams, 14), (0.6, beams, 6), (1.0, 1, 14), (2.0, beams, 14)):
            search = Beam(beams, n_best, "mean", alpha, stopping="ctranslate2")
            outputs |= compare(ours, theirs, search, steps, seed)
    assert len(outputs) > 30
    assert len({len(ids) for ids, ended in outputs if ended}) > 3
    assert {ended for _, ended in outputs} == {True, False}


def test_no_normalisation_is_length_penalty_0(tmp_path: Path) -> None:
    ours, theirs = both(0, 2.0, tmp_path)
    source, seg = sentences(LENGTHS, vocab=V)
    batch = Batch(source[:, :1], source=source, source_seg=seg)
    for n_best in (1, 3):
        compare(ours, theirs, Beam(3, n_best, "mean", 0.0, stopping="ctranslate2"), 9, 1)
        none, zero = (
            find(ours, batch, search, SpecialTokens(BOS, EOS, 0), Limits(max_len=9))
            for search in (
                Beam(3, n_best, "none", stopping="ctranslate2"),
                Beam(3, n_best, "mean", 0.0, stopping="ctranslate2"),
            )
        )
        assert none == zero
