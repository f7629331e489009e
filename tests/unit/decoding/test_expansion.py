import pytest

from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.search import find

from .telling import BOS, ENDS, EOS, PAD, Says, Telling, random_rows, random_says, read_back, sources, translator

Text = tuple[int, ...]


def simple_diverse(
    says: Says, source: Text, vocab: int, beams: int, groups: int, diversity: float, limit: int
) -> list[Text]:
    """Vijayakumar et al. 2016 with Hamming diversity, to the very end: what ended, best mean log-probability first."""
    width = beams // groups
    live: list[list[tuple[Text, float]]] = [[((), 0.0)] for _ in range(groups)]
    ended: dict[Text, float] = {}
    for step in range(limit + 1):
        said: list[int] = []
        for g in range(groups):
            extended = []
            for ids, total in live[g]:
                log_probs = says(source, ids)
                for t in range(vocab):
                    if t not in (PAD, BOS):
                        own = total + log_probs[t]
                        extended.append((own - diversity * said.count(t), t, ids, own))
            extended.sort(reverse=True)
            for _, t, ids, own in extended[:width]:
                if t == EOS:
                    ended[ids] = own / (step + 1)
            onward = [(ids, t, own) for _, t, ids, own in extended if t != EOS][:width]
            live[g] = [((*ids, t), own) for ids, t, own in onward]
            said += [t for _, t, _ in onward]
    return sorted(ended, key=lambda ids: -ended[ids])


@pytest.mark.parametrize(("beams", "groups"), [(2, 2), (4, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("diversity", [0.3, 2.0])
def test_diverse_groups_by_definition(beams: int, groups: int, diversity: float) -> None:
    says, rows = random_says(8, seed=4, eos=0.5), [(3,), (4, 5), (6,)]
    search = Beam(beams, beams, groups=groups, diversity=diversity)
    found = find(Telling(says), sources(*rows), search, ENDS, Limits(max_len=7))
    for row, hypotheses in zip(rows, found, strict=True):
        expected = simple_diverse(says, row, 8, beams, groups, diversity, 7)
        ended = [one.ids for one in hypotheses if one.ended]
        assert ended == expected[: len(ended)]
        assert len(ended) >= min(beams, len(expected))


def test_one_group_is_plain_beam_search() -> None:
    """Groups that hardly differ are beams of their own: the first group of two is a beam of half the width."""
    says, rows = random_says(8, seed=4), [(3,), (4, 5)]
    one = find(Telling(says), sources(*rows), Beam(3, 3, groups=1, diversity=0.0), ENDS, Limits(max_len=6))
    assert one == find(Telling(says), sources(*rows), Beam(3, 3), ENDS, Limits(max_len=6))
    expected = [simple_diverse(says, row, 8, 3, 1, 0.0, 6) for row in rows]
    assert [[h.ids for h in row if h.ended] for row in one] == [row[:3] for row in expected]


def test_the_penalty_is_part_of_no_score() -> None:
    model, rows = translator(), random_rows(6, 23)
    found = find(model, sources(*rows), Beam(4, 4, groups=2, diversity=1.5), ENDS, Limits(max_len=6))
    plain = find(model, sources(*rows), Beam(4, 4), ENDS, Limits(max_len=6))
    assert [[one.ids for one in row] for row in found] != [[one.ids for one in row] for row in plain]
    for row, hypotheses in zip(rows, found, strict=True):
        assert len({one.ids for one in hypotheses}) == len(hypotheses)
        for one in hypotheses:
            again = read_back(model, one.ids, one.ended, source=row)
            assert one.token_log_probs == pytest.approx(again, abs=1e-9)
