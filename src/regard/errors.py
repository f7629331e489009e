"""Errors shown to the user. A message is one sentence: what is wrong, where, and what to do."""

import errno
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches


class RegardError(Exception):
    """Base class of errors that the user can correct; the command line prints the message and exits with code 2."""


class SpecError(RegardError, ValueError):
    """Raised for an invalid model, recipe or option; `path` locates the invalid field, for example `decoder.depth`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message

    def inside(self, prefix: str) -> "SpecError":
        """Return a copy of the error in which `path` begins with `prefix`, to be raised for the enclosing spec."""
        return SpecError(join(prefix, self.path), self.message)


class DataError(RegardError, ValueError):
    """Raised for invalid data, files or run folders. The message contains the location of the problem."""


class KernelError(RegardError, RuntimeError):
    """Raised if the requested kernel cannot do a computation exactly."""


class OutOfMemoryError(RegardError, MemoryError):
    """Raised if CPU or GPU memory runs out. The message suggests what to reduce."""


# Parts of the messages of torch's RuntimeErrors when memory runs out: on the CPU, in cuBLAS and on Apple's GPUs.
NO_MEMORY = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed",
    "storage size calculation overflowed",
)  # fmt: skip


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error from Python, NumPy or torch means that memory is exhausted."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in NO_MEMORY)


class CountedWarnings:
    """A filter for warnings. If warnings differ only in numbers, the first one is shown and the others are counted.

    `with CountedWarnings(print) as warn: run.translate(texts, warn=warn)` prints the first warning of each kind and, at
    the end, the number of further warnings of that kind.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def __call__(self, sentence: str) -> None:
        """Show the warning if it is the first of its kind."""
        kind = re.sub(r"\d[\d,.]*", "0", sentence)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind not in self.first:
            self.first[kind] = sentence
            self.show(sentence)

    def close(self) -> None:
        """Show the number of further warnings of each kind and reset the counts."""
        counts, first = self.counts, self.first
        self.counts, self.first = {}, {}
        for kind, count in counts.items():
            if count > 1:
                self.show(f"{count - 1:,} more like this one: {first[kind]}")

    def __enter__(self) -> "CountedWarnings":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(prefix: str, path: str) -> str:
    """Join two paths: `join("decoder", "depth") == "decoder.depth"`, and `join("pattern", "[0]") == "pattern[0]"`."""
    if not prefix or not path:
        return prefix or path
    return prefix + path if path.startswith("[") else f"{prefix}.{path}"


def nearest(name: str, options: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest option, or else up to 24 options."""
    names = sorted(options)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    if not names:
        return "there are no names to choose from"
    shown = ", ".join(repr(option) for option in names[:24])
    return f"known names: {shown}" + (f" and {len(names) - 24} more" if len(names) > 24 else "")
