"""Commands that use a run: translate, generate, classify, score, evaluate."""

import errno
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.base import (
    USE,
    AsJson,
    Device,
    Plain,
    Quantize,
    Threads,
    TrustCode,
    app,
    complain,
    print_json,
    set_threads,
    warn,
)
from regard.cli.lines import lines_of, pieces_of
from regard.errors import DataError, SpecError

if TYPE_CHECKING:
    from regard.decoding.search import Search
    from regard.inference.text import Output
    from regard.runs.trained_model import TrainedModel

LINES, AHEAD = 32, 32  # lines of a batch, and batches that are read together to be sorted by length
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]
BatchSize = Annotated[
    int | None,
    typer.Option(min=1, show_default="32", help="Lines that are worked on together; changes nothing but speed."),
]
NBest = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Outputs of each line, best first; 1, or what the recipe says.")
]
MinLen = Annotated[int, typer.Option(min=0, help="Fewest tokens of an output.")]
MaxLen = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of an output; by the lengths of the training text, if not given.")
]
Prefix = Annotated[str, typer.Option(help="What every output begins with.")]
Require = Annotated[list[str] | None, typer.Option(help="A word that every output must hold. May be repeated.")]
Ban = Annotated[list[str] | None, typer.Option(help="A word that no output may hold. May be repeated.")]
NoRepeat = Annotated[int, typer.Option(min=0, metavar="N", help="No N tokens in a row twice; 0: they may.")]
Temperature = Annotated[
    float | None, typer.Option(help="Sample instead of searching; 1 as the model says, less is safer.")
]
TopK = Annotated[int | None, typer.Option(help="Sample from the K likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens that make up this probability.")]
MinP = Annotated[float | None, typer.Option(help="Sample from tokens at least this likely, relative to the likeliest.")]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Random seed of sampling; 0, or what the recipe says, if not given.")
]
Average = Annotated[int | None, typer.Option(min=1, metavar="N", help="Use the mean of the last N checkpoints.")]
Change = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change the search: normalise=gnmt, alpha=0.6, coverage=0.2, ..."),
]


