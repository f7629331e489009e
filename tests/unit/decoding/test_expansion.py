import pytest

from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.search import find

from .known_models import (
    BOS,
    ENDS,
    EOS,
    PAD,
    KnownModel,
    NextLogProbs,
    random_log_probs,
    random_rows,
    read_back,
    sources,
    translator,
)

Text = tuple[int, ...]


def simple_diverse(
    next_log_probs: NextLogProbs, source: Text, vocab: int, beams: int, groups: int, diversity: float, limit: int
) -> list[Text]:
    """Vijayakumar et al. 2016 with Hamming diversity, to the length limit: the ended outputs, best first."""
    width = beams // groups
    live: list[list[tuple[Text, float]]] = [[((), 0.0)] for _ in range(groups)]
    ended: dict[Text, float] = {}
    for step in range(limit + 1):
        chosen: list[int] = []
        for g in range(groups):
            extended = []
            for ids, total in live[g]:
                log_probs = next_log_probs(source, ids)
                for t in range(vocab):
                    if t not in (PAD, BOS):
                        own = total + log_probs[t]
                        extended.append((own - diversity * chosen.count(t), t, ids, own))
            extended.sort(reverse=True)
            for _, t, ids, own in extended[:width]:
                if t == EOS:
                    ended[ids] = own / (step + 1)
            onward = [(ids, t, own) for _, t, ids, own in extended if t != EOS][:width]
            live[g] = [((*ids, t), own) for ids, t, own in onward]
            chosen += [t for _, t, _ in onward]
    return sorted(ended, key=lambda ids: -ended[ids])


@pytest.mark.parametrize(("beams", "groups"), [(2, 2), (4, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("diversity", [0.3, 2.0])
def test_diverse_groups_by_definition(beams: int, groups: int, diversity: float) -> None:
    next_log_probs, rows = random_log_probs(8, seed=4, eos=0.5), [(3,), (4, 5), (6,)]
    search = Beam(beams, beams, groups=groups, diversity=diversity)
    results = find(KnownModel(next_log_probs), sources(*rows), search, ENDS, Limits(max_len=7))
    for row, hypotheses in zip(rows, results, strict=True):
        expected = simple_diverse(next_log_probs, row, 8, beams, groups, diversity, 7)
        ended = [h.ids for h in hypotheses if h.ended]
        assert ended == expected[: len(ended)]
        assert len(ended) >= min(beams, len(expected))


def test_one_group_is_plain_beam_search() -> None:
    """One group equals plain beam search, in the library and by definition."""
    next_log_probs, rows = random_log_probs(8, seed=4), [(3,), (4, 5)]
    grouped = find(
        KnownModel(next_log_probs), sources(*rows), Beam(3, 3, groups=1, diversity=0.0), ENDS, Limits(max_len=6)
    )
    assert grouped == find(KnownModel(next_log_probs), sources(*rows), Beam(3, 3), ENDS, Limits(max_len=6))
    expected = [simple_diverse(next_log_probs, row, 8, 3, 1, 0.0, 6) for row in rows]
    assert [[h.ids for h in row if h.ended] for row in grouped] == [row[:3] for row in expected]


def test_the_diversity_penalty_does_not_change_scores() -> None:
    model, rows = translator(), random_rows(6, 23)
    results = find(model, sources(*rows), Beam(4, 4, groups=2, diversity=1.5), ENDS, Limits(max_len=6))
    plain = find(model, sources(*rows), Beam(4, 4), ENDS, Limits(max_len=6))
    assert [[h.ids for h in row] for row in results] != [[h.ids for h in row] for row in plain]
    for row, hypotheses in zip(rows, results, strict=True):
        assert len({h.ids for h in hypotheses}) == len(hypotheses)
        for hypothesis in hypotheses:
            again = read_back(model, hypothesis.ids, hypothesis.ended, source=row)
            assert hypothesis.token_log_probs == pytest.approx(again, abs=1e-9)
