"""The cache of prepared data is used only if nothing that the data depend on has changed."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs.macos
import platformdirs.unix
import platformdirs.windows
import pytest

from regard.data import cache as caching
from regard.data.cache import INDEX, MANIFEST, Cache, Key, cache_folder, size_limit
from regard.data.objectives import LanguageModelling
from regard.data.prepare import DataSpec, Prepared, prepare
from regard.data.text import TSV, Lines, ParallelFiles
from regard.data.tokenizer import BPE, Bytes, Imported, train
from regard.errors import SpecError


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat no file as recently changed, so that tests need not wait."""
    monkeypatch.setattr(caching, "RECENT", -(10**12))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 10**9)


def pairs(path: Path, count: int = 40, word: str = "target") -> str:
    path.write_text("".join(f"source {n}\t{word} {n}\n" for n in range(count)), encoding="utf-8")
    return str(path)


def spec_of(path: str, **settings: Any) -> DataSpec:
    return DataSpec(**{"train": (TSV(path),), "tokenizer": Bytes()} | settings)


class Messages(list[str]):
    """The reported messages, which show whether the data came from the cache."""

    @property
    def hit(self) -> bool:
        assert ("reading the text" in self) == (not any("cache" in sentence for sentence in self)), self
        return "reading the text" not in self


def prepared(
    spec: DataSpec, folder: Path, cache: Cache, seed: int = 1, tokenizers: Any = None
) -> tuple[Messages, Prepared]:
    messages = Messages()
    return messages, prepare(spec, folder, seed, tokenizers, messages.append, cache)


def same(first: Path, second: Path) -> bool:
    files = {path.relative_to(first): path.read_bytes() for path in first.rglob("*") if path.is_file()}
    return files == {path.relative_to(second): path.read_bytes() for path in second.rglob("*") if path.is_file()}


def test_unchanged_text_comes_from_the_cache(tmp_path: Path, cache: Cache) -> None:
    spec = spec_of(pairs(tmp_path / "a.tsv"), tokenizer=BPE())
    first, original = prepared(spec, tmp_path / "one" / "data", cache)
    second, cached = prepared(spec, tmp_path / "two" / "data", cache)
    assert (first.hit, second.hit) == (False, True)
    assert same(tmp_path / "one" / "data", tmp_path / "two" / "data")
    assert (cached.report, cached.valid_texts, cached.survey) == (
        original.report,
        original.valid_texts,
        original.survey,
    )
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["data"]
    assert (tmp_path / "one/data/train-0/source.ids").stat().st_ino == (
        tmp_path / "two/data/train-0/source.ids"
    ).stat().st_ino, "linked, not copied"
    (entry,) = cache.entries()
    assert entry.files == ("a.tsv",)
    assert entry.size == sum(path.stat().st_size for path in (tmp_path / "one").rglob("*") if path.is_file())


def test_renamed_text_comes_from_the_cache(tmp_path: Path, cache: Cache) -> None:
    prepared(spec_of(pairs(tmp_path / "a.tsv")), tmp_path / "1", cache)
    assert prepared(spec_of(pairs(tmp_path / "b.tsv")), tmp_path / "2", cache)[0].hit
    weighted = DataSpec((TSV(pairs(tmp_path / "c.tsv"), weight=3.0),), tokenizer=Bytes())
    messages, data = prepared(weighted, tmp_path / "3", cache)
    assert (messages.hit, data.weights) == (True, [3.0])


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": BPE(270)},
        {"max_len": 11},
        {"held_out": 3},
        {"held_out": 0},
        {"joint": False},
        {"objective": LanguageModelling("lines"), "train": "lines"},
        {"valid": "tsv"},
        {"train": "columns"},
    ],
    ids=str,
)
def test_other_preparation_is_another_entry(tmp_path: Path, cache: Cache, change: dict[str, Any]) -> None:
    path = pairs(tmp_path / "a.tsv")
    alternatives = {"lines": (Lines(path),), "columns": (TSV(path, 2, 1),), "tsv": (TSV(path),)}
    change = {name: alternatives[value] if isinstance(value, str) else value for name, value in change.items()}
    prepared(spec_of(path), tmp_path / "1", cache)
    assert not prepared(spec_of(path, **change), tmp_path / "2", cache)[0].hit
    assert prepared(spec_of(path, **change), tmp_path / "3", cache)[0].hit
    assert prepared(spec_of(path), tmp_path / "4", cache)[0].hit
    assert len(cache.entries()) == 2


