"""Preparation of data: held-out and left-out examples, the training of tokenizers, and the files on disk."""

import errno
import gzip
import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from regard.data.batching import Buckets, Packing, Windows
from regard.data.objectives import Classification, LanguageModelling, Summarization, Translation
from regard.data.prepare import DataSpec, Prepared, Survey, opened, prepare
from regard.data.text import TSV, Corpus, Labelled, Lines, ParallelFiles
from regard.data.token_store import Table
from regard.data.tokenizer import BPE, Bytes, Characters, Tokenizer, TokenizerSpec, Words
from regard.errors import DataError, SpecError
from regard.files import TEMPORARY

Pair = tuple[str, str]


def tsv(path: Path, pairs: list[Pair], weight: float = 1.0) -> TSV:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return TSV(str(path), weight=weight)


def text(path: Path, lines: list[str]) -> Lines:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return Lines(str(path))


def labelled(path: Path, records: list[Pair]) -> Labelled:
    path.write_text("".join(f"{label}\t{line}\n" for label, line in records), encoding="utf-8")
    return Labelled(str(path))


def spec_of(*train: Corpus, **settings: Any) -> DataSpec:
    return DataSpec(**{"train": train, "tokenizer": Bytes()} | settings)


def pairs_of(count: int) -> list[Pair]:
    return [(f"source {n}", f"target {n}") for n in range(count)]


def decoded(prepared: Prepared, table: Table, column: str) -> list[str]:
    tokenizer = prepared.tokenizers[column]
    return [tokenizer.decode(table[column][row].tolist()) for row in range(table.rows)]


def training(prepared: Prepared) -> list[Pair]:
    sides = ([line for table in prepared.train for line in decoded(prepared, table, side)] for side in SIDES)
    return list(zip(*sides, strict=True))


def held_out(prepared: Prepared) -> list[Pair]:
    assert prepared.valid is not None
    return list(zip(*(decoded(prepared, prepared.valid, side) for side in SIDES), strict=True))


SIDES = ("source", "target")


# -- the split


def test_split_keeps_all_records_and_shares_no_source(tmp_path: Path) -> None:
    # Sources come one to four times, with other targets.
    pairs = [(f"source {n}", f"target {n} {k}") for n in range(100) for k in range(n % 4 + 1)]
    prepared = prepare(spec_of(tsv(tmp_path / "a.tsv", pairs), held_out=30), tmp_path / "data", seed=1)
    learned, valid_pairs = training(prepared), held_out(prepared)
    assert Counter(learned + valid_pairs) == Counter(pairs)
    assert not {source for source, _ in learned} & {source for source, _ in valid_pairs}
    assert 30 <= len(valid_pairs) < 30 + 4
    assert prepared.valid_texts == valid_pairs
    assert (prepared.survey.records, prepared.valid_survey.records) == (len(learned), len(valid_pairs))
    assert prepared.report[0] == (
        f"validation text: {len(valid_pairs)} records split off, no source of which is in the training text"
    )


@pytest.mark.parametrize(("count", "expected"), [(20, 2), (100, 10), (549, 54)])
def test_a_tenth_of_a_small_text_is_held_out(tmp_path: Path, count: int, expected: int) -> None:
    prepared = prepare(spec_of(tsv(tmp_path / "a.tsv", pairs_of(count))), tmp_path / "data", seed=1)
    assert len(held_out(prepared)) == expected


def test_seed_determines_the_held_out_records(tmp_path: Path) -> None:
    spec = spec_of(tsv(tmp_path / "a.tsv", pairs_of(200)), held_out=20)
    splits = [set(held_out(prepare(spec, tmp_path / "data", seed))) for seed in (1, 1, 2, -1)]
    assert splits[0] == splits[1]
    assert all(len(a & b) < 10 for a, b in [(splits[0], splits[2]), (splits[0], splits[3]), (splits[2], splits[3])])


