"""Cache of prepared data: training on the same text again links to the cached files instead of tokenizing the text.

An entry of the cache is a folder whose name is the SHA-256 of everything that the content depends on. It is
created by an atomic rename, so it is either complete or absent. The files of an entry are verified against their
checksums on every use. The cache folder may contain other files, so this module deletes only files with names that it
assigns itself, and never follows links.
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
from regard.files import STALE, TEMPORARY, file_digest, new_folder, remove, replace_text, temporary

FOLDER, SIZE = "REGARD_CACHE", "REGARD_CACHE_SIZE"  # environment variables
DEFAULT_SIZE = "20GB"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
MANIFEST = "entry.json"  # lists the files of an entry with checksums; its mtime is when the entry was last used
INDEX = "regard-files.json"  # checksums of text files, keyed by path
ENTRY = re.compile(r"[0-9a-f]{64}")
# A file may change twice within one tick of the file system's clock, so the index does not list files newer than this.
RECENT = 10 * 10**9  # nanoseconds
INDEX_LIMIT = 1000  # files
TIMINGS = re.compile(r"regard-[0-9a-f]{16}\.json")  # files in the folder `threads`: speed by number of threads
COMPILED = "regard-compiled"  # folder of torch.compile's cache; torch chooses the names of the files in it
MARKER = ".regard"  # marker file: its presence shows that regard created the folder of compiled code
# Temporary files; earlier versions used names of the second form.
UNFINISHED = re.compile(rf"{TEMPORARY.pattern}|\.[0-9a-f]{{64}}-[0-9a-f]{{8}}")
FORMER_INDEX, FORMER_TIMINGS, FORMER_COMPILED = "files.json", re.compile(r"[0-9a-f]{16}\.json"), "compiled"

Stamp = tuple[int, int, int, int, int]


def cache_folder() -> Path:
    """Return the cache folder: the value of REGARD_CACHE if it is set, else `regard` in the system's cache folder."""
    if folder := os.environ.get(FOLDER):
        return Path(folder).expanduser().absolute()
    if sys.platform == "darwin" and (former := Path("~/Library/Caches/regard").expanduser()).is_dir():
        return former  # platformdirs prefers XDG_CACHE_HOME, which earlier versions ignored on macOS
    import platformdirs  # noqa: PLC0415  # not needed where REGARD_CACHE is set

    return platformdirs.user_cache_path("regard", appauthor=False, opinion=False).absolute()


def size_limit() -> int:
    """Return the maximum size of the cache in bytes, from REGARD_CACHE_SIZE (for example 500MB). Default: 20 GB."""
    text = os.environ.get(SIZE) or DEFAULT_SIZE
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    if not match:
        raise SpecError(SIZE, f"{text!r} is not a size; write 500MB or 20GB (0 disables the cache)")
    return int(float(match[1]) * UNITS[match[2]])


def timings_file(machine: str) -> Path:
    """Return the path of the file that stores the results of a speed measurement.

    `machine` describes the machine and everything else that the results depend on.
    """
    return cache_folder() / "threads" / f"regard-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def store_timings(path: Path, timings: Mapping[Any, Any]) -> None:
    """Write speed measurements to the JSON file `path`.

    Nothing is written if the cache is disabled. Errors of writing are ignored.
    """
    with suppress(OSError, SpecError):
        if size_limit():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(timings))


def compile_folder() -> Path | None:
    """Create the cache folder for torch.compile and return its path.

    Return None if the folder cannot be created, or if it contains files but not the marker file of regard.
    """
    folder = cache_folder() / COMPILED
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            (folder / MARKER).touch()
        if (folder / MARKER).is_file():
            return folder
    return None


@dataclass(frozen=True)
class Key:
    """The key of a cache entry: its name, its text files, and the `_stamp` of each file when the file was read."""

    name: str
    files: tuple[str, ...]
    stamps: tuple[Stamp, ...]


@dataclass(frozen=True)
class Entry:
    """One prepared corpus in the cache. Times are in seconds since 1970."""

    name: str
    files: tuple[str, ...]  # names of the text files that it was prepared from
    size: int  # bytes
    made: float  # when it was stored
    used: float  # when it was last used


