"""The HTTP interface of the lens: the page, its files, and the JSON requests that the page sends."""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from regard.errors import RegardError, nearest
from regard.lens.request import LensRequest, request_from_json
from regard.lens.session import Lens
from regard.runs.trained_model import TrainedModel
from regard.serving.errors import RequestError
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
WAITING = 8  # requests for one model that may wait or run
BODY = 1 << 18  # bytes of a request
GONE = 499  # status of a request whose client left; nobody receives it


def files() -> dict[str, tuple[bytes, str]]:
    """Return the contents and the type of every file of the page, by path. No request reaches the file system."""
    listed = sorted(path for path in PAGE.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(PAGE).as_posix(): (path.read_bytes(), TYPES[path.suffix]) for path in listed}


def router(models: Mapping[str, TrainedModel], timeout: float = 60.0) -> APIRouter:
    """Return the routes of the lens for named models: the page at `/`, its files, and its requests.

    A request that is not answered within `timeout` seconds is refused.
    """
    routes, page = APIRouter(include_in_schema=False), files()
    lenses = {name: Lens(run, name) for name, run in models.items()}
    places = {name: threading.BoundedSemaphore(WAITING) for name in lenses}
    # Threads of its own, one per place: texts that take long keep no thread from the other routes of a server.
    threads = ThreadPoolExecutor(WAITING * max(len(lenses), 1), "lens")

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
        try:
            name, wanted = _read(body, lenses)
        except RequestError as error:
            return _refused(error.status, error.message)
        place, left = places[name], threading.Event()
        if not place.acquire(blocking=False):
            return _refused(429, "too many requests are waiting for this model; try again", {"Retry-After": "1"})
        # The page leaves old requests when a slider moves; they must not delay the new one.
        work = asyncio.get_running_loop().run_in_executor(threads, _inspect, lenses[name], wanted, place, left.is_set)
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({work, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                return _refused(GONE, "the client has closed the connection")
            return _refused(503, f"the request was not answered within {timeout:g} seconds; use a shorter text")
        finally:
            left.set()
            gone.cancel()

    return routes


def _read(body: bytes, lenses: Mapping[str, Lens]) -> tuple[str, LensRequest]:
    """Return the name of the model and the request in a body; raise RequestError with one sentence if it is wrong."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, "the request is not JSON") from None
    try:
        request = request_from_json(record)
    except RegardError as error:
        raise RequestError(422, str(error)) from None
    name = record.get("model", next(iter(lenses)))
    if not isinstance(name, str) or name not in lenses:
        raise RequestError(422, f"there is no model {str(name)[:80]!r}; {nearest(str(name)[:80], lenses)}")
    return name, request


def _inspect(
    lens: Lens, request: LensRequest, place: threading.BoundedSemaphore, left: Callable[[], bool]
) -> JSONResponse:
    """Answer a request of the page, and release its place. An error is returned as one sentence under the key `error`.

    `left()` is true if the client has closed the connection. A waiting request is then dropped.
    """
    try:
        return JSONResponse(lens.inspect(request, left))
    except RegardError as error:
        return _refused(422, str(error))
    finally:
        place.release()


def _refused(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    shown = sentence.encode("utf-8", "backslashreplace").decode()  # a key of the request may hold half a character
    return JSONResponse({"error": shown}, status, headers)


def _file(page: Mapping[str, tuple[bytes, str]], path: str) -> Response:
    if path not in page:
        return Response("there is no such file", 404, media_type="text/plain", headers=HEADERS)
    content, kind = page[path]
    return Response(content, media_type=kind, headers=HEADERS)
