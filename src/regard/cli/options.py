"""Groups of options shared by several commands.

A command with a parameter of one of these classes has all options of the class.
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from regard.cli.base import Device, Plain, Threads, TrustCode, app, compute_option, set_threads

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel

# Options by panel of the help.
data_option = partial(typer.Option, metavar="FILE", rich_help_panel="Training data")
experiment_option = partial(typer.Option, rich_help_panel="Experiment")
search_option = partial(typer.Option, rich_help_panel="Search")
sampling_option = partial(typer.Option, rich_help_panel="Sampling")
output_option = partial(typer.Option, rich_help_panel="Constraints on the output")


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

        # Each paragraph on one line, so that the help can be wrapped to the terminal width.
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        run.__doc__ = "\n\n".join(text if text.startswith("\b") else text.replace("\n", " ") for text in paragraphs)
        run.__name__ = function.__name__
        parameters.sort(key=lambda p: p.default is not p.empty)  # a stable sort keeps the order of the help
        run.__signature__ = inspect.Signature(parameters)
        app.command(rich_help_panel=panel)(run)
        return function

    return register


def given(options: Any) -> dict[str, Any]:
    """Return the options of a group that are not None, as keyword arguments for the function of the command."""
    return {name: value for name, value in asdict(options).items() if value is not None}


Average = Annotated[int | None, compute_option(min=1, metavar="N", help="Average the last N checkpoints.")]
BatchSize = Annotated[
    int | None, compute_option(min=1, help="Number of lines computed together; affects speed only. Default: 32.")
]
Change = Annotated[
    list[str] | None,
    search_option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a search setting, such as normalise=gnmt, alpha=0.6 or coverage=0.2. Repeatable.",
    ),
]


@dataclass(frozen=True)
class PairFiles:
    """The options for files of text pairs to train on."""

    source: Annotated[str | None, data_option(help="Source text, one sentence per line.")] = None
    target: Annotated[str | None, data_option(help="The translation of the source, line by line.")] = None
    valid_source: Annotated[
        str | None, data_option(help="Validation source. Default: a part of the training text.")
    ] = None
    valid_target: Annotated[str | None, data_option(help="The translation of the validation source.")] = None
    tsv: Annotated[list[str] | None, data_option(help="Tab-separated source and target. Repeatable.")] = None
    jsonl: Annotated[list[str] | None, data_option(help="JSON lines with source and target. Repeatable.")] = None
    valid: Annotated[str | None, data_option(help="Validation file of the same format as the training file.")] = None

    def keywords(self) -> dict[str, Any]:
        """Return the given files as keyword arguments for `regard.train`."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class TextFiles(PairFiles):
    """The options for files of pairs, plain text or labelled text to train on."""

    text: Annotated[list[str] | None, data_option(help="Text for a language model. Repeatable.")] = None
    labelled: Annotated[list[str] | None, data_option(help="Tab-separated label and text. Repeatable.")] = None


@dataclass(frozen=True)
class Runs:
    """The options of `ablate` and `ladder` that apply to all of their runs."""

    base: Annotated[
        str | None,
        experiment_option(
            metavar="PRESET",
            help="The base model, with which all others are compared. Default: chosen to suit the text.",
        ),
    ] = None
    changes: Annotated[
        list[str] | None,
        experiment_option(
            "--set",
            metavar="PATH=VALUE",
            help="Change the recipe of the base model, such as model.d_model=64. Repeatable.",
        ),
    ] = None
    steps: Annotated[int | None, experiment_option(metavar="N", help="Number of training steps per run.")] = None
    metric: Annotated[
        str | None,
        experiment_option(
            metavar="NAME",
            help="A metric in addition to the loss, such as bleu, chrf, exact_match or rougeL.",
        ),
    ] = None
    search_rates: Annotated[
        bool,
        experiment_option(
            "--search-rates", help="First search for the best learning rate of every model, with equal effort."
        ),
    ] = False
    jobs: Annotated[
        int | None,
        compute_option(
            min=1, metavar="N", help="Number of simultaneous runs. Default: one per GPU, or one per CPU core."
        ),
    ] = None
    device: Device = "auto"
    threads: Annotated[
        int | None,
        compute_option(
            min=1,
            help="Number of CPU threads per run. Default: the CPU cores divided by the number of simultaneous runs.",
        ),
    ] = None
    max_time: Annotated[
        str | None,
        compute_option(
            metavar="TIME",
            help="Start no run that would end after this time, such as 90s, 30m or 2h. To continue, run the command "
            "again.",
        ),
    ] = None
    trust_code: TrustCode = False


@dataclass(frozen=True)
class Decoding:
    """The options for search, sampling and constraints, as in `regard.runs.options.DecodingOptions`."""

    beam: Annotated[int | None, search_option(min=1, metavar="N", help="Beam size; 1 is greedy search.")] = None
    n_best: Annotated[int | None, search_option(min=1, metavar="N", help="Number of outputs per line, best first.")] = (
        None
    )
    changes: Change = None
    temperature: Annotated[float | None, sampling_option(help="Sampling temperature; lower is more conservative.")] = (
        None
    )
    top_k: Annotated[int | None, sampling_option(help="Sample from the K most probable tokens.")] = None
    top_p: Annotated[
        float | None, sampling_option(help="Sample from the smallest set of tokens with this total probability.")
    ] = None
    min_p: Annotated[
        float | None,
        sampling_option(help="Sample from tokens at least this probable, relative to the most probable one."),
    ] = None
    seed: Annotated[int | None, sampling_option(min=0, help="Random seed for sampling.")] = None
    min_len: Annotated[int, output_option(min=0, metavar="N", help="Minimum length in tokens.")] = 0
    max_len: Annotated[
        int | None,
        output_option(
            min=1,
            metavar="N",
            help="Maximum length in tokens. Default: 200 for generate; for translate, estimated from the training "
            "text.",
        ),
    ] = None
    prefix: Annotated[str, output_option(help="Begin every output with this text.")] = ""
    required: Annotated[
        list[str] | None,
        output_option("--require", metavar="WORD", help="A word that every output must contain. Repeatable."),
    ] = None
    banned: Annotated[
        list[str] | None, output_option("--ban", metavar="WORD", help="A word that no output may contain. Repeatable.")
    ] = None
    no_repeat: Annotated[
        int, output_option(min=0, metavar="N", help="Forbid repeated sequences of N tokens. 0 allows them.")
    ] = 0


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
