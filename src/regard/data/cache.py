"""The cache of prepared data: what was made of the same bytes in the same way is linked into a run, not made again.

An entry is a folder named by a hash of all that its content depends on. It appears by a rename, whole or not at all,
and its files are compared with their checksums whenever it is used. The folder of the cache may hold other things, too:
nothing is removed but what has a name that only we give, and no link is followed to remove what it points to.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from regard.errors import SpecError
from regard.files import STALE, TEMPORARY, new_folder, remove, replace_text, temporary

FOLDER, SIZE = "REGARD_CACHE", "REGARD_CACHE_SIZE"  # environment variables
MOST = "20GB"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
ABOUT = "entry.json"  # in an entry: what it holds; its time is when the entry was last used
INDEX = "regard-files.json"  # checksums of text files, by path and mark
ENTRY = re.compile(r"[0-9a-f]{64}")
# A file may change twice within one tick of its clock, so what changed so recently is not taken for unchanged later.
RECENT = 10 * 10**9  # nanoseconds
KNOWN = 1000  # files in the index
MEASURED = re.compile(r"regard-[0-9a-f]{16}\.json")  # in `threads`, beside the data: what was measured of the machine
COMPILED = "regard-compiled"  # beside the data, where torch.compile keeps things of any name
MARK = ".regard"  # in that folder: it is ours
HALF_MADE = re.compile(rf"{TEMPORARY.pattern}|\.[0-9a-f]{{64}}-[0-9a-f]{{8}}")  # now, and by earlier versions
FORMER_INDEX, FORMER_MEASURED, FORMER_COMPILED = "files.json", re.compile(r"[0-9a-f]{16}\.json"), "compiled"

Mark = tuple[int, int, int, int, int]


def where() -> Path:
    """The folder of the cache: REGARD_CACHE, or `regard` in the folder that the platform has for caches."""
    if given := os.environ.get(FOLDER):
        return Path(given).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "regard"


def limit() -> int:
    """How many bytes the cache may hold: REGARD_CACHE_SIZE, such as 500MB, or 20 GB."""
    given = os.environ.get(SIZE) or MOST
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", given.strip().upper())
    if not found:
        raise SpecError(SIZE, f"{given!r} is no size; write 500MB or 20GB (0: keep nothing)")
    return int(float(found[1]) * UNITS[found[2]])


def measured(facts: str) -> Path:
    """The file for what was measured of a machine that is described by `facts`."""
    return where() / "threads" / f"regard-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


def compiled() -> Path | None:
    """The folder for what torch.compile makes; None, if there can be none, or one of that name is somebody else's."""
    folder = where() / COMPILED
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            (folder / MARK).touch()
        if (folder / MARK).is_file():
            return folder
    return None