def test_equal_sources_of_two_corpora_stay_on_one_side_of_the_split(tmp_path: Path) -> None:
    first, second = (
        tsv(tmp_path / "a.tsv", pairs_of(60)),
        tsv(tmp_path / "b.tsv", [(s, "other") for s, _ in pairs_of(60)]),
    )
    prepared = prepare(spec_of(first, second, held_out=20), tmp_path / "data", seed=1)
    valid_pairs = held_out(prepared)
    assert Counter(source for source, _ in valid_pairs) == dict.fromkeys({source for source, _ in valid_pairs}, 2)
    assert not {source for source, _ in training(prepared)} & {source for source, _ in valid_pairs}
    assert [table.rows for table in prepared.train] == [50, 50]


def test_empty_records_are_not_held_out(tmp_path: Path) -> None:
    pairs = pairs_of(60) + [("", f"target {n}") for n in range(60)]
    for seed in range(20):  # the empty source would be drawn sooner or later
        prepared = prepare(spec_of(tsv(tmp_path / "a.tsv", pairs), held_out=20), tmp_path / "data", seed)
        assert (len(held_out(prepared)), prepared.valid_survey.empty, prepared.survey.empty) == (20, 0, 60)


def test_held_out_0_holds_nothing_out(tmp_path: Path) -> None:
    prepared = prepare(spec_of(tsv(tmp_path / "a.tsv", pairs_of(10)), held_out=0), tmp_path / "data", seed=1)
    assert training(prepared) == pairs_of(10)
    assert prepared.valid is None
    assert prepared.valid_texts == []


def test_split_without_training_text_is_refused(tmp_path: Path) -> None:
    corpus = tsv(tmp_path / "a.tsv", [("the same", f"target {n}") for n in range(50)])
    with pytest.raises(DataError, match="50 records with 1 different sources are too few to hold out 5"):
        prepare(spec_of(corpus), tmp_path / "data", seed=1)
    with pytest.raises(DataError, match="too few to hold out 10"):
        prepare(spec_of(tsv(tmp_path / "a.tsv", pairs_of(10)), held_out=10), tmp_path / "data", seed=1)


def test_given_validation_text_replaces_the_split(tmp_path: Path) -> None:
    train = tsv(tmp_path / "a.tsv", pairs_of(50))
    valid = tsv(tmp_path / "b.tsv", [("source 3", "x"), ("new", "y"), ("source 7", "z"), ("", "w")])
    prepared = prepare(spec_of(train, valid=(valid,)), tmp_path / "data", seed=1)
    assert training(prepared) == pairs_of(50)
    assert held_out(prepared) == prepared.valid_texts == [("source 3", "x"), ("new", "y"), ("source 7", "z")]
    assert prepared.survey.leaked == 2
    assert "warning: 2 records of training text have a source that is also in the validation text" in prepared.report
    assert prepared.valid_survey.leaked == 0


def test_validation_text_without_usable_records_is_refused(tmp_path: Path) -> None:
    train, valid = tsv(tmp_path / "a.tsv", pairs_of(50)), tsv(tmp_path / "b.tsv", [("", "y"), ("long " * 9, "z")])
    with pytest.raises(DataError, match="validation text is left to measure on: of 2 records 1 are empty and 1 longer"):
        prepare(spec_of(train, valid=(valid,), max_len=20), tmp_path / "data", seed=1)


# -- left-out examples


def test_left_out_records_are_counted_and_reported(tmp_path: Path) -> None:
    pairs = [("", "a"), ("b", "  "), ("c", "c"), ("d", "d"), ("e" * 11, "e"), ("f", "f" * 11), ("g", "g"), ("h", "i")]
    prepared = prepare(spec_of(tsv(tmp_path / "a.tsv", pairs), held_out=0, max_len=10), tmp_path / "data", seed=1)
    assert training(prepared) == [("c", "c"), ("d", "d"), ("g", "g"), ("h", "i")]
    survey = prepared.survey
    assert (survey.records, survey.kept, survey.empty, survey.long, survey.identical) == (8, 4, 2, 2, 3)
    assert prepared.report == [
        "training text: 4 of 8 records kept",
        "training text: 2 left out because a text is empty",
        "training text: 2 left out because a text is longer than 10 tokens (data.max_len)",
        "warning: in 3 of 4 records of training text the target is the source itself",
    ]


