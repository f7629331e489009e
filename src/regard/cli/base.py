"""What all commands share: the app, its panels, and how it complains."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.threads import Kind

TRAIN, USE, STUDY, INSIDE, SHIP = "Train", "Use", "Study", "Look inside", "Ship"

app = typer.Typer(
    name="regard",
    help="The Transformer that people train themselves: train it, change it, prove the change, see inside it, ship it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if os.environ.get("NO_COLOR") else "rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Let a recipe name parts as module:Class and import them.")
]
# What is learned from: `train` and `ablate` are told in the same words.
RecipeFile = Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="A .toml or .json recipe.")]
Source = Annotated[str | None, typer.Option(metavar="FILE", help="Text to translate from, a sentence a line.")]
Target = Annotated[str | None, typer.Option(metavar="FILE", help="Its translation, line by line.")]
ValidSource = Annotated[str | None, typer.Option(metavar="FILE", help="Held-out text; split off if not given.")]
ValidTarget = Annotated[str | None, typer.Option(metavar="FILE", help="Its translation.")]
Pairs = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="Pairs in two columns between a tab. May be repeated.")
]
JsonPairs = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="Pairs as JSON: source and target. May be repeated.")
]
Text = Annotated[list[str] | None, typer.Option(metavar="FILE", help="Text for a language model. May be repeated.")]
LabelledText = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="Label, tab, text: for a classifier. May be repeated.")
]
HeldOut = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Held-out file of the same kind as --tsv, --jsonl, --text, --labelled."),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE", help="Store weights as int8 (fastest) or float16 (half the file); float32 if not given."
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads; what was measured here, or torch's choice, if not given.")
]


class Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt, which typer turns into an exit code that depends on its version."""


def main() -> None:
    """Run the command line. What a user can put right is one sentence on stderr and exit code 2; Ctrl-C is 130."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except RegardError as error:
        complain(str(error))
        sys.exit(2)
    except Interrupted:
        complain("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _interrupt(*_: object) -> None:
    raise Interrupted


def complain(sentence: str) -> None:
    """One sentence on stderr."""
    print(f"regard: {sentence}", file=sys.stderr)


def warn(sentence: str) -> None:
    """A warning on stderr."""
    complain(f"warning: {sentence}")


def print_json(value: Any) -> None:
    """The one document that --json promises."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def set_threads(threads: int | None, kind: "Kind" = "decode", device: str = "cpu", run: Path | None = None) -> None:
    """As many CPU threads as asked for; else as a run was trained with; else as this machine does best with.

    Only training is long enough to find that out first.
    """
    from regard.threads import chosen, recorded, said

    if threads is None and not said():
        threads = None if run is None else recorded(run)
        if threads is None and _on_cpu(device):
            threads = chosen(kind, measure=kind == "train")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _on_cpu(device: str) -> bool:
    """Whether `device` will be the CPU; a wrong name is complained about where it is used."""
    if device != "auto":
        return device == "cpu"
    import torch

    return not torch.cuda.is_available() and not torch.backends.mps.is_available()


def _version(wanted: bool) -> bool:
    if wanted:
        from regard import __version__

        print(f"regard {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None: ...
