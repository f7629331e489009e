"""The commands that use a trained model: `translate`, `generate`, `classify`, `score` and `evaluate`."""

import errno
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.base import USE, AsJson, Quantize, complain, compute_option, console, print_json, warn
from regard.cli.input_lines import lines_of, pieces_of
from regard.cli.options import BatchSize, Change, Decoding, Loading, OnCluster, cluster_option, command, given
from regard.errors import DataError, SpecError

if TYPE_CHECKING:
    from regard.inference.text import Output
    from regard.runs.trained_model import TrainedModel

LINES, AHEAD = 32, 32  # lines per batch; batches that are read at once and sorted by length
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a training run.")]
RunsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN... [FILE]",
        help="Folder of a training run, or several folders for an ensemble, followed by the file to read.",
    ),
]
Stream = Annotated[
    bool, typer.Option("--stream", help="Print each token as it is generated; needs beam size 1 or sampling.")
]


@command(USE)
def translate(
    runs: RunsArgument,
    decoding: Decoding,
    loading: Loading,
    cluster: OnCluster,
    stream: Stream = False,
    engine: Annotated[
        str, compute_option(help="Inference engine: native, or ctranslate2 (RUN is exported on first use).")
    ] = "native",
    quantize: Quantize = None,
    workers: Annotated[
        int | None,
        compute_option(
            min=1,
            metavar="N",
            help="Number of worker processes with one CPU thread each, for large files; with --cluster, number of "
            "simultaneous jobs.",
        ),
    ] = None,
    work: Annotated[
        str | None,
        cluster_option(metavar="DIR", help="Folder, shared by all nodes, for finished shards. Default: FILE.shards."),
    ] = None,
    shard_lines: Annotated[
        int | None, cluster_option(min=1, metavar="N", help="Number of lines per job. Default: 10000.")
    ] = None,
    batch_size: BatchSize = None,
    as_json: AsJson = False,
) -> None:
    """Translate a file or standard input, line by line.

    With --n-best N, N lines are printed for every input line. Search settings that you do not give are taken from the
    recipe (section decode). An input with more tokens than data.max_len in the recipe is truncated, with a warning.

    With --cluster, shards of a large file are translated by jobs of a cluster, and printed in order. Shards that were
    finished before an interruption are not translated again.
    """
    from regard.cluster.schedulers import cluster_from_options
    from regard.runs.decode import text_decoder
    from regard.runs.shards import Shards, check_options, node_task
    from regard.runs.workers import Workers, task_of

    paths, file = _runs_and_file(runs)
    on_cluster = cluster_from_options(**given(cluster))
    check_options(on_cluster, engine, work, shard_lines)
    if on_cluster is not None:
        work = _work_folder(work, file, stream)
    processes = workers is not None and engine == "native" and on_cluster is None
    if workers is not None and on_cluster is None:
        _check_workers(stream, loading.threads)
    if stream:
        _check_stream(batch_size, as_json)
    if loading.plain and (engine != "native" or quantize is not None):
        raise SpecError("--plain", "applies only to the native engine; leave out --plain, or --engine and --quantize")
    device = loading.device if on_cluster is None else "cpu"
    if (workers is not None and on_cluster is None) or engine != "native":
        if device not in {"auto", "cpu"}:
            what = "--workers compute" if processes else f"the engine {engine!r} computes"
            raise SpecError("--device", f"{what} on the CPU, not on {device!r}; leave out --device")
        device = "cpu"
    loaded = [loading.load(path, device, mapped=processes) for path in paths]
    loading.set_threads(max(run.parameters for run in loaded), device)
    for run in loaded:
        run.check_command("translate")
    if stream and (engine != "native" or quantize is not None):
        raise SpecError("--stream", f"the engine {engine!r} returns only whole outputs; leave out --stream")
    decoder = text_decoder(
        loaded,
        **given(decoding),
        batch_size=batch_size or LINES,
        engine=engine,
        quantize=quantize,
        threads=workers or loading.threads,
        warn=warn,
        report=complain,
    )
    if on_cluster is not None:
        task = node_task(task_of(decoder, paths, loading.keywords()), loading.device, loading.threads)
        with Shards(on_cluster, Path(work or ""), task, workers, shard_lines, complain) as shards:
            _print_outputs(shards.translate(lines_of(file), warn), as_json)
    elif stream:
        _stream(decoder.stream(line, number) for number, line in enumerate(lines_of(file)))
    elif workers is not None and processes:
        with Workers(workers, task_of(decoder, paths, loading.keywords())) as several:
            _print_outputs(several.translate(lines_of(file), warn), as_json)
    else:
        pieces = pieces_of(file, AHEAD * decoder.batch_size)
        _print_outputs(chain.from_iterable(decoder.outputs(piece, first) for first, piece in pieces), as_json)