def test_text_without_faults_is_reported_in_one_line(tmp_path: Path) -> None:
    prepared = prepare(spec_of(tsv(tmp_path / "a.tsv", pairs_of(10)), held_out=0), tmp_path / "data", seed=1)
    assert prepared.report == [
        "training text: 10 of 10 records kept",
        "length limit: 256 tokens (100.0% of the examples fit); longer pairs are left out",
    ]
    survey = prepared.survey
    assert survey.words == {"source": 20, "target": 20}
    assert survey.ids == {"source": 10 * 9, "target": 10 * 10}
    assert (survey.characters, survey.bytes) == (80, 80)


def test_statistics_count_only_kept_records(tmp_path: Path) -> None:
    pairs = [("ab", "\u00e9\u00e9"), ("", "not counted"), ("x" * 50, "nor this")]
    survey = prepare(
        spec_of(tsv(tmp_path / "a.tsv", pairs), held_out=0, max_len=20, long="drop"), tmp_path / "data", seed=1
    ).survey
    assert (survey.words, survey.characters, survey.bytes) == ({"source": 1, "target": 1}, 2, 4)
    assert survey.ids == {"source": 3, "target": 6}


def test_training_text_without_usable_records_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tsv(tmp_path / "a.tsv", [("a" * 30, "b"), ("", "c")]), held_out=0, max_len=10, long="drop")
    with pytest.raises(DataError, match="of 2 records 1 are empty and 1 longer than 10 tokens"):
        prepare(spec, tmp_path / "data", seed=1)
    with pytest.raises(DataError, match="no record of the training text is left"):
        prepare(spec_of(tsv(tmp_path / "a.tsv", [("", "c")] * 9)), tmp_path / "data", seed=1)


# -- tokenizers


def test_tokenizer_is_shared_or_one_per_side(tmp_path: Path) -> None:
    corpus = tsv(tmp_path / "a.tsv", [(f"\u4e00\u4e01 {n}", f"\u00e4\u00f6 {n}") for n in range(10)])
    joint = prepare(spec_of(corpus, held_out=0, tokenizer=Characters()), tmp_path / "joint", seed=1)
    assert joint.tokenizers["source"].sha256 == joint.tokenizers["target"].sha256
    assert len(joint.tokenizers["source"].encode("\u4e00\u00e4")) == 2
    separate = prepare(spec_of(corpus, held_out=0, tokenizer=Characters(), joint=False), tmp_path / "separate", seed=1)
    source, target = separate.tokenizers["source"], separate.tokenizers["target"]
    assert len(source.encode("\u4e00\u00e4")) == 1 + 2  # characters that are not in its text become bytes
    assert len(target.encode("\u4e00\u00e4")) == 3 + 1
    assert training(separate) == training(joint)


def test_tokenizers_do_not_learn_from_held_out_text(tmp_path: Path) -> None:
    letters = [chr(0x4E00 + n) for n in range(60)]
    corpus = tsv(tmp_path / "a.tsv", [(f"source {letter}", f"target {letter}") for letter in letters])
    prepared = prepare(spec_of(corpus, held_out=20, tokenizer=Characters()), tmp_path / "data", seed=1)
    valid_letters = {source[-1] for source, _ in held_out(prepared)}
    assert len(valid_letters) == 20
    tokenizer = prepared.tokenizers["source"]
    assert {letter: len(tokenizer.encode(letter)) for letter in letters} == {
        letter: 3 if letter in valid_letters else 1 for letter in letters
    }


