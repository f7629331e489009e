"""The routes `/v1/translate`, `/v1/generate` and `/v1/classify`, with the options of the commands of these names."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from regard.errors import RegardError
from regard.inference.text import Output
from regard.serving.errors import RequestError, refused
from regard.serving.operations import ERRORS, Serving
from regard.serving.service import ServedModel, Service
from regard.serving.texts import Body, SearchFields, Text, check_texts, decoded, located
from regard.serving.ticket import Ticket

router = APIRouter(prefix="/v1", tags=["regard"], responses=ERRORS)


class TranslationRequest(SearchFields):
    """One text or several texts to translate. Every text is translated as one line of `regard translate`."""

    texts: Text | list[Text] = Field(description="One text or several texts.")
    model: str | None = Field(None, description="Name of the model; needed if several models translate.")


class OutputBody(BaseModel):
    """One output text."""

    model_config = ConfigDict(ser_json_inf_nan="null")
    text: str
    score: float | None
    log_prob: float | None
    tokens: list[str]
    ended: bool


class TranslationResponse(BaseModel):
    """The translations of every text, best first, and the warnings of `regard translate`."""

    model: str
    translations: list[list[OutputBody]]
    warnings: list[str]


def finite(value: float) -> float | None:
    """Return a number, or None for infinity, which JSON cannot store."""
    return value if abs(value) != float("inf") else None


def described(output: Output) -> OutputBody:
    """Return the JSON form of an output."""
    return OutputBody(
        text=output.text,
        score=finite(output.score),
        log_prob=finite(output.log_prob),
        tokens=list(output.tokens),
        ended=output.ended,
    )


@router.post("/translate")
async def translate(body: TranslationRequest, request: Request, service: Serving) -> TranslationResponse:
    """Translate one text or several texts; the result equals that of `regard translate`."""
    model = service.model("translate", body.model)
    texts = [body.texts] if isinstance(body.texts, str) else body.texts
    outputs, warnings = await decode(request, service, model, texts, body.options(service.settings))
    translations = [[described(output) for output in best] for best in outputs]
    return TranslationResponse(model=model.name, translations=translations, warnings=warnings)


async def decode(
    request: Request, service: Service, model: ServedModel, texts: list[str], options: dict[str, Any]
) -> tuple[list[list[Output]], list[str]]:
    """Return the outputs for the texts of a request, and the warnings."""
    check_texts("texts", texts, service.settings)
    warnings: list[str] = []

    def compute(ticket: Ticket) -> list[list[Output]]:
        outputs = decoded(model, ticket, texts, options, warnings)
        service.metrics.read.labels(model.name).inc(sum(len(best[0].read) for best in outputs))
        service.metrics.written.labels(model.name).inc(sum(len(output.ids) for best in outputs for output in best))
        return outputs

    try:
        outputs = await service.compute(request, model, compute)
    except RegardError as error:
        raise _located(request, error) from None
    return outputs, list(located(warnings, "texts"))


def _located(request: Request, error: RegardError) -> RegardError:
    """Return an error about `line 3` as an error about `texts[2]`, and an error about `--beam` as one about `beam`."""
    if isinstance(error, RequestError) or type(error).__name__ == "ClientGoneError":
        return error
    (sentence,) = located([str(error)], "texts")
    known = refused(request.url.path, error)
    return RequestError(known.status, sentence.removeprefix("--"), known.field)
