"""Load trained models and serve them over HTTP until the process is stopped."""

import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from regard.errors import DataError, SpecError, nearest
from regard.inference.engine import Engine
from regard.runs.inference import load_runs
from regard.runs.options import LoadOptions, accepts, cpu_threads, several
from regard.runs.trained_model import TrainedModel
from regard.serving.languages import code_in
from regard.serving.settings import Pair, Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

KEY_VARIABLE = "REGARD_API_KEY"
PACKAGES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client", "py3langid")
BACKLOG = 2048  # connections that wait to be accepted
MARGIN = 5  # seconds that remain for sending the last answers when the server stops
Report = Callable[[str], None]


@accepts(LoadOptions, load_runs)
def serve(  # noqa: PLR0913  # the options of the command line
    runs: str | Path | TrainedModel | Sequence[str | Path | TrainedModel],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    pairs: str | Sequence[str] = (),
    api_key_file: str | Path | None = None,
    allow_hosts: str | Sequence[str] = (),
    allow_origins: str | Sequence[str] = (),
    engine: str = "native",
    quantize: str | None = None,
    threads: int | None = None,
    max_batch: int = 64,
    queue: int = 256,
    timeout: float = 60.0,
    max_body: int = 1 << 20,
    max_texts: int = 128,
    max_chars: int = 10_000,
    max_beam: int = 16,
    max_new_tokens: int = 2048,
    report: Report = lambda _: None,
    extend: "Callable[[FastAPI], None] | None" = None,
    **loading: Unpack[LoadOptions],
) -> None:
    """Serve trained models over HTTP, and return when the process receives SIGTERM or SIGINT.

        regard.serve("runs/mine", port=8000, pairs="en:de")

    All requests that were accepted are answered before the function returns. Port 0 stands for any free port. API keys
    are read from `api_key_file` or from the environment variable REGARD_API_KEY, one per line. `report` is called with
    messages about the server. `extend` is called with the application before it starts, and may add routes.
    """
    check_installed()
    keys = read_keys(api_key_file)
    if engine != "native":
        if loading.get("device", "auto") not in {"auto", "cpu"}:
            message = f"the engine {engine!r} computes on the CPU, not on {loading.get('device')!r}; leave out --device"
            raise SpecError("--device", message)
        if loading.get("plain"):
            raise SpecError("--plain", "applies only to the native engine; leave out --plain or --engine")
        loading["device"] = "cpu"
    with listen(host, port) as listener, cpu_threads(threads):
        models = named(load_runs(runs, **loading))
        settings = Settings(
            host=host,
            pairs=pairs_of(models, several(pairs)),
            keys=keys,
            allow_hosts=tuple(several(allow_hosts)),
            allow_origins=tuple(several(allow_origins)),
            queue=queue,
            max_batch=max_batch,
            timeout=timeout,
            max_body=max_body,
            max_texts=max_texts,
            max_chars=max_chars,
            max_beam=max_beam,
            max_new_tokens=max_new_tokens,
        )
        engines = load_engines(models, engine, quantize, threads, report)
        for name, run in models.items():
            pair = settings.pairs.get(name)
            languages = f", {pair.source} to {pair.target}" if pair else ""
            report(f"{name}: {run.command}{languages}, {run.parameters:,} parameters, {engine} engine on {run.device}")
        run_server(models, settings, engines, listener, report, extend)


