"""Groups of command-line options that several commands share.

A group is a dataclass with one field per option. A function decorated with `command` receives all options of a group in
one parameter, whose type is the dataclass.
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

# Constructors of options, one for each panel of the help.
data_option = partial(typer.Option, metavar="FILE", rich_help_panel="Training data")
experiment_option = partial(typer.Option, rich_help_panel="Experiment")
search_option = partial(typer.Option, rich_help_panel="Search")
sampling_option = partial(typer.Option, rich_help_panel="Sampling")
cluster_option = partial(typer.Option, rich_help_panel="Cluster")
output_option = partial(typer.Option, rich_help_panel="Constraints on the output")


def command(panel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function a command, listed in `panel` of the help.

    If a parameter of the function is a group of options, the command has the options of the group instead.
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
    """Return the options of a group as keyword arguments, without those that are None."""
    return {name: value for name, value in asdict(options).items() if value is not None}


Average = Annotated[int | None, compute_option(min=1, metavar="N", help="Use the average of the last N checkpoints.")]
BatchSize = Annotated[
    int | None, compute_option(min=1, help="Number of lines per batch; affects only speed and memory. Default: 32.")
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
    """The options for training files that contain pairs of source and target."""

    source: Annotated[str | None, data_option(help="File with the source text, one sentence per line.")] = None
    target: Annotated[str | None, data_option(help="File with the translation of the source, line by line.")] = None
    valid_source: Annotated[
        str | None, data_option(help="File with the validation source. Default: a part of the training text.")
    ] = None
    valid_target: Annotated[
        str | None, data_option(help="File with the translation of the validation source, line by line.")
    ] = None
    tsv: Annotated[list[str] | None, data_option(help="File of tab-separated source and target. Repeatable.")] = None
    jsonl: Annotated[list[str] | None, data_option(help="File of JSON lines with source and target. Repeatable.")] = (
        None
    )
    valid: Annotated[str | None, data_option(help="Validation file in the format of the training file.")] = None

    def keywords(self) -> dict[str, Any]:
        """Return the files that are given, as keyword arguments for `regard.train`."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class TextFiles(PairFiles):
    """The options for training files (pairs of source and target, plain text, or labelled text)."""

    text: Annotated[list[str] | None, data_option(help="Text file, to train a language model. Repeatable.")] = None
    labelled: Annotated[list[str] | None, data_option(help="File of tab-separated label and text. Repeatable.")] = None


@dataclass(frozen=True)
class Runs:
    """The options of `ablate` and `ladder` that apply to all of their training runs."""

    base: Annotated[
        str | None,
        experiment_option(
            metavar="PRESET",
            help="Base model, with which all others are compared. Default: chosen to suit the text.",
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
    steps: Annotated[int | None, experiment_option(metavar="N", help="Number of training steps per model.")] = None
    metric: Annotated[
        str | None,
        experiment_option(
            metavar="NAME",
            help="Metric in addition to the loss, such as bleu, chrf, exact_match or rougeL.",
        ),
    ] = None
    search_rates: Annotated[
        bool,
        experiment_option(
            "--search-rates", help="First try 0.5, 1 and 2 times the learning rate for every model; use the best."
        ),
    ] = False
    jobs: Annotated[
        int | None,
        compute_option(
            min=1,
            metavar="N",
            help="Number of models trained at once. Default: one per GPU, or one per CPU core; 64 on Slurm.",
        ),
    ] = None
    device: Device = "auto"
    threads: Annotated[
        int | None,
        compute_option(
            min=1,
            help="Number of CPU threads per model. Default: the number of CPU cores divided by --jobs.",
        ),
    ] = None
    max_time: Annotated[
        str | None,
        compute_option(
            metavar="TIME",
            help="Time limit, such as 90s, 30m or 2h. Training runs that would exceed the limit are not started; to "
            "continue, run the command again.",
        ),
    ] = None
    trust_code: TrustCode = False


@dataclass(frozen=True)
class OnCluster:
    """The options of commands whose jobs may run on a cluster, as in `regard.runs.options.ClusterOptions`."""

    cluster: Annotated[
        str | None,
        cluster_option(
            metavar="KIND", help="Run the jobs on a cluster: slurm, or local (submitit's local executor, for tests)."
        ),
    ] = None
    partition: Annotated[
        str | None, cluster_option(metavar="NAME", help="Partition of Slurm. Default: that of the cluster.")
    ] = None
    cluster_options: Annotated[
        list[str] | None,
        cluster_option(
            "--cluster-option",
            metavar="KEY=VALUE",
            help="An option of sbatch for every job, such as time=120, mem=16GB or gpus_per_node=1. Repeatable.",
        ),
    ] = None


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
    top_k: Annotated[int | None, sampling_option(help="Top-k: sample only from the K most probable tokens.")] = None
    top_p: Annotated[
        float | None, sampling_option(help="Top-p: sample from the most probable tokens, up to this total probability.")
    ] = None
    min_p: Annotated[
        float | None,
        sampling_option(
            help="Min-p: sample only from tokens whose probability is at least this fraction of the highest "
            "token probability."
        ),
    ] = None
    seed: Annotated[int | None, sampling_option(min=0, help="Random seed for sampling.")] = None
    min_len: Annotated[int, output_option(min=0, metavar="N", help="Minimum length of an output, in tokens.")] = 0
    max_len: Annotated[
        int | None,
        output_option(
            min=1,
            metavar="N",
            help="Maximum length of an output, in tokens. Default: 200 for generate; for translate, computed from the "
            "length of the source.",
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
        int,
        output_option(
            min=0, metavar="N", help="Never repeat a sequence of N tokens in an output; 0 allows repetition."
        ),
    ] = 0


@dataclass(frozen=True)
class Loading:
    """The options for loading a trained model, as in `regard.runs.options.LoadOptions`, and `--threads`."""

    average: Average = None
    device: Device = "auto"
    threads: Threads = None
    plain: Plain = False
    trust_code: TrustCode = False

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments for `regard.load`."""
        return {name: value for name, value in asdict(self).items() if name != "threads"}

    def load(self, path: str, device: str | None = None, mapped: bool = False) -> "TrainedModel":
        """Return the trained model in the folder `path`, loaded onto `device` (default: that of `--device`)."""
        from regard.runs.trained_model import load

        options: dict[str, Any] = self.keywords() | {"device": device or self.device}
        return load(path, **options, mapped=mapped)

    def set_threads(self, parameters: int | None = None, device: str | None = None) -> None:
        """Set the number of CPU threads for decoding with a model of `parameters` parameters."""
        set_threads(self.threads, device=device or self.device, parameters=parameters)
