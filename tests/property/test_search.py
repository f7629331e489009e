"""Properties of searches with random settings, over models with random distributions."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.batch import Batch, pad
from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints, contains
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.rank import best
from regard.decoding.sample import Sample
from regard.decoding.search import Search, find, stream
from regard.models.base import Generator
from regard.models.decoding import Decoding
from regard.nn.cache import Rows

V, ENDS = 7, SpecialTokens(1, 2, 0)
Ids = tuple[int, ...]


class Memory:
    """A hash of the tokens that every row has read."""

    def __init__(self, read: Tensor) -> None:
        self.read = read

    def reorder(self, parent: Tensor) -> None:
        self.read = self.read[parent]

    def keep(self, rows: Tensor, sources: Tensor) -> None:
        self.read = self.read[rows]


class Chaotic(Generator):
    """A model whose distribution of the next token is a random function of a hash of all previous tokens."""

    def __init__(self, seed: int, sharp: float, eos: float) -> None:
        super().__init__()
        self.weights = torch.randn(997, V, generator=torch.Generator().manual_seed(seed)) * sharp
        self.weights[:, ENDS.eos] += eos
        self.eval()

    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        assert batch.source is not None
        first = self.mixed(torch.zeros(len(batch.source), dtype=torch.int64), batch.source, batch.source_seg)
        rows = Rows(torch.zeros(len(first) * beams, dtype=torch.int64), max_len)
        return Decoding(rows, [Memory(first.repeat_interleave(beams))], beams)

    def mixed(self, number: Tensor, ids: Tensor, seg: Tensor | None) -> Tensor:
        for t in range(ids.shape[1]):
            after = (number * 31 + ids[:, t] * 7 + 13) % 997
            number = after if seg is None else torch.where(seg[:, t] != 0, after, number)
        return number

    def advance(self, ids: Tensor, decoding: Decoding, seg: Tensor | None = None) -> Tensor:
        decoding.rows.claim(ids.shape[1])
        decoding.rows.advance(ids.shape[1], None)
        (memory,) = decoding.states
        memory.read = self.mixed(memory.read, ids, seg)
        return self.weights[memory.read].log_softmax(-1)


def batch(rows: Sequence[Ids]) -> Batch:
    ids, seg = pad(rows)
    return Batch(ids, source=ids, source_seg=seg)


words = st.integers(3, V - 1)
sentences = st.lists(words, min_size=1, max_size=4).map(tuple)
models = st.builds(Chaotic, st.integers(0, 99), st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([-3.0, 0.0, 2.0]))


# Searches and rules are constructed in the test, because the type checks of tests draw random numbers, which would
# interfere with Hypothesis.
Make = Callable[[], Search]


@st.composite
def beam_searches(draw: st.DrawFn, least: int = 1) -> Make:
    beams = draw(st.integers(least, 6))
    normalise: Any = draw(st.sampled_from(["none", "mean", "gnmt"]))
    alpha = 1.0 if normalise == "none" else draw(st.sampled_from([0.0, 0.6, 1.0, 2.0]))
    stopping: Any = draw(st.sampled_from(["optimal", "first"]))
    n_best = draw(st.integers(1, beams))
    return lambda: Beam(beams, n_best, normalise, alpha, stopping=stopping)


searches = st.one_of(
    beam_searches(),
    st.just(lambda: Beam(4, 3, groups=2, diversity=0.5)),
    st.just(lambda: Beam(4, 2, stopping="huggingface")),
    st.just(lambda: Beam(4, 2, stopping="ctranslate2")),
    st.builds(
        lambda temperature, top_k, n_best: lambda: Sample(temperature=temperature, top_k=top_k, n_best=n_best),
        st.sampled_from([0.5, 2.0]),
        st.sampled_from([0, 2]),
        st.integers(1, 3),
    ),
)


def consistent(rule: tuple[Ids, Ids, int]) -> bool:
    """True if the prefix contains no banned sequence."""
    prefix, banned, _ = rule
    return not any(prefix[i : i + len(banned)] == banned for i in range(len(prefix)) if banned)


phrases = st.lists(words, min_size=1, max_size=2).map(tuple)
row_rules = st.tuples(st.just(()) | phrases, st.just(()) | phrases, st.integers(0, 3)).filter(consistent)


def rules_of(rule: tuple[Ids, Ids, int]) -> TokenConstraints:
    prefix, banned, no_repeat = rule
    return TokenConstraints(prefix, (banned,) if banned else (), no_repeat=no_repeat)


required = st.lists(phrases, max_size=3).map(tuple)


@given(
    models,
    st.lists(st.tuples(sentences, row_rules), min_size=1, max_size=5),
    searches,
    st.integers(0, 3),
    st.integers(3, 8),
)
@settings(max_examples=60)
def test_outputs_satisfy_limits_and_constraints_with_model_probabilities(
    model: Chaotic, rows: list[tuple[Ids, tuple[Ids, Ids, int]]], make: Make, least: int, most: int
) -> None:
    search = make()
    texts, rules = [text for text, _ in rows], [rules_of(rule) for _, rule in rows]
    results = find(model, batch(texts), search, ENDS, Limits(least, most), rules)
    for text, rule, hypotheses in zip(texts, rules, results, strict=True):
        assert 1 <= len(hypotheses) <= getattr(search, "n_best", 1)
        assert len({hypothesis.ids for hypothesis in hypotheses}) == len(hypotheses) or isinstance(search, Sample)
        for hypothesis in hypotheses:
            assert len(hypothesis.ids) <= most
            assert len(hypothesis.ids) >= least or not hypothesis.ended
            assert set(hypothesis.ids) <= set(range(3, V))
            assert hypothesis.ids[: len(rule.prefix)] == rule.prefix
            assert not any(contains(hypothesis.ids, banned) for banned in rule.banned)
            assert (
                hypothesis.log_prob == sum(hypothesis.token_log_probs)
                or abs(hypothesis.log_prob - sum(hypothesis.token_log_probs)) < 1e-9
            )
            expected = teacher_forced(model, text, hypothesis.ids, hypothesis.ended)
            torch.testing.assert_close(
                torch.tensor(hypothesis.token_log_probs), torch.tensor(expected), rtol=0, atol=1e-9
            )
        ended = [hypothesis.score for hypothesis in hypotheses if hypothesis.ended]
        assert all(a > b - 2e-5 for a, b in itertools.pairwise(ended))  # within a tie the ids decide


def teacher_forced(model: Chaotic, source: Ids, ids: Ids, ended: bool) -> list[float]:
    decoding = model.start(batch([source]), 50)
    read, log_probs = ENDS.bos, []
    for token in (*ids, ENDS.eos) if ended else ids:
        log_probs.append(float(model.advance(torch.tensor([[read]]), decoding)[0, token]))
        read = token
    return log_probs


@given(models, st.lists(st.tuples(sentences, row_rules), min_size=2, max_size=5), searches, st.randoms())
@settings(max_examples=25)
def test_result_of_a_row_is_independent_of_other_rows(
    model: Chaotic, rows: list[tuple[Ids, tuple[Ids, Ids, int]]], make: Make, random: Any
) -> None:
    search = make()
    numbers = list(range(len(rows)))
    random.shuffle(numbers)

    def run(selected: list[int]) -> list[list[Any]]:
        chosen = [rows[i] for i in selected]
        limits = [Limits(i % 2, 4 + i % 4) for i in selected]
        return find(
            model, batch([r[0] for r in chosen]), search, ENDS, limits, [rules_of(r[1]) for r in chosen], selected
        )

    expected = run(numbers)
    assert [run([i])[0] for i in numbers] == expected


@given(models, st.lists(st.tuples(sentences, required), min_size=1, max_size=4), beam_searches(least=2))
@settings(max_examples=40)
def test_outputs_contain_required_sequences(
    model: Chaotic, rows: list[tuple[Ids, tuple[Ids, ...]]], make: Make
) -> None:
    """Every output contains its required sequences, where nothing but a prefix is constrained beside them."""
    search = make()
    rules = [TokenConstraints(text[:2], required=sequences) for text, sequences in rows]
    results = find(model, batch([text for text, _ in rows]), search, ENDS, Limits(max_len=8), rules)
    for rule, hypotheses in zip(rules, results, strict=True):
        assert hypotheses
        for hypothesis in hypotheses:
            assert all(contains(hypothesis.ids, sequence) for sequence in rule.required)
            assert hypothesis.ids[: len(rule.prefix)] == rule.prefix


@given(
    models, st.lists(sentences, min_size=1, max_size=4), st.sampled_from([Beam(1), Sample(), Sample(temperature=0.3)])
)
@settings(max_examples=40)
def test_streamed_parts_concatenate_to_the_hypothesis(model: Chaotic, rows: list[Ids], search: Search) -> None:
    streamed: dict[int, list[int]] = {i: [] for i in range(len(rows))}
    for pieces in stream(model, batch(rows), search, ENDS, Limits(max_len=6)):
        for piece in pieces:
            streamed[piece.row] += piece.ids
    results = find(model, batch(rows), search, ENDS, Limits(max_len=6))
    assert [tuple(streamed[i]) for i in range(len(rows))] == [row[0].ids for row in results]


@given(st.integers(0, 999), st.integers(1, 4), st.sampled_from([9, 1100, 2000]), st.sampled_from([1e-6, 1e-4, 1.0]))
@settings(max_examples=80)
def test_beam_order_matches_the_definition(seed: int, beams: int, vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (spread * torch.randn(beams, vocab, generator=generator)).log_softmax(-1)
    totals = (spread * -torch.rand(beams, generator=generator)).tolist()
    every = [(-round((totals[k] + x) / 1e-5), v, k) for k in range(beams) for v, x in enumerate(log_probs[k].tolist())]
    (ranked,) = best(log_probs, [totals], 2 * beams)
    assert [(candidate.token, candidate.beam) for candidate in ranked] == [
        (v, k) for _, v, k in sorted(every)[: 2 * beams]
    ]
