"""The command `serve`: an HTTP server for trained models."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.base import SHIP, Quantize, complain, compute_option
from regard.cli.options import Loading, command

NETWORK, LIMITS = "Network", "Limits"  # panels of options
RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of training runs.")]


@command(SHIP)
def serve(
    runs: RunsArgument,
    loading: Loading,
    host: Annotated[
        str, typer.Option(rich_help_panel=NETWORK, help="Address to bind to; 0.0.0.0 is every address of the machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, rich_help_panel=NETWORK, help="Port; 0 is any free port.")
    ] = 8000,
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            "--pair",
            metavar="RUN=SRC:TGT",
            help="Languages of a run, such as mine=en:de. Default: from the names of its training files. Repeatable.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=NETWORK,
            help="File of API keys, one per line. Default: the variable REGARD_API_KEY, or no keys.",
        ),
    ] = None,
    allow_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            rich_help_panel=NETWORK,
            help="Additional host name of the server, by which clients address it. Repeatable.",
        ),
    ] = None,
    allow_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="URL",
            rich_help_panel=NETWORK,
            help="Origin of web pages that may use the server (CORS). Repeatable.",
        ),
    ] = None,
    engine: Annotated[
        str, compute_option(help="Inference engine: native, or ctranslate2 (RUN is exported on first use).")
    ] = "native",
    quantize: Quantize = None,
    max_batch: Annotated[
        int, compute_option(min=1, metavar="N", help="Maximum number of texts per model that are decoded together.")
    ] = 64,
    queue: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=LIMITS,
            help="Maximum number of requests per model that wait or run; others receive status 429.",
        ),
    ] = 256,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="S", rich_help_panel=LIMITS, help="Seconds until an unanswered request is dropped."
        ),
    ] = 60.0,
    max_body: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=LIMITS, help="Maximum number of bytes of a request.")
    ] = 1 << 20,
    max_texts: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=LIMITS, help="Maximum number of texts in a request.")
    ] = 128,
    max_chars: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=LIMITS, help="Maximum number of characters of a text.")
    ] = 10_000,
    max_beam: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=LIMITS, help="Maximum beam size and number of outputs.")
    ] = 16,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", rich_help_panel=LIMITS, help="Maximum length of an output that a request can ask for."
        ),
    ] = 2048,
) -> None:
    """Serve trained models over HTTP.

    The server has the interfaces of OpenAI (/v1/completions) and LibreTranslate (/translate), and its own
    (/v1/translate, /v1/generate, /v1/classify). The page of `regard lens` is at /. The texts of all requests are
    decoded together in batches. On SIGTERM or Ctrl-C, the server answers all accepted requests, then stops.
    """
    from regard.cli.base import set_threads
    from regard.lens.serve import add_lens
    from regard.serving.serve import serve as serve_runs

    device = "cpu" if engine != "native" and loading.device == "auto" else loading.device
    set_threads(loading.threads, device=device)
    serve_runs(
        runs,
        host=host,
        port=port,
        engine=engine,
        quantize=quantize,
        threads=loading.threads,
        pairs=pairs or (),
        api_key_file=api_key_file,
        allow_hosts=allow_hosts or (),
        allow_origins=allow_origins or (),
        queue=queue,
        max_batch=max_batch,
        timeout=timeout,
        max_body=max_body,
        max_texts=max_texts,
        max_chars=max_chars,
        max_beam=max_beam,
        max_new_tokens=max_new_tokens,
        report=complain,
        extend=add_lens,
        **loading.keywords(),
    )
