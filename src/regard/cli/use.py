"""Commands that use a run: translate, generate, classify, score, evaluate."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from regard.cli.base import (
    USE,
    AsJson,
    Device,
    Quantize,
    Threads,
    TrustCode,
    app,
    complain,
    print_json,
    set_threads,
    warn,
)
from regard.errors import DataError, SpecError

if TYPE_CHECKING:
    from regard.decoding.api import Output
    from regard.decoding.search import Search
    from regard.run import Run

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Lines that are worked on together; changes nothing but speed.")]
MinLen = Annotated[int, typer.Option(min=0, help="Fewest tokens of an output.")]
MaxLen = Annotated[int | None, typer.Option(min=1, help="Most tokens of an output.")]
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
Seed = Annotated[int, typer.Option(help="Of sampling.")]
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
    n_best: Annotated[int, typer.Option(min=1, metavar="N", help="Translations of each line, best first.")] = 1,
    batch_size: BatchSize = 32,
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
    seed: Seed = 0,
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
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Translate a file or standard input, a line for every line.

    With --n-best N, N lines for every line. An input longer than the model was trained for is cut, with a warning.
    """
    set_threads(threads, device=device)
    from dataclasses import replace

    from regard.decoding.api import Wishes
    from regard.decoding.hypothesis import Limits
    from regard.engines.ctranslate2 import adapted
    from regard.run import load, texts_of
    from regard.workers import Task, Workers

    paths, file = _runs_and_file(runs)
    lines = _lines(file)
    processes = workers is not None and engine == "native"
    if workers is not None:
        _check_workers(stream, threads)
    if workers is not None or engine != "native":
        if device not in {"auto", "cpu"}:
            what = "--workers are processes" if processes else f"the engine {engine!r} is here"
            raise SpecError("--device", f"{what} on the CPU, not on {device!r}; leave it out")
        device = "cpu"
    loaded = [load(path, device, average, trust_code=trust_code, mapped=processes) for path in paths]
    for run in loaded:
        _needs(run, "translation", "translate")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    search = _search(loaded[0].recipe.decode, beam, n_best, sampling, seed, change or [])
    wishes = Wishes(prefix, tuple(require or ()), tuple(ban or ()), no_repeat)
    limits = Limits(min_len, max_len)
    texts = texts_of(loaded, warn)
    if engine != "native" or quantize is not None:
        if stream:
            raise SpecError("--stream", f"the engine {engine!r} shows only whole outputs; leave it out")
        if len(loaded) > 1:
            raise SpecError("--engine", f"{engine!r} cannot join several runs as an ensemble; give one run")
        texts = replace(texts, engine=loaded[0].engine(engine, quantize, workers or threads, complain))
        if not any(each.partition("=")[0].removeprefix("decode.") == "stopping" for each in change or []):
            search = adapted(search, warn)
    if stream:
        _stream((texts.translate_stream(line, search, limits, wishes) for line in lines), as_json)
    elif workers is not None and processes:
        task = Task(paths, search, batch_size, limits, wishes, average, trust_code)
        with Workers(workers, task) as several:
            _print_outputs(several.translate(lines, warn), as_json)
    else:
        _print_outputs(texts.translate(lines, search, batch_size, limits, wishes), as_json)


def _check_workers(stream: bool, threads: int | None) -> None:
    """Refuse what would be ignored beside --workers."""
    if stream:
        raise SpecError("--stream", "shows one text as it grows, and --workers many at once; choose one of them")
    if threads is not None:
        raise SpecError("--threads", "each of the --workers has one thread; leave it out")


def _print_outputs(outputs: "Iterator[list[Output]]", as_json: bool) -> None:
    if as_json:
        print_json([[_output(o) for o in best] for best in outputs])
        return
    for best in outputs:
        for output in best:
            _print_line(output.text)


@app.command(rich_help_panel=USE)
def generate(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN... [FILE]", help="One run, or several as an ensemble; a file.")
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue. May be repeated.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, metavar="N", help="Search instead of sampling.")] = None,
    n_best: Annotated[int, typer.Option(min=1, metavar="N", help="Continuations of each prompt.")] = 1,
    batch_size: BatchSize = 32,
    min_len: MinLen = 0,
    max_len: Annotated[int, typer.Option(min=1, help="Most new tokens.")] = 200,
    ban: Ban = None,
    no_repeat: NoRepeat = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    change: Change = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show every token as it is said.")] = False,
    average: Average = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    r"""Continue prompts with a language model; samples unless --beam is given. Prompts may also stand in a file.

    A newline inside a prompt is written \\n.
    """
    set_threads(threads, device=device)
    from regard.decoding.api import Wishes
    from regard.decoding.hypothesis import Limits
    from regard.decoding.sample import Sample
    from regard.run import load, texts_of

    paths, file = _runs_and_file(runs)
    prompts = [text.replace("\\n", "\n") for text in prompt] if prompt else list(_lines(file)) if file else ["\n"]
    loaded = [load(path, device, average, trust_code=trust_code) for path in paths]
    for run in loaded:
        _needs(run, "language_model", "generate")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    first: Search = loaded[0].recipe.decode if beam is not None else Sample()
    search = _search(first, beam, n_best, sampling, seed, change or [])
    wishes = Wishes("", (), tuple(ban or ()), no_repeat)
    texts, limits = texts_of(loaded, warn), Limits(min_len, max_len)
    begin = loaded[0].begin
    if not begin:
        prompts = [text or "\n" for text in prompts]
    if stream:
        _stream((texts.generate_stream(text, search, limits, wishes, begin) for text in prompts), as_json)
        return
    outputs = list(texts.generate(prompts, search, batch_size, limits, wishes, begin))
    if as_json:
        print_json([[_output(o) for o in best] for best in outputs])
        return
    for best in outputs:
        for output in best:
            print(output.text)