@app.command(rich_help_panel=USE)
def translate(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN... [FILE]", help="One run, or several as an ensemble; a file.")
    ],
    beam: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Hypotheses kept at each step; 1 is greedy.")
    ] = None,
    n_best: NBest = None,
    batch_size: BatchSize = None,
    min_len: MinLen = 0,
    max_len: MaxLen = None,
    prefix: Prefix = "",
    require: Require = None,
    ban: Ban = None,
    no_repeat: NoRepeat = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    change: Change = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show every token as it is said; beam 1 or sampling.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="native, or ctranslate2: exports the run on first use, into RUN/exports.")
    ] = "native",
    quantize: Quantize = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes of one thread each, for much text on a CPU.")
    ] = None,
    average: Average = None,
    device: Device = "auto",
    threads: Threads = None,
    plain: Plain = False,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Translate a file or standard input, a line for every line.

    With --n-best N, N lines for every line. An input longer than the model was trained for is cut, with a warning. The
    search is that of the recipe (decode), unless options say otherwise.
    """
    from dataclasses import replace

    from regard.decoding.hypothesis import Limits
    from regard.inference.ctranslate2 import adapted
    from regard.inference.text import Constraints
    from regard.recipe.recipe import parse_changes
    from regard.runs.trained_model import load, texts_of
    from regard.runs.workers import Task, Workers

    paths, file = _runs_and_file(runs)
    processes = workers is not None and engine == "native"
    if workers is not None:
        _check_workers(stream, threads)
    if stream:
        _check_stream(batch_size, as_json)
    if plain and (engine != "native" or quantize is not None):
        raise SpecError("--plain", "is a form of the native engine; leave out --plain, or --engine and --quantize")
    if workers is not None or engine != "native":
        if device not in {"auto", "cpu"}:
            what = "--workers are processes" if processes else f"the engine {engine!r} is here"
            raise SpecError("--device", f"{what} on the CPU, not on {device!r}; leave it out")
        device = "cpu"
    loaded = [load(path, device, average, trust_code=trust_code, mapped=processes, plain=plain) for path in paths]
    set_threads(threads, device=device, parameters=max(run.parameters for run in loaded))
    for run in loaded:
        _needs(run, "translation", "translate")
    asked = SearchOptions(
        beam, n_best, {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}, seed
    )
    changes = parse_changes(change or [], "decode")
    search = asked.search(loaded[0].recipe.decode, changes)
    wishes = Constraints(prefix, tuple(require or ()), tuple(ban or ()), no_repeat)
    limits = Limits(min_len, max_len)
    texts = texts_of(loaded, warn)
    size = batch_size or LINES
    if engine != "native" or quantize is not None:
        if stream:
            raise SpecError("--stream", f"the engine {engine!r} shows only whole outputs; leave it out")
        if len(loaded) > 1:
            raise SpecError("--engine", f"{engine!r} cannot join several runs as an ensemble; give one run")
        texts = replace(texts, engine=loaded[0].engine(engine, quantize, workers or threads, complain))
        if "stopping" not in changes:
            search = adapted(search, warn)
    if stream:
        _stream(
            texts.translate_stream(line, search, limits, wishes, number) for number, line in enumerate(lines_of(file))
        )
    elif workers is not None and processes:
        task = Task(paths, search, size, limits, wishes, average, trust_code, plain)
        with Workers(workers, task) as several:
            _print_outputs(several.translate(lines_of(file), warn), as_json)
    else:
        outputs = (
            texts.translate(piece, search, size, limits, wishes, first)
            for first, piece in pieces_of(file, AHEAD * size)
        )
        _print_outputs(chain.from_iterable(outputs), as_json)


def _check_workers(stream: bool, threads: int | None) -> None:
    """Refuse what would be ignored beside --workers."""
    if stream:
        raise SpecError("--stream", "shows one text as it grows, and --workers many at once; choose one of them")
    if threads is not None:
        raise SpecError("--threads", "each of the --workers has one thread; leave it out")


def _check_stream(batch_size: int | None, as_json: bool) -> None:
    """Refuse what would be ignored beside --stream."""
    if as_json:
        raise SpecError("--stream", "writes text as it comes, and --json one document; choose one of them")
    if batch_size is not None:
        raise SpecError("--batch-size", "--stream works on one line at a time; leave it out")


def _print_outputs(outputs: "Iterable[list[Output]]", as_json: bool, whole: bool = False) -> None:
    """Outputs as they come, a line each; `whole` leaves the line feeds inside them, which would shift other lines."""
    if as_json:
        print_json([[_output(o) for o in best] for best in outputs])
        return
    for best in outputs:
        for output in best:
            _print_line(output.text if whole else _one_line(output.text))


@app.command(rich_help_panel=USE)
def generate(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN... [FILE]", help="One run, or several as an ensemble; a file.")
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue. May be repeated.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, metavar="N", help="Search instead of sampling.")] = None,
    n_best: NBest = None,
    batch_size: BatchSize = None,
    min_len: MinLen = 0,
    max_len: Annotated[
        int | None,
        typer.Option(min=1, help="Most new tokens; 200, or as many as the model has positions for, if not given."),
    ] = None,
    ban: Ban = None,
    no_repeat: NoRepeat = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    change: Change = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show every token as it is said.")] = False,
    average: Average = None,
    device: Device = "auto",
    threads: Threads = None,
    plain: Plain = False,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    r"""Continue prompts with a language model; prompts may also stand in a file, a line each, or on standard input (-).

    Samples, unless --beam or the recipe (decode) says otherwise. A newline inside --prompt is written \n; a file is
    read as it stands. Of a prompt that is too long only the end is read, with a warning.
    """
    from regard.decoding.hypothesis import Limits
    from regard.inference.text import Constraints
    from regard.recipe.recipe import parse_changes
    from regard.runs.trained_model import load, texts_of

    paths, file = _runs_and_file(runs)
    if prompt and file is not None:
        raise SpecError("--prompt", f"the prompts of {file} would be ignored; give one of the two")
    if stream:
        _check_stream(batch_size, as_json)
    loaded = [load(path, device, average, trust_code=trust_code, plain=plain) for path in paths]
    set_threads(threads, device=device, parameters=max(run.parameters for run in loaded))
    for run in loaded:
        _needs(run, "language_model", "generate")
    asked = SearchOptions(
        beam, n_best, {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}, seed
    )
    search = asked.search(loaded[0].recipe.decode, parse_changes(change or [], "decode"))
    wishes = Constraints("", (), tuple(ban or ()), no_repeat)
    texts, limits, size = texts_of(loaded, warn), Limits(min_len, max_len), batch_size or LINES
    prompts = [text.replace("\\n", "\n") for text in prompt or [""]]
    if stream:
        given = lines_of(file) if file is not None else prompts
        _stream((texts.generate_stream(text, search, limits, wishes, n) for n, text in enumerate(given)), whole=True)
        return
    pieces = pieces_of(file, AHEAD * size) if file is not None else [(0, prompts)]
    outputs = (texts.generate(piece, search, size, limits, wishes, first) for first, piece in pieces)
    _print_outputs(chain.from_iterable(outputs), as_json, whole=True)


@app.command(rich_help_panel=USE)
def classify(
    run: RunArgument,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="A text a line; standard input if not given.")
    ] = None,
    batch_size: BatchSize = None,
    average: Average = None,
    device: Device = "auto",
    threads: Threads = None,
    plain: Plain = False,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Name the class of every line of a file or standard input."""
    set_threads(threads, device=device)
    from regard.runs.trained_model import load

    loaded, size = load(run, device, average, trust_code=trust_code, plain=plain), batch_size or LINES
    _needs(loaded, "classification", "classify")
    guesses = (loaded.classify(piece, size, warn, first) for first, piece in pieces_of(file, AHEAD * size))
    if as_json:
        every = chain.from_iterable(guesses)
        print_json([{"label": guess.label, "probabilities": guess.probabilities} for guess in every])
        return
    for guess in chain.from_iterable(guesses):
        _print_line(guess.label)


