"""OpenAI's interface for language models: `/v1/completions` and `/v1/models`.

Fields that regard cannot compute are refused unless they have the value that changes nothing.
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Hypothesis, Limits, Piece
from regard.decoding.sample import Sample
from regard.decoding.search import FREE, Search
from regard.errors import DataError
from regard.runs.decode import ensemble
from regard.serving.errors import RequestError
from regard.serving.errors import body as error_body
from regard.serving.operations import Serving
from regard.serving.service import ServedModel, Service
from regard.serving.streaming import event, pieces, respond
from regard.serving.texts import Body, Text, Texts, check_most, check_texts
from regard.serving.ticket import Decode, Row, Ticket

router = APIRouter(prefix="/v1", tags=["OpenAI"])


class OpenAIError(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(BaseModel):
    """An error in the form of OpenAI."""

    error: OpenAIError


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIErrorBody} for status in (400, 401, 403, 404, 413, 429, 503)
}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class CompletionRequest(Body):
    """The prompts to continue. The fields are those of OpenAI."""

    model: str = Field(description="Name of a language model, as in /v1/models.")
    prompt: Texts = Field([""], description="One prompt or several prompts.")
    max_tokens: int | None = Field(16, ge=1, description="Maximum number of new tokens.")
    temperature: float | None = Field(1.0, ge=0, le=2, description="Sampling temperature; 0 is greedy search.")
    top_p: float | None = Field(1.0, gt=0, le=1, description="Sample from the tokens with this total probability.")
    n: int | None = Field(1, ge=1, description="Number of choices for every prompt.")
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="Random seed; without it, every request differs.")
    stop: Texts | None = Field(None, max_length=4, description="The output ends before any of these texts.")
    echo: bool | None = Field(False, description="Begin every text with the prompt.")
    logprobs: int | None = Field(None, ge=0, description="0: return the log-probabilities of the generated tokens.")
    stream: bool | None = Field(False, description="Send the tokens as they are generated.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="A name for your own records; it changes nothing.")
    best_of: int | None = Field(None, ge=1, description="Must equal n.")
    suffix: Text | None = Field(None, description="Not supported; leave it out.")
    presence_penalty: float | None = Field(0.0, description="Must be 0.")
    frequency_penalty: float | None = Field(0.0, description="Must be 0.")
    logit_bias: dict[str, float] | None = Field(None, description="Must be empty.")

    def check(self, service: Service) -> None:
        """Raise RequestError for values that the server does not support."""
        check_texts("prompt", self.prompt, service.settings, 400)
        check_texts("stop", self.stop or [], service.settings, 400)
        check_most("n", self.n, service.settings.max_beam)
        check_most("max_tokens", self.max_tokens, service.settings.max_new_tokens)
        unsupported = {
            "suffix": bool(self.suffix),
            "presence_penalty": bool(self.presence_penalty),
            "frequency_penalty": bool(self.frequency_penalty),
            "logit_bias": bool(self.logit_bias),
            "best_of": self.best_of not in {None, self.n or 1},
        }
        for name, given in unsupported.items():
            if given:
                raise RequestError(400, f"{name}: this server does not support it; leave it out", name)
        if self.logprobs is not None and (self.logprobs > 0 or self.stream):
            message = "logprobs: only 0 is supported (the generated tokens alone), and not in a stream"
            raise RequestError(400, message, "logprobs")
        if "" in (self.stop or []):
            raise RequestError(400, "stop: an empty text ends every output; leave it out", "stop")
        if not self.prompt:
            raise RequestError(400, "prompt: the list is empty; give at least one prompt", "prompt")
        if self.stream_options is not None and not self.stream:
            raise RequestError(400, "stream_options: needs stream: true; leave it out", "stream_options")

    @property
    def search(self) -> Search:
        """The search: sampling, or greedy search at temperature 0."""
        if self.temperature == 0:
            return Beam(beam_size=1)
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        return Sample(temperature=temperature, top_p=top_p, seed=self.seed or 0)


@dataclass
class Choice:
    """A continuation that is being generated."""

    index: int
    stop: Sequence[str]
    decode: Callable[[list[int]], str]
    ids: list[int] = field(default_factory=list)
    text: str = ""  # the text without what may be the begin of a stop text
    hypothesis: Hypothesis | None = None
    stopped: bool = False

    def add(self, piece: Piece) -> str:
        """Add new tokens, and return the new text."""
        if self.stopped:
            return ""
        self.ids += piece.ids
        self.hypothesis = piece.hypothesis
        text = self.decode(self.ids)
        ends = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if ends:
            self.stopped, text = True, text[: min(ends)]
        elif self.hypothesis is None:
            # A character of several bytes is complete once all its bytes are generated.
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
            text = text[: len(text) - _begun(text, self.stop)]
        new = text[len(self.text) :] if len(text) > len(self.text) else ""
        self.text += new
        return new

    @property
    def over(self) -> bool:
        """True if there is no more text."""
        return self.stopped or self.hypothesis is not None

    @property
    def finish_reason(self) -> str | None:
        """Why the output ended, in OpenAI's words; None: it has not ended."""
        if not self.over:
            return None
        return "stop" if self.stopped or (self.hypothesis is not None and self.hypothesis.ended) else "length"

    def logprobs(self, offset: int) -> dict[str, Any]:
        """Return the tokens of the text, their log-probabilities, and where they begin; the text begins at `offset`."""
        assert self.hypothesis is not None
        begins = [len(self.decode(self.ids[:i])) for i in range(len(self.ids) + 1)]
        kept = [i for i in range(len(self.ids)) if begins[i] < len(self.text)]
        whole = self.decode(self.ids)
        return {
            "tokens": [whole[begins[i] : begins[i + 1]] for i in kept],
            "token_logprobs": [self.hypothesis.token_log_probs[i] for i in kept],
            "top_logprobs": None,
            "text_offset": [offset + begins[i] for i in kept],
        }