def test_swapped_training_and_validation_text_is_another_entry(tmp_path: Path, cache: Cache) -> None:
    first, second = TSV(pairs(tmp_path / "a.tsv")), TSV(pairs(tmp_path / "b.tsv", word="other"))
    specs = [
        DataSpec(train, valid, tokenizer=Bytes(), held_out=0)
        for train, valid in [((first,), (second,)), ((second,), (first,)), ((first, second), ()), ((second, first), ())]
    ]
    assert [prepared(spec, tmp_path / "d", cache)[0].hit for spec in specs] == [False] * 4


def test_seed_is_part_of_the_key_only_if_text_is_held_out(tmp_path: Path, cache: Cache) -> None:
    path = pairs(tmp_path / "a.tsv")
    for spec, hit in [(spec_of(path), False), (spec_of(path, held_out=0), True)]:
        prepared(spec, tmp_path / "1", cache, seed=1)
        assert prepared(spec, tmp_path / "2", cache, seed=2)[0].hit == hit


def test_given_and_imported_tokenizers_are_part_of_the_key(tmp_path: Path, cache: Cache) -> None:
    path = pairs(tmp_path / "a.tsv")
    first, second = train(Bytes(), []), train(BPE(), ["to be or not to be"] * 3)
    prepared(spec_of(path), tmp_path / "1", cache)
    for tokenizer in (first, second):
        tokenizers = {"source": tokenizer, "target": tokenizer}
        assert not prepared(spec_of(path), tmp_path / "2", cache, tokenizers=tokenizers)[0].hit
        assert prepared(spec_of(path), tmp_path / "3", cache, tokenizers=tokenizers)[0].hit
    for tokenizer in (first, second):
        (tmp_path / "tokenizer.json").write_text(tokenizer.plain_json(), encoding="utf-8")
        spec = spec_of(path, tokenizer=Imported(str(tmp_path / "tokenizer.json")))
        assert not prepared(spec, tmp_path / "4", cache)[0].hit
        assert prepared(spec, tmp_path / "5", cache)[0].hit