def _work_folder(work: str | None, file: str | None, stream: bool) -> str:
    """Return the folder for finished shards."""
    if stream:
        raise SpecError("--stream", "prints tokens as they are generated, but --cluster translates whole shards")
    if work is None and (file is None or file == "-"):
        raise SpecError("--work", "is missing; with --cluster, name a file to translate, or a folder for its shards")
    return work or f"{file}.shards"


def _check_workers(stream: bool, threads: int | None) -> None:
    """Raise an error for options that have no effect with `--workers`."""
    if stream:
        raise SpecError(
            "--stream", "prints one text at a time, but --workers translate several at once; leave out one of the two"
        )
    if threads is not None:
        raise SpecError("--threads", "each of the --workers has one thread; leave out --threads")


def _check_stream(batch_size: int | None, as_json: bool) -> None:
    """Raise an error for options that have no effect with `--stream`."""
    if as_json:
        raise SpecError(
            "--stream",
            "prints tokens as they are generated, but --json prints one document at the end; leave out one of the two",
        )
    if batch_size is not None:
        raise SpecError("--batch-size", "--stream decodes one line at a time; leave out --batch-size")


def _print_outputs(outputs: "Iterable[list[Output]]", as_json: bool, whole: bool = False) -> None:
    """Print each output as soon as it is available. Line feeds inside an output become spaces unless `whole` is set."""
    if as_json:
        print_json([[_output_record(output) for output in best] for best in outputs])
        return
    for output in chain.from_iterable(outputs):
        _write((output.text if whole else output.text.replace("\n", " ")) + "\n")


@command(USE)
def generate(
    runs: RunsArgument,
    decoding: Decoding,
    loading: Loading,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text to continue. Repeatable.")] = None,
    stream: Stream = False,
    batch_size: BatchSize = None,
    as_json: AsJson = False,
) -> None:
    r"""Continue prompts with a language model.

    The prompts are those of --prompt, or the lines of a file or of standard input (-). Continuations are sampled,
    unless --beam or the recipe (section decode) selects beam search. In --prompt, \n stands for a line feed. If a
    prompt is too long, only its end is read, with a warning.
    """
    from regard.runs.decode import text_decoder

    paths, file = _runs_and_file(runs)
    if prompt and file is not None:
        raise SpecError("--prompt", f"cannot be combined with the prompts in {file}; give one of the two")
    if stream:
        _check_stream(batch_size, as_json)
    loaded = [loading.load(path) for path in paths]
    loading.set_threads(max(run.parameters for run in loaded))
    for run in loaded:
        run.check_command("generate")
    decoder = text_decoder(loaded, **given(decoding), batch_size=batch_size or LINES, warn=warn)
    prompts = [text.replace("\\n", "\n") for text in prompt or [""]]
    if stream:
        texts = lines_of(file) if file is not None else prompts
        _stream((decoder.stream(text, number) for number, text in enumerate(texts)), whole=True)
        return
    pieces = pieces_of(file, AHEAD * decoder.batch_size) if file is not None else [(0, prompts)]
    outputs = chain.from_iterable(decoder.outputs(piece, first) for first, piece in pieces)
    _print_outputs(outputs, as_json, whole=True)


