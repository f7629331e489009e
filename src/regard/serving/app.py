"""The application: all routes and checks around a set of trained models."""

import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.errors import RegardError
from regard.inference.engine import Engine
from regard.runs.trained_model import TrainedModel
from regard.serving import completions, libretranslate, operations, routes
from regard.serving.errors import LIBRETRANSLATE, OPENAI, ClientGoneError, RequestError, body, failed, refused, stopping
from regard.serving.guard import Guard
from regard.serving.scheduler import ClosedError
from regard.serving.service import Service
from regard.serving.settings import Settings

_log = logging.getLogger("regard.serving")
GONE = 499  # status in the metrics if the client left; nobody receives it
FAILED = 500  # status of the answer to a request whose computation raised an unexpected error


def create_app(
    models: Mapping[str, TrainedModel],
    settings: Settings | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> FastAPI:
    """Return the application that serves `models`, a mapping from the names in requests to trained models.

    `engines` maps names of models to their inference engines (see `TrainedModel.engine`). Other models use the native
    engine. `app.state.service` is the `Service`, with the models and their schedulers. Add routes with
    `app.include_router`; they compute with `service.models[name].call(function)`, and errors of regard become answers
    with one sentence.
    """
    settings = settings or Settings()
    service = Service(models, settings, engines)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001
        yield
        await run_in_threadpool(service.close)

    # FastAPI's pages /docs and /redoc would load their scripts from another server.
    app = FastAPI(
        title="regard",
        version=version("regard"),
        summary="Translate, generate and classify.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    for router in (operations.router, routes.router, completions.router, libretranslate.router):
        app.include_router(router)
    _handle_errors(app)
    app.add_middleware(Guard, settings=settings)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allow_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Measured, service=service)  # outside of the others, to count also what they refuse
    return app


def _handle_errors(app: FastAPI) -> None:
    """Register the handlers that turn exceptions into answers with one sentence."""

    @app.exception_handler(RegardError)
    async def regard_error(request: Request, error: RegardError) -> Response:
        if isinstance(error, ClientGoneError):
            return Response(status_code=GONE)
        return answer(request, refused(request.url.path, error))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return answer(request, invalid(request.url.path, error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:80]
        sentences = {404: f"there is nothing at {path!a}", 405: f"{path!a} does not accept {request.method[:16]!a}"}
        message = sentences.get(error.status_code, str(error.detail))
        return answer(request, RequestError(error.status_code, message, headers=error.headers))

    @app.exception_handler(ClosedError)
    async def closed(request: Request, error: ClosedError) -> Response:  # noqa: ARG001
        return answer(request, stopping())

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> Response:
        return answer(request, failed(error))


def answer(request: Request, error: RequestError) -> Response:
    """Return the response for an error."""
    return JSONResponse(body(request.url.path, error), error.status, error.headers)


def invalid(path: str, error: RequestValidationError) -> RequestError:
    """Return the error for a request that does not have the fields of its schema."""
    status = 400 if path.startswith((*OPENAI, *LIBRETRANSLATE)) else 422
    first: dict[str, Any] = dict(error.errors()[0])
    places = [place for place in first["loc"] if place != "body"]
    if first["type"] == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", "malformed"))
        return RequestError(400, f"the body is not valid JSON ({reason}, character {first['loc'][-1]})")
    field = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places).lstrip(".")
    field = field.encode("utf-8", "backslashreplace").decode()[:80]
    if first["type"] == "unknown_field":
        return RequestError(status, first["msg"], first["ctx"]["field"])
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return RequestError(status, f"{field}: {message}" if field else f"the body: {message}", field or None)


class Measured:
    """ASGI middleware that counts requests by route and status, and measures their time.

    The route of a request that was refused before it was routed is "other".
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service, self.metrics = app, service, service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), GONE  # without an answer, the client has left
        self.service.received += 1

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, observe)
        except Exception:
            # Starlette answers outside of all middleware, unless the answer has begun.
            status = FAILED if status == GONE else status
            raise
        finally:
            self.service.answered += status != GONE
            route = getattr(scope.get("route"), "path", "other")  # a path from a request would be a label of its own
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - start)
