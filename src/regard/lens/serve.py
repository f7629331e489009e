"""Serve the lens page for trained models."""

import os
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from regard.errors import DataError
from regard.runs.trained_model import TrainedModel
from regard.serving.serve import check_installed, listen, run_server
from regard.serving.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

LOOPBACK = "127.0.0.1"
Report = Callable[[str], None]


def serve(models: Mapping[str, TrainedModel], port: int, text: str | None, show: bool | None, report: Report) -> None:
    """Serve the lens on loopback until the process is stopped.

    The page shows the first model or, if there are two models, both side by side. `text` is the initial input. If
    `show` is true, the page is opened in a browser. If it is None, the page is opened if there is a screen. The
    interfaces of `regard serve` are at the same address.
    """
    check_installed()
    names = list(models)
    view = {"m": names[0]} | ({"m2": names[1]} if len(names) == 2 else {}) | ({"q": text} if text else {})
    with listen(LOOPBACK, port) as listener:
        listener.listen()  # from here on, requests wait for the server instead of being refused
        address = f"http://{LOOPBACK}:{listener.getsockname()[1]}/#{urlencode(view)}"

        def extend(app: "FastAPI") -> None:
            add_lens(app)
            report(f"the lens is at {address} (stop with Ctrl-C)")
            if show if show is not None else has_screen():
                webbrowser.open(address)

        run_server(dict(models), Settings(LOOPBACK), {}, listener, lambda _: None, extend)


def add_lens(app: "FastAPI") -> None:
    """Add the lens to an application of `regard.serving.app.create_app`, with all of its models and its timeout."""
    from regard.lens.api import router  # noqa: PLC0415  # FastAPI is an optional dependency

    service = app.state.service
    app.include_router(router({name: model.run for name, model in service.models.items()}, service.settings.timeout))


def named(runs: Sequence[TrainedModel]) -> dict[str, TrainedModel]:
    """Return the models by the names of their folders, or by their paths if two folders have the same name."""
    short = [run.path.resolve().name for run in runs]
    full = [str(run.path.resolve()) for run in runs]
    for i, path in enumerate(full):
        if path in full[:i]:
            raise DataError(f"{runs[i].path} is given twice; name different runs to compare them")
    return dict(zip(short if len(set(short)) == len(short) else full, runs, strict=True))


def has_screen() -> bool:
    """Return whether a browser can open a window: on a desktop, and started from a terminal."""
    desktop = sys.platform in {"win32", "darwin"} or any(os.environ.get(x) for x in ("DISPLAY", "WAYLAND_DISPLAY"))
    return desktop and sys.stdout is not None and sys.stdout.isatty()