@command(USE)
def classify(
    run: RunArgument,
    loading: Loading,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="File of texts, one per line. Default: standard input.")
    ] = None,
    batch_size: BatchSize = None,
    as_json: AsJson = False,
) -> None:
    """Print the predicted class of each line of a file or of standard input."""
    loading.set_threads()
    loaded, size = loading.load(run), batch_size or LINES
    loaded.check_command("classify")
    pieces = pieces_of(file, AHEAD * size)
    predictions = chain.from_iterable(loaded.classify(piece, size, warn, first) for first, piece in pieces)
    if as_json:
        print_json([asdict(prediction) for prediction in predictions])
        return
    for prediction in predictions:
        _write(f"{prediction.label}\n")


@command(USE)
def score(
    run: RunArgument,
    loading: Loading,
    source: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of source texts, for a translation model.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="FILE", help="File of texts to score, one per line.")] = None,
    outputs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File of outputs to score token by token, written by `translate --json` or `generate --json`.",
        ),
    ] = None,
    batch_size: BatchSize = None,
    as_json: AsJson = False,
) -> None:
    """Print the log-probability of each text.

    A translation is scored given its source. The log-probability includes that of the end-of-text token. Texts are
    tokenized before they are scored. With --outputs, nothing is tokenized: the generated token ids in the file are
    scored. A language model that was trained on continuous text (a stream) scores each line as if it followed a line
    feed.
    """
    from regard.data.text import ParallelFiles

    loading.set_threads()
    loaded, size = loading.load(run), batch_size or LINES
    if loaded.command == "classify":  # refuse before waiting for input
        loaded.check_command("score")
    pieces: Iterable[tuple[int, Sequence[Any]]]
    if outputs is not None:
        for name, file in (("--source", source), ("--target", target)):
            if file is not None:
                raise SpecError(name, f"--outputs contains the sources and the outputs; leave out {name}")
        pieces = [(0, _outputs(outputs))]
    elif loaded.command == "translate":
        if source is None or target is None:
            raise SpecError("", "two aligned files are needed; give both --source and --target")
        pieces = [(0, list(ParallelFiles(source, target).records()))]
    else:
        if source is not None:
            raise SpecError("--source", "a language model has no source; give --target alone")
        pieces = pieces_of(target, AHEAD * size)
    scores = chain.from_iterable(loaded.score(piece, size, warn, first) for first, piece in pieces)
    if as_json:
        print_json(
            [
                {"log_prob": _number(s.log_prob), "tokens": s.tokens, "token_log_probs": s.token_log_probs}
                for s in scores
            ]
        )
        return
    for each in scores:
        _write(f"{each.log_prob:.6f}\n")


@dataclass(frozen=True)
class Evaluation:
    """The options of `evaluate`, as in `regard.runs.options.EvaluationOptions`."""

    source: Annotated[str | None, typer.Option(metavar="FILE", help="File of test texts to translate.")] = None
    reference: Annotated[str | None, typer.Option(metavar="FILE", help="File of reference translations.")] = None
    tsv: Annotated[str | None, typer.Option(metavar="FILE", help="File of tab-separated source and reference.")] = None
    jsonl: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of JSON objects, one per line, with source and target.")
    ] = None
    text: Annotated[str | None, typer.Option(metavar="FILE", help="File of test text for a language model.")] = None
    labelled: Annotated[str | None, typer.Option(metavar="FILE", help="File of tab-separated label and text.")] = None
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="Compare with another run, or with a file of its outputs.")
    ] = None
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Metric to compute: bleu, chrf, rougeL, ..., or module:Class for a metric of your own. Repeatable.",
        ),
    ] = None
    samples: Annotated[
        int | None, typer.Option(min=100, help="Number of resamples in the paired bootstrap. Default: 1000.")
    ] = None
    tokenize: Annotated[str | None, typer.Option(help="Tokenizer of sacreBLEU: 13a, none, intl, zh, char, ...")] = None
    beam: Annotated[int | None, typer.Option(min=1, metavar="N", help="Beam size; 1 is greedy search.")] = None
    changes: Change = None
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="For a language model: tokens between the starts of adjacent windows. Default: half a window.",
        ),
    ] = None
    windows: Annotated[
        str | None,
        typer.Option(
            metavar="W,W,...",
            help="For a language model: also evaluate it with attention limited to the last W tokens in each layer.",
        ),
    ] = None
    batch_size: BatchSize = None