@app.command(rich_help_panel=USE)
def score(
    run: RunArgument,
    source: Annotated[str | None, typer.Option(metavar="FILE", help="Source text (translation).")] = None,
    target: Annotated[str | None, typer.Option(metavar="FILE", help="The text whose probability is asked.")] = None,
    outputs: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What translate --json or generate --json printed, scored token by token."),
    ] = None,
    batch_size: BatchSize = None,
    average: Average = None,
    device: Device = "auto",
    threads: Threads = None,
    plain: Plain = False,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Print log p of every target line, given its source line; of a text alone for a language model; or of outputs.

    A line for every line, and with --outputs for every output. A text is scored as the tokenizer splits it and with its
    end; an output as it was said. A language model of a stream scores each line as it stands after a line feed.
    """
    set_threads(threads, device=device)
    from regard.runs.trained_model import load

    loaded, size = load(run, device, average, trust_code=trust_code, plain=plain), batch_size or LINES
    if loaded.objective.kind == "classification":  # before text is waited for
        _needs(loaded, "language_model", "score")
    translates = loaded.objective.kind == "translation"
    pieces: Iterable[tuple[int, Sequence[Any]]]
    if outputs is not None:
        for name, file in (("--source", source), ("--target", target)):
            if file is not None:
                raise SpecError(name, "--outputs hold what was read and what was said; leave it out")
        pieces = [(0, _outputs(outputs))]
    elif translates:
        pieces = [(0, _pairs(source, target))]
    else:
        if source is not None:
            raise SpecError("--source", "a language model reads no source; give --target alone")
        pieces = pieces_of(target, AHEAD * size)
    found = chain.from_iterable(loaded.score(piece, size, warn, first) for first, piece in pieces)
    if as_json:
        print_json(
            [{"log_prob": _number(s.log_prob), "tokens": s.tokens, "token_log_probs": s.token_log_probs} for s in found]
        )
        return
    for each in found:
        _print_line(f"{each.log_prob:.6f}")


@app.command(rich_help_panel=USE)
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or a file of its outputs.")],
    source: Annotated[str | None, typer.Option(metavar="FILE", help="Test text to translate.")] = None,
    reference: Annotated[str | None, typer.Option(metavar="FILE", help="Its translation by people.")] = None,
    tsv: Annotated[str | None, typer.Option(metavar="FILE", help="Source and reference in two columns.")] = None,
    text: Annotated[str | None, typer.Option(metavar="FILE", help="Test text for a language model.")] = None,
    labelled: Annotated[str | None, typer.Option(metavar="FILE", help="Labelled test text for a classifier.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="Another run, or a file of its outputs, to compare.")
    ] = None,
    tokenize: Annotated[str | None, typer.Option(help="sacreBLEU's tokenizer: 13a, none, intl, zh, char, ...")] = None,
    beam: Annotated[int | None, typer.Option(min=1, metavar="N", help="Hypotheses kept at each step.")] = None,
    batch_size: BatchSize = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens from window to window of a language model; half a window."),
    ] = None,
    average: Average = None,
    samples: Annotated[
        int | None, typer.Option(min=100, show_default="1000", help="Resamples of the paired bootstrap.")
    ] = None,
    change: Change = None,
    device: Device = "auto",
    threads: Threads = None,
    plain: Plain = False,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Measure a run on test text: BLEU, chrF, TER with signatures, perplexity; accuracy; or bits per byte.

    With --against another run, a paired bootstrap says whether the difference is more than chance.
    """
    from regard.recipe.recipe import parse_changes
    from regard.runs.evaluate import Test, evaluate_run, holds_outputs
    from regard.runs.trained_model import load

    if samples is not None and against is None:
        raise SpecError("--samples", "are of a comparison; give --against, or leave it out")
    changes = parse_changes(change or [], "decode")
    searching = {"--beam": beam is not None, "--set": bool(changes)}
    if all(name is None or holds_outputs(name) for name in (run, against)):
        computing = {
            "--average": average is not None,
            "--batch-size": batch_size is not None,
            "--device": device != "auto",
            "--plain": plain,
            "--stride": stride is not None,
        }
        _refuse(searching | computing, "files of outputs are only compared, nothing is computed")

    def loaded(path: str) -> "TrainedModel":
        found = load(path, device, average, trust_code=trust_code, plain=plain)
        kind = found.objective.kind
        set_threads(threads, device=device, parameters=found.parameters if kind == "translation" else None)
        if kind != "language_model":
            _refuse({"--stride": stride is not None}, f"{path} was trained for {kind} and reads no windows")
        if kind != "translation":
            about = {"--tokenize": tokenize is not None}
            if kind == "language_model":
                about["--batch-size"] = batch_size is not None
            _refuse(searching | about, f"{path} was trained for {kind} and translates nothing")
        return found

    test = Test(source, reference, tsv, text, labelled, tokenize, batch_size or LINES, stride)
    result = evaluate_run(
        loaded,
        run,
        against,
        test,
        lambda loaded: SearchOptions(beam).search(_fitting(loaded.recipe.decode, beam), changes),
        samples or 1000,
        warn,
    )
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        _print_fact(name, value)


