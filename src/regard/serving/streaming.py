"""Answers that are sent piece by piece, as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from regard.errors import RegardError
from regard.serving.errors import ClientGoneError, RequestError, failed, refused, timed_out
from regard.serving.service import ServedModel, Service, disconnected
from regard.serving.ticket import Ticket

Item = TypeVar("Item")
OVER = object()
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must not collect the events


def event(value: Any, name: str | None = None) -> str:
    """Return a server-sent event. The data are `value` as JSON, or `value` itself if it is a string."""
    data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "") + f"data: {data}\n\n"


async def pieces(
    service: Service, model: ServedModel, produce: Callable[[Ticket], Iterator[Item]]
) -> AsyncIterator[Item]:
    """Run `produce` in a thread, and yield its items. If the caller stops, the ticket is cancelled.

    The time limit of the server applies to each piece.
    """
    ticket = service.admit(model)
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def work() -> None:
        for item in produce(ticket):
            loop.call_soon_threadsafe(queue.put_nowait, item)

    future = service.start(model, ticket, work)
    future.add_done_callback(lambda _: queue.put_nowait(OVER))
    late = False
    try:
        while True:
            try:
                item = await asyncio.wait_for(queue.get(), service.settings.timeout)
            except TimeoutError:
                late = True
                service.metrics.late.labels(model.name).inc()
                raise timed_out(service.settings.timeout) from None
            if item is OVER:
                future.result()
                return
            yield item
    finally:
        if not (late or future.done()):
            service.metrics.gone.labels(model.name).inc()
        ticket.cancel(ClientGoneError("the request is over"))


async def respond(
    request: Request, items: AsyncIterator[str], describe: Callable[[RequestError], str]
) -> StreamingResponse:
    """Send `items` as they arrive. An error before the first one becomes an answer with its status.

    A later error is sent as the last event, which `describe` returns.
    """
    first = asyncio.ensure_future(anext(items))
    gone = asyncio.ensure_future(disconnected(request))
    await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
    left = not first.done()
    gone.cancel()
    if left:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise ClientGoneError("the client has closed the connection")
    begin = first.result()

    async def body() -> AsyncIterator[str]:
        async with aclosing(items):  # type: ignore[type-var]
            yield begin
            try:
                async for item in items:
                    yield item
            except Exception as error:  # the status was sent already
                known = refused(request.url.path, error) if isinstance(error, RegardError) else failed(error)
                yield describe(known)

    return StreamingResponse(body(), media_type="text/event-stream", headers=HEADERS)