def test_given_tokenizers_are_used_unchanged(tmp_path: Path) -> None:
    first = prepare(spec_of(tsv(tmp_path / "a.tsv", pairs_of(10)), held_out=0, tokenizer=BPE()), tmp_path / "a", seed=1)
    messages: list[str] = []
    other = tsv(tmp_path / "b.tsv", [("quite other", "words")] * 3)
    second = prepare(spec_of(other, held_out=0), tmp_path / "b", 1, first.tokenizers, messages.append)
    assert {n: t.sha256 for n, t in second.tokenizers.items()} == {n: t.sha256 for n, t in first.tokenizers.items()}
    assert messages == ["reading the text", "using the given tokenizer", "encoding the text"]
    assert training(second) == [("quite other", "words")] * 3


def test_tokenizer_of_a_large_text_is_learned_from_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.data.prepare.SAMPLE", 4000)
    learned: list[list[str]] = []
    train = BPE.learn

    def recording_learn(self: BPE, texts: Iterable[str], share: float = 1.0) -> Tokenizer:
        learned.append(list(texts))
        return train(self, learned[-1], share)

    monkeypatch.setattr(BPE, "learn", recording_learn)
    corpus = tsv(tmp_path / "a.tsv", [(f"source {n:04}", f"target {n:04}") for n in range(1000)])
    prepared = prepare(spec_of(corpus, held_out=30, tokenizer=BPE(270)), tmp_path / "data", seed=1)
    assert len(learned) == 1
    assert 4000 <= sum(len(line) for line in learned[0]) < 4030
    sources, targets = learned[0][::2], learned[0][1::2]
    assert [line[-4:] for line in sources] == [line[-4:] for line in targets]
    assert set(sources) <= {source for source, _ in training(prepared)}, "nothing that is held out"
    assert prepared.tokenizers["source"].why == "270 subwords, as requested, learned from 0.0 million characters"
    again = prepare(spec_of(corpus, held_out=30, tokenizer=BPE(270)), tmp_path / "again", seed=1)
    assert again.tokenizers["source"].sha256 == prepared.tokenizers["source"].sha256
    # With two tokenizers, each is trained on as much text.
    learned.clear()
    prepare(spec_of(corpus, held_out=0, tokenizer=BPE(262), joint=False), tmp_path / "two", seed=1)
    assert [4000 <= sum(len(line) for line in side) < 4030 for side in learned] == [True, True]
    assert [side[0][:6] for side in learned] == ["source", "target"]


def test_whole_text_is_used_if_the_sample_has_too_few_subwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(f"{chr(0x4E00 + n % 100)} x", f"{chr(0x4F00 + n % 100)} y") for n in range(300)]
    spec = spec_of(tsv(tmp_path / "a.tsv", pairs), held_out=0, tokenizer=BPE(450))
    whole = prepare(spec, tmp_path / "whole", seed=1)
    monkeypatch.setattr("regard.data.prepare.SAMPLE", 100)
    prepared = prepare(spec, tmp_path / "data", seed=1)
    assert prepared.tokenizers["source"].sha256 == whole.tokenizers["source"].sha256
    with pytest.raises(DataError, match=r"the corpus supports a vocabulary of at most \d+"):
        prepare(replace(spec, tokenizer=BPE(5000)), tmp_path / "data", seed=1)


@pytest.mark.parametrize("tokenizer", [Characters(), Words()])
def test_character_and_word_tokenizers_learn_from_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: TokenizerSpec
) -> None:
    pairs = [(f"source {chr(0x4E00 + n // 2)}", "target") for n in range(300)]
    spec = spec_of(tsv(tmp_path / "a.tsv", pairs), held_out=0, tokenizer=tokenizer)
    whole = prepare(spec, tmp_path / "whole", seed=1)
    monkeypatch.setattr("regard.data.prepare.SAMPLE", 100)
    prepared = prepare(spec, tmp_path / "data", seed=1)
    assert prepared.tokenizers["source"].sha256 == whole.tokenizers["source"].sha256