@pytest.mark.parametrize("name", ["FORMAT", "SAMPLE"])
def test_other_version_prepares_again(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    spec = spec_of(pairs(tmp_path / "a.tsv"))
    prepared(spec, tmp_path / "1", cache)
    monkeypatch.setattr(f"regard.data.prepare.{name}", 7)
    assert not prepared(spec, tmp_path / "2", cache)[0].hit


# -- text that changes


def changes() -> dict[str, Callable[[Path], None]]:
    def rewritten(path: Path) -> None:
        """Write other content of the same size to the same file, and reset its modification time."""
        before = path.stat()
        with open(path, "r+b") as file:
            file.seek(3)
            file.write(b"X")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def replaced(path: Path) -> None:
        before, replacement = path.stat(), path.with_suffix(".new")
        replacement.write_bytes(path.read_bytes().replace(b"source", b"Source"))
        os.utime(replacement, ns=(before.st_atime_ns, before.st_mtime_ns))
        replacement.replace(path)

    def grown(path: Path) -> None:
        with open(path, "ab") as file:
            file.write(b"more\ttext\n")

    return {"rewritten": rewritten, "replaced": replaced, "grown": grown}


@pytest.mark.parametrize("change", changes())
def test_changed_text_is_prepared_again(tmp_path: Path, cache: Cache, change: str) -> None:
    path = Path(pairs(tmp_path / "a.tsv"))
    spec = spec_of(str(path), held_out=0)
    prepared(spec, tmp_path / "1", cache)
    changes()[change](path)
    messages, data = prepared(spec, tmp_path / "2", cache)
    assert not messages.hit
    expected = [line.split("\t")[0] for line in path.read_text().splitlines()]
    column = data.train[0]["source"]
    assert [data.tokenizers["source"].decode(column[n].tolist()) for n in range(len(column))] == expected


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    files_read: list[str] = []
    digest = caching.file_digest
    monkeypatch.setattr(caching, "file_digest", lambda path: files_read.append(path.name) or digest(path))
    return files_read


def test_checksum_of_unchanged_file_comes_from_the_index(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pairs(tmp_path / "a.tsv")
    read = counting(monkeypatch)
    first = cache.key({}, [path, path])
    assert read == ["a.tsv"]
    assert cache.key({}, [path, path]) == first
    assert read == ["a.tsv"]
    (cache.data / INDEX).write_text("nonsense")
    assert cache.key({}, [path, path]) == first
    assert read == ["a.tsv"] * 2
    os.utime(path)
    assert cache.key({}, [path]) is not None
    assert read == ["a.tsv"] * 3


def test_recently_changed_file_is_not_indexed(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "RECENT", 10 * 10**9)
    path = pairs(tmp_path / "a.tsv")
    read = counting(monkeypatch)
    assert cache.key({}, [path]) == cache.key({}, [path])
    assert read == ["a.tsv"] * 2


def test_text_changed_during_preparation_is_not_cached(tmp_path: Path, cache: Cache) -> None:
    path = pairs(tmp_path / "a.tsv")

    def report(message: str) -> None:
        if message == "reading the text":
            pairs(tmp_path / "a.tsv", word="altered")

    prepare(spec_of(path), tmp_path / "1", 1, None, report, cache)
    assert cache.entries() == []


def test_pipe_is_not_cached(tmp_path: Path, cache: Cache) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert cache.key({}, [str(path)]) is None
    assert cache.key({}, [str(tmp_path / "missing")]) is None
    assert cache.key({}, [str(tmp_path)]) is None


# -- damaged, evicted and cleared entries


def entry(cache: Cache) -> Path:
    return cache.data / cache.entries()[0].name


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte": lambda path: (path / "train-0/source.ids").write_bytes(
        b"\1" + (path / "train-0/source.ids").read_bytes()[1:]
    ),
    "cut short": lambda path: (path / "train-0/target.ids").write_bytes(b""),
    "a file": lambda path: (path / "survey.json").unlink(),
    "a folder": lambda path: shutil.rmtree(path / "train-0"),
    "invalid JSON": lambda path: (path / MANIFEST).write_text("{"),
    "wrong types": lambda path: (path / MANIFEST).write_text('{"content": {"a": 3}, "files": [], "made": 1}'),
    "path outside the entry": lambda path: (path / MANIFEST).write_text(
        json.dumps({"content": {"../../x": [0, ""]}, "files": [], "made": 1})
    ),
    "itself": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_prepared_again(tmp_path: Path, cache: Cache, damage: str) -> None:
    spec = spec_of(pairs(tmp_path / "a.tsv"))
    prepared(spec, tmp_path / "1", Cache(tmp_path / "none", 0))
    prepared(spec, tmp_path / "2", cache)
    shutil.rmtree(tmp_path / "2")  # the cache has the only link, so that the damage stays there
    DAMAGES[damage](entry(cache))
    assert not prepared(spec, tmp_path / "3", cache)[0].hit
    assert same(tmp_path / "3", tmp_path / "1")
    assert prepared(spec, tmp_path / "4", cache)[0].hit
    assert same(tmp_path / "4", tmp_path / "1")
    assert not list(tmp_path.glob(".*"))


def test_run_keeps_its_data_when_the_cache_is_cleared(tmp_path: Path, cache: Cache) -> None:
    spec = spec_of(pairs(tmp_path / "a.tsv"))
    prepared(spec, tmp_path / "1", cache)
    _, data = prepared(spec, tmp_path / "2", cache)
    (cache.folder / "threads").mkdir()  # what `regard.planner.threads` measured
    (cache.folder / "threads" / "regard-0123456789abcdef.json").write_text("{}")
    (cache.folder / "mine").mkdir()
    cache.clear()
    assert sorted(path.name for path in cache.folder.iterdir()) == ["data", "mine"]
    assert cache.entries() == []
    assert list(cache.data.iterdir()) == []
    assert same(tmp_path / "1", tmp_path / "2")
    assert data.train[0]["source"][0].tolist()
    assert not prepared(spec, tmp_path / "3", cache)[0].hit


def test_files_are_copied_without_hard_links(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    spec = spec_of(pairs(tmp_path / "a.tsv"))
    prepared(spec, tmp_path / "1", cache)
    assert prepared(spec, tmp_path / "2", cache)[0].hit
    assert same(tmp_path / "1", tmp_path / "2")
    paths = (folder / "train-0/source.ids" for folder in (tmp_path / "1", tmp_path / "2", entry(cache)))
    assert len({path.stat().st_ino for path in paths}) == 3


def test_unwritable_cache_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    messages, data = prepared(spec_of(pairs(tmp_path / "a.tsv")), tmp_path / "1", Cache(tmp_path / "cache", 10**9))
    assert data.survey.kept
    assert any(sentence.startswith("warning: the prepared data are not kept in the cache") for sentence in messages)


def test_least_recently_used_entry_is_evicted_first(tmp_path: Path, cache: Cache) -> None:
    specs = [spec_of(pairs(tmp_path / f"{n}.tsv", word=f"word{n}")) for n in range(4)]
    for n, spec in enumerate(specs[:3]):
        prepared(spec, tmp_path / f"d{n}", cache)
        os.utime(entry(cache) / MANIFEST, (1000 + n, 1000 + n))
    assert prepared(specs[0], tmp_path / "again", cache)[0].hit  # used now: no longer the oldest
    size = cache.entries()[0].size
    small_cache = Cache(cache.folder, 3 * size + size // 2)
    prepared(specs[3], tmp_path / "d3", small_cache)
    assert {cached.files for cached in small_cache.entries()} == {("0.tsv",), ("2.tsv",), ("3.tsv",)}
    tiny_cache = Cache(tmp_path / "other", size // 2)  # too small for any
    prepared(specs[0], tmp_path / "d4", tiny_cache)
    assert tiny_cache.entries() == []


def test_old_temporary_folders_are_removed(tmp_path: Path, cache: Cache) -> None:
    old, new = f".old-making-{'0' * 16}", f".new-making-{'0' * 16}"
    for name, age in ((old, 2 * caching.STALE), (new, 10), (".git", 2 * caching.STALE)):
        (cache.data / name).mkdir(parents=True)
        os.utime(cache.data / name, (time.time() - age, time.time() - age))
    prepared(spec_of(pairs(tmp_path / "a.tsv")), tmp_path / "1", cache)
    assert sorted(path.name for path in cache.data.iterdir() if path.name.startswith(".")) == [".git", new]


def test_clearing_removes_only_files_of_regard(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files in the folder REGARD_CACHE are kept, whatever their names and ages."""
    monkeypatch.setenv("REGARD_CACHE", str(cache.folder))
    outside = tmp_path / "outside"
    foreign = [
        *("data/.git/config", "data/precious/a", "data/files.json", "data/.hidden", f"data/{'a' * 64}/mine"),
        *(
            "threads/mine.txt",
            "threads/0123456789abcdef.json",
            "compiled/main.o",
            "regard-compiled/main.o",
            "mine/a",
            f"data/{'b' * 63}/entry.json",
        ),
    ]
    for path in [*(cache.folder / name for name in foreign), outside / "a", outside / MANIFEST]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    links = {cache.data / ("c" * 64): outside, cache.data / f".x-making-{'0' * 16}": outside}
    for path, to in links.items():
        path.symlink_to(to)
    for path in [*cache.folder.rglob("*"), outside]:
        os.utime(path, (1, 1), follow_symlinks=False)
    before = sorted(path for path in tmp_path.rglob("*"))
    for n in range(3):
        prepared(spec_of(pairs(tmp_path / "a.tsv", word=f"word{n}")), tmp_path / "1", Cache(cache.folder, 5000))
    assert caching.compile_folder() is None
    cache.fetch(Key("c" * 64, (), ()), tmp_path / "2")
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "a.tsv").unlink()
    cache.clear()
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert all((cache.folder / name).read_text() == "precious" for name in foreign)


def test_clearing_removes_compiled_code(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(cache.folder))
    outside = tmp_path / "outside"
    outside.mkdir()
    for _ in range(2):
        folder = caching.compile_folder()
        assert folder is not None
        assert folder == cache.folder / "regard-compiled"
        (folder / "fx").mkdir()
        (folder / "link").symlink_to(outside)
        (outside / "mine").touch()
        cache.clear()
        assert not folder.exists()
        assert (outside / "mine").exists()
    monkeypatch.setenv("REGARD_CACHE", str(outside / "mine" / "below-a-file"))
    assert caching.compile_folder() is None


def test_clearing_removes_files_of_earlier_versions(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(cache.folder))
    half, old = f".{'a' * 64}-0123abcd", f".{'b' * 64}-0123abcd"
    old_files = {
        f"data/{half}/x": "",
        f"data/{old}/x": "",
        "data/files.json": '{"/a": {"mark": [1, 2], "sha256": "0"}}',
        "threads/0123456789abcdef.json": '{"train": {"1": 0.5}, "decode": {"1": 0.5}}',
        "compiled/fx/graph": "",  # without a mark
    }
    for name, text in old_files.items():
        (cache.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cache.folder / name).write_text(text)
    os.utime(cache.data / old, (1, 1))
    assert caching.compile_folder() == cache.folder / "regard-compiled"
    cache.trim()
    assert [path.name for path in cache.data.glob(".*")] == [half]
    cache.clear()
    remaining = [path.relative_to(cache.folder).as_posix() for path in cache.folder.rglob("*") if path.is_file()]
    assert remaining == ["compiled/fx/graph"]  # which may be anybody's


def test_concurrent_preparations_and_clearing(tmp_path: Path, cache: Cache) -> None:
    spec = spec_of(pairs(tmp_path / "a.tsv", 300))
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for k in range(3):
                prepare(spec, tmp_path / f"{n}-{k}", 1, None, lambda _: None, Cache(cache.folder, 10**9))
                if n == 0:
                    cache.clear()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(same(tmp_path / "0-0", tmp_path / f"{n}-{k}") for n in range(4) for k in range(3))
    assert not list(cache.data.glob(".*"))


def test_storing_an_existing_entry_changes_nothing(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    key = Key("0" * 64, (), ())
    cache.keep(key, tmp_path / "a")
    made = cache.entries()
    cache.keep(key, tmp_path / "a")
    assert cache.entries() == made
    assert [path.name for path in cache.data.iterdir()] == ["0" * 64]


# -- folder and size limit


def test_cache_folder_of_each_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("REGARD_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platformdirs, "PlatformDirs", platformdirs.unix.Unix)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "regard"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "regard"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platformdirs, "PlatformDirs", platformdirs.macos.MacOS)
    (tmp_path / "Library" / "Caches" / "regard").mkdir(parents=True)  # of an earlier version, which ignored XDG
    assert cache_folder() == tmp_path / "Library" / "Caches" / "regard"
    (tmp_path / "Library" / "Caches" / "regard").rmdir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "regard"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platformdirs, "PlatformDirs", platformdirs.windows.Windows)
    monkeypatch.setattr(platformdirs.windows, "get_win_folder", platformdirs.windows.get_win_folder_from_env_vars)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "regard"


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("500 mb", 5 * 10**8), ("1.5G", 1_500_000_000), ("0", 0), ("123", 123), ("", 20 * 10**9)],
)
def test_size_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("REGARD_CACHE_SIZE", text)
    assert size_limit() == size


@pytest.mark.parametrize("text", ["much", "-1", "20 apples", "GB"])
def test_invalid_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("REGARD_CACHE_SIZE", text)
    with pytest.raises(SpecError, match=r"REGARD_CACHE_SIZE: .* is not a size; write 500MB or 20GB"):
        size_limit()


def test_importing_the_cache_does_not_import_torch() -> None:
    code = "import sys, regard.data.cache; print('torch' in sys.modules, 'numpy' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert process.stdout == "False False\n"


def test_swapped_parallel_files_are_another_entry(tmp_path: Path, cache: Cache) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(f"{name} {n}\n" for n in range(30)))
    spec = DataSpec((ParallelFiles(str(tmp_path / "a"), str(tmp_path / "b")),), tokenizer=Bytes())
    prepared(spec, tmp_path / "1", cache)
    swapped = replace(spec, train=(ParallelFiles(str(tmp_path / "b"), str(tmp_path / "a")),))
    assert not prepared(swapped, tmp_path / "2", cache)[0].hit
    assert prepared(spec, tmp_path / "3", cache)[0].hit