def _fitting(search: "Search", beam: int | None) -> "Search":
    """A search that asks for no more outputs than a beam of this size holds: only the best is measured."""
    from dataclasses import replace

    from regard.decoding.beam import Beam

    if beam is None or not isinstance(search, Beam):
        return search
    return replace(search, n_best=min(search.n_best, beam))


def _print_fact(name: str, value: Any, indent: str = "") -> None:
    if isinstance(value, dict):
        print(f"{indent}{name}")
        for inner, each in value.items():
            _print_fact(inner, each, indent + "  ")
    else:
        print(f"{indent}{name:<14} {value:.4f}" if isinstance(value, float) else f"{indent}{name:<14} {value}")


def _runs_and_file(given: list[str]) -> tuple[list[str], str | None]:
    """Runs are folders; the last argument may be a file."""
    if len(given) > 1 and not Path(given[-1]).is_dir():
        return given[:-1], given[-1]
    return given, None


def _refuse(given: dict[str, bool], why: str) -> None:
    """Refuse the first option that was given and would be ignored."""
    for name, there in given.items():
        if there:
            raise SpecError(name, f"would be ignored: {why}; leave it out")


def _pairs(source: str | None, target: str | None) -> list[tuple[str, ...]]:
    from regard.data.text import ParallelFiles

    if source is None or target is None:
        raise SpecError("", "two aligned files are needed; give both --source and --target")
    return list(ParallelFiles(source, target).records())


def _outputs(file: str) -> "list[Output]":
    """All outputs of a document that `translate --json` or `generate --json` printed."""
    from regard.inference.text import Output

    try:
        document = json.loads("\n".join(lines_of(file)))
        flat = [one for best in document for one in best]
        return [
            Output(
                one["text"],
                -math.inf if one["score"] is None else float(one["score"]),
                -math.inf if one["log_prob"] is None else float(one["log_prob"]),
                tuple(one["tokens"]),
                bool(one["ended"]),
                _ids(one["ids"]),
                _ids(one["read"]),
            )
            for one in flat
        ]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file}: is not what translate --json or generate --json prints ({type(error).__name__}: {error})"
        ) from None


