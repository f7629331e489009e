"""The generated documents, and the best possible perplexity at every input length."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import permutations, product
from pathlib import Path

import pytest

from regard.data.extraction import best_first
from regard.demo.documents import FactDocuments
from regard.errors import DataError, SpecError

TINY = FactDocuments(paragraphs=3, attributes=2, entities=3, values=2)
DOUBLING = FactDocuments(3, 2, 3, 2, "doubling")
TASKS = [FactDocuments(3, 2, 2, 2), FactDocuments(2, 2, 2, 3), FactDocuments(3, 1, 3, 2), DOUBLING]


def every(task: FactDocuments) -> Iterator[tuple[str, str]]:
    """Every document with its summary; each is equally probable."""
    for title in range(task.entities):
        entities = [entity for entity in range(task.entities) if entity != title]
        facts = list(product(entities, range(task.attributes), range(task.values)))
        places = permutations(range(task.paragraphs), task.attributes)
        if task.places == "doubling":  # one fact is in the first paragraph, one in the next two, in any order
            places = [place for place in places if sorted(place) in ([0, 1], [0, 2])]
        values = product(range(task.values), repeat=task.attributes)
        others = product(facts, repeat=task.paragraphs - task.attributes)
        for choices in product(places, values, others):
            yield task.document(title, *choices)


def enumerated_perplexity(pairs: Iterable[tuple[str, str]], labels: int) -> float:
    """exp(H / labels), where H is the mean of -ln p(summary | input) under the exact posterior p."""
    joint = Counter(pairs)
    inputs = Counter[str]()
    for (read, _), count in joint.items():
        inputs[read] += count
    entropy = -sum(n * math.log(n / inputs[read]) for (read, _), n in joint.items()) / inputs.total()
    return math.exp(entropy / labels)


@pytest.mark.parametrize("extract", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_optimum_equals_exact_enumeration_at_every_input_length(task: FactDocuments, extract: bool) -> None:
    pairs = [(source, best_first(source) if extract else source, target) for source, target in every(task)]
    for max_len in range(1, task.words + 2):
        which = 1 if max_len < task.words else 0  # a document that fits is read as it is
        read = ((" ".join(pair[which].split()[:max_len]), pair[2]) for pair in pairs)
        expected = enumerated_perplexity(read, len(pairs[0][2].split()) + 1)
        assert task.optimal_perplexity(max_len, extract) == pytest.approx(expected, abs=1e-12)
    assert task.optimal_perplexity(task.words) == 1


@pytest.mark.parametrize(("task", "documents", "most"), [(TINY, 576, 709), (DOUBLING, 384, 494)])
def test_generated_documents_follow_the_distribution(task: FactDocuments, documents: int, most: float) -> None:
    """Each of the tiny documents is drawn about equally often: `most` is the quantile of chi-squared for p = 1e-4."""
    count, possible = 10_000, Counter(every(task))
    drawn = Counter(task.generate(count))
    assert drawn.keys() == possible.keys()
    assert set(possible.values()) == {1}
    assert len(possible) == documents
    expected = count / len(possible)
    assert sum((n - expected) ** 2 / expected for n in drawn.values()) < most


def test_each_doubling_of_the_input_adds_a_fact() -> None:
    task = FactDocuments(1023, 10, 16, 16, "doubling")
    assert [task.share_read(2**n) for n in range(6, 13)] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert task.optimal_perplexity(4096) == 1
    for source, _ in task.generate(5):
        title, *paragraphs = source.split(" . ")
        about = [i for i, paragraph in enumerate(paragraphs) if paragraph.split()[0] == title]
        assert [(i + 1).bit_length() for i in about] == list(range(1, 11))


def test_shortened_documents_have_the_same_distribution() -> None:
    for words in (1, 3, 5, 8, 12, 15):
        whole = {(" ".join(source.split()[:words]), target) for source, target in every(DOUBLING)}
        assert {*DOUBLING.generate(6000, words=words)} == whole
    assert [*TINY.generate(4, words=99)] == [*TINY.generate(4)]


def test_pairs_depend_on_the_seed_alone() -> None:
    task = FactDocuments(paragraphs=5, attributes=2, entities=9, values=7)
    pairs = list(task.generate(3))
    assert list(task.generate(5))[:3] == pairs
    assert next(task.generate(1, seed=2)) != pairs[0]
    assert pairs[0] == (
        "e4 . e4 a0 v0 . e6 a0 v6 . e4 a1 v5 . e2 a0 v0 . e5 a0 v5 .",
        "e4 a0 v0 e4 a1 v5",
    )
    assert all(len(source.split()) == task.words for source, _ in pairs)


def test_files_have_different_documents(tmp_path: Path) -> None:
    FactDocuments().write(tmp_path / "facts", train=20, valid=3, test=2)
    lines = {file.stem: file.read_text().splitlines() for file in (tmp_path / "facts").iterdir()}
    assert {name: len(each) for name, each in lines.items()} == {"train": 20, "valid": 3, "test": 2}
    assert len({line for each in lines.values() for line in each}) == 25
    with pytest.raises(DataError, match="exists"):
        FactDocuments().write(tmp_path / "facts")


def test_too_few_paragraphs_are_refused() -> None:
    with pytest.raises(SpecError, match="paragraphs: must be at least 4, not 3"):
        FactDocuments(paragraphs=3)
    with pytest.raises(SpecError, match=r"paragraphs: with places='doubling', 4 attributes need .* = 15 paragraphs"):
        FactDocuments(places="doubling")
    with pytest.raises(SpecError, match="values: must be at least 2, not 1"):
        FactDocuments(values=1)
