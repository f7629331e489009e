"""The command-line app, with the options, error messages and exit codes that all commands share."""

import errno
import io
import json
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import CountedWarnings, RegardError, SpecError, lacks_memory

if TYPE_CHECKING:
    from rich.console import Console

    from regard.planner.threads import Kind

TRAIN, USE, STUDY, INSIDE, SHIP = "Train", "Use", "Study", "Look inside", "Ship"  # panels of commands

app = typer.Typer(
    name="regard",
    help="Train Transformers on your own text, change them, measure the change, look inside and deploy them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if os.environ.get("NO_COLOR") else "rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMPUTE, PRINT = "Computation", "Messages"  # panels of options
compute_option = partial(typer.Option, rich_help_panel=COMPUTE)
print_option = partial(typer.Option, rich_help_panel=PRINT)

AsJson = Annotated[bool, print_option("--json", help="Print the result as one JSON document to standard output.")]
Device = Annotated[str, compute_option(help="Device to compute on: auto, cpu, cuda or mps.")]
Quiet = Annotated[bool, print_option("--quiet", "-q", help="Print only errors.")]
TrustCode = Annotated[
    bool,
    compute_option(
        "--trust-code",
        help="Allow a recipe or option to import and run your own Python code, named as module:name. The module may be "
        "a file in the current folder.",
    ),
]
Plain = Annotated[bool, compute_option("--plain", help="Use plain PyTorch modules instead of fused kernels; slower.")]
RecipeFile = Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe: a .toml or .json file.")]
Quantize = Annotated[
    str | None,
    compute_option(
        metavar="TYPE", help="Store weights as int8 (fastest) or float16 (half the size) instead of float32."
    ),
]
Threads = Annotated[
    int | None,
    compute_option(
        min=1,
        help="Number of CPU threads. Default: the fastest number, as measured by `regard train` on this machine.",
    ),
]


class Interrupted(BaseException):
    """Raised on Ctrl-C instead of KeyboardInterrupt, whose exit code depends on the version of typer."""


def main() -> None:
    """Run the command in `sys.argv`, and exit.

    If the user can correct an error, the disk is full or memory runs out, print one sentence on stderr and exit with
    code 2. On Ctrl-C, exit with code 130. If the reader of the output closes the pipe (as `| head` does), print nothing
    and exit with code 141, the code of SIGPIPE in shells.
    """
    signal.signal(signal.SIGINT, _interrupt)
    _write_utf8()
    code = _attempt()
    _warnings.close()
    try:
        if sys.stdout is not None:  # None if standard output is closed
            sys.stdout.flush()
    except OSError as error:
        code = code or _system_error(error)
        _discard_output()
    sys.exit(code)


def _attempt() -> int:
    """Run the command, and return its exit code."""
    try:
        _check_arguments(sys.argv[1:])
        app()
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # typer and rich turn this error into exit code 1
            return _system_error(left.__context__)
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        complain(str(left.code))
        return 1
    except RegardError as error:
        complain(str(error))
    except Interrupted:
        complain("interrupted")
        return 130
    except (MemoryError, RuntimeError, OSError) as error:
        if not lacks_memory(error):
            if isinstance(error, OSError):
                return _system_error(error)
            raise
        complain(
            f"memory ran out ({' '.join(str(error).split())[:120] or 'MemoryError'}); use a smaller "
            "--batch-size or --beam to decode, data.batching.tokens to train, or a smaller model"
        )
    return 2


def _interrupt(*_: object) -> None:
    raise Interrupted


def _check_arguments(words: list[str]) -> None:
    """Raise an error for an argument that is not UTF-8, such as a file name in another encoding."""
    for word in words:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:  # JSON could not store the name
            raise SpecError("", f"the argument {word!a} is not UTF-8; rename the file") from None


def _write_utf8() -> None:
    """Write output to files and pipes in UTF-8, whatever the locale. Output to a terminal keeps its encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _system_error(error: OSError) -> int:
    """Print one sentence about an operating system error, and return the exit code."""
    if error.errno == errno.EPIPE:
        _discard_output()
        return 141
    where = error.filename if error.filename is not None else "the output"
    todo = (
        "free disk space, or write elsewhere"
        if error.errno == errno.ENOSPC
        else "correct this and run the command again"
    )
    complain(f"{where}: cannot be read or written ({error.strerror or error}); {todo}")
    return 2


def _discard_output() -> None:
    """Discard buffered output, because writing it at exit would fail again."""
    with suppress(OSError, ValueError):  # if stdout is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(sentence: str) -> None:
    """Print one sentence on stderr."""
    with suppress(OSError):  # stderr is closed
        print(f"regard: {sentence}", file=sys.stderr)


_warnings = CountedWarnings(lambda sentence: complain(f"warning: {sentence}"))


def warn(sentence: str) -> None:
    """Print a warning on stderr. Later warnings of its kind are only counted; their number is printed at the end."""
    _warnings(sentence)


def console(stderr: bool = False, width: int | None = None) -> "Console":
    """Return a rich console that prints text from users unchanged, without highlighting or emoji for `:cat:`."""
    from rich.console import Console

    return Console(stderr=stderr, width=width, emoji=False, highlight=False)


def print_json(value: Any) -> None:
    """Print a value to standard output as JSON; a command with `--json` prints only this."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def set_threads(
    threads: int | None,
    kind: "Kind" = "decode",
    device: str = "cpu",
    run: Path | None = None,
    parameters: int | None = None,
) -> None:
    """Set the number of CPU threads of torch.

    If `threads` is None, use the number with which training in the folder `run` began. Without such a number, use the
    fastest number for training or decoding (`kind`) with a model of `parameters` parameters. This number is measured
    only before training, because the measurement takes seconds. If an environment variable sets the number of threads,
    only `threads` overrides it.
    """
    from regard.planner.threads import for_decoding, for_training, recorded, set_by_user

    if threads is None and not set_by_user():
        threads = None if run is None else recorded(run)
        if threads is None and _on_cpu(device):
            threads = for_training() if kind == "train" else for_decoding(parameters)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _on_cpu(device: str) -> bool:
    # An invalid device name raises an error later, when the device is used.
    if device != "auto":
        return device == "cpu"
    import torch

    return not torch.cuda.is_available() and not torch.backends.mps.is_available()


def _version(given: bool) -> bool:
    if given:
        from regard import __version__

        print(f"regard {__version__}")
        raise typer.Exit
    return given


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...
