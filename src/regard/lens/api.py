"""The HTTP interface of the lens: the page, its files, and the JSON requests that the page sends."""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from regard.errors import RegardError, nearest
from regard.lens.request import request_from_json
from regard.lens.session import Lens
from regard.runs.trained_model import TrainedModel
from regard.serving.service import disconnected

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
# The page loads nothing from elsewhere. A saved PNG is drawn from a blob that the page makes.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
WAITING = 8  # requests for one model that may wait for their turn
BODY = 1 << 18  # bytes of a request
GONE = 499  # status of a request whose client left; nobody receives it


def files() -> dict[str, tuple[bytes, str]]:
    """Return the contents and the type of every file of the page, by path. No request reaches the file system."""
    listed = sorted(path for path in PAGE.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(PAGE).as_posix(): (path.read_bytes(), TYPES[path.suffix]) for path in listed}


def router(models: Mapping[str, TrainedModel]) -> APIRouter:
    """Return the routes of the lens for named models: the page at `/`, its files, and its requests."""
    routes, page = APIRouter(include_in_schema=False), files()
    lenses = {name: Lens(run, name) for name, run in models.items()}
    turns = {name: threading.BoundedSemaphore(WAITING) for name in lenses}

    @routes.get("/")
    def index() -> Response:
        return _file(page, "index.html")

    @routes.get("/lens/page/{path:path}")
    def file(path: str) -> Response:
        return _file(page, path)

    @routes.get("/lens/api/models")
    def describe() -> JSONResponse:
        return JSONResponse({"models": [lens.describe() for lens in lenses.values()]})

    @routes.post("/lens/api/inspect")
    async def inspect(request: Request) -> JSONResponse:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY:
                return _refused(413, f"a request has at most {BODY:,} bytes; shorten the text")
        left = threading.Event()  # the page leaves old requests when a slider moves; they must not delay the new one
        work = asyncio.ensure_future(run_in_threadpool(_inspect, lenses, turns, body, left.is_set))
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else _refused(GONE, "the client has closed the connection")
        finally:
            left.set()
            gone.cancel()

    return routes


def _inspect(
    lenses: Mapping[str, Lens],
    turns: Mapping[str, threading.BoundedSemaphore],
    body: bytes,
    left: Callable[[], bool],
) -> JSONResponse:
    """Answer one request of the page. An error is returned as one sentence under the key `error`.

    `left()` is true if the client has closed the connection. A waiting request is then dropped.
    """
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        return _refused(400, "the request is not JSON")
    try:
        request = request_from_json(record)
        name = record.get("model", next(iter(lenses)))
        if not isinstance(name, str) or name not in lenses:
            return _refused(422, f"there is no model {str(name)[:80]!r}; {nearest(str(name)[:80], lenses)}")
        if not turns[name].acquire(blocking=False):
            return _refused(429, "too many requests are waiting for this model; try again")
        try:
            return JSONResponse(lenses[name].inspect(request, left))
        finally:
            turns[name].release()
    except RegardError as error:
        return _refused(422, str(error))


def _refused(status: int, sentence: str) -> JSONResponse:
    shown = sentence.encode("utf-8", "backslashreplace").decode()  # a key of the request may hold half a character
    return JSONResponse({"error": shown}, status)


def _file(page: Mapping[str, tuple[bytes, str]], path: str) -> Response:
    if path not in page:
        return Response("there is no such file", 404, media_type="text/plain", headers=HEADERS)
    content, kind = page[path]
    return Response(content, media_type=kind, headers=HEADERS)
