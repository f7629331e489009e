"""From text files to token tables: survey, split, tokenizer, store. What is left out is counted and said."""

import hashlib
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from regard.data import choices
from regard.data import tokenizer as tokenizers_
from regard.data.batching import Batching, Buckets, Windows
from regard.data.cache import Cache
from regard.data.objectives import Classification, LanguageModelling, Objective, Record, Translation
from regard.data.sample import Sample
from regard.data.text import Corpus, is_pipe, spool
from regard.data.token_store import Table, Writer, chunks
from regard.data.tokenizer import BPE, TOKENIZERS, Imported, Tokenizer, TokenizerSpec
from regard.errors import DataError, SpecError
from regard.files import new_folder, temporary
from regard.tree import Spec, read, to_record

CHUNK = 8192  # records that are encoded at once
FORMAT = 4  # of the prepared data: one more whenever the same text would give other data
ROOM = 1024  # tokens that a chosen length limit is at most
STREAM = 1_000_000  # characters that are held out of a stream at most
SAMPLE = 10_000_000  # characters that a tokenizer is learned from, where a sample is enough


@dataclass(frozen=True, slots=True)
class DataSpec(Spec):
    """What is learned from: the objective, the texts, and how they become batches of ids."""

    kind = "data"
    train: tuple[Corpus, ...]
    valid: tuple[Corpus, ...] = ()  # (): split off from the training text
    objective: Objective = Translation()
    # How many records are split off; None: 2 %, at least 500 or a tenth, at most 1,000; 0: none.
    held_out: int | None = None
    tokenizer: TokenizerSpec | None = None  # None: chosen from the text
    joint: bool = True  # one tokenizer for both sides of a translation
    max_len: int | None = None  # tokens on a side; None: chosen from the text
    # Pairs with a source longer than max_len: their source is cut, or they are left out. None: chosen from the text.
    # A pair with a longer target is always left out, and a longer text of another objective always cut.
    long: Literal["cut", "drop"] | None = None
    batching: Batching | None = None  # None: buckets, or windows of a stream

    def check(self) -> None:
        if not self.train:
            raise SpecError("train", "is empty; name at least one corpus")
        if self.max_len is not None and self.max_len < 1:
            raise SpecError("max_len", f"must be at least 1, not {self.max_len}")
        if self.long is not None and not isinstance(self.objective, Translation):
            raise SpecError("long", "is about pairs; longer texts of other objectives are always cut; leave it out")
        if self.held_out is not None and self.held_out < 0:
            raise SpecError("held_out", f"must be at least 0, not {self.held_out}")
        if self.held_out and self.valid:
            raise SpecError("held_out", "a validation text is given, so nothing is split off; leave one of the two out")
        self._check_corpora()
        if self.batching is not None and isinstance(self.batching, Windows) != self.objective.stream:
            raise SpecError("batching", "windows are cut from a stream, and from nothing else")
        if self.batching is not None and self.batching.packed and isinstance(self.objective, Classification):
            raise SpecError("batching", "a packed row has no label of its own; classify with kind 'buckets'")

    def _check_corpora(self) -> None:
        wanted = len(self.objective.texts)
        for name, corpora in (("train", self.train), ("valid", self.valid)):
            for i, corpus in enumerate(corpora):
                if corpus.texts != wanted or corpus.labelled != isinstance(self.objective, Classification):
                    raise SpecError(
                        f"{name}[{i}]",
                        f"a corpus of kind {type(corpus).kind!r} does not fit the objective {self.objective.kind!r}",
                    )
        for i, corpus in enumerate(self.train):
            if self.objective.stream and corpus.weight % 1:
                raise SpecError(
                    f"train[{i}].weight", f"a stream is seen a whole number of times an epoch, not {corpus.weight}"
                )
        for i, corpus in enumerate(self.valid):
            if corpus.weight != 1.0:
                raise SpecError(f"valid[{i}].weight", "every validation record is measured once; leave it out")

    @property
    def longest(self) -> int:
        """The length limit, which must be chosen by now."""
        assert self.max_len is not None, "resolved while preparing"
        return self.max_len

    @property
    def split_by_source(self) -> bool:
        """Whether records are held out by a hash of their source, which the seed chooses."""
        return not self.valid and not self.objective.stream and self.held_out != 0

    @property
    def batches(self) -> Batching:
        """How examples are put together, chosen or given."""
        return self.batching or (Windows() if self.objective.stream else Buckets())