@dataclass(frozen=True)
class Key:
    """What an entry is found by, and the files that it was computed from as they were then."""

    name: str
    files: tuple[str, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Entry:
    """What the cache holds of one text."""

    name: str
    files: tuple[str, ...]  # the text files that it was made of
    size: int
    made: float
    used: float


class Cache:
    """Entries in a folder, together at most `most` bytes; the one that was not used for longest goes first."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self.data = folder / "data"

    @classmethod
    def usual(cls) -> "Cache":
        """The cache that the environment says."""
        return cls(where(), limit())

    def key(self, description: Mapping[str, Any], files: Sequence[str]) -> Key | None:
        """The key of what is described, made of these files; None if one of them cannot be read twice."""
        try:
            marks = [_mark(file) for file in files]
            digests = self._digests(files, marks)
        except OSError:  # reading it will say what is wrong
            return None
        if digests is None:
            return None
        text = json.dumps([description, digests], sort_keys=True, ensure_ascii=False)
        return Key(hashlib.sha256(text.encode()).hexdigest(), tuple(files), tuple(marks))

    def fetch(self, key: Key, folder: Path) -> bool:
        """Link the files of an entry into a new folder, which appears whole; False if there is no such entry."""
        entry = self.data / key.name
        about = _about(entry)
        if about is None:
            self.drop(key.name)
            return False
        try:
            with new_folder(folder) as making:
                for name, (size, digest) in about["content"].items():
                    _link(entry / name, making / name)  # first, so that who clears the cache now does no harm
                    if (making / name).stat().st_size != size or _digest(making / name) != digest:
                        raise FileNotFoundError
                os.utime(entry / ABOUT)
        except FileNotFoundError:  # damaged, or cleared a moment ago
            self.drop(key.name)
            return False
        except OSError:  # not the entry's fault
            return False
        return True

    def keep(self, key: Key, folder: Path, warn: Callable[[str], None] = lambda _: None) -> None:
        """Make an entry of what is in a folder, unless a file that it was made of has changed since."""
        try:
            if [_mark(file) for file in key.files] != list(key.marks):
                return
            paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            if sum(path.stat().st_size for path in paths) > self.most:
                return
            self._keep(key, folder, paths)
            self.trim()
        except OSError as error:
            warn(f"warning: the prepared data are not kept in the cache {self.folder}: {error.strerror or error}")

    def _keep(self, key: Key, folder: Path, paths: Sequence[Path]) -> None:
        making = temporary(self.data / key.name)
        making.mkdir(parents=True)
        try:
            content = {}
            for path in paths:
                name = path.relative_to(folder).as_posix()
                _link(path, making / name)
                content[name] = (path.stat().st_size, _digest(path))
            about = {"files": [Path(file).name for file in key.files], "made": time.time(), "content": content}
            (making / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
            try:
                making.rename(self.data / key.name)
            except OSError:
                if not (self.data / key.name).exists():  # then another process was first, which is as well
                    raise
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def entries(self) -> list[Entry]:
        """What is there, the latest used first."""
        found = []
        for path in _named(self.data, ENTRY):
            if (about := _about(path)) is not None:
                size = sum(size for size, _ in about["content"].values())
                with suppress(OSError):
                    used = (path / ABOUT).stat().st_mtime
                    found.append(Entry(path.name, tuple(about["files"]), size, about["made"], used))
        return sorted(found, key=lambda entry: (-entry.used, entry.name))

    def trim(self) -> None:
        """Remove what was not used for longest until the rest is small enough, and what was never finished."""
        total = 0
        for entry in self.entries():
            total += entry.size
            if total > self.most:
                self.drop(entry.name)
        for path in _named(self.data, HALF_MADE):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE:
                    remove(path)

    def clear(self) -> None:
        """Remove everything that is ours. Runs keep their data: they have links or copies of their own."""
        for path in _named(self.data, ENTRY):
            if (path / ABOUT).is_file():
                self.drop(path.name)
        threads = self.folder / "threads"
        ours = [self.data / INDEX, *_named(self.data, HALF_MADE)]
        ours += [*_named(threads, MEASURED), *_named(threads, TEMPORARY), *self._former()]
        ours += [path for name in (COMPILED, FORMER_COMPILED) if ((path := self.folder / name) / MARK).is_file()]
        for path in ours:
            with suppress(OSError):
                remove(path)
        with suppress(OSError):
            threads.rmdir()  # unless it holds something else

    def _former(self) -> Iterator[Path]:
        """Files of earlier versions. Others may give such names, too, so their content must also be ours."""
        if _index(self.data / FORMER_INDEX):
            yield self.data / FORMER_INDEX
        for path in _named(self.folder / "threads", FORMER_MEASURED):
            with suppress(OSError, ValueError, TypeError, RecursionError):
                if set(json.loads(path.read_text(encoding="utf-8"))) == {"train", "decode"}:
                    yield path

    def drop(self, name: str) -> None:
        """Remove an entry, at once for whoever looks for it."""
        gone = temporary(self.data / name)
        with suppress(OSError):
            if not (self.data / name).is_symlink():
                (self.data / name).rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _digests(self, files: Sequence[str], marks: Sequence[Mark]) -> list[str] | None:
        """The checksum of every file; those that have not changed since they were last read are not read again."""
        index, found, news = _index(self.data / INDEX), [], False
        for file, mark in zip(files, marks, strict=True):
            path = os.path.realpath(file)
            known = index.get(path)
            if known is None or known["mark"] != list(mark):
                if not stat.S_ISREG(os.stat(file).st_mode):
                    return None  # a pipe can be read only once
                known = {"mark": list(mark), "sha256": _digest(Path(file))}
                if _mark(file) != mark:
                    return None  # it is being written
                if time.time_ns() - max(mark[3:]) > RECENT:
                    index[path], news = known, True
            found.append(known["sha256"])
        if news:
            self._remember(index)
        return found

    def _remember(self, index: dict[str, Any]) -> None:
        """Write the index; of two processes that do so at once the later wins, and a file may be read once more."""
        with suppress(OSError):
            self.data.mkdir(parents=True, exist_ok=True)
            latest = dict(list(index.items())[-KNOWN:])
            replace_text(self.data / INDEX, json.dumps(latest, ensure_ascii=False, indent=1))


def _index(path: Path) -> dict[str, Any]:
    """The checksums of text files that were read before; none if the file is not there or is something else."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return {file: {"mark": list(one["mark"]), "sha256": str(one["sha256"])} for file, one in index.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _mark(file: str) -> Mark:
    """What changes when a file does. The time of the last change of any kind cannot be set back, unlike the other."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _link(path: Path, to: Path) -> None:
    """The same file under another name, or a copy where the file system has no such thing."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, to)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, to)


def _about(entry: Path) -> dict[str, Any] | None:
    """What an entry says of itself; None if it is not there or makes no sense."""
    try:
        about = json.loads((entry / ABOUT).read_text(encoding="utf-8"))
        content = {str(name): (int(size), str(digest)) for name, (size, digest) in about["content"].items()}
        if not all(_inside(name) for name in content):
            return None
        return {"files": [str(file) for file in about["files"]], "made": float(about["made"]), "content": content}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _named(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """Yield the members of a folder with such a name, without links: their targets belong to somebody else."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return
    yield from (path for path in found if pattern.fullmatch(path.name) and not path.is_symlink())
