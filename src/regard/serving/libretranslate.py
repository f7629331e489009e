"""LibreTranslate's interface for translation models, so that its clients work without a change."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from regard.errors import nearest
from regard.serving.errors import RequestError
from regard.serving.guard import key_in, right_key
from regard.serving.languages import NAMES, detect
from regard.serving.markup import Document, PlainText
from regard.serving.operations import ErrorBody, Serving
from regard.serving.service import ServedModel, Service
from regard.serving.texts import check_texts, clean, decoded
from regard.serving.ticket import Ticket

FIELDS = ("q", "source", "target", "format", "alternatives", "api_key", "secret")
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 403, 413, 429, 500, 503)}
router = APIRouter(tags=["LibreTranslate"], responses=ERRORS)


def _body(required: Sequence[str], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that is JSON or a form."""
    schema = {"type": "object", "required": list(required), "properties": dict(properties)}
    return {"requestBody": {"required": True, "content": {
        kind: {"schema": schema}
        for kind in ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
    }}}  # fmt: skip


TEXT = {"type": "string", "minLength": 1}
TRANSLATION = _body(
    ("q", "source", "target"),
    {
        "q": {"anyOf": [TEXT, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
        "source": {**TEXT, "description": "Language code such as en, or auto."},
        "target": {**TEXT, "description": "Language code such as de."},
        "format": {"type": "string", "enum": ["text", "html"]},
        "alternatives": {"type": "integer", "minimum": 0},
        "api_key": {"type": "string"},
    },
)
DETECTION = _body(("q",), {"q": TEXT, "api_key": {"type": "string"}})


class Detected(BaseModel):
    """A language and its probability in percent."""

    confidence: float
    language: str


class Translation(BaseModel):
    """The translation of a text, or a list with those of several texts."""

    translatedText: str | list[str]  # noqa: N815
    detectedLanguage: Detected | list[Detected] | None = None  # noqa: N815
    alternatives: list[str] | list[list[str]] | None = None


class Language(BaseModel):
    """A source language, and the languages into which it is translated."""

    code: str
    name: str
    targets: list[str]


async def fields_of(request: Request) -> dict[str, Any]:
    """Return the fields of a request whose body is JSON or a form; fields in the URL count, too."""
    fields: dict[str, Any] = dict(request.query_params)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        try:
            given = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            reason = str(error).splitlines()[0][:80] if isinstance(error, ValueError) else "nested too deeply"
            raise RequestError(400, f"the body is not valid JSON ({reason})") from None
        if not isinstance(given, dict):
            raise RequestError(400, 'the body must be a JSON object, such as {"q": "..."}')
        return fields | given
    form = await request.form(max_files=0, max_fields=1000)
    for name in form:
        values = form.getlist(name)
        if any(isinstance(value, UploadFile) for value in values):
            raise RequestError(400, f"{name[:80]}: files are not translated; send the text itself")
        fields[name] = values[0] if len(values) == 1 else values
    return fields


def check_fields(fields: Mapping[str, Any], request: Request, service: Service, required: Sequence[str]) -> None:
    """Raise RequestError for a wrong API key, or for fields that are unknown, missing or malformed."""
    keys, given = service.settings.keys, fields.get("api_key") or key_in(request.headers)
    if keys and not given:
        raise RequestError(400, "an API key is needed; send it in the field api_key", "api_key")
    if keys and not (isinstance(given, str) and right_key(given, keys)):
        raise RequestError(403, "the API key is wrong; ask the operator of the server for one", "api_key")
    for name, value in fields.items():
        if name not in FIELDS:
            shown = name.encode("utf-8", "backslashreplace").decode()[:80]
            raise RequestError(400, f"{shown!r} is no field of this request; {nearest(shown, FIELDS)}")
        for text in value if isinstance(value, list) else [value]:
            try:
                clean(text)
            except ValueError as error:
                raise RequestError(400, f"{name}: {error}", name) from None
    for name in required:
        value = fields.get(name)
        if not value:
            raise RequestError(400, f"Invalid request: missing {name} parameter", name)
        several = name == "q" and isinstance(value, list) and all(isinstance(text, str) for text in value)
        if not isinstance(value, str) and not several:
            raise RequestError(400, f"{name}: needs a string" + (" or a list of strings" if name == "q" else ""), name)


@dataclass(frozen=True)
class Job:
    """A text to translate, with the model that translates it and the language that was detected."""

    text: str
    model: ServedModel
    detected: Detected | None


@router.post("/translate", response_model_exclude_none=True, openapi_extra=TRANSLATION)
async def translate(request: Request, service: Serving) -> Translation:
    """Translate a text, or a list of texts. Every sentence is translated by itself; HTML keeps its tags."""
    fields = await fields_of(request)
    check_fields(fields, request, service, ("q", "source", "target"))
    texts: list[str] = fields["q"] if isinstance(fields["q"], list) else [fields["q"]]
    check_texts("q", texts, service.settings, 400)
    alternatives = number(fields.get("alternatives") or 0, service.settings.max_beam - 1)
    form = fields.get("format") or "text"
    if form not in ("text", "html"):  # a tuple: a list in a request cannot be hashed
        raise RequestError(400, f"format: {str(form)[:20]!r} is not supported; use 'text' or 'html'", "format")
    # In a thread, because detecting the languages of long texts takes a while.
    jobs = await run_in_threadpool(lambda: [_job(service, text, fields["source"], fields["target"]) for text in texts])
    results = await _translations(request, service, jobs, form == "html", alternatives)
    first = [best[0] for best in results]
    others = [best[1:] for best in results] if alternatives else None
    found = [job.detected for job in jobs if job.detected is not None] or None
    if isinstance(fields["q"], list):
        return Translation(translatedText=first, detectedLanguage=found, alternatives=others)
    return Translation(
        translatedText=first[0],
        detectedLanguage=found[0] if found else None,
        alternatives=others[0] if others else None,
    )


def number(value: Any, most: int) -> int:
    """Return the number of alternatives; raise RequestError if it is not a number, or is above `most`."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:9])
    if type(value) is not int or value < 0:
        raise RequestError(400, "Invalid request: alternatives parameter is not a number", "alternatives")
    if value > most:
        raise RequestError(400, f"Invalid request: alternatives parameter must be <= {most}", "alternatives")
    return value


def _job(service: Service, text: str, source: str, target: str) -> Job:
    """Return the text with the model for its languages."""
    models = {(str(m.pair.source), str(m.pair.target)): m for m in service.translators() if m.pair is not None}
    for code, codes in ((source, {"auto", *(s for s, _ in models)}), (target, {t for _, t in models})):
        if code not in codes:
            raise RequestError(400, f"{code[:20]} is not supported; {nearest(code[:20], codes)}")
    if source != "auto":
        if (source, target) not in models:
            names = f"{NAMES[target]} ({target}) is not available as a target language from {NAMES[source]} ({source})"
            raise RequestError(400, f"{names}; see /languages")
        return Job(text, models[source, target], None)
    candidates = [s for s, t in models if t == target]
    if len(candidates) == 1:
        return Job(text, models[candidates[0], target], Detected(confidence=100.0, language=candidates[0]))
    found = detect(text, candidates)
    code, probability = found[0] if found else (candidates[0], 0.0)
    return Job(text, models[code, target], Detected(confidence=round(100 * probability, 1), language=code))


async def _translations(
    request: Request, service: Service, jobs: Sequence[Job], markup: bool, alternatives: int
) -> list[list[str]]:
    """Return the translation of every text, followed by its alternatives."""
    results: dict[int, list[str]] = {}
    for model in dict.fromkeys(job.model for job in jobs):
        places = [place for place, job in enumerate(jobs) if job.model is model]
        texts = [jobs[place].text for place in places]
        found = await service.compute(
            request, model, lambda ticket, m=model, t=texts: rendered(service, m, ticket, t, markup, alternatives)
        )
        results |= dict(zip(places, found, strict=True))
    return [results[place] for place in range(len(jobs))]


def rendered(
    service: Service, model: ServedModel, ticket: Ticket, texts: Sequence[str], markup: bool, alternatives: int
) -> list[list[str]]:
    """Translate the sentences of all texts together. Return every text translated, followed by its alternatives.

    The n-th alternative consists of the n-th best translations of the sentences, or the last ones that the search
    found.
    """
    tokenizer, longest = model.run.tokenizers.get("source", model.run.tokenizer), model.run.recipe.data.longest

    def fits(sentence: str) -> bool:
        return len(tokenizer.encode(sentence)) <= longest

    documents = [Document.read(text, fits) if markup else PlainText.read(text, fits) for text in texts]
    sentences = list(dict.fromkeys(sentence for document in documents for sentence in document.sentences()))
    options = {"n_best": alternatives + 1} if alternatives else {"best": True}
    outputs = decoded(model, ticket, sentences, options, [])
    service.count(model, outputs)
    found = {
        sentence: [best[0].text, *(output.text for output in best[1:] if output.log_prob > float("-inf"))]
        for sentence, best in zip(sentences, outputs, strict=True)
    }
    ranks = [{text: best[min(rank, len(best) - 1)] for text, best in found.items()} for rank in range(alternatives + 1)]
    return [[document.render(translations) for translations in ranks] for document in documents]


@router.post("/detect", openapi_extra=DETECTION)
async def detect_language(request: Request, service: Serving) -> list[Detected]:
    """Detect the language of a text among the source languages of the models, the most likely one first."""
    fields = await fields_of(request)
    check_fields(fields, request, service, ("q",))
    text = fields["q"] if isinstance(fields["q"], str) else "\n".join(fields["q"])
    check_texts("q", [text], service.settings, 400)
    codes = sorted({model.pair.source for model in service.translators() if model.pair is not None})
    if not codes:
        raise RequestError(400, "the languages of the models are not known; start the server with --pair RUN=en:de")
    found = await run_in_threadpool(detect, text, codes) or [(codes[0], 0.0)]
    return [Detected(confidence=round(100 * probability, 1), language=code) for code, probability in found]


@router.get("/languages")
async def languages(service: Serving) -> list[Language]:
    """List the source languages, and the languages into which each is translated."""
    targets: dict[str, set[str]] = {}
    for model in service.translators():
        assert model.pair is not None
        targets.setdefault(model.pair.source, set()).add(model.pair.target)
    return [Language(code=code, name=NAMES[code], targets=sorted(targets[code])) for code in sorted(targets)]


@router.get("/frontend/settings")
async def frontend_settings(service: Serving) -> dict[str, Any]:
    """Return the settings that LibreTranslate's web page reads."""
    pair = next((model.pair for model in service.translators()), None)
    chosen = {"source": pair.source, "target": pair.target} if pair else {}
    keys = bool(service.settings.keys)
    return {
        "apiKeys": keys,
        "charLimit": service.settings.max_chars,
        "filesTranslation": False,
        "frontendTimeout": 500,
        "keyRequired": keys,
        "language": {side: {"code": code, "name": NAMES[code]} for side, code in chosen.items()},
        "suggestions": False,
        "supportedFilesFormat": [],
    }