@dataclass
class Survey:
    """What was found in a text."""

    records: int = 0
    kept: int = 0
    empty: int = 0  # left out: a side without text
    long: int = 0  # left out: a side longer than max_len
    cut: int = 0  # cut to max_len, or into pieces of it
    identical: int = 0  # target equals source
    leaked: int = 0  # also in the validation text
    words: dict[str, int] = field(default_factory=dict)  # per text of a record
    ids: dict[str, int] = field(default_factory=dict)  # per column
    characters: int = 0
    bytes: int = 0  # of the text that is to be said

    @classmethod
    def of(cls, record: Any) -> "Survey":
        """From JSON."""
        found = cls(**record)
        for name, value in asdict(found).items():
            counts = value.values() if isinstance(getattr(cls(), name), dict) else [value]
            if not all(type(count) is int and count >= 0 for count in counts):
                raise TypeError(f"{name} is not a count")
        return found

    def sentences(self, name: str, max_len: int) -> list[str]:
        """The survey in words, one line for each thing that a user should know."""
        said = [f"{name}: {self.kept:,} of {self.records:,} records kept"]
        if self.empty:
            said.append(f"{name}: {self.empty:,} left out because a side is empty")
        if self.long:
            said.append(f"{name}: {self.long:,} left out because a side is longer than {max_len} tokens (data.max_len)")
        if self.cut:
            said.append(f"{name}: {self.cut:,} longer than {max_len} tokens (data.max_len) were cut there")
        if self.leaked:
            said.append(f"warning: {self.leaked:,} records of {name} have a source that is also in the validation text")
        if self.identical > self.kept / 2:
            said.append(
                f"warning: in {self.identical:,} of {self.kept:,} records of {name} the target is the source itself"
            )
        return said


@dataclass(frozen=True)
class Prepared:
    """The data of a run, ready to be batched."""

    spec: DataSpec  # complete: what was not given is chosen
    objective: Objective
    train: list[Table]
    weights: list[float]
    valid: Table | None
    valid_texts: list[Record]
    tokenizers: dict[str, Tokenizer]
    survey: Survey
    valid_survey: Survey
    report: list[str]


def prepare(
    spec: DataSpec,
    folder: Path,
    seed: int,
    tokenizers: dict[str, Tokenizer] | None = None,
    say: Callable[[str], None] = lambda _: None,
    cache: Cache | None = None,
    room: int = ROOM,
) -> Prepared:
    """Read all text, train the tokenizers unless they are given, and leave the token tables in `folder`.

    The folder appears whole or not at all. What a `cache` has of the same text, prepared in the same way, is taken from
    it, and what it has not is kept there. A pipe is copied into a file first, for the text is read more than once. A
    length limit that is chosen is at most `room` tokens.
    """
    try:
        with _spooled(spec, folder, say) as (data, named):
            key = None if cache is None else cache.key(*_described(data, seed, tokenizers, room))
            if cache is None or key is None:
                return _prepare(data, folder, seed, tokenizers, say, named, room)
            if cache.fetch(key, folder):
                say("this text was prepared before: taking the data from the cache (regard cache)")
                return opened(data, folder)
            prepared = _prepare(data, folder, seed, tokenizers, say, named, room)
            cache.keep(key, folder, say)
    except OSError as error:
        raise DataError(f"cannot write the prepared data to {folder}: {error.strerror or error}; make room") from None
    return prepared