def test_text_is_read_only_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files_read: list[str] = []
    records = TSV.records

    def recording_records(self: TSV) -> Iterator[tuple[str, str]]:
        files_read.append(Path(self.path).name)
        return records(self)

    monkeypatch.setattr(TSV, "records", recording_records)
    first, second = tsv(tmp_path / "a.tsv", pairs_of(50)), tsv(tmp_path / "b.tsv", pairs_of(20))
    prepare(spec_of(first, second, tokenizer=BPE()), tmp_path / "data", seed=1)
    assert Counter(files_read) == {"a.tsv": 2, "b.tsv": 2}
    prepare(spec_of(first, valid=(second,), tokenizer=BPE()), tmp_path / "data", seed=1)
    assert Counter(files_read) == {"a.tsv": 4, "b.tsv": 4}


def test_text_that_grows_during_preparation_is_refused(tmp_path: Path) -> None:
    corpus = tsv(tmp_path / "a.tsv", pairs_of(20))

    def on_message(sentence: str) -> None:
        if sentence == "encoding the text":
            tsv(tmp_path / "a.tsv", pairs_of(21))

    with pytest.raises(DataError, match=r"a\.tsv: grew while it was read"):
        prepare(spec_of(corpus), tmp_path / "data", 1, report=on_message)


# -- the folder


def test_a_table_without_a_column_of_the_task_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tsv(tmp_path / "a.tsv", pairs_of(40)))
    prepare(spec, tmp_path / "data", 1)
    path = tmp_path / "data" / "train-0" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["columns"]["target"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="has a table without the column 'target'"):
        opened(spec, tmp_path / "data")


def test_opened_data_equal_the_prepared_data(tmp_path: Path) -> None:
    corpora = tsv(tmp_path / "a.tsv", pairs_of(40), 2.0), tsv(tmp_path / "b.tsv", [("", "x"), ("y", "y")], 0.5)
    spec = spec_of(*corpora, held_out=5, tokenizer=BPE())
    prepared, reopened = prepare(spec, tmp_path / "data", seed=1), opened(spec, tmp_path / "data")
    assert reopened.weights == prepared.weights == [2.0, 0.5]
    assert (reopened.objective, reopened.valid_texts, reopened.report) == (
        prepared.objective,
        prepared.valid_texts,
        prepared.report,
    )
    assert (asdict(reopened.survey), asdict(reopened.valid_survey)) == (
        asdict(prepared.survey),
        asdict(prepared.valid_survey),
    )
    assert training(reopened) == training(prepared)
    assert held_out(reopened) == held_out(prepared)
    assert {n: t.sha256 for n, t in reopened.tokenizers.items()} == {
        n: t.sha256 for n, t in prepared.tokenizers.items()
    }


class KilledError(BaseException):
    """Simulates a killed process."""


@pytest.mark.parametrize("at", ["reading the text", "training the tokenizer", "encoding the text"])
def test_killed_preparation_leaves_no_data(tmp_path: Path, at: str) -> None:
    spec = spec_of(tsv(tmp_path / "a.tsv", pairs_of(20)))

    def on_message(sentence: str) -> None:
        if sentence == at:
            raise KilledError

    with pytest.raises(KilledError):
        prepare(spec, tmp_path / "run" / "data", 1, report=on_message)
    assert not (tmp_path / "run" / "data").exists()
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / ".data-making").symlink_to(tmp_path / "outside")
    prepared = prepare(spec, tmp_path / "run" / "data", 1)
    assert len(training(prepared)) == 18
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".data-making", "data"]
    assert not list((tmp_path / "outside").iterdir())


def test_data_folder_appears_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(self: Path, to: Path) -> Path:
        assert {path.name for path in self.iterdir()} >= {"survey.json", "valid.jsonl", "labels.json", "train-0"}
        raise KilledError

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KilledError):
        prepare(spec_of(tsv(tmp_path / "a.tsv", pairs_of(20))), tmp_path / "data", 1)
    assert not (tmp_path / "data").exists()


