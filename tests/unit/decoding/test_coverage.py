import math

import pytest
import torch

from regard.batch import Batch
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.search import find
from regard.errors import SpecError
from regard.models.base import LanguageModel, Trace

from .known_models import BOS, ENDS, EOS, prompts, random_rows, sources, translator, writer


def penalty(models: list[LanguageModel], source: list[int], ids: tuple[int, ...], ended: bool, beta: float) -> float:
    """Return beta * sum_j log(min(sum_t a_tj, 1)) from one forward pass over the whole output, in plain Python."""
    total = [0.0] * len(source)
    for model in models:
        trace = Trace()
        batch = Batch(torch.tensor([[BOS, *ids]]), source=torch.tensor([source]))
        with torch.no_grad():
            model.log_probs(batch, trace)
        weights = trace.weights["decoder.cross"][-1][0]  # (H, T, S): query t predicts token t
        length = len(ids) + ended
        for j in range(len(source)):
            total[j] += sum(float(weights[:, t, j].mean()) for t in range(length)) / len(models)
    return beta * sum(math.log(min(x, 1.0)) for x in total)


@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("several", [False, True])
def test_scores_follow_the_coverage_formula(beams: int, several: bool) -> None:
    models = [translator(), translator(seed=11)] if several else [translator()]
    rows = random_rows(7, 23)
    results = find(models, sources(*rows), Beam(beams, beams, "gnmt", 0.7, coverage=0.4), ENDS, Limits(max_len=5))
    assert {h.ended for row in results for h in row} == {True, False} or beams == 1
    for row, hypotheses in zip(rows, results, strict=True):
        for hypothesis in hypotheses:
            length = len(hypothesis.token_log_probs)
            normalised = hypothesis.log_prob / ((5 + length) / 6) ** 0.7
            assert hypothesis.score - normalised == pytest.approx(
                penalty(models, row, hypothesis.ids, hypothesis.ended, 0.4), abs=1e-9
            )
        ended = [h.score for h in hypotheses if h.ended]
        assert ended == sorted(ended, reverse=True)


def test_the_search_returns_the_best_output_under_the_penalty() -> None:
    """A beam as wide as the tree finds the best of all outputs of at most two tokens."""
    model, row, tokens = translator(vocab=7), [3, 4, 5, 6], (3, 4, 5, 6)
    texts = [(), *((a,) for a in tokens), *((a, b) for a in tokens for b in tokens)]
    scored = []
    for ids in texts:
        batch = Batch(torch.tensor([[BOS, *ids]]), source=torch.tensor([row]))
        with torch.no_grad():
            log_probs = model.log_probs(batch)[0]
        total = sum(float(log_probs[t, token]) for t, token in enumerate((*ids, EOS)))
        scored.append((total / (len(ids) + 1) + penalty([model], row, ids, True, 2.0), ids))
    (hypotheses,) = find(model, sources(row), Beam(60, 6, coverage=2.0), ENDS, Limits(max_len=2))
    assert [h.ids for h in hypotheses] == [ids for _, ids in sorted(scored, reverse=True)[:6]]
    (plain,) = find(model, sources(row), Beam(60, 6), ENDS, Limits(max_len=2))
    assert [h.ids for h in plain] != [h.ids for h in hypotheses]


def test_coverage_changes_only_the_ranking() -> None:
    """In a batch, every row has the penalties that it has alone."""
    model, rows = translator(), random_rows(8, 23)
    search = Beam(3, 3, coverage=0.6)
    together = find(model, sources(*rows), search, ENDS, Limits(max_len=9))
    for row, hypotheses in zip(rows, together, strict=True):
        (alone,) = find(model, sources(row), search, ENDS, Limits(max_len=9))
        assert [h.ids for h in alone] == [h.ids for h in hypotheses]
        assert [h.score for h in alone] == pytest.approx([h.score for h in hypotheses], abs=1e-9)


def test_a_model_without_a_source_has_no_coverage() -> None:
    with pytest.raises(SpecError, match=r"^coverage: the coverage penalty needs cross-attention"):
        find(writer(), prompts((3, 4)), Beam(2, coverage=0.1), ENDS, Limits(max_len=3))