@command(USE)
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a training run, or a file of its outputs.")],
    loading: Loading,
    evaluation: Evaluation,
    as_json: AsJson = False,
) -> None:
    """Measure the quality of a trained model on test text.

    The default metrics of a translation model are BLEU, chrF and TER (with signatures), exact match and perplexity.
    Those of a summarization model are ROUGE-L, ROUGE-1, ROUGE-2, chrF and perplexity. Those of a classifier are
    accuracy and Matthews correlation. Those of a language model are loss, perplexity and bits per byte.

    With --against, a paired bootstrap tests whether the two models differ by more than chance.
    """
    from regard.runs.evaluate import evaluate as evaluate_options
    from regard.runs.trained_model import load

    def loaded(path: str, **options: Any) -> "TrainedModel":
        model = load(path, **options)
        loading.set_threads(model.parameters if model.command == "translate" else None)
        return model

    result = evaluate_options(run, loaded, **given(evaluation), warn=warn, **loading.keywords())
    if as_json:
        print_json(result)
        return
    windows = result.pop("windows", ())
    for name, value in result.items():
        _print_fact(name, value)
    if windows:
        _print_windows(windows)


def _print_windows(rows: list[dict[str, Any]]) -> None:
    """Print the scores of a language model by attention window, as a table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    console().print(table)


def _print_fact(name: str, value: Any, indent: str = "") -> None:
    if isinstance(value, dict):
        print(f"{indent}{name}")
        for inner, each in value.items():
            _print_fact(inner, each, indent + "  ")
    else:
        print(f"{indent}{name:<14} {value:.4f}" if isinstance(value, float) else f"{indent}{name:<14} {value}")


def _runs_and_file(arguments: list[str]) -> tuple[list[str], str | None]:
    """Return the run folders and the input file (or None). The last of several arguments may be this file."""
    if len(arguments) > 1 and not Path(arguments[-1]).is_dir():
        return arguments[:-1], arguments[-1]
    return arguments, None


def _outputs(file: str) -> "list[Output]":
    """Read a file written by `translate --json` or `generate --json`, and return all of its outputs in one list."""
    from regard.inference.text import Output

    try:
        document = json.loads("\n".join(lines_of(file)))
        return [
            Output(
                record["text"],
                -math.inf if record["score"] is None else float(record["score"]),
                -math.inf if record["log_prob"] is None else float(record["log_prob"]),
                tuple(record["tokens"]),
                bool(record["ended"]),
                _ids(record["ids"]),
                _ids(record["read"]),
            )
            for best in document
            for record in best
        ]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file}: is not the output of translate --json or generate --json ({type(error).__name__}: {error})"
        ) from None


def _ids(values: Sequence[Any]) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int:
            raise TypeError(f"{value!r} is not a token id")
    return tuple(values)


def _output_record(output: "Output") -> dict[str, Any]:
    return asdict(output) | {"score": _number(output.score), "log_prob": _number(output.log_prob)}


def _number(value: float) -> float | None:
    """Return the value, or None for infinity and NaN, which JSON cannot store."""
    return value if math.isfinite(value) else None


def _write(text: str) -> None:
    """Write text to standard output and flush it."""
    if sys.stdout is None:  # standard output is closed
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    sys.stdout.write(text)
    sys.stdout.flush()


def _stream(texts: Iterable[Iterator[str]], whole: bool = False) -> None:
    """Print each text while it is generated. Line feeds inside a text become spaces unless `whole` is set."""
    for pieces in texts:
        for piece in pieces:
            _write(piece if whole else piece.replace("\n", " "))
        _write("\n")
