"""Routes for the operator of the server: health and metrics.

They do not use the thread pool of the other routes, so that they are answered at once when all of its threads work.
"""

import asyncio
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from regard.serving.metrics import CONTENT_TYPE
from regard.serving.service import Service

router = APIRouter(tags=["operation"])


async def service_of(request: Request) -> Service:  # async: FastAPI calls other functions in its thread pool
    """Return the service of the application that received a request."""
    return request.app.state.service


Serving = Annotated[Service, Depends(service_of)]


class ErrorBody(BaseModel):
    """An error in one sentence."""

    error: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request is malformed.",
        401: "The API key is missing or wrong.",
        403: "The host or the origin is not allowed.",
        404: "There is no such model.",
        408: "The body of the request did not arrive in time.",
        413: "The request has too many bytes.",
        422: "A field is invalid, or the model cannot process the text.",
        429: "The queue is full; the header Retry-After contains the seconds to wait.",
        503: "The request was not answered in time, or the server is stopping.",
    }.items()
}


class ModelHealth(BaseModel):
    """The task of a model, and its load."""

    command: str
    weights: str
    languages: list[str] | None
    active: int
    waiting: int
    running: int


class Health(BaseModel):
    """The state of the server."""

    status: str
    version: str
    models: dict[str, ModelHealth]


@router.get("/health", responses={403: ERRORS[403]})
async def health(service: Serving) -> Health:
    """Return the models, the SHA-256 of their weights, and the number of requests that wait or run."""
    return await asyncio.to_thread(health_of, service)


def health_of(service: Service) -> Health:
    """Return the state of a server. The first call computes the SHA-256 of all weights."""
    models = {}
    for name, model in service.models.items():
        waiting, running = model.scheduler.sizes
        pair = [model.pair.source, model.pair.target] if model.pair else None
        models[name] = ModelHealth(
            command=model.command, weights=model.weights, languages=pair, active=model.active, waiting=waiting,
            running=running,
        )  # fmt: skip
    return Health(status="ok", version=version("regard"), models=models)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, 401: ERRORS[401]})
async def metrics(service: Serving) -> Response:
    """Return the metrics in the format of Prometheus."""
    return Response(await asyncio.to_thread(service.metrics.page), media_type=CONTENT_TYPE)