def _begun(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is the beginning of a stop text."""
    lengths = (n for stop in stops for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n]))
    return max(lengths, default=0)


@dataclass
class Completion:
    """The computation of one request: it yields the choice and the new text after each token."""

    model: ServedModel
    request: CompletionRequest
    choices: list[Choice] = field(default_factory=list)
    prompt_tokens: int = 0

    def steps(self, ticket: Ticket) -> Iterator[tuple[Choice, str]]:
        """Yield a choice and its new text after each token."""
        request, n = self.request, self.request.n or 1
        texts = ensemble([self.model.run], refuse)
        limits = Limits(0, request.max_tokens or 16)
        prompts = [text or ("" if texts.begin else "\n") for text in request.prompt]
        read = [ids for ids in texts.prompts(prompts, 0, limits) for _ in range(n)]
        self.prompt_tokens = sum(map(len, read)) // n
        # Samples without a seed have a random number of their own, so that requests still share a batch.
        first = 0 if request.seed is not None or request.temperature == 0 else secrets.randbits(62)
        tasks = [Decode(ids, request.search, limits, FREE, first + i, False, True) for i, ids in enumerate(read)]
        rows = [Row(ticket, index, task) for index, task in enumerate(tasks)]
        self.choices = [Choice(index, request.stop or (), texts.target.decode) for index in range(len(rows))]
        self.model.scheduler.submit(rows)
        if request.echo:
            yield from ((choice, prompts[choice.index // n]) for choice in self.choices)
        for item in ticket.events(len(rows)):
            choice = self.choices[item.row]
            if not choice.stopped:
                new = choice.add(item.value)
                yield choice, new
            elif item.value.hypothesis is not None:
                choice.hypothesis = item.value.hypothesis
            rows[item.row].dropped |= choice.stopped

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        generated = sum(len(choice.ids) for choice in self.choices)
        total = self.prompt_tokens + generated
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": generated, "total_tokens": total}


def refuse(warning: str) -> None:
    """Raise DataError if a prompt is so long that the model would read only a part of it."""
    raise DataError(warning)


def count(service: Service, completion: Completion) -> None:
    """Add the tokens of a completion to the metrics."""
    usage = completion.usage()
    service.metrics.read.labels(completion.model.name).inc(usage["prompt_tokens"])
    service.metrics.written.labels(completion.model.name).inc(usage["completion_tokens"])


@router.post("/completions", responses=ERRORS)
async def completions(body: CompletionRequest, request: Request, service: Serving) -> Response:
    """Continue one prompt or several prompts with a language model."""
    body.check(service)
    completion = Completion(service.model("generate", body.model), body)
    about = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if body.stream:
        items = events(service, completion, about)
        return await respond(request, items, lambda error: event(error_body(request.url.path, error)))

    def compute(ticket: Ticket) -> list[dict[str, Any]]:
        texts: dict[int, list[str]] = {}
        for choice, new in completion.steps(ticket):
            texts.setdefault(choice.index, []).append(new)
        count(service, completion)
        return [_choice(completion, choice, "".join(texts[choice.index])) for choice in completion.choices]

    choices = await service.compute(request, completion.model, compute)
    return JSONResponse({**about, "choices": choices, "usage": completion.usage()})


def _choice(completion: Completion, choice: Choice, text: str) -> dict[str, Any]:
    wanted = completion.request.logprobs is not None
    logprobs = choice.logprobs(len(text) - len(choice.text)) if wanted else None
    return {"text": text, "index": choice.index, "logprobs": logprobs, "finish_reason": choice.finish_reason}


async def events(service: Service, completion: Completion, about: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the events of a streamed completion."""
    options = completion.request.stream_options
    usage: dict[str, Any] = {"usage": None} if options and options.include_usage else {}

    def parts(ticket: Ticket) -> Iterator[dict[str, Any]]:
        for choice, new in completion.steps(ticket):
            if new or choice.over:
                reason = choice.finish_reason
                yield {"text": new, "index": choice.index, "logprobs": None, "finish_reason": reason}
        count(service, completion)

    async for part in pieces(service, completion.model, parts):
        yield event({**about, "choices": [part], **usage})
    if usage:
        yield event({**about, "choices": [], "usage": completion.usage()})
    yield event("[DONE]")


def described(model: ServedModel) -> dict[str, Any]:
    """Return the JSON object that describes a model."""
    about = {"id": model.name, "object": "model", "created": int(model.loaded), "owned_by": "regard"}
    return {**about, "command": model.command}


@router.get("/models", responses=ERRORS)
async def models(service: Serving) -> dict[str, Any]:
    """List all models; `command` is `translate`, `generate` or `classify`."""
    return {"object": "list", "data": [described(model) for model in service.models.values()]}


@router.get("/models/{name}", responses=ERRORS)
async def model(name: str, service: Serving) -> dict[str, Any]:
    """Describe one model."""
    if name not in service.models:
        raise RequestError(404, f"there is no model {name[:80]!r}; see /v1/models", "model", "model_not_found")
    return described(service.models[name])
