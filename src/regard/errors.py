"""The errors a user meets: one sentence that says what is wrong, where, and what to do."""

from collections.abc import Iterable
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
