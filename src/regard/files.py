"""Atomic writing of files and folders, locks against concurrent writers, and protection from writing through links."""

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from regard.errors import DataError

try:
    import fcntl
except ImportError:  # without `fcntl`, concurrent writers are not detected
    fcntl = None

WINDOWS = os.name == "nt"
LOCK = ".lock"
STALE = 24 * 3600  # age in seconds from which an unfinished temporary file counts as abandoned
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
TEMPORARY = re.compile(r"\..+-making-[0-9a-f]{16}")
FORMER = re.compile(r"\.saving|\..+-making")  # temporary names of earlier versions


def temporary(path: Path) -> Path:
    """Return an unpredictable temporary path next to `path`; the caller renames it to `path`."""
    return path.with_name(f".{path.name}-making-{secrets.token_hex(8)}")


def write_text(path: Path, text: str) -> None:
    """Write a text file and flush it to disk. An existing file or link is replaced; a link is not followed."""
    path.unlink(missing_ok=True)
    with open(path, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically and flush it to disk."""
    making = temporary(path)
    try:
        write_text(making, text)
        making.replace(path)
        sync(path.parent)
    finally:
        making.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """Append text to a file; raise OSError if the file is a link."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW, 0o666)
    with open(handle, "a", encoding="utf-8", newline="\n") as file:
        file.write(text)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` when the `with` block ends without an error."""
    making = temporary(path)
    making.mkdir(parents=True)
    try:
        yield making
        remove(path)
        making.rename(path)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link (but not the target of the link)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def usual_mode(folder: Path) -> int:
    """Return the permissions that a new file gets in a folder."""
    probe = temporary(folder / "mode")
    try:
        with open(probe, "x") as file:
            return os.fstat(file.fileno()).st_mode & 0o777
    finally:
        probe.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or folder to disk. On Windows, folders are skipped, because they cannot be flushed."""
    if WINDOWS and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear(folder: Path, keep: Container[str]) -> None:
    """Remove all files and folders in a folder except those named in `keep`."""
    for path in list(folder.iterdir()):
        if path.name not in keep:
            remove(path)


@contextmanager
def locked(
    folder: Path,
    check: Callable[[], None] = lambda: None,
    writes: Callable[[str], bool] = lambda _: True,
    wait: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Lock a folder against other processes during a `with` block.

    A missing folder is created, and removed afterwards if it is empty. If another process has the lock, DataError is
    raised. If `wait` is given, `wait()` is called instead, and this process then waits for the lock. `check` is called
    before anything in the locked folder changes, and may raise an error. `writes(name)` returns whether the block may
    write the file or folder `name`. DataError is raised if such a file or folder is a link or contains a link. If the
    process dies, the lock is released. Temporary files of killed processes are removed.
    """
    lock = _acquire(folder, wait)
    try:
        check()
        for link in filter(Path.is_symlink, _written_paths(folder, writes)):
            raise DataError(f"{link} is a link, and nothing is written through links; replace it by its target")
        _remove_temporary(folder, lock.exclusive)
        yield
    finally:
        lock.release()


def _written_paths(folder: Path, writes: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the paths in a folder, at any depth, that may be written (see `locked`), and its temporary files."""
    for path in sorted(folder.iterdir()):
        if writes(path.name):
            yield path
            yield from path.rglob("*")
        elif _is_temporary(path):
            yield path


def _remove_temporary(folder: Path, exclusive: bool) -> None:
    """Remove temporary files. Without an exclusive lock, remove only files older than `STALE` seconds."""
    for path in filter(_is_temporary, list(folder.iterdir())):
        with suppress(FileNotFoundError):  # renamed by another process
            if exclusive or time.time() - path.stat().st_mtime > STALE:
                remove(path)


def _is_temporary(path: Path) -> bool:
    return bool(TEMPORARY.fullmatch(path.name) or FORMER.fullmatch(path.name))


@dataclass(frozen=True)
class _Lock:
    """An open lock file."""

    path: Path
    handle: int
    exclusive: bool  # False if the system or file system has no locks
    created: bool  # True if this lock created the file
    folder_created: bool

    def release(self) -> None:
        """Release the lock. Remove the lock file unless another process owns it.

        Also remove the folder if it was created for this lock and is empty.
        """
        with suppress(OSError):
            if not self.exclusive:
                os.close(self.handle)  # close first, because Windows cannot remove an open file
                if self.created:
                    self.path.unlink()
            elif _same_file(self.handle, self.path) and not os.fstat(self.handle).st_size:  # lock files are empty
                self.path.unlink()  # unlink while locked: a waiting process notices this and creates a new file
        with suppress(OSError):
            if self.folder_created:
                self.path.parent.rmdir()  # fails if the folder has content, such as the lock of the next process
        if self.exclusive:
            os.close(self.handle)


def _acquire(folder: Path, wait: Callable[[], None] | None) -> _Lock:
    """Lock a folder and return the lock; create the folder if it is missing."""
    path = folder / LOCK
    while True:
        folder_created = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot create the folder {folder}: {error.strerror}") from None
        created = not os.path.lexists(path)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        except FileNotFoundError:  # the folder has just been removed
            continue
        except OSError as error:
            raise DataError(f"cannot write to {folder}: {path.name}: {error.strerror}") from None
        try:
            exclusive = _lock(handle, folder, wait)
            if _same_file(handle, path):
                return _Lock(path, handle, exclusive, created, folder_created)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the previous process has removed this file


def _lock(handle: int, folder: Path, wait: Callable[[], None] | None) -> bool:
    """Lock an open file and return True; return False if the system or file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        if wait is None:
            raise DataError(f"{folder} is in use by another process; wait for it, or choose another folder") from None
    except OSError:  # a file system without locks
        return False
    else:
        return True
    wait()
    fcntl.flock(handle, fcntl.LOCK_EX)
    return True


def _same_file(handle: int, path: Path) -> bool:
    """Return whether the open file is the file at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False
