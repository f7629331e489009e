"""The errors a user meets: one sentence that says what is wrong, where, and what to do."""

import errno
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches


class RegardError(Exception):
    """Anything a user can put right. The command line prints it as one sentence and exits with code 2."""


class SpecError(RegardError, ValueError):
    """A description that cannot be built or read; `path` is the field it is about, such as `decoder.depth`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message

    def inside(self, prefix: str) -> "SpecError":
        """The same complaint seen from the part that holds `prefix`."""
        return SpecError(join(prefix, self.path), self.message)


class DataError(RegardError, ValueError):
    """Data that no model could use; the message says where it is."""


class KernelError(RegardError, RuntimeError):
    """A kernel was asked for something that it cannot compute exactly; the message says what and why."""


class OutOfMemoryError(RegardError, MemoryError):
    """The memory of the machine or of its GPU does not hold the work; the message says what would make it smaller."""


# How torch's errors begin where it has no type of its own for a lack of memory: on a CPU, in cuBLAS, on Apple's GPUs.
NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed", "storage size calculation overflowed")


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error of Python, NumPy or torch means that memory ran out."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in NO_MEMORY)


class CountedWarnings:
    """Show a warning once, and count those like it: the same sentence, whatever its numbers.

    `with CountedWarnings(print) as warn: run.translate(texts, warn=warn)` prints the first warning of each kind and, at
    the end, how many more there were.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def __call__(self, sentence: str) -> None:
        """Show the sentence if it is the first of its kind."""
        kind = re.sub(r"\d[\d,.]*", "0", sentence)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind not in self.first:
            self.first[kind] = sentence
            self.show(sentence)

    def close(self) -> None:
        """Say how many more there were of each kind, and forget them."""
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
    """`join("decoder", "depth") == "decoder.depth"`; an index needs no dot."""
    if not prefix or not path:
        return prefix or path
    return prefix + path if path.startswith("[") else f"{prefix}.{path}"


def nearest(name: str, options: Iterable[str]) -> str:
    """The end of an error sentence about an unknown name: the closest option, or all of them if they are few."""
    names = sorted(options)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    if not names:
        return "nothing can be named here"
    shown = ", ".join(repr(option) for option in names[:24])
    return f"known names: {shown}" + (f" and {len(names) - 24} more" if len(names) > 24 else "")