def test_full_disk_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: object, rows: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("regard.data.token_store.Writer.add", add)
    with pytest.raises(
        DataError, match=r"cannot write the prepared data to .*: No space left on device; free disk space"
    ):
        prepare(spec_of(tsv(tmp_path / "a.tsv", pairs_of(20))), tmp_path / "data", 1)


@pytest.mark.parametrize("name", ["survey.json", "labels.json", "valid.jsonl", "valid", "train-0/manifest.json"])
def test_damaged_data_folder_is_refused(tmp_path: Path, name: str) -> None:
    spec = spec_of(tsv(tmp_path / "a.tsv", pairs_of(20)))
    prepare(spec, tmp_path / "data", seed=1)
    (tmp_path / "data" / name).rename(tmp_path / "gone")
    with pytest.raises(DataError):
        opened(spec, tmp_path / "data")
    if name == "survey.json":
        (tmp_path / "data" / name).write_text("{}")
        with pytest.raises(DataError, match="not prepared data"):
            opened(spec, tmp_path / "data")
    with pytest.raises(DataError, match="not prepared data"):
        opened(spec, tmp_path / "nowhere")


def test_all_files_are_checked_before_training(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("eins\n")
    messages: list[str] = []
    train, valid = ParallelFiles(str(tmp_path / "a"), str(tmp_path / "b")), tsv(tmp_path / "v.tsv", pairs_of(2))
    for spec in (spec_of(train), spec_of(train, valid=(valid,)), spec_of(valid, valid=(train,))):
        with pytest.raises(DataError, match="has 2 lines but"):
            prepare(spec, tmp_path / "data", 1, report=messages.append)
    assert set(messages) == {"reading the text"}


# -- streams and lines of text


def language(*corpora: Lines, **settings: Any) -> DataSpec:
    return spec_of(*corpora, **{"objective": LanguageModelling()} | settings)


def streamed(prepared: Prepared, table: Table) -> str:
    (content,) = decoded(prepared, table, "target")
    return content


def test_end_of_a_stream_is_held_out(tmp_path: Path) -> None:
    lines = [f"line {n:03}" for n in range(100)]
    prepared = prepare(language(text(tmp_path / "a", lines)), tmp_path / "data", seed=1)
    assert prepared.valid is not None
    assert streamed(prepared, prepared.train[0]) == "".join(f"{line}\n" for line in lines[:89])
    assert streamed(prepared, prepared.valid) == "".join(f"{line}\n" for line in lines[89:])
    assert prepared.report[0] == "validation text: the end of the text, a tenth of it, is split off"
    assert prepared.valid_survey.bytes == 11 * 9
    assert prepared.survey.ids == {"target": 89 * 9}


def test_requested_number_of_lines_of_a_stream_is_held_out(tmp_path: Path) -> None:
    first = text(tmp_path / "a", ["one", "", "two", "three"])
    second = text(tmp_path / "b", ["four", "five", "six", "", "seven"])
    prepared = prepare(language(first, second, held_out=2), tmp_path / "data", seed=1)
    assert prepared.valid is not None
    assert [streamed(prepared, table) for table in prepared.train] == ["one\n\n", "four\nfive\nsix\n"]
    assert streamed(prepared, prepared.valid) == "two\nthree\n\nseven\n"
    assert prepared.report[0] == "validation text: the end of the text, 2 lines of it, is split off"
    assert prepared.survey.empty == 0  # an empty line is part of a stream
    whole = prepare(language(first, held_out=0), tmp_path / "data", seed=1)
    assert streamed(whole, whole.train[0]) == "one\n\ntwo\nthree\n"
    assert whole.valid is None
    with pytest.raises(DataError, match="no text would be left for training"):
        prepare(language(first, second, held_out=4), tmp_path / "data", seed=1)


def test_stream_with_given_validation_text_is_not_split(tmp_path: Path) -> None:
    first, second = text(tmp_path / "a", ["one", "two"]), text(tmp_path / "b", ["one", "three"])
    prepared = prepare(language(first, valid=(second,)), tmp_path / "data", seed=1)
    assert prepared.valid is not None
    assert streamed(prepared, prepared.train[0]) == "one\ntwo\n"
    assert streamed(prepared, prepared.valid) == "one\nthree\n"
    assert prepared.survey.leaked == 0


def test_long_lines_are_divided_into_parts(tmp_path: Path) -> None:
    lines = text(tmp_path / "a", ["abcdefghij", "", "klm"])
    spec = language(lines, objective=LanguageModelling("lines"), held_out=0, max_len=4)
    prepared = prepare(spec, tmp_path / "data", seed=1)
    table, tokenizer = prepared.train[0], prepared.tokenizers["target"]
    assert [table["target"][row].tolist() for row in range(table.rows)] == [
        [1, *tokenizer.encode("abcde")],
        tokenizer.encode("efghij"),
        [*tokenizer.encode("j"), 2],
        [1, *tokenizer.encode("klm"), 2],
    ]
    assert (prepared.survey.kept, prepared.survey.cut, prepared.survey.empty) == (2, 1, 1)
    assert "training text: 1 longer than 4 tokens (data.max_len) were cut to this length" in prepared.report


# -- classification


def test_labels_are_those_of_the_training_text_in_order(tmp_path: Path) -> None:
    corpus = labelled(tmp_path / "a.tsv", [("spam", f"text {n}") for n in range(9)] + [("ham", "z"), ("eggs", "y")])
    spec = spec_of(corpus, objective=Classification(), held_out=0)
    prepared = prepare(spec, tmp_path / "data", seed=1)
    assert isinstance(prepared.objective, Classification)
    assert prepared.objective.labels == ("eggs", "ham", "spam")
    assert prepared.train[0]["label"].ids[:].tolist() == [2] * 9 + [1, 0]
    assert opened(spec, tmp_path / "data").objective == prepared.objective
    reordered = prepare(
        spec_of(corpus, objective=Classification(("spam", "ham", "eggs")), held_out=0), tmp_path / "data", 1
    )
    assert reordered.train[0]["label"].ids[:].tolist() == [0] * 9 + [1, 2]


def test_suspected_header_line_is_a_warning(tmp_path: Path) -> None:
    records = [("spam", "x"), ("ham", "y"), ("spam", "z"), ("ham", "w")]
    named = labelled(tmp_path / "a.tsv", [("label", "text"), *records])
    spec = spec_of(named, objective=Classification(), held_out=0)
    assert any("warning: the label 'label' of the first line" in line for line in prepare_report(spec, tmp_path))
    plain = labelled(tmp_path / "b.tsv", [*records, ("eggs", "v")])
    spec = spec_of(plain, objective=Classification(), held_out=0)
    assert not any("warning" in line for line in prepare_report(spec, tmp_path))


def prepare_report(spec: DataSpec, folder: Path) -> list[str]:
    return prepare(spec, folder / "data", seed=1).report


def test_equal_texts_of_a_classification_stay_on_one_side_of_the_split(tmp_path: Path) -> None:
    records = [(label, f"text {n}") for n in range(60) for label in ("a", "b")]
    prepared = prepare(
        spec_of(labelled(tmp_path / "a.tsv", records), objective=Classification(), held_out=20), tmp_path / "data", 1
    )
    valid_texts = {line for _, line in prepared.valid_texts}
    assert (len(prepared.valid_texts), len(valid_texts)) == (20, 10)
    assert not valid_texts & set(decoded(prepared, prepared.train[0], "text"))


def test_unlearnable_labels_are_refused(tmp_path: Path) -> None:
    only = labelled(tmp_path / "a.tsv", [("spam", "x"), ("spam", "y")])
    with pytest.raises(DataError, match="only the label 'spam'; a classifier needs two or more"):
        prepare(spec_of(only, objective=Classification(), held_out=0), tmp_path / "data", 1)
    two = labelled(tmp_path / "b.tsv", [("spam", "x"), ("ham", "y")])
    other = labelled(tmp_path / "c.tsv", [("eggs", "x")])
    with pytest.raises(DataError, match="label 'eggs' does not occur in the training text"):
        prepare(spec_of(two, valid=(other,), objective=Classification()), tmp_path / "data", 1)


# -- the spec


def test_default_batching_depends_on_the_objective(tmp_path: Path) -> None:
    corpus = tsv(tmp_path / "a.tsv", pairs_of(3))
    assert spec_of(corpus).batches == Buckets()
    assert spec_of(corpus, batching=Packing(length=64)).batches == Packing(length=64)
    assert language(text(tmp_path / "b", ["x"])).batches == Windows()
    assert language(text(tmp_path / "b", ["x"]), objective=LanguageModelling("lines")).batches == Buckets()


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"train": ()}, "train"),
        ({"max_len": 0}, "max_len"),
        ({"held_out": -1}, "held_out"),
        ({"held_out": 5, "valid": (TSV("v"),)}, "held_out"),
        ({"train": (TSV("t"), Lines("l"))}, "train[1]"),
        ({"valid": (Labelled("l"),)}, "valid[0]"),
        ({"valid": (TSV("v", weight=2.0),)}, "valid[0].weight"),
        ({"batching": Windows()}, "batching"),
        ({"objective": LanguageModelling(), "train": (Lines("l"),), "batching": Buckets()}, "batching"),
        ({"objective": LanguageModelling(), "train": (Lines("l", weight=0.5),)}, "train[0].weight"),
        ({"objective": Classification(), "train": (Labelled("l"),), "batching": Packing()}, "batching"),
        ({"objective": Classification()}, "train[0]"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        DataSpec(**{"train": (TSV("t"),), "objective": Translation(), "tokenizer": Words()} | settings)
    assert raised.value.path == path


def test_survey_without_faults_is_one_sentence() -> None:
    assert Survey(records=1200, kept=1200).sentences("training text", 9) == [
        "training text: 1,200 of 1,200 records kept"
    ]


def test_compressed_pipe_is_copied_whole_into_a_temporary_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pairs.tsv.gz"
    os.mkfifo(pipe)
    packed = gzip.compress("".join(f"source {n * n}\ttarget {n}\n" for n in range(20_000)).encode())
    assert b"\0" in packed
    writer = threading.Thread(target=pipe.write_bytes, args=(packed,), daemon=True)
    writer.start()
    names: list[str] = []

    def on_message(sentence: str) -> None:
        if sentence == "reading the text":
            names.extend(path.name for path in (tmp_path / "run").iterdir())

    prepared = prepare(spec_of(TSV(str(pipe))), tmp_path / "run" / "data", 1, report=on_message)
    writer.join(10)
    assert prepared.survey.records + prepared.valid_survey.records == 20_000
    assert len(names) == 2
    assert all(TEMPORARY.fullmatch(name) for name in names)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]


def test_long_documents_are_extracted_and_reported(tmp_path: Path) -> None:
    pairs = [("Fox. A bird sings. The fox is red.", "a"), ("Fox. A bird.", "b")]
    spec = spec_of(tsv(tmp_path / "a.tsv", pairs), held_out=0, max_len=22, long="extract", objective=Summarization())
    prepared = prepare(spec, tmp_path / "data", seed=1)
    assert training(prepared) == [("Fox. The fox is red. A", "a"), ("Fox. A bird.", "b")]
    assert prepared.report == [
        "training text: 2 of 2 records kept",
        "training text: 1 longer than 22 tokens (data.max_len) were cut to this length after their paragraphs were "
        "ranked by tf-idf for the words of the first paragraph",
    ]
    assert opened(spec, tmp_path / "data").spec.long == "extract"
