"""Split the text into training and validation text, and sample the training text."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from regard.data import choices
from regard.data.objectives import Objective, Record
from regard.data.sample import Sample
from regard.errors import DataError

if TYPE_CHECKING:
    from regard.data.prepare import DataSpec

STREAM = 1_000_000  # maximum number of characters held out from a stream


class FirstReading:
    """Reads the training text once, to collect a sample, the class labels, and the hashes that `split` needs."""

    def __init__(self, spec: "DataSpec", seed: int, sample_size: int) -> None:
        """Read all corpora. The sample for each tokenizer has about `sample_size` characters."""
        objective = spec.objective
        texts = tuple(objective.encoded.values()) or (objective.input_text,)
        self.sample = Sample(texts, sample_size if spec.joint else sample_size * len(texts))
        self.counts: list[int] = []  # number of examples in each corpus
        self.labels: Counter[str] = Counter()
        self.first_labels: list[str] = []  # the class label of the first line of each corpus
        self.hashes: list[np.ndarray] = []  # hashes of the inputs, if they decide which examples are held out
        self.hashed: list[np.ndarray] = []  # the example number for each hash
        self.ends: list[np.ndarray] = []  # the ends of the lines in a stream, in characters
        for corpus, text in enumerate(spec.train):
            number, hashes, hashed, sizes = -1, bytearray(), array("q"), array("q")
            for number, record in enumerate(text.records()):
                self.sample.offer(corpus, number, record)
                # Examples with an empty text are left out later, so holding them out would waste places.
                if spec.split_by_source and is_complete(record):
                    hashes += hash_of(record[objective.input_text], seed)
                    hashed.append(number)
                if objective.stream:
                    sizes.append(len(record[0]) + 1)
                if objective.labelled:
                    self.labels[record[0]] += 1
                    if number == 0:
                        self.first_labels.append(record[0])
            self.counts.append(number + 1)
            self.hashes.append(np.frombuffer(bytes(hashes), ">u8"))
            self.hashed.append(np.frombuffer(hashed.tobytes(), np.int64))
            self.ends.append(np.cumsum(np.frombuffer(sizes.tobytes(), np.int64)))

    def labelled(self, objective: Objective, report: list[str]) -> Objective:
        """Return the objective with its class labels: the given labels, or else the sorted labels of the training text.

        If the first line of a corpus is probably a header, a warning is appended to `report`.
        """
        if not objective.labelled or objective.labels:
            return objective
        for i, first in enumerate(self.first_labels):
            if self.labels[first] == 1 and len(self.labels) > 2:
                report.append(
                    f"warning: the label {first!r} of the first line occurs nowhere else; if that line names the "
                    f"columns, set data.train[{i}].header=true"
                )
        if len(self.labels) < 2:
            only = next(iter(self.labels))
            raise DataError(f"the training text has only the label {only!r}; a classifier needs two or more")
        return objective.with_labels(sorted(self.labels))


class Split:
    """A split of the examples into training and validation examples, with a sample of the training examples."""

    def __init__(
        self,
        spec: "DataSpec",
        reading: FirstReading,
        held_out: list[bytes] | None = None,
        leaked: frozenset[bytes] = frozenset(),
        report: str = "",
    ) -> None:
        """`held_out` has a byte per example of each corpus (1: held out); `leaked` has hashes of validation inputs."""
        self.spec, self.held_out, self.leaked = spec, held_out, leaked
        self.validates = bool(spec.valid) or held_out is not None
        self.report = [report] if report else []
        self.sample, self.share = reading.sample.records(held_out)

    def training(self, corpus: int, held_out: list[Record] | None = None) -> Iterator[Record]:
        """Yield the training examples of a corpus; append its held-out examples to the list `held_out`, if given."""
        marks = None if self.held_out is None else self.held_out[corpus]
        for number, record in enumerate(self.spec.train[corpus].records()):
            if marks is not None and number >= len(marks):
                files = " and ".join(self.spec.train[corpus].files())
                raise DataError(f"{files}: grew while it was read; wait until it is complete")
            if marks is None or not marks[number]:
                yield record
            elif held_out is not None:
                held_out.append(record)


def split(spec: "DataSpec", reading: FirstReading) -> Split:
    """Split the training text into training and validation examples, unless the spec has a validation text.

    Validation examples are chosen by a hash of the input, so that no input is in both sets. If a corpus is one long
    text (a stream), its end is held out.
    """
    objective = spec.objective
    if spec.valid:
        inputs = (record[objective.input_text] for corpus in spec.valid for record in corpus.records())
        leaked = frozenset(hash_of(text, 0) for text in inputs)
        return Split(spec, reading, leaked=frozenset() if objective.stream else leaked)
    if objective.stream:
        return _split_stream(spec, reading)
    count = sum(map(len, reading.hashes))
    number = choices.held_out(count) if spec.held_out is None else spec.held_out
    if number == 0 or not count:
        return Split(spec, reading)
    values, counts = np.unique(np.concatenate(reading.hashes), return_counts=True)
    enough = int(np.searchsorted(np.cumsum(counts), number)) + 1
    if enough >= len(values):
        raise DataError(
            f"data.held_out: {count} records with {len(values)} different sources are too few to hold out {number}; "
            "give a validation set, or hold out fewer (0: none)"
        )
    held_out = []
    for size, hashes, numbers in zip(reading.counts, reading.hashes, reading.hashed, strict=True):
        marks = np.zeros(size, np.bool_)
        marks[numbers[hashes <= values[enough - 1]]] = True
        held_out.append(marks.tobytes())
    taken = int(counts[:enough].sum())
    report = f"validation text: {taken:,} records split off, no source of which is in the training text"
    return Split(spec, reading, held_out, report=report)


def _split_stream(spec: "DataSpec", reading: FirstReading) -> Split:
    """Hold out the end of every stream (a corpus that is read as one long text) for validation.

    The last `spec.held_out` lines are held out. If `spec.held_out` is None, this is the last tenth of the text, but at
    most `STREAM` characters.
    """
    if spec.held_out == 0:
        return Split(spec, reading)
    if spec.held_out is None:
        begins = [int(np.searchsorted(ends, max(0.9 * ends[-1], ends[-1] - STREAM))) for ends in reading.ends]
        share = "a tenth" if all(0.1 * ends[-1] <= STREAM for ends in reading.ends) else f"{STREAM:,} characters"
    else:
        begins = [len(ends) - spec.held_out for ends in reading.ends]
        share = f"{spec.held_out:,} lines"
    if min(begins) < 1:
        raise DataError("data.held_out: no text would be left for training; hold out less, or give a validation text")
    held_out = [bytes(begin) + b"\1" * (size - begin) for begin, size in zip(begins, reading.counts, strict=True)]
    return Split(spec, reading, held_out, report=f"validation text: the end of the text, {share} of it, is split off")


def is_complete(record: Record) -> bool:
    """Return whether every text of the example contains more than white space."""
    return all(text.strip() for text in record)


def hash_of(text: str, seed: int) -> bytes:
    """Return an 8-byte hash of a text. The hash depends only on the text and the seed."""
    return hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "big", signed=True)).digest()