@app.command(rich_help_panel=USE)
def classify(
    run: RunArgument,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="A text a line; standard input if not given.")
    ] = None,
    batch_size: BatchSize = 32,
    average: Average = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Name the class of every line of a file or standard input."""
    set_threads(threads, device=device)
    from regard.run import load

    lines = list(_lines(file))
    loaded = load(run, device, average, trust_code=trust_code)
    guesses = loaded.classify(lines, batch_size, warn)
    if as_json:
        print_json([{"label": guess.label, "probabilities": guess.probabilities} for guess in guesses])
        return
    for guess in guesses:
        print(guess.label)


@app.command(rich_help_panel=USE)
def score(
    run: RunArgument,
    source: Annotated[str | None, typer.Option(metavar="FILE", help="Source text (translation).")] = None,
    target: Annotated[str | None, typer.Option(metavar="FILE", help="The text whose probability is asked.")] = None,
    batch_size: BatchSize = 32,
    average: Average = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Print log p of every target line, given its source line; of a text alone for a language model."""
    set_threads(threads, device=device)
    from regard.run import load

    loaded = load(run, device, average, trust_code=trust_code)
    records: list[Any]
    if loaded.objective.kind == "translation":
        records = _pairs(source, target, "--source", "--target")
    else:
        if source is not None:
            raise SpecError("--source", "a language model reads no source; give --target alone")
        records = list(_lines(target))
    found = loaded.score(records, batch_size)
    if as_json:
        print_json([{"log_prob": s.log_prob, "tokens": s.tokens, "token_log_probs": s.token_log_probs} for s in found])
        return
    for each in found:
        print(f"{each.log_prob:.6f}")


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
    batch_size: BatchSize = 32,
    average: Average = None,
    samples: Annotated[int, typer.Option(min=100, help="Resamples of the paired bootstrap.")] = 1000,
    change: Change = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Measure a run on test text: BLEU, chrF, TER with signatures, perplexity; accuracy; or bits per byte.

    With --against another run, a paired bootstrap says whether the difference is more than chance.
    """
    set_threads(threads, device=device)
    from regard.evaluation.report import Test, evaluate_run
    from regard.run import load

    test = Test(source, reference, tsv, text, labelled, tokenize, batch_size)
    result = evaluate_run(
        lambda path: load(path, device, average, trust_code=trust_code),
        run,
        against,
        test,
        lambda loaded: _search(loaded.recipe.decode, beam, 1, {}, 0, change or []),
        samples,
        warn,
    )
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        _print_fact(name, value)


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


def _lines(file: str | None) -> Iterator[str]:
    """The lines of a file, or of standard input."""
    from regard.data.text import decoded_lines, lines

    if file is not None and file != "-":
        return lines(file)
    stream: BinaryIO = sys.stdin.buffer
    with suppress(OSError):  # io.UnsupportedOperation, where it is no file
        # A buffer of our own: a thread may be waiting in it when we leave, and in its own Python would not allow that.
        stream = open(stream.fileno(), "rb", closefd=False)  # noqa: SIM115
    return decoded_lines(stream, "standard input")


def _pairs(source: str | None, target: str | None, *names: str) -> list[tuple[str, ...]]:
    from regard.data.text import ParallelFiles

    if source is None or target is None:
        raise SpecError("", f"two aligned files are needed; give both {names[0]} and {names[1]}")
    return list(ParallelFiles(source, target).records())


def _needs(run: "Run", objective: str, command: str) -> None:
    use = {"translation": "translate", "language_model": "generate", "classification": "classify"}
    if run.objective.kind != objective:
        raise DataError(
            f"{run.path} was trained for {run.objective.kind}: regard {use[run.objective.kind]}, not {command}"
        )


def _search(
    usual: "Search", beam: int | None, n_best: int, sampling: dict[str, Any], seed: int, changes: list[str]
) -> "Search":
    """The search asked for: sampling if any of its settings is given, else a beam."""
    from dataclasses import replace

    from regard.decoding.beam import Beam
    from regard.decoding.sample import Sample
    from regard.recipe import PARTS, parse_change
    from regard.tree import edit

    given = {name: value for name, value in sampling.items() if value is not None}
    if given and beam is not None:
        raise SpecError("--beam", "searches and sampling settings sample; choose one of them")
    if given or (isinstance(usual, Sample) and beam is None):
        base = usual if isinstance(usual, Sample) else Sample()
        search: Search = replace(base, n_best=n_best, seed=seed, **given)
    else:
        found = usual if isinstance(usual, Beam) else Beam()
        beams = beam if beam is not None else max(found.beams, n_best)
        if n_best > beams:
            raise SpecError("--n-best", f"a beam of {beams} does not hold {n_best}; raise --beam")
        search = replace(found, beams=beams, n_best=n_best)
    edits = {path.removeprefix("decode."): value for path, value in map(parse_change, changes)}
    return edit(search, edits, PARTS) if edits else search


def _output(output: "Output") -> dict[str, Any]:
    return {
        "text": output.text,
        "score": output.score,
        "log_prob": output.log_prob,
        "tokens": list(output.tokens),
        "ended": output.ended,
    }


def _print_line(text: str) -> None:
    """One line on stdout, whatever the text holds: a line feed inside it would shift all lines after it."""
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()


def _stream(texts: Iterator[Iterator[str]], as_json: bool) -> None:
    if as_json:
        raise SpecError("--stream", "writes text as it comes, and --json one document; choose one of them")
    for pieces in texts:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