class Cache:
    """A cache of prepared corpora (entries) of at most `limit` bytes; least recently used entries are deleted first."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.data = folder / "data"

    @classmethod
    def default(cls) -> "Cache":
        """Return the cache in `cache_folder()` with the limit `size_limit()`."""
        return cls(cache_folder(), size_limit())

    def key(self, description: Mapping[str, Any], files: Sequence[str]) -> Key | None:
        """Return the cache key for a description of the settings and the content of the text files.

        Return None if a file cannot be read, is a pipe, or changes while it is read.
        """
        try:
            stamps = [_stamp(file) for file in files]
            digests = self._digests(files, stamps)
        except OSError:  # reported when the file is read
            return None
        if digests is None:
            return None
        text = json.dumps([description, digests], sort_keys=True, ensure_ascii=False)
        return Key(hashlib.sha256(text.encode()).hexdigest(), tuple(files), tuple(stamps))

    def fetch(self, key: Key, folder: Path) -> bool:
        """Create `folder` with links to all files of a cache entry, and return whether this succeeded.

        If the entry is absent or damaged, or the folder cannot be written, `folder` is not created.
        """
        entry = self.data / key.name
        manifest = _manifest(entry)
        if manifest is None:
            self.drop(key.name)
            return False
        try:
            with new_folder(folder) as making:
                for name, (size, digest) in manifest["content"].items():
                    _link(entry / name, making / name)  # before verification: the cache may be cleared meanwhile
                    if (making / name).stat().st_size != size or file_digest(making / name) != digest:
                        raise FileNotFoundError
                os.utime(entry / MANIFEST)
        except FileNotFoundError:  # damaged, or cleared in the meantime
            self.drop(key.name)
            return False
        except OSError:  # a fault of the target folder
            return False
        return True

    def keep(self, key: Key, folder: Path, warn: Callable[[str], None] = lambda _: None) -> None:
        """Store the files of a folder as a cache entry, unless a text file has changed since the key was computed.

        A folder larger than the limit is not stored. `warn` is called with a message if writing fails.
        """
        try:
            if [_stamp(file) for file in key.files] != list(key.stamps):
                return
            paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            if sum(path.stat().st_size for path in paths) > self.limit:
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
                content[name] = (path.stat().st_size, file_digest(path))
            manifest = {"files": [Path(file).name for file in key.files], "made": time.time(), "content": content}
            (making / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            try:
                making.rename(self.data / key.name)
            except OSError:
                if not (self.data / key.name).exists():  # if it exists, another process has stored the same entry
                    raise
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def entries(self) -> list[Entry]:
        """Return all valid entries, most recently used first."""
        entries = []
        for path in _members(self.data, ENTRY):
            if (manifest := _manifest(path)) is not None:
                size = sum(size for size, _ in manifest["content"].values())
                with suppress(OSError):
                    used = (path / MANIFEST).stat().st_mtime
                    entries.append(Entry(path.name, tuple(manifest["files"]), size, manifest["made"], used))
        return sorted(entries, key=lambda entry: (-entry.used, entry.name))

    def trim(self) -> None:
        """Delete temporary files older than a day, and the least recently used entries until the size limit is met."""
        total = 0
        for entry in self.entries():
            total += entry.size
            if total > self.limit:
                self.drop(entry.name)
        for path in _members(self.data, UNFINISHED):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE:
                    remove(path)

    def clear(self) -> None:
        """Delete everything that regard stored in the cache. Training runs keep their data, as links or copies."""
        for path in _members(self.data, ENTRY):
            if (path / MANIFEST).is_file():
                self.drop(path.name)
        threads = self.folder / "threads"
        stored = [self.data / INDEX, *_members(self.data, UNFINISHED)]
        stored += [*_members(threads, TIMINGS), *_members(threads, TEMPORARY), *self._former()]
        stored += [path for name in (COMPILED, FORMER_COMPILED) if ((path := self.folder / name) / MARKER).is_file()]
        for path in stored:
            with suppress(OSError):
                remove(path)
        with suppress(OSError):
            threads.rmdir()  # fails if other files are in it

    def _former(self) -> Iterator[Path]:
        """Yield the paths of the files that earlier versions of regard stored.

        They are recognised by their content, because other programs may use the same file names.
        """
        if _index(self.data / FORMER_INDEX):
            yield self.data / FORMER_INDEX
        for path in _members(self.folder / "threads", FORMER_TIMINGS):
            with suppress(OSError, ValueError, TypeError, RecursionError):
                if set(json.loads(path.read_text(encoding="utf-8"))) == {"train", "decode"}:
                    yield path

    def drop(self, name: str) -> None:
        """Delete an entry. The entry is renamed first, so that other processes never use a half-deleted entry."""
        dropped = temporary(self.data / name)
        with suppress(OSError):
            if not (self.data / name).is_symlink():
                (self.data / name).rename(dropped)
                shutil.rmtree(dropped, ignore_errors=True)

    def _digests(self, files: Sequence[str], stamps: Sequence[Stamp]) -> list[str] | None:
        """Return the SHA-256 of every file. Return None if a file is a pipe or changes while it is read.

        The checksum of a file that has not changed since an earlier call is taken from the index file.
        """
        index, added, digests = _index(self.data / INDEX), False, []
        for file, stamp in zip(files, stamps, strict=True):
            path = os.path.realpath(file)
            if index.get(path, {}).get("mark") == list(stamp):
                digests.append(index[path]["sha256"])
                continue
            digest = file_digest(Path(file)) if stat.S_ISREG(os.stat(file).st_mode) else None
            if digest is None or _stamp(file) != stamp:
                return None
            digests.append(digest)
            if time.time_ns() - max(stamp[3:]) > RECENT:
                index[path], added = {"mark": list(stamp), "sha256": digest}, True
        if added:
            with suppress(OSError):  # without the index, or if another process overwrites it, files are read again
                self.data.mkdir(parents=True, exist_ok=True)
                latest = dict(list(index.items())[-INDEX_LIMIT:])
                replace_text(self.data / INDEX, json.dumps(latest, ensure_ascii=False, indent=1))
        return digests


def _index(path: Path) -> dict[str, Any]:
    """Return the index {path: {"mark": stamp, "sha256": checksum}}, or an empty dict if the file is unusable."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return {file: {"mark": list(item["mark"]), "sha256": str(item["sha256"])} for file, item in index.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _stamp(file: str) -> Stamp:
    """Return (device, inode, size, mtime, ctime) of a file, to detect changes. Unlike mtime, ctime cannot be reset."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _link(path: Path, to: Path) -> None:
    """Create `to` as a hard link to `path`, or as a copy if the file system does not support hard links."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, to)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, to)


def _manifest(entry: Path) -> dict[str, Any] | None:
    """Return the manifest of an entry, or None if it is absent or invalid or lists a file outside the entry."""
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        content = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["content"].items()}
        if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in content):
            return None
        files = [str(file) for file in manifest["files"]]
        return {"files": files, "made": float(manifest["made"]), "content": content}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _members(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """Yield the files and folders in `folder` whose names match `pattern`, except symbolic links."""
    with suppress(OSError):
        paths = sorted(folder.iterdir())
        yield from (path for path in paths if pattern.fullmatch(path.name) and not path.is_symlink())