@contextmanager
def _spooled(
    spec: DataSpec, folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[DataSpec, Callable[[str], str]]]:
    """The same data with every pipe copied into a file beside `folder`, while that is needed.

    Also a function that gives such files in a sentence the names of the pipes, which are what a user knows.
    """
    corpora = (*spec.train, *spec.valid)
    pipes = list(dict.fromkeys(file for corpus in corpora for file in corpus.files() if is_pipe(file)))
    if not pipes:
        yield spec, str
        return
    place = temporary(folder.with_name("text"))
    place.mkdir(0o700, parents=True)
    try:
        # The suffix says how it is packed.
        copies = {pipe: str(place / f"pipe-{number}{Path(pipe).suffix}") for number, pipe in enumerate(pipes)}

        def named(sentence: str) -> str:
            for pipe, copy in copies.items():
                sentence = sentence.replace(copy, pipe)
            return sentence

        def moved(corpus: Corpus) -> Corpus:
            files = {name: getattr(corpus, name) for name in corpus.paths}
            return replace(corpus, **{name: copies.get(file, file) for name, file in files.items()})  # type: ignore[type-var]  # every concrete spec is a dataclass

        for pipe, copy in copies.items():
            say(f"reading {pipe}")
            spool(pipe, Path(copy))
        try:
            yield replace(spec, train=tuple(map(moved, spec.train)), valid=tuple(map(moved, spec.valid))), named
        except DataError as error:
            raise DataError(named(str(error))) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _described(
    spec: DataSpec, seed: int, tokenizers: dict[str, Tokenizer] | None, room: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """All that prepared data depend on but the content of files, and these files."""
    corpora = (*spec.train, *spec.valid)
    files = [file for corpus in corpora for file in corpus.files()]
    description = {
        "format": FORMAT,
        "library": tokenizers_.VERSION,
        "sample": SAMPLE,
        "train": len(spec.train),
        "corpora": [_without(to_record(corpus), "weight", *corpus.paths) for corpus in corpora],
        "objective": to_record(spec.objective),
        "held_out": spec.held_out,
        "seed": seed if spec.split_by_source else None,
        "joint": spec.joint,
        "max_len": spec.max_len,
        "room": room if spec.max_len is None else None,
        "long": spec.long,
    }
    if tokenizers is not None:
        description["tokenizers"] = {name: tokenizer.sha256 for name, tokenizer in tokenizers.items()}
    elif isinstance(spec.tokenizer, Imported):
        files.append(spec.tokenizer.path)
        description["tokenizer"] = spec.tokenizer.kind
    else:
        description["tokenizer"] = None if spec.tokenizer is None else to_record(spec.tokenizer)
    return description, tuple(files)


def _without(record: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in fields}


def _prepare(
    spec: DataSpec,
    folder: Path,
    seed: int,
    tokenizers: dict[str, Tokenizer] | None,
    say: Callable[[str], None],
    named: Callable[[str], str],
    room: int,
) -> Prepared:
    with new_folder(folder) as making:
        spec = _fill(spec, making, seed, tokenizers, say, named, room)
    return opened(spec, folder)


def _fill(
    spec: DataSpec,
    making: Path,
    seed: int,
    tokenizers: dict[str, Tokenizer] | None,
    say: Callable[[str], None],
    named: Callable[[str], str],
    room: int,
) -> DataSpec:
    """Write the prepared data into a folder; the description of the data with its labels."""
    say("reading the text")
    found = _Reading(spec, seed)
    split = _split(spec, found)
    objective = found.objective(spec.objective, split.said)
    spec = replace(spec, objective=objective)
    say("training the tokenizer" if tokenizers is None else "taking the tokenizer as it is")
    reasons: list[str] = []
    if spec.tokenizer is None:
        choice = choices.choose_tokenizer(objective, split.sample)
        spec = replace(spec, tokenizer=choice.tokenizer)
        reasons += [] if tokenizers else [choice.why]
    if isinstance(spec.tokenizer, BPE) and spec.tokenizer.languages is None:
        languages = 1 if isinstance(objective, LanguageModelling) else 2
        spec = replace(spec, tokenizer=replace(spec.tokenizer, languages=languages))
    tokenizers = tokenizers or _tokenizers(spec, split)
    if spec.max_len is None or (spec.long is None and isinstance(objective, Translation)):
        limit = choices.choose_limit(objective, split.sample, tokenizers, spec.max_len or room, spec.long)
        reasons += [limit.why] if limit.why and spec.max_len is None else []
        long = limit.long if isinstance(objective, Translation) else None
        spec = replace(spec, max_len=spec.max_len or limit.max_len, long=long)
    say("encoding the text")
    survey, valid_survey = Survey(), Survey()
    aside: list[Record] = []
    kept: list[Record] = []
    for i, _ in enumerate(spec.train):
        _write(spec, tokenizers, split.training(i, aside), making / f"train-{i}", survey, split.leaked)
    if split.any_valid:
        given = (record for corpus in spec.valid for record in corpus.records())
        _write(spec, tokenizers, chain(given, aside), making / "valid", valid_survey, None, kept)
    if not survey.kept:
        raise DataError("no record of the training text is left to learn from: " + _why_none(survey, spec.longest))
    if split.any_valid and not valid_survey.kept:
        why = _why_none(valid_survey, spec.longest)
        raise DataError(f"no record of the validation text is left to measure on: {why}")
    remarks = [named(remark) for corpus in (*spec.train, *spec.valid) for remark in corpus.remarks()]
    report = [*remarks, *split.said, *survey.sentences("training text", spec.longest)]
    if valid_survey.records:
        report += valid_survey.sentences("validation text", spec.longest)
    chosen = {"tokenizer": to_record(_required(spec.tokenizer)), "max_len": spec.longest, "long": spec.long}
    report += reasons
    surveys = {"train": asdict(survey), "valid": asdict(valid_survey), "report": report, "chosen": chosen}
    (making / "survey.json").write_text(json.dumps(surveys, indent=2), encoding="utf-8")
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    (making / "valid.jsonl").write_text(lines, encoding="utf-8")
    for name, tokenizer in tokenizers.items():
        tokenizer.save(making / f"tokenizer.{name}.json")
    labels = list(objective.labels) if isinstance(objective, Classification) else []
    (making / "labels.json").write_text(json.dumps(labels, ensure_ascii=False), encoding="utf-8")
    return spec


def opened(spec: DataSpec, folder: Path) -> Prepared:
    """What `prepare` left in `folder`."""
    try:
        surveys = json.loads((folder / "survey.json").read_text(encoding="utf-8"))
        labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
        with open(folder / "valid.jsonl", encoding="utf-8", newline="\n") as lines:
            texts = [_strings(json.loads(line), len(spec.objective.texts)) for line in lines]
        survey, valid_survey = Survey.of(surveys["train"]), Survey.of(surveys["valid"])
        report, labels = list(_strings(surveys["report"])), _strings(labels)
        spec = _completed(spec, surveys.get("chosen", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{folder} is not prepared data ({error}); train again from the text") from None
    objective = replace(spec.objective, labels=labels) if isinstance(spec.objective, Classification) else spec.objective
    tables = [Table.open(folder / f"train-{i}") for i in range(len(spec.train))]
    valid = Table.open(folder / "valid") if valid_survey.records else None
    tokenizers = _loaded({path.name.split(".")[1]: path for path in sorted(folder.glob("tokenizer.*.json"))})
    if missing := set(objective.encoded) - set(tokenizers):
        raise DataError(f"{folder} has lost tokenizer.{missing.pop()}.json; train again from the text")
    weights = [corpus.weight for corpus in spec.train]
    spec = replace(spec, objective=objective)
    return Prepared(spec, objective, tables, weights, valid, texts, tokenizers, survey, valid_survey, report)


def _completed(spec: DataSpec, chosen: Any) -> DataSpec:
    """The description of the data with what was chosen for it; data of before have the choices of then."""
    pairs = isinstance(spec.objective, Translation)
    known = {"tokenizer": {"kind": "bpe"}, "max_len": 256, "long": "drop" if pairs else None} | chosen
    max_len, long = known["max_len"], known["long"]
    if type(max_len) is not int or long not in (("cut", "drop") if pairs else (None,)):
        raise TypeError("a chosen limit is something else")
    tokenizer = spec.tokenizer or read(known["tokenizer"], TokenizerSpec, "tokenizer", TOKENIZERS)
    return replace(spec, tokenizer=tokenizer, max_len=spec.max_len or max_len, long=spec.long or long)


def _required(tokenizer: TokenizerSpec | None) -> TokenizerSpec:
    assert tokenizer is not None, "chosen by now"
    return tokenizer


def _strings(value: Any, count: int | None = None) -> tuple[str, ...]:
    """A list of strings from a file that anybody may have edited, `count` of them if that is given."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("a list of strings is something else")
    if count is not None and len(value) != count:
        raise ValueError(f"a record has {len(value)} texts instead of {count}")
    return tuple(value)


def _loaded(paths: dict[str, Path]) -> dict[str, Tokenizer]:
    """Tokenizers by name; one that several have in common is made once."""
    made: dict[bytes, Tokenizer] = {}
    for path in paths.values():
        if (content := path.read_bytes()) not in made:
            made[content] = Tokenizer.load(path)
    return {name: made[path.read_bytes()] for name, path in paths.items()}


def _why_none(survey: Survey, max_len: int) -> str:
    return f"of {survey.records:,} records {survey.empty:,} are empty and {survey.long:,} longer than {max_len} tokens"


class _Split:
    """Which records are for training and which for validation, and a sample of the former."""

    def __init__(self, spec: DataSpec, found: "_Reading", held: list[bytes] | None, leaked: set[bytes]) -> None:
        self.spec, self.held, self.leaked = spec, held, leaked
        self.any_valid = bool(spec.valid) or held is not None
        self.said: list[str] = []
        self.sample, self.share = found.sample.records(held)

    def training(self, corpus: int, aside: list[Record] | None = None) -> Iterator[Record]:
        """The records of a corpus to learn from; those that are held out are put `aside`."""
        held = None if self.held is None else self.held[corpus]
        for number, record in enumerate(self.spec.train[corpus].records()):
            if held is not None and number >= len(held):
                files = " and ".join(self.spec.train[corpus].files())
                raise DataError(f"{files}: grew while it was read; wait until it is written")
            if held is None or not held[number]:
                yield record
            elif aside is not None:
                aside.append(record)


class _Reading:
    """What the first reading of the training text finds; also what is wrong with it, before anything is trained."""

    def __init__(self, spec: DataSpec, seed: int) -> None:
        objective = spec.objective
        texts = tuple(objective.encoded.values())
        self.sample = Sample(texts, SAMPLE if spec.joint else SAMPLE * len(texts))
        self.counts: list[int] = []  # records of each corpus
        self.labels: Counter[str] = Counter()
        self.first_labels: list[str] = []
        self.hashes: list[np.ndarray] = []  # of the sources, where records are split by them
        self.hashed: list[np.ndarray] = []  # numbers of the records that they are of
        self.ends: list[np.ndarray] = []  # of the lines of a stream, in characters
        labels = isinstance(objective, Classification)
        for corpus, text in enumerate(spec.train):
            number, hashes, hashed, sizes = -1, bytearray(), array("q"), array("q")
            for number, record in enumerate(text.records()):
                self.sample.offer(corpus, number, record)
                # Records with an empty side are left out later; held out, they would take the place of others.
                if spec.split_by_source and _full(record):
                    hashes += _hash(record[objective.input_text], seed)
                    hashed.append(number)
                if objective.stream:
                    sizes.append(len(record[0]) + 1)
                if labels:
                    self.labels[record[0]] += 1
                    if number == 0:
                        self.first_labels.append(record[0])
            self.counts.append(number + 1)
            self.hashes.append(np.frombuffer(bytes(hashes), ">u8"))
            self.hashed.append(np.frombuffer(hashed.tobytes(), np.int64))
            self.ends.append(np.cumsum(np.frombuffer(sizes.tobytes(), np.int64)))

    def objective(self, objective: Objective, said: list[str]) -> Objective:
        """A classification knows its labels: those of the training text, sorted, unless given."""
        if not isinstance(objective, Classification) or objective.labels:
            return objective
        for i, first in enumerate(self.first_labels):
            if self.labels[first] == 1 and len(self.labels) > 2:
                said.append(
                    f"warning: the label {first!r} of the first line occurs nowhere else; if that line names the "
                    f"columns, set data.train[{i}].header=true"
                )
        if len(self.labels) < 2:
            only = next(iter(self.labels))
            raise DataError(f"the training text has only the label {only!r}; a classifier needs two or more")
        return replace(objective, labels=tuple(sorted(self.labels)))


def _split(spec: DataSpec, found: _Reading) -> _Split:
    """What is held out. Records are split by a hash of their source, so that no source is on both sides.

    A stream gives its end away.
    """
    if spec.valid:
        read, stream = spec.objective.input_text, spec.objective.stream
        leaked = {_hash(record[read], 0) for corpus in spec.valid for record in corpus.records()}
        return _Split(spec, found, None, set() if stream else leaked)
    if spec.objective.stream:
        return _stream_split(spec, found)
    count = sum(len(hashes) for hashes in found.hashes)
    wanted = choices.held_out(count) if spec.held_out is None else spec.held_out
    if wanted == 0 or not count:
        return _Split(spec, found, None, set())
    values, counts = np.unique(np.concatenate(found.hashes), return_counts=True)
    enough = int(np.searchsorted(np.cumsum(counts), wanted)) + 1
    if enough >= len(values):
        raise DataError(
            f"data.held_out: {count} records with {len(values)} different sources are too few to hold out {wanted}; "
            "give a validation set, or hold out fewer (0: none)"
        )
    held = []
    for size, hashes, numbers in zip(found.counts, found.hashes, found.hashed, strict=True):
        marks = np.zeros(size, np.bool_)
        marks[numbers[hashes <= values[enough - 1]]] = True
        held.append(marks.tobytes())
    split = _Split(spec, found, held, set())
    taken = int(counts[:enough].sum())
    split.said.append(f"validation text: {taken:,} records split off, no source of which is in the training text")
    return split


def _stream_split(spec: DataSpec, found: _Reading) -> _Split:
    """The last tenth of every stream, at most `STREAM` characters, or its last `held_out` lines."""
    if spec.held_out == 0:
        return _Split(spec, found, None, set())
    if spec.held_out is None:
        begins = [int(np.searchsorted(ends, max(0.9 * ends[-1], ends[-1] - STREAM))) for ends in found.ends]
    else:
        begins = [len(ends) - spec.held_out for ends in found.ends]
    if min(begins) < 1:
        raise DataError("data.held_out: nothing would be left to learn from; hold out less, or give a validation text")
    held = [bytes(begin) + b"\1" * (size - begin) for begin, size in zip(begins, found.counts, strict=True)]
    split = _Split(spec, found, held, set())
    tenth = all(0.1 * ends[-1] <= STREAM for ends in found.ends)
    share = "a tenth" if tenth else f"{STREAM:,} characters"
    lines = share if spec.held_out is None else f"{spec.held_out:,} lines"
    split.said.append(f"validation text: the end of the text, {lines} of it, is split off")
    return split


def _full(record: Record) -> bool:
    return all(text.strip() for text in record)


def _hash(text: str, seed: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "big", signed=True)).digest()


def _tokenizers(spec: DataSpec, split: _Split) -> dict[str, Tokenizer]:
    """A tokenizer for each side, or one for both; trained on what is learned from, not on what is held out."""
    names = spec.objective.encoded
    if len(names) == 1 or spec.joint:
        return dict.fromkeys(names, _learned(_required(spec.tokenizer), split, tuple(names.values())))
    return {name: _learned(_required(spec.tokenizer), split, (column,)) for name, column in names.items()}


def _learned(spec: TokenizerSpec, split: _Split, columns: tuple[int, ...]) -> Tokenizer:
    """A tokenizer of some texts of the records: from a sample, where that is enough, or from all of them."""
    if split.share == 1.0 or spec.sampled:
        with suppress(tokenizers_.TooFewPiecesError):
            sample = (record[column] for record in split.sample for column in columns)
            return tokenizers_.train(spec, sample, split.share)
    corpora = range(len(split.spec.train))
    records = (record for corpus in corpora for record in split.training(corpus))
    return tokenizers_.train(spec, (record[column] for record in records for column in columns))


def _write(
    spec: DataSpec,
    tokenizers: dict[str, Tokenizer],
    records: Iterator[Record],
    folder: Path,
    survey: Survey,
    leaked: set[bytes] | None,
    keep: list[Record] | None = None,
) -> Table:
    """Encode records into a table, leaving out what cannot be learned from, and count."""
    objective = spec.objective
    stream, read, said = objective.stream, objective.input_text, objective.output_text
    vocab = max(tokenizer.size for tokenizer in tokenizers.values())
    with Writer(folder, objective.columns, vocab, stream) as writer:
        for chunk in chunks(records, CHUNK):
            full = [record for record in chunk if stream or _full(record)]
            limited = objective.limit(objective.table(full, tokenizers), spec.longest, cut=spec.long == "cut")
            kept = list(compress(full, limited.kept.tolist()))
            writer.add(limited.table)
            survey.records += len(chunk)
            survey.empty += len(chunk) - len(full)
            survey.long += len(full) - len(kept)
            survey.kept += len(kept)
            survey.cut += limited.cut
            survey.identical += sum(record[read] == record[said] for record in kept) if read != said else 0
            survey.leaked += sum(_hash(record[read], 0) in leaked for record in kept) if leaked else 0
            survey.characters += sum(len(record[said]) for record in kept)
            survey.bytes += sum(len(record[said].encode()) for record in kept) + stream * len(kept)
            for name, texts in zip(objective.texts, zip(*kept, strict=True), strict=bool(kept)):
                survey.words[name] = survey.words.get(name, 0) + sum(len(text.split()) for text in texts)
            for name, column in limited.table.columns.items():
                survey.ids[name] = survey.ids.get(name, 0) + len(column.ids)
            if keep is not None:
                keep += kept
        return writer.close()
