"""A sample of a text: its size, its distribution over the text, and held-out examples."""

import numpy as np
import pytest

from regard.data.sample import Sample


def offered(count: int, limit: int, texts: tuple[int, ...] = (0, 1), corpora: int = 1) -> Sample:
    sample = Sample(texts, limit)
    for corpus in range(corpora):
        for number in range(count):
            sample.offer(corpus, number, (f"{number:06}", f"{corpus:04}"))
    return sample


def test_sample_of_a_small_text_is_the_whole_text() -> None:
    records, share = offered(50, 500).records()
    assert share == 1.0
    assert [int(record[0]) for record in records] == list(range(50))
    marks = np.zeros(50, np.bool_)
    marks[[3, 40]] = True
    records, share = offered(50, 500).records([marks.tobytes()])
    assert share == 1.0
    assert [int(record[0]) for record in records] == [n for n in range(50) if n not in (3, 40)]


@pytest.mark.parametrize("count", [51, 60, 99, 101, 150, 1000, 5000, 20011])
def test_sample_of_a_large_text_has_the_requested_size(count: int) -> None:
    records, share = offered(count, 500).records()
    assert len(records) == 50
    assert share == pytest.approx(50 / count)
    numbers = [int(record[0]) for record in records]
    assert numbers == sorted(set(numbers))
    # Evenly: in every tenth of the text there are about five of the fifty.
    assert max(np.histogram(numbers, 10, (0, count))[0]) <= 8
    assert min(np.histogram(numbers, 10, (0, count))[0]) >= 2


def test_sample_excludes_held_out_records() -> None:
    sample = offered(1000, 500)
    first, _ = sample.records()
    marks = np.zeros(1000, np.bool_)
    marks[[int(record[0]) for record in first[::10]]] = True
    second, _ = sample.records([marks.tobytes()])
    assert not {int(record[0]) for record in second} & set(np.flatnonzero(marks).tolist())
    assert {record for n, record in enumerate(first) if n % 10} <= set(second)
    assert len(second) == 50  # other examples replace those that are held out


def test_sample_counts_only_the_given_texts_of_a_record() -> None:
    records, share = offered(1000, 600, texts=(0,)).records()
    assert (len(records), share) == (100, 0.1)


def test_sample_contains_every_corpus_proportionally() -> None:
    records, _ = offered(1000, 1000, corpora=2).records()
    assert [record[1] for record in records] == ["0000"] * 50 + ["0001"] * 50


def test_sample_keeps_a_bounded_number_of_records() -> None:
    sample = Sample((0,), 100)
    for number in range(5000):
        sample.offer(0, number, ("x" * 10,))
        assert len(sample._kept) <= 21