def _ids(written: Sequence[Any]) -> tuple[int, ...]:
    for each in written:
        if type(each) is not int:
            raise TypeError(f"{each!r} is no token id")
    return tuple(written)


def _needs(run: "TrainedModel", objective: str, command: str) -> None:
    use = {"translation": "translate", "language_model": "generate", "classification": "classify"}
    if run.objective.kind != objective:
        raise DataError(
            f"{run.path} was trained for {run.objective.kind}: regard {use[run.objective.kind]}, not {command}"
        )


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of a command line that change the search of a recipe; None: as the recipe has it."""

    beam: int | None = None
    n_best: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def search(self, usual: "Search", changes: dict[str, Any]) -> "Search":
        """The search of the recipe with these options: it samples if any setting of sampling is given.

        A search of the other kind than the recipe's begins with that kind's defaults. A search of the recipe that is
        neither a beam nor a sample takes no options: it is changed by path alone.
        """
        from dataclasses import replace

        from regard.decoding.beam import Beam
        from regard.decoding.sample import Sample
        from regard.recipe.recipe import PARTS
        from regard.tree import edit

        given = {name: value for name, value in self.sampling.items() if value is not None}
        if given and self.beam is not None:
            raise SpecError("--beam", "searches and sampling settings sample; choose one of them")
        if self.n_best is not None:
            given["n_best"] = self.n_best
        if not isinstance(usual, Beam | Sample):
            self._refuse(usual, given)
            return edit(usual, changes, PARTS) if changes else usual
        samples = self.beam is None and (isinstance(usual, Sample) or bool(given.keys() - {"n_best"}))
        if samples:
            if self.seed is not None:
                given["seed"] = self.seed
            search: Search = replace(usual if isinstance(usual, Sample) else Sample(), **given)
        else:
            if self.seed is not None:
                raise SpecError(
                    "--seed", "a beam draws nothing at random; leave it out, or sample with --temperature 1"
                )
            found = usual if isinstance(usual, Beam) else Beam()
            n_best = self.n_best or found.n_best
            beams = self.beam if self.beam is not None else max(found.beam_size, n_best)
            if n_best > beams:
                more = "" if self.n_best else ", which the recipe asks for (decode.n_best)"
                raise SpecError("--n-best", f"a beam of {beams} does not hold {n_best}{more}; raise --beam")
            given["beam_size"] = beams
            search = replace(found, beam_size=beams, n_best=n_best)
        return edit(search, self._edits(changes, given), PARTS) if changes else search

    def _refuse(self, usual: "Search", given: dict[str, Any]) -> None:
        options = {"beam": self.beam, "seed": self.seed} | given
        for name, value in options.items():
            if value is not None:
                raise SpecError(
                    f"--{name.replace('_', '-')}", f"the search of the recipe is {usual.kind!r}; change it with --set"
                )

    def _edits(self, changes: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        options = {name: f"--{name.replace('_', '-')}" for name in given} | {"beam_size": "--beam"}
        for path in changes:
            if path in given and (path != "beam_size" or self.beam is not None):
                raise SpecError("--set", f"{path} is what {options[path]} says already; give one of them")
        return changes


def _output(output: "Output") -> dict[str, Any]:
    return {
        "text": output.text,
        "score": _number(output.score),
        "log_prob": _number(output.log_prob),
        "tokens": list(output.tokens),
        "ended": output.ended,
        "ids": list(output.ids),
        "read": list(output.read),
    }


def _number(value: float) -> float | None:
    """A number as JSON has it, which knows no infinity."""
    return value if math.isfinite(value) else None


def _one_line(text: str) -> str:
    """A text on one line: a line feed inside it would shift all lines after it."""
    return text.replace("\n", " ")


def _print_line(text: str) -> None:
    """One line on stdout, at once."""
    _write(text + "\n")


def _write(text: str) -> None:
    if sys.stdout is None:  # Python's way to say that it is closed
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    sys.stdout.write(text)
    sys.stdout.flush()


def _stream(texts: Iterable[Iterator[str]], whole: bool = False) -> None:
    """Texts as they grow. `whole` leaves the line feeds inside them."""
    for pieces in texts:
        for piece in pieces:
            _write(piece if whole else _one_line(piece))
        _print_line("")
