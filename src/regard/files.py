"""Files and folders that appear whole or not at all, are written by one process at a time, and never through a link."""

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
except ImportError:  # where there are no such locks, two commands in one folder are not noticed
    fcntl = None

WINDOWS = os.name == "nt"
LOCK = ".lock"
STALE = 24 * 3600  # seconds after which what is half-made is what nobody goes on with
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
TEMPORARY = re.compile(r"\..+-making-[0-9a-f]{16}")
FORMER = re.compile(r"\.saving|\..+-making")  # temporaries of earlier versions, in folders that are ours


def temporary(path: Path) -> Path:
    """A name beside `path` that nobody can know before, for what is to become `path`."""
    return path.with_name(f".{path.name}-making-{secrets.token_hex(8)}")


def write_text(path: Path, text: str) -> None:
    """Write a text file, on the disk when this returns. It is a new file: one that is there, or a link, is replaced."""
    path.unlink(missing_ok=True)
    with open(path, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all, on the disk when this returns."""
    making = temporary(path)
    try:
        write_text(making, text)
        making.replace(path)
        sync(path.parent)
    finally:
        making.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """Write at the end of a text file that is no link."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW, 0o666)
    with open(handle, "a", encoding="utf-8", newline="\n") as file:
        file.write(text)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` once it is filled."""
    making = temporary(path)
    making.mkdir(parents=True)
    try:
        yield making
        remove(path)
        making.rename(path)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link and not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def usual_mode(folder: Path) -> int:
    """The permissions that a new file gets in a folder: what the umask, and the folder, leave of them."""
    probe = temporary(folder / "mode")
    try:
        with open(probe, "x") as file:
            return os.fstat(file.fileno()).st_mode & 0o777
    finally:
        probe.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk. Windows opens no folder, and flushes only what may be written."""
    if WINDOWS and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear(folder: Path, keep: Container[str]) -> None:
    """Remove all that is in a folder but what has a name in `keep`."""
    for path in list(folder.iterdir()):
        if path.name not in keep:
            remove(path)


@contextmanager
def held(
    folder: Path,
    check: Callable[[], None] = lambda: None,
    writes: Callable[[str], bool] = lambda _: True,
    wait: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Keep other processes from writing to a folder, which is made if it is not there, and goes if it is still empty.

    Whoever comes second is refused; with `wait` it calls that, and waits. `check` may refuse the folder once it is
    locked, before anything in it is touched. `writes` tells which names in the folder may be written to: a link there,
    at any depth, is refused. The lock ends with its holder, however that ends; what a killed holder left half-made is
    removed.
    """
    lock = _locked(folder, wait)
    try:
        check()
        for link in filter(Path.is_symlink, _written(folder, writes)):
            raise DataError(
                f"{link} is a link, and nothing is written through links; put what it points to in its place"
            )
        _sweep(folder, lock.works)
        yield
    finally:
        lock.release()


def _written(folder: Path, writes: Callable[[str], bool]) -> Iterator[Path]:
    """All in a folder that may be written to, at any depth, or removed."""
    for path in sorted(folder.iterdir()):
        if writes(path.name):
            yield path
            yield from path.rglob("*")
        elif _left_over(path):
            yield path


def _sweep(folder: Path, locked: bool) -> None:
    """Remove what was left half-made; without a lock, only what is so old that nobody is still making it."""
    for path in filter(_left_over, list(folder.iterdir())):
        with suppress(FileNotFoundError):  # finished by another process, where there are no locks
            if locked or time.time() - path.stat().st_mtime > STALE:
                remove(path)


def _left_over(path: Path) -> bool:
    return bool(TEMPORARY.fullmatch(path.name) or FORMER.fullmatch(path.name))


@dataclass(frozen=True)
class _Lock:
    """An open lock file."""

    path: Path
    handle: int
    works: bool  # False where there are no locks: others may have the same file open
    made: bool  # whether the file was made for it
    folder_made: bool

    def release(self) -> None:
        """Remove the lock file, unless it is somebody else's, and the folder if it was made for it and is empty."""
        with suppress(OSError):
            if not self.works:
                os.close(self.handle)  # first, for Windows removes no open file
                if self.made:
                    self.path.unlink()
            elif _is(self.handle, self.path) and not os.fstat(self.handle).st_size:  # ours are empty
                self.path.unlink()  # while it is locked: whoever waits for it sees that, and makes another
        with suppress(OSError):
            if self.folder_made:
                self.path.parent.rmdir()  # fails if there is anything in it, such as the lock of whoever came next
        if self.works:
            os.close(self.handle)


def _locked(folder: Path, wait: Callable[[], None] | None) -> _Lock:
    """A lock that is ours, in a folder that is made if it is not there."""
    path = folder / LOCK
    while True:
        folder_made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot make the folder {folder}: {error.strerror}") from None
        made = not os.path.lexists(path)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        except FileNotFoundError:  # the folder was removed a moment ago
            continue
        except OSError as error:
            raise DataError(f"cannot write to {folder}: {path.name}: {error.strerror}") from None
        try:
            works = _lock(handle, folder, wait)
            if _is(handle, path):
                return _Lock(path, handle, works, made, folder_made)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # of a holder who has ended, and taken the file away


def _lock(handle: int, folder: Path, wait: Callable[[], None] | None) -> bool:
    """Lock an open file; False if there are no locks here."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        if wait is None:
            raise DataError(
                f"{folder} is being worked on by another process; wait for it, or choose another folder"
            ) from None
    except OSError:  # a file system without locks
        return False
    else:
        return True
    wait()
    fcntl.flock(handle, fcntl.LOCK_EX)
    return True


def _is(handle: int, path: Path) -> bool:
    """Return True if the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False
