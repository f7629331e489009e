"""Prepare text files for training: count and split the text, train tokenizers, and write token tables."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, get_args

from regard.data import choices
from regard.data import tokenizer as tokenizers_
from regard.data.batching import Batching, Buckets, Windows
from regard.data.cache import Cache
from regard.data.extraction import shortened
from regard.data.objectives import Objective, Record, Translation
from regard.data.split import FirstReading, Split, hash_of, is_complete, split
from regard.data.text import Corpus, is_pipe, spool
from regard.data.token_store import Table, Writer, chunks
from regard.data.tokenizer import BPE, TOKENIZERS, Imported, Tokenizer, TokenizerSpec
from regard.errors import DataError, SpecError
from regard.files import new_folder, temporary
from regard.tree import Spec, read, to_record, walk

CHUNK = 8192  # number of examples encoded at once
FORMAT = 4  # version of the prepared data, incremented whenever the same text would give different data
ROOM = 1024  # upper bound of a length limit that is chosen from the text, in tokens
SAMPLE = 10_000_000  # number of characters that a tokenizer is trained on, if a sample is enough

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DataSpec(Spec):
    """The data section of a recipe: objective, text files, tokenizer, length limit and batching."""

    kind = "data"
    train: tuple[Corpus, ...]
    valid: tuple[Corpus, ...] = ()  # (): validation text is split off from the training text
    objective: Objective = Translation()
    # Number of examples to split off. None: 2 %, but at least 500 (or a tenth, if that is less) and at most 1,000.
    held_out: int | None = None
    tokenizer: TokenizerSpec | None = None  # None: chosen from the text
    joint: bool = True  # True: source and target share one tokenizer
    max_len: int | None = None  # maximum number of tokens in a source or target; None: chosen from the text
    # For a pair with a source longer than max_len: cut the source, extract the parts that are most similar to its first
    # line (extraction.py), or drop the pair. None: chosen from the text. A pair with a longer target is always dropped.
    # For other objectives, a longer text is always cut.
    long: choices.Long | None = None
    batching: Batching | None = None  # None: windows for a stream, else buckets

    def check(self) -> None:
        if not self.train:
            raise SpecError("train", "is empty; name at least one corpus")
        if self.max_len is not None and self.max_len < 1:
            raise SpecError("max_len", f"must be at least 1, not {self.max_len}")
        if self.long is not None and not self.objective.may_drop:
            raise SpecError(
                "long", "applies only to pairs; longer texts of other objectives are always truncated; leave it out"
            )
        if self.held_out is not None and self.held_out < 0:
            raise SpecError("held_out", f"must be at least 0, not {self.held_out}")
        if self.held_out and self.valid:
            raise SpecError("held_out", "a validation text is given, so nothing is split off; leave one of the two out")
        self._check_corpora()
        if self.batching is not None and isinstance(self.batching, Windows) != self.objective.stream:
            stream = "a stream is cut into windows; use kind 'windows'"
            other = "windows are cut only from a stream; use kind 'buckets'"
            raise SpecError("batching", stream if self.objective.stream else other)
        if self.batching is not None and self.batching.packed and not self.objective.packs:
            raise SpecError("batching", "a packed row holds several texts but would have one label; use kind 'buckets'")

    def _check_corpora(self) -> None:
        objective = self.objective
        for name, corpora in (("train", self.train), ("valid", self.valid)):
            for i, corpus in enumerate(corpora):
                if (corpus.texts, corpus.labelled) != (len(objective.texts), objective.labelled):
                    message = f"a corpus of kind {type(corpus).kind!r} does not fit the objective {objective.kind!r}"
                    raise SpecError(f"{name}[{i}]", message)
        for i, corpus in enumerate(self.train):
            if objective.stream and corpus.weight % 1:
                message = f"a stream is read a whole number of times per epoch, not {corpus.weight}"
                raise SpecError(f"train[{i}].weight", message)
        for i, corpus in enumerate(self.valid):
            if corpus.weight != 1.0:
                raise SpecError(
                    f"valid[{i}].weight", "has no effect, because validation counts every example once; leave it out"
                )

    @property
    def longest(self) -> int:
        """The field `max_len`, which must have been given by the user or chosen from the text before."""
        assert self.max_len is not None, "resolved while preparing"
        return self.max_len

    @property
    def split_by_source(self) -> bool:
        """True if the held-out examples are chosen by a hash of the source and the seed."""
        return not self.valid and not self.objective.stream and self.held_out != 0

    @property
    def batches(self) -> Batching:
        """The field `batching`, or the default batching for the objective if the field is None."""
        return self.batching or (Windows() if self.objective.stream else Buckets())


@dataclass
class Survey:
    """Counts of the training (or validation) examples that are kept, left out or cut, and the size of their text."""

    records: int = 0  # examples in the text files
    kept: int = 0
    empty: int = 0  # examples left out because the source or target has no text
    long: int = 0  # examples left out because the source or target is longer than max_len
    cut: int = 0  # examples cut to max_len tokens or split into chunks of max_len tokens
    identical: int = 0  # examples whose target equals the source
    leaked: int = 0  # training examples whose source is also in the validation text
    words: dict[str, int] = field(default_factory=dict)  # text of an example -> number of words
    ids: dict[str, int] = field(default_factory=dict)  # column -> number of ids
    characters: int = 0  # characters of the text that is predicted
    bytes: int = 0  # bytes of the text that is predicted

    @classmethod
    def of(cls, record: Any) -> "Survey":
        """Return the survey stored in a JSON object; raise TypeError if a value is not a nonnegative integer."""
        survey = cls(**record)
        for name, value in asdict(survey).items():
            counts = value.values() if isinstance(getattr(cls(), name), dict) else [value]
            if not all(type(count) is int and count >= 0 for count in counts):
                raise TypeError(f"{name} is not a count")
        return survey

    def sentences(self, name: str, max_len: int, rule: choices.Long | None = None) -> list[str]:
        """Return lines to print: warnings, and how many examples of the text `name` are kept, left out and cut.

        `rule` is what happens to long sources (`DataSpec.long`).
        """
        long = f"longer than {max_len} tokens (data.max_len)"
        cut = "were cut to this length"
        if rule == "extract":
            cut += " after their paragraphs were ranked by tf-idf for the words of the first paragraph"
        leaked = f"{self.leaked:,} records of {name} have a source that is also in the validation text"
        identical = f"in {self.identical:,} of {self.kept:,} records of {name} the target is the source itself"
        sentences = (
            (True, f"{name}: {self.kept:,} of {self.records:,} records kept"),
            (self.empty, f"{name}: {self.empty:,} left out because a text is empty"),
            (self.long, f"{name}: {self.long:,} left out because a text is {long}"),
            (self.cut, f"{name}: {self.cut:,} {long} {cut}"),
            (self.leaked, f"warning: {leaked}"),
            (self.identical > self.kept / 2, f"warning: {identical}"),
        )
        return [sentence for matters, sentence in sentences if matters]

    def check_kept(self, name: str, purpose: str, max_len: int) -> None:
        """Raise DataError if no example is kept."""
        if not self.kept:
            raise DataError(
                f"no record of the {name} is left to {purpose}: of {self.records:,} records {self.empty:,} are empty "
                f"and {self.long:,} longer than {max_len} tokens; give more text, or increase data.max_len"
            )


@dataclass(frozen=True)
class Prepared:
    """The prepared data of a training run: token tables, validation texts and tokenizers."""

    spec: DataSpec  # complete: settings that were None have been chosen
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
    report: Report = lambda _: None,
    cache: Cache | None = None,
    room: int = ROOM,
) -> Prepared:
    """Read all text, train the tokenizers unless they are given, and write the token tables to `folder`.

    The folder is created completely or not at all. If the `cache` has data that were prepared from the same text with
    the same settings, they are used; otherwise the new data are stored in the cache. A pipe is first copied to a file,
    because the text is read more than once. If the length limit is chosen from the text, it is at most `room` tokens.
    """
    if any(not type(part).__module__.startswith("regard.") for part in walk(spec)):
        cache = None  # the key does not cover code outside regard
    try:
        with _spooled(spec, folder, report) as (data, named):
            key = None if cache is None else cache.key(*_description(data, seed, tokenizers, room))
            if cache is not None and key is not None and cache.fetch(key, folder):
                report("this text was prepared before: taking the data from the cache (regard cache)")
                return opened(data, folder)
            with new_folder(folder) as making:
                complete = _write_all(data, making, seed, tokenizers, report, named, room)
            prepared = opened(complete, folder)
            if cache is not None and key is not None:
                cache.keep(key, folder, report)
    except OSError as error:
        raise DataError(
            f"cannot write the prepared data to {folder}: {error.strerror or error}; free disk space"
        ) from None
    return prepared


@contextmanager
def _spooled(spec: DataSpec, folder: Path, report: Report) -> Iterator[tuple[DataSpec, Callable[[str], str]]]:
    """Copy every pipe to a temporary file beside `folder`, and yield (spec, function).

    The spec reads the copies. The function takes a sentence and replaces the names of copies with those of the pipes.
    """
    corpora = (*spec.train, *spec.valid)
    pipes = list(dict.fromkeys(file for corpus in corpora for file in corpus.files() if is_pipe(file)))
    if not pipes:
        yield spec, str
        return
    place = temporary(folder.with_name("text"))
    place.mkdir(0o700, parents=True)
    try:
        # The suffix shows how the pipe is compressed.
        copies = {pipe: str(place / f"pipe-{number}{Path(pipe).suffix}") for number, pipe in enumerate(pipes)}

        def named(sentence: str) -> str:
            for pipe, copy in copies.items():
                sentence = sentence.replace(copy, pipe)
            return sentence

        def copied(corpus: Corpus) -> Corpus:
            files = zip(corpus.paths, corpus.files(), strict=True)
            return replace(corpus, **{field: copies.get(file, file) for field, file in files})  # type: ignore[type-var]  # every concrete spec is a dataclass

        for pipe, copy in copies.items():
            report(f"reading {pipe}")
            spool(pipe, Path(copy))
        try:
            yield replace(spec, train=tuple(map(copied, spec.train)), valid=tuple(map(copied, spec.valid))), named
        except DataError as error:
            raise DataError(named(str(error))) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _description(
    spec: DataSpec, seed: int, tokenizers: dict[str, Tokenizer] | None, room: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings that the prepared data depend on, and the names of the files to read."""
    corpora = (*spec.train, *spec.valid)
    files = [file for corpus in corpora for file in corpus.files()]
    records = [(to_record(corpus), ("weight", *corpus.paths)) for corpus in corpora]
    description = {
        "format": FORMAT,
        "library": tokenizers_.VERSION,
        "sample": SAMPLE,
        "train": len(spec.train),
        "corpora": [{k: v for k, v in record.items() if k not in left_out} for record, left_out in records],
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


def _write_all(
    spec: DataSpec,
    folder: Path,
    seed: int,
    tokenizers: dict[str, Tokenizer] | None,
    report: Report,
    named: Callable[[str], str],
    room: int,
) -> DataSpec:
    """Write the prepared data to a folder. Return the spec with the settings that were chosen from the text."""
    report("reading the text")
    reading = FirstReading(spec, seed, SAMPLE)
    parts = split(spec, reading)
    spec = replace(spec, objective=reading.labelled(spec.objective, parts.report))
    if spec.objective.encoded:
        report("training the tokenizer" if tokenizers is None else "using the given tokenizer")
    spec, tokenizers, reasons = _choose(spec, parts, tokenizers, room)
    report("encoding the text")
    survey, valid_survey = Survey(), Survey()
    held_out, kept = list[Record](), list[Record]()
    for i in range(len(spec.train)):
        _write(spec, tokenizers, parts.training(i, held_out), folder / f"train-{i}", survey, parts.leaked)
    if parts.validates:
        given = (record for corpus in spec.valid for record in corpus.records())
        _write(spec, tokenizers, chain(given, held_out), folder / "valid", valid_survey, texts=kept)
    survey.check_kept("training text", "learn from", spec.longest)
    if parts.validates:
        valid_survey.check_kept("validation text", "measure on", spec.longest)
    remarks = [named(remark) for corpus in (*spec.train, *spec.valid) for remark in corpus.remarks()]
    lines = [*remarks, *parts.report, *survey.sentences("training text", spec.longest, spec.long)]
    if valid_survey.records:
        lines += valid_survey.sentences("validation text", spec.longest, spec.long)
    tokenizer = None if spec.tokenizer is None else to_record(spec.tokenizer)
    chosen = {"tokenizer": tokenizer, "max_len": spec.longest, "long": spec.long}
    surveys = {"train": asdict(survey), "valid": asdict(valid_survey), "report": lines + reasons, "chosen": chosen}
    (folder / "survey.json").write_text(json.dumps(surveys, indent=2), encoding="utf-8")
    texts = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    (folder / "valid.jsonl").write_text(texts, encoding="utf-8")
    for name, tokenizer in tokenizers.items():
        tokenizer.save(folder / f"tokenizer.{name}.json")
    labels = list(spec.objective.labels) if spec.objective.labelled else []
    (folder / "labels.json").write_text(json.dumps(labels, ensure_ascii=False), encoding="utf-8")
    return spec


def _choose(
    spec: DataSpec, parts: Split, tokenizers: dict[str, Tokenizer] | None, room: int
) -> tuple[DataSpec, dict[str, Tokenizer], list[str]]:
    """Choose the tokenizer and the length limit from the text if they are not given, and train the tokenizers.

    Return the spec with these choices, the trained tokenizers keyed by column, and sentences with the reasons.
    """
    objective, reasons = spec.objective, list[str]()
    if spec.tokenizer is None and objective.encoded:
        choice = choices.choose_tokenizer(objective, parts.sample)
        spec = replace(spec, tokenizer=choice.tokenizer)
        reasons += [] if tokenizers else [choice.why]
    if isinstance(spec.tokenizer, BPE) and spec.tokenizer.languages is None:
        spec = replace(spec, tokenizer=replace(spec.tokenizer, languages=objective.languages))
    tokenizers = tokenizers or _train_tokenizers(spec, parts)
    if spec.max_len is None or (spec.long is None and objective.may_drop):
        limit = choices.choose_limit(objective, parts.sample, tokenizers, spec.max_len or room, spec.long)
        reasons += [limit.why] if limit.why and spec.max_len is None else []
        long = limit.long if objective.may_drop else None
        spec = replace(spec, max_len=spec.max_len or limit.max_len, long=long)
    return spec, tokenizers, reasons


def _train_tokenizers(spec: DataSpec, parts: Split) -> dict[str, Tokenizer]:
    """Train tokenizers on the training text. Return {column: tokenizer}, with a single tokenizer if `joint` is true."""
    columns = spec.objective.encoded
    if columns and spec.joint:
        return dict.fromkeys(columns, _train_tokenizer(spec, parts, tuple(dict.fromkeys(columns.values()))))
    return {name: _train_tokenizer(spec, parts, (text,)) for name, text in columns.items()}


def _train_tokenizer(spec: DataSpec, parts: Split, texts: tuple[int, ...]) -> Tokenizer:
    """Train a tokenizer on all or a sample of the text, using the strings with indices `texts` in each example."""
    assert spec.tokenizer is not None, "chosen by now"
    if parts.share == 1.0 or spec.tokenizer.sampled:
        with suppress(tokenizers_.TooFewSubwordsError):
            sample = (record[text] for record in parts.sample for text in texts)
            return tokenizers_.train(spec.tokenizer, sample, parts.share)
    records = (record for corpus in range(len(spec.train)) for record in parts.training(corpus))
    return tokenizers_.train(spec.tokenizer, (record[text] for record in records for text in texts))


def _write(
    spec: DataSpec,
    tokenizers: dict[str, Tokenizer],
    records: Iterator[Record],
    folder: Path,
    survey: Survey,
    leaked: frozenset[bytes] = frozenset(),
    texts: list[Record] | None = None,
) -> None:
    """Encode examples into a token table in `folder`, leave out unusable examples, and add the counts to `survey`.

    The examples that are in the table are appended to the list `texts`, if it is given.
    """
    objective = spec.objective
    stream, input_text, output_text = objective.stream, objective.input_text, objective.output_text
    vocab = max((tokenizer.size for tokenizer in tokenizers.values()), default=0)
    with Writer(folder, objective.columns, vocab, stream) as writer:
        for chunk in chunks(records, CHUNK):
            complete = [record for record in chunk if stream or is_complete(record)]
            limited = shortened(objective, complete, tokenizers, spec.longest, spec.long)
            kept = list(compress(complete, limited.kept.tolist()))
            writer.add(limited.table)
            survey.records += len(chunk)
            survey.empty += len(chunk) - len(complete)
            survey.long += len(complete) - len(kept)
            survey.kept += len(kept)
            survey.cut += limited.cut
            if input_text != output_text:
                survey.identical += sum(record[input_text] == record[output_text] for record in kept)
            if leaked:
                survey.leaked += sum(hash_of(record[input_text], 0) in leaked for record in kept)
            survey.characters += sum(len(record[output_text]) for record in kept)
            survey.bytes += sum(len(record[output_text].encode()) for record in kept) + stream * len(kept)
            for name, column in zip(objective.texts, zip(*kept, strict=True), strict=bool(kept)):
                survey.words[name] = survey.words.get(name, 0) + sum(len(text.split()) for text in column)
            for name, column in limited.table.columns.items():
                survey.ids[name] = survey.ids.get(name, 0) + len(column.ids)
            if texts is not None:
                texts += kept
        writer.close()


def opened(spec: DataSpec, folder: Path) -> Prepared:
    """Return the data that `prepare` wrote to `folder`."""
    try:
        surveys = json.loads((folder / "survey.json").read_text(encoding="utf-8"))
        labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
        with open(folder / "valid.jsonl", encoding="utf-8", newline="\n") as lines:
            texts = [_strings(json.loads(line), len(spec.objective.texts)) for line in lines]
        survey, valid_survey = Survey.of(surveys["train"]), Survey.of(surveys["valid"])
        report, labels = list(_strings(surveys["report"])), _strings(labels)
        spec = _complete(spec, surveys.get("chosen", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{folder} is not prepared data ({error}); train again from the text") from None
    objective = spec.objective.with_labels(labels) if spec.objective.labelled else spec.objective
    tables = [Table.open(folder / f"train-{i}") for i in range(len(spec.train))]
    valid = Table.open(folder / "valid") if valid_survey.records else None
    tokenizers = _load_tokenizers(folder)
    if missing := set(objective.encoded) - set(tokenizers):
        raise DataError(f"{folder} lacks tokenizer.{missing.pop()}.json; train again from the text")
    for table in (*tables, *([] if valid is None else [valid])):
        if missing := set(objective.columns) - table.columns.keys():
            raise DataError(f"{folder} has a table without the column {missing.pop()!r}; train again from the text")
    weights = [corpus.weight for corpus in spec.train]
    spec = replace(spec, objective=objective)
    return Prepared(spec, objective, tables, weights, valid, texts, tokenizers, survey, valid_survey, report)


def _complete(spec: DataSpec, chosen: Any) -> DataSpec:
    """Return the spec with the stored tokenizer and length limit.

    For prepared data of earlier versions, which do not store these settings, use the defaults of those versions.
    """
    may_drop = spec.objective.may_drop
    known = {"tokenizer": {"kind": "bpe"}, "max_len": 256, "long": "drop" if may_drop else None} | chosen
    max_len, long, tokenizer = known["max_len"], known["long"], spec.tokenizer
    if type(max_len) is not int or long not in (get_args(choices.Long) if may_drop else (None,)):
        raise TypeError("the stored length limit is invalid")
    if tokenizer is None and known["tokenizer"] is not None:
        tokenizer = read(known["tokenizer"], TokenizerSpec, "tokenizer", TOKENIZERS)
    return replace(spec, tokenizer=tokenizer, max_len=spec.max_len or max_len, long=spec.long or long)


def _strings(value: Any, count: int | None = None) -> tuple[str, ...]:
    """Convert a JSON list of `count` strings (by default any number) to a tuple. Raise an error for other values."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("a value is not a list of strings")
    if count is not None and len(value) != count:
        raise ValueError(f"a record has {len(value)} texts instead of {count}")
    return tuple(value)


def _load_tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """Return the tokenizers in a folder, keyed by column. Columns with identical files share a tokenizer."""
    tokenizers, by_content = dict[str, Tokenizer](), dict[bytes, Tokenizer]()
    for path in sorted(folder.glob("tokenizer.*.json")):
        content = path.read_bytes()
        by_content[content] = by_content.get(content) or Tokenizer.load(path)
        tokenizers[path.name.split(".")[1]] = by_content[content]
    return tokenizers