def check_installed() -> None:
    """Raise DataError if a package of the server is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise DataError(f"the server needs {', '.join(missing)}: pip install 'regard[serve]'")


def read_keys(file: str | Path | None) -> tuple[str, ...]:
    """Return the API keys in a file, or else in the environment variable REGARD_API_KEY, one per line."""
    if file is None:
        text, where = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
        if not text:
            return ()
    else:
        where = str(file)
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise DataError(f"{where}: the API keys cannot be read ({reason}); name a readable file") from None
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise DataError(f"{where}: contains no API key; write one key per line")
    return keys


def named(runs: Sequence[TrainedModel]) -> dict[str, TrainedModel]:
    """Return the models by the names of their run folders."""
    models: dict[str, TrainedModel] = {}
    for run in runs:
        name = run.path.resolve().name
        if name in models:
            raise DataError(f"{models[name].path} and {run.path} have the same name; rename one of the folders")
        models[name] = run
    return models


def pairs_of(models: dict[str, TrainedModel], options: Sequence[str]) -> dict[str, Pair]:
    """Return the languages of the translation models: those of `options`, or else those in the names of their files.

    An option is RUN=en:de, or en:de if there is only one model that translates.
    """
    translators = [name for name, run in models.items() if run.command == "translate"]
    pairs: dict[str, Pair] = {}
    for option in options:
        name, equals, codes = option.rpartition("=")
        name = Path(name).resolve().name if equals else (translators[0] if len(translators) == 1 else "")
        source, colon, target = codes.partition(":")
        if not name or not colon:
            raise SpecError("--pair", f"{option!r} does not name a run and its languages; write RUN=en:de")
        if name not in translators:
            raise SpecError("--pair", f"{name!r} is no run that translates; {nearest(name, translators)}")
        if name in pairs:
            raise SpecError("--pair", f"{name!r} has two pairs of languages; give one")
        pairs[name] = Pair(source, target)
    for name in translators:
        found = pair_in_recipe(models[name])
        if name not in pairs and found is not None:
            pairs[name] = found
    owners: dict[Pair, str] = {}
    for name, pair in pairs.items():
        if pair in owners:
            raise SpecError("--pair", f"{owners[pair]!r} and {name!r} both translate {pair}; serve one of them")
        owners[pair] = name
    return pairs


def pair_in_recipe(run: TrainedModel) -> Pair | None:
    """Return the languages in the names of the training files, such as train.en and train.de, or None."""
    for corpus in run.recipe.data.train:
        source, target = (code_in(str(getattr(corpus, side, ""))) for side in ("source", "target"))
        if source and target and source != target and not run.objective.summarizes:
            return Pair(source, target)
    return None


def load_engines(
    models: dict[str, TrainedModel], name: str, quantize: str | None, threads: int | None, report: Report
) -> dict[str, Engine]:
    """Return the engines of the models; {} if the native engine computes all of them."""
    engines: dict[str, Engine] = {}
    for model, run in models.items():
        if name != "native" and run.command != "translate":
            raise SpecError("--engine", f"{name!r} only translates, but {model!r} is used with {run.command}")
        engine = run.engine(name, quantize, threads, report)
        if engine is not None:
            engines[model] = engine
    return engines


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Context manager that binds a socket before any model is loaded; raise DataError if that is not possible."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise DataError(f"--host {host}: there is no such address ({error.strerror}); use 127.0.0.1") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        what = f"port {port} of {host} cannot be used ({error.strerror})"
        raise DataError(f"{what}; choose another with --port, or 0 for any free port") from None
    try:
        yield listener
    finally:
        listener.close()


def run_server(
    models: dict[str, TrainedModel],
    settings: Settings,
    engines: dict[str, Engine],
    listener: socket.socket,
    report: Report,
    extend: "Callable[[FastAPI], None] | None" = None,
) -> None:
    """Answer requests until the process receives SIGTERM or SIGINT, then finish those that were accepted."""
    import uvicorn  # noqa: PLC0415  # an optional dependency, like those of the next import

    from regard.serving.app import create_app  # noqa: PLC0415

    app = create_app(models, settings, engines)
    if extend is not None:
        extend(app)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        limit_concurrency=max(1024, 4 * settings.queue * len(models)),
        timeout_graceful_shutdown=math.ceil(settings.timeout) + MARGIN,
    )
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    service = app.state.service
    with quiet_signals():
        listener.listen(BACKLOG)  # from here on, connections wait until uvicorn has started
        report(f"listening on http://{shown}:{address[1]} (stop with Ctrl-C)")
        uvicorn.Server(config).run(sockets=[listener])
    report(f"stopped: {service.received:,} requests received, {service.answered:,} answered")


@contextmanager
def quiet_signals() -> Iterator[None]:
    """Context manager in which SIGTERM and SIGINT do nothing; uvicorn handles them, then raises them again."""
    signals = (signal.SIGTERM, signal.SIGINT)
    try:
        before = [signal.signal(number, lambda *_: None) for number in signals]
    except ValueError:  # not in the main thread, which alone receives signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
