"""Groups of options shared by several commands.

A command with a parameter of one of these classes has all options of the class.
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from regard.cli.base import (
    COMPUTE,
    Device,
    HeldOut,
    JsonPairs,
    LabelledText,
    Pairs,
    Plain,
    Source,
    Target,
    Text,
    Threads,
    TrustCode,
    ValidSource,
    ValidTarget,
    app,
    set_threads,
)

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel

SEARCH, SAMPLING, OUTPUT, EXPERIMENT = "Search", "Sampling", "Constraints on the output", "Experiment"


def command(panel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a function to the command line.

    A parameter whose type is a group of options is replaced by the options of the group.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        groups: dict[str, type] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if is_dataclass(hints[name]):
                groups[name] = hints[name]
                types = get_type_hints(hints[name], include_extras=True)
                parameters += [
                    inspect.Parameter(f.name, parameter.kind, default=f.default, annotation=types[f.name])
                    for f in fields(hints[name])
                ]
            else:
                parameters.append(parameter.replace(annotation=hints[name]))

        def run(**options: Any) -> None:
            for name, group in groups.items():
                options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
            function(**options)

        run.__name__, run.__doc__ = function.__name__, _one_line_paragraphs(function)
        positional = sorted(
            parameters, key=lambda p: p.default is not p.empty
        )  # a stable sort keeps the order of the help
        run.__signature__ = inspect.Signature(positional)
        app.command(rich_help_panel=panel)(run)
        return function

    return register


def _one_line_paragraphs(function: Callable[..., None]) -> str:
    """Return the docstring with each paragraph on one line, so that the help can be wrapped to the terminal width."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(text if text.startswith("\b") else text.replace("\n", " ") for text in paragraphs)


Average = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Average the last N checkpoints.", rich_help_panel=COMPUTE)
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of lines computed together; affects speed only. Default: 32.", rich_help_panel=COMPUTE
    ),
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a search setting, such as normalise=gnmt, alpha=0.6 or coverage=0.2. Repeatable.",
        rich_help_panel=SEARCH,
    ),
]


@dataclass(frozen=True)
class PairFiles:
    """The options for files of text pairs to train on."""

    source: Source = None
    target: Target = None
    valid_source: ValidSource = None
    valid_target: ValidTarget = None
    tsv: Pairs = None
    jsonl: JsonPairs = None
    valid: HeldOut = None

    def keywords(self) -> dict[str, Any]:
        """Return the given files as keyword arguments for `regard.train`."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class TextFiles(PairFiles):
    """The options for files of pairs, plain text or labelled text to train on."""

    text: Text = None
    labelled: LabelledText = None


@dataclass(frozen=True)
class Runs:
    """The options of `ablate` and `ladder` that apply to all of their runs."""

    base: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET",
            help="The base model, with which all others are compared. Default: chosen to suit the text.",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Change the recipe of the base model, such as model.d_model=64. Repeatable.",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Number of training steps per run.", rich_help_panel=EXPERIMENT)
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A metric in addition to the loss, such as bleu, chrf, exact_match, rougeL or (ablate) perplexity.",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None
    search_rates: Annotated[
        bool,
        typer.Option(
            "--search-rates",
            help="First search for the best learning rate of every model, with equal effort.",
            rich_help_panel=EXPERIMENT,
        ),
    ] = False
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of simultaneous runs. Default: one per GPU, or one per CPU core.",
            rich_help_panel=COMPUTE,
        ),
    ] = None
    device: Device = "auto"
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of CPU threads per run. Default: the CPU cores divided by the number of simultaneous runs.",
            rich_help_panel=COMPUTE,
        ),
    ] = None
    max_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Start no run that would end after this time, such as 90s, 30m or 2h. To continue, run the command "
            "again.",
            rich_help_panel=COMPUTE,
        ),
    ] = None
    trust_code: TrustCode = False

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments for `regard.ablate`."""
        return asdict(self) | {"changes": self.changes or ()}


@dataclass(frozen=True)
class Decoding:
    """The options for search, sampling and constraints, as in `regard.runs.options.DecodingOptions`."""

    beam: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Beam size; 1 is greedy search.", rich_help_panel=SEARCH)
    ] = None
    n_best: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of outputs per line, best first.", rich_help_panel=SEARCH),
    ] = None
    changes: Change = None
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; lower is more conservative.", rich_help_panel=SAMPLING)
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the K most probable tokens.", rich_help_panel=SAMPLING)
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the smallest set of tokens with this total probability.", rich_help_panel=SAMPLING
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from tokens at least this probable, relative to the most probable one.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed for sampling.", rich_help_panel=SAMPLING)] = None
    min_len: Annotated[
        int, typer.Option(min=0, metavar="N", help="Minimum length in tokens.", rich_help_panel=OUTPUT)
    ] = 0
    max_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Maximum length in tokens. Default: 200 for generate; for translate, estimated from the training "
            "text.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    prefix: Annotated[str, typer.Option(help="Begin every output with this text.", rich_help_panel=OUTPUT)] = ""
    required: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="WORD",
            help="A word that every output must contain. Repeatable.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    banned: Annotated[
        list[str] | None,
        typer.Option(
            "--ban", metavar="WORD", help="A word that no output may contain. Repeatable.", rich_help_panel=OUTPUT
        ),
    ] = None
    no_repeat: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Forbid repeated sequences of N tokens. 0 allows them.",
            rich_help_panel=OUTPUT,
        ),
    ] = 0

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments for `regard.translate` and `regard.generate`."""
        return {name: () if value is None and name in _LISTS else value for name, value in asdict(self).items()}


_LISTS = {"changes", "required", "banned"}


@dataclass(frozen=True)
class Loading:
    """The options for loading a run, as in `regard.runs.options.LoadOptions`, and the number of CPU threads."""

    average: Average = None
    device: Device = "auto"
    threads: Threads = None
    plain: Plain = False
    trust_code: TrustCode = False

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments for `regard.load`."""
        return {name: value for name, value in asdict(self).items() if name != "threads"}

    def load(self, path: str, device: str | None = None, mapped: bool = False) -> "TrainedModel":
        """Return the trained model in the folder `path`, on `device`, or on that of `--device` if `device` is None."""
        from regard.runs.trained_model import load

        options: dict[str, Any] = self.keywords() | {"device": device or self.device}
        return load(path, **options, mapped=mapped)

    def set_threads(self, parameters: int | None = None, device: str | None = None) -> None:
        """Set the number of CPU threads for decoding with a model of this number of parameters."""
        set_threads(self.threads, device=device or self.device, parameters=parameters)
