"""Files and folders that appear whole or not at all, are written by one process at a time, and never through a link."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regard.errors import DataError

try:
    import fcntl
except ImportError:  # where there are no such locks, two commands in one folder are not noticed
    fcntl = None

LOCK = ".lock"
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
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def held(folder: Path, wait: bool = False) -> Iterator[None]:
    """Keep other processes from writing to a folder, which is made if it is not there, and goes if it is still empty.

    Whoever comes second waits, or is told. The lock ends with its holder, however that ends; what a killed holder left
    half-made is removed. A link in the folder, through which we might write elsewhere, is refused.
    """
    handle, made = _locked(folder, wait)
    try:
        for path in sorted(folder.iterdir()):
            if path.is_symlink():
                raise DataError(
                    f"{path} is a link, and nothing is written through links; put what it points to in its place"
                )
            if TEMPORARY.fullmatch(path.name) or FORMER.fullmatch(path.name):
                remove(path)
        yield
    finally:
        with suppress(OSError):
            if _is(handle, folder / LOCK):
                (folder / LOCK).unlink()  # while it is locked: whoever waits for it sees that, and makes another
            if made:
                folder.rmdir()  # fails if there is anything in it, such as the lock of whoever came next
        os.close(handle)


def _locked(folder: Path, wait: bool) -> tuple[int, bool]:
    """An open lock file that is ours, and whether its folder was made for it."""
    path = folder / LOCK
    while True:
        made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot make the folder {folder}: {error.strerror}") from None
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        except FileNotFoundError:  # the folder was removed a moment ago
            continue
        except OSError as error:
            raise DataError(f"cannot write to {folder}: {path.name}: {error.strerror}") from None
        try:
            _lock(handle, folder, wait)
            if _is(handle, path):
                return handle, made
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # of a holder who has ended, and taken the file away


def _lock(handle: int, folder: Path, wait: bool) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        raise DataError(
            f"{folder} is being worked on by another process; wait for it, or choose another folder"
        ) from None
    except OSError:  # a file system without locks
        return


def _is(handle: int, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False
