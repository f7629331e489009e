"""The trained models of a server, each with its scheduler, and the admission of requests."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from starlette.requests import Request

from regard.data.tokenizer import Tokenizer
from regard.decoding.hypothesis import SpecialTokens
from regard.errors import nearest
from regard.inference.engine import Engine
from regard.inference.native import Native
from regard.inference.text import Output
from regard.models.base import Generator
from regard.runs.trained_model import TrainedModel
from regard.serving.engine import BatchRunner, SharedEngine, submit
from regard.serving.errors import ClientGoneError, RequestError, busy, timed_out
from regard.serving.metrics import Metrics
from regard.serving.scheduler import Scheduler
from regard.serving.settings import Pair, Settings
from regard.serving.ticket import Call, Ticket

Value = TypeVar("Value")
RECENT = 64  # number of answers from which the time to wait is estimated


@dataclass(eq=False)
class ServedModel:
    """A trained model with the scheduler that computes its batches."""

    name: str
    run: TrainedModel
    scheduler: Scheduler
    engine: Engine
    pair: Pair | None
    active: int = 0  # requests that wait or run
    answered: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # times of the last answers
    loaded: float = field(default_factory=time.time)

    @property
    def command(self) -> str:
        """The `regard` command that uses this model: `translate`, `generate` or `classify`."""
        return self.run.command

    @cached_property
    def weights(self) -> str:
        """The SHA-256 of the weights."""
        return self.run.weights_sha256

    def shared(self, ticket: Ticket) -> SharedEngine:
        """Return the engine for one request."""
        return SharedEngine(self.scheduler, ticket, self.engine)

    def call(self, function: Callable[[], Value], ticket: Ticket | None = None) -> Value:
        """Call a function in the thread of the scheduler, while the model computes nothing else, and return its result.

        The function must leave the model as it was.
        """
        (result,) = submit(self.scheduler, ticket or Ticket(), [Call(function)])
        return result

    def wait_seconds(self) -> int:
        """Return the number of seconds after which half of the queue has probably been answered."""
        times = list(self.answered)
        if len(times) < 2 or times[-1] <= times[0]:
            return 1
        rate = (len(times) - 1) / (times[-1] - times[0])
        return max(1, min(60, math.ceil(self.active / 2 / rate)))


class Service:
    """All models of a server."""

    def __init__(
        self, models: Mapping[str, TrainedModel], settings: Settings, engines: Mapping[str, Engine] | None = None
    ) -> None:
        """`engines` maps names of models to their inference engines. Other models use the native engine."""
        self.settings, self.metrics = settings, Metrics()
        self.received = self.answered = 0  # requests, and those that were answered, also with an error
        self.models = {name: self._served(name, run, (engines or {}).get(name)) for name, run in models.items()}
        # One thread per admitted request: it encodes the text, waits for the scheduler, and decodes the ids.
        self.threads = ThreadPoolExecutor(settings.queue * max(len(models), 1), "request")
        self.metrics.watch(self)

    def _served(self, name: str, run: TrainedModel, engine: Engine | None) -> ServedModel:
        if engine is None:
            tokenizer: Tokenizer = run.tokenizer
            ends = SpecialTokens(tokenizer.bos, tokenizer.eos, tokenizer.pad)
            engine = Native([run.model] if isinstance(run.model, Generator) else [], ends, run.device)
        observe = self.metrics.batch.labels(name).observe
        scheduler = Scheduler(BatchRunner(run, engine, self.settings.max_batch), self.settings.max_batch, observe)
        return ServedModel(name, run, scheduler, engine, self.settings.pairs.get(name))

    def model(self, command: str, name: str | None) -> ServedModel:
        """Return the model with this name, or the only model for a command; raise RequestError if there is none."""
        fitting = [model for model in self.models.values() if model.command == command]
        if name is None:
            if len(fitting) == 1:
                return fitting[0]
            what = f"{len(fitting)} models can {command}" if fitting else f"no model of this server can {command}"
            names = ", ".join(repr(model.name) for model in fitting)
            raise RequestError(404 if not fitting else 422, what + (f"; name one: {names}" if fitting else ""), "model")
        if name not in self.models:
            hint = nearest(name, [model.name for model in fitting])
            raise RequestError(404, f"there is no model {name[:80]!r}; {hint}", "model", "model_not_found")
        if self.models[name].command != command:
            used = self.models[name].command
            raise RequestError(422, f"the model {name!r} is used with {used}, not with {command}", "model")
        return self.models[name]

    def translators(self) -> Sequence[ServedModel]:
        """Return the translation models whose languages are known."""
        return [model for model in self.models.values() if model.pair is not None]

    def admit(self, model: ServedModel) -> Ticket:
        """Count a request, and return its ticket; raise RequestError if the queue of the model is full."""
        if model.active >= self.settings.queue:
            self.metrics.refused.labels(model.name).inc()
            raise busy(model.wait_seconds())
        model.active += 1
        return Ticket()

    async def compute(self, request: Request, model: ServedModel, function: Callable[[Ticket], Value]) -> Value:
        """Call `function` with a new ticket in a thread, and return its result.

        If the client closes the connection or the time limit is reached, the ticket is cancelled, and its rows are
        dropped.
        """
        ticket = self.admit(model)
        work = self.start(model, ticket, lambda: function(ticket))
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({work, gone}, timeout=self.settings.timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            left = gone.done()
            (self.metrics.gone if left else self.metrics.late).labels(model.name).inc()
            error = (
                ClientGoneError("the client has closed the connection") if left else timed_out(self.settings.timeout)
            )
            raise error
        finally:
            gone.cancel()
            ticket.cancel(ClientGoneError("the request is over"))

    def start(self, model: ServedModel, ticket: Ticket, function: Callable[[], Value]) -> "asyncio.Future[Value]":
        """Call `function` in a thread. The ticket counts towards the queue limit until the function has returned."""
        work = asyncio.get_running_loop().run_in_executor(self.threads, function)

        def over(future: "asyncio.Future[Value]") -> None:
            model.active -= 1
            if not future.cancelled() and future.exception() is None and not ticket.cancelled:
                model.answered.append(time.monotonic())

        work.add_done_callback(over)
        return work

    def count(self, model: ServedModel, outputs: Sequence[Sequence[Output]]) -> None:
        """Add the tokens of outputs to the metrics."""
        self.metrics.read.labels(model.name).inc(sum(len(best[0].read) for best in outputs if best))
        self.metrics.written.labels(model.name).inc(sum(len(output.ids) for best in outputs for output in best))

    def close(self) -> None:
        """Compute everything that was admitted, and stop all threads."""
        closing = [threading.Thread(target=model.scheduler.close) for model in self.models.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self.threads.shutdown(wait=True)


async def disconnected(request: Request) -> None:
    """Return when the client closes the connection. The body of the request must have been read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
