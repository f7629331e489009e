"""The routes `/v1/translate`, `/v1/generate` and `/v1/classify`, with the options of the commands of these names."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from regard.errors import RegardError
from regard.inference.text import NEW, Output
from regard.inspection.alignment import aligning_layer
from regard.inspection.recording import record
from regard.runs.inspect import Attention, batch_of_output
from regard.runs.trained_model import TrainedModel
from regard.serving.engine import submit
from regard.serving.errors import ClientGoneError, RequestError, refused
from regard.serving.errors import body as error_body
from regard.serving.operations import ERRORS, Serving
from regard.serving.service import ServedModel, Service
from regard.serving.streaming import event, pieces, respond
from regard.serving.texts import Body, SearchFields, Texts, check_texts, decoded, decoder, located
from regard.serving.ticket import Classify, Ticket

router = APIRouter(prefix="/v1", tags=["regard"], responses=ERRORS)
MAX_WEIGHTS = 1_000_000  # maximum number of attention weights in an answer
ModelName = Field(None, description="Name of the model; needed if several models fit.")


class TranslationRequest(SearchFields):
    """One text or several texts to translate. Every text is translated as one line of `regard translate`."""

    texts: Texts = Field(description="One text or several texts.")
    model: str | None = ModelName
    alignment: bool = Field(False, description="Return the source token to which each output token attends most.")
    attention: bool = Field(False, description="Return the attention weights of the best output; for one text.")


class GenerationRequest(SearchFields):
    """One prompt or several prompts to continue, as with `regard generate`."""

    prompts: Texts = Field(description="One prompt or several prompts.")
    model: str | None = ModelName
    stream: bool = Field(False, description="Send the text as it is generated, as server-sent events; for one prompt.")


class ClassificationRequest(Body):
    """One text or several texts to classify."""

    texts: Texts = Field(description="One text or several texts.")
    model: str | None = ModelName


class OutputBody(BaseModel):
    """One output text. `score` and `log_prob` are null for an output that the search did not find."""

    text: str
    score: float | None
    log_prob: float | None
    tokens: list[str]
    ended: bool


class AlignmentBody(BaseModel):
    """Tokens of a source and of its best output, and pairs (index in source, index in target)."""

    source: list[str]
    target: list[str]
    pairs: list[tuple[int, int]]


class AttentionBody(BaseModel):
    """Attention weights by kind, as [layer][head][query][key], and the tokens that encoder and decoder read."""

    tokens: dict[str, list[str]]
    weights: dict[str, list[list[list[list[float]]]]]


class TranslationResponse(BaseModel):
    """The translations of every text, best first, and the warnings of `regard translate`."""

    model: str
    translations: list[list[OutputBody]]
    warnings: list[str]
    alignments: list[AlignmentBody] | None = None
    attention: AttentionBody | None = None


class GenerationResponse(BaseModel):
    """The outputs for every prompt, best first. A text begins with its prompt."""

    model: str
    outputs: list[list[OutputBody]]
    warnings: list[str]


class PredictionBody(BaseModel):
    """The predicted class of a text, and the probabilities of all classes."""

    label: str
    probabilities: dict[str, float]


class ClassificationResponse(BaseModel):
    """The prediction for every text."""

    model: str
    predictions: list[PredictionBody]
    warnings: list[str]


@router.post("/translate")
async def translate(body: TranslationRequest, request: Request, service: Serving) -> TranslationResponse:
    """Translate one text or several texts; the result equals that of `regard translate`."""
    model = service.model("translate", body.model)
    if body.attention and len(body.texts) != 1:
        raise RequestError(422, "attention: is returned for one text at a time; send one text", "attention")
    alignments: list[AlignmentBody] = []
    attentions: list[AttentionBody] = []

    def inspect(ticket: Ticket, outputs: list[list[Output]]) -> None:
        for best in outputs:
            if not (best[0].read or body.attention):  # the model did not read an empty text
                alignments.append(AlignmentBody(source=[], target=[], pairs=[]))
                continue
            attention = model.call(lambda best=best: attention_to(model.run, best[0]), ticket)
            if body.alignment:
                alignments.append(aligned(attention))
            if body.attention:
                attentions.append(weights_of(attention))

    outputs, warnings = await _decode(
        request, service, model, body.texts, body, inspect if body.alignment or body.attention else None
    )
    return TranslationResponse(
        model=model.name,
        translations=_described(outputs),
        warnings=warnings,
        alignments=alignments if body.alignment else None,
        attention=attentions[0] if body.attention else None,
    )


def attention_to(run: TrainedModel, output: Output) -> Attention:
    """Return the attention weights of a translation model for a source and its own output."""
    batch = batch_of_output(run, output)
    recording = record(run.model, batch, tokenizers=run.tokenizers, keep=["attention"])
    return Attention(recording.tokens, recording.attention)


def aligned(attention: Attention) -> AlignmentBody:
    """Return, for every output token, the source token with the largest weight of cross-attention.

    The weights are the mean over all heads of one layer, which is that of `regard align`. The end token of the source
    is left out.
    """
    layers = attention.weights.get("decoder.cross")
    if not layers:
        raise RequestError(422, "alignment: this model has no cross-attention; leave it out", "alignment")
    source, target = list(attention.tokens["encoder"])[:-1], list(attention.tokens["decoder"])[1:]
    weights = layers[aligning_layer(len(layers))].mean(0)[: len(target), : len(source)]
    best = weights.argmax(-1).tolist() if source and target else []
    return AlignmentBody(source=source, target=target, pairs=[(place, index) for index, place in enumerate(best)])


def weights_of(attention: Attention) -> AttentionBody:
    """Return the JSON form of attention weights."""
    total = sum(layer.numel() for layers in attention.weights.values() for layer in layers)
    if total > MAX_WEIGHTS:
        message = f"attention: {total:,} weights are more than {MAX_WEIGHTS:,}; send a shorter text"
        raise RequestError(422, message, "attention")
    return AttentionBody(
        tokens={side: list(names) for side, names in attention.tokens.items()},
        weights={kind: [layer.tolist() for layer in layers] for kind, layers in attention.weights.items()},
    )


@router.post("/generate", response_model=GenerationResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def generate(body: GenerationRequest, request: Request, service: Serving) -> Response:
    """Continue one prompt or several prompts; the result equals that of `regard generate`.

    With `stream`, each event contains {"text": ...}: first the prompt, then the new text. The last event has the name
    `end` and contains {"warnings": [...]}; if the computation fails, it has the name `error` instead.
    """
    model = service.model("generate", body.model)
    if body.max_len is None and service.settings.max_new_tokens < NEW:
        body.max_len = max(service.settings.max_new_tokens, body.min_len)
    if not body.stream:
        outputs, warnings = await _decode(request, service, model, body.prompts, body, name="prompts")
        response = GenerationResponse(model=model.name, outputs=_described(outputs), warnings=warnings)
        return JSONResponse(response.model_dump())
    if len(body.prompts) != 1:
        raise RequestError(422, "stream: one prompt at a time is streamed; send one prompt", "stream")
    check_texts("prompts", body.prompts, service.settings)
    events = _generated(service, model, body.prompts[0], body.options(service.settings))
    return await respond(request, events, lambda error: event(error_body(request.url.path, error), "error"))


async def _generated(service: Service, model: ServedModel, prompt: str, options: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the events of a streamed continuation."""
    warnings: list[str] = []

    def parts(ticket: Ticket) -> Iterator[str]:
        yield from decoder(model, ticket, options, warnings).stream(prompt)

    async for text in pieces(service, model, parts):
        if text:
            yield event({"text": text})
    yield event({"warnings": list(located(warnings, "prompts"))}, "end")


@router.post("/classify")
async def classify(body: ClassificationRequest, request: Request, service: Serving) -> ClassificationResponse:
    """Predict the class of one text or of several texts; the result equals that of `regard classify`."""
    model = service.model("classify", body.model)
    check_texts("texts", body.texts, service.settings)
    tasks = [Classify(text) for text in body.texts]
    results = await service.compute(request, model, lambda ticket: submit(model.scheduler, ticket, tasks))
    return ClassificationResponse(
        model=model.name,
        predictions=[PredictionBody(label=p.label, probabilities=p.probabilities) for p, _ in results],
        warnings=[f"texts[{i}]: {warning}" for i, (_, warnings) in enumerate(results) for warning in warnings],
    )


async def _decode(
    request: Request,
    service: Service,
    model: ServedModel,
    texts: list[str],
    body: SearchFields,
    inspect: Any = None,
    name: str = "texts",
) -> tuple[list[list[Output]], list[str]]:
    """Return the outputs for the texts of a request, and the warnings. `inspect` is called with the outputs."""
    check_texts(name, texts, service.settings)
    options, warnings = body.options(service.settings), list[str]()

    def compute(ticket: Ticket) -> list[list[Output]]:
        outputs = decoded(model, ticket, texts, options, warnings)
        service.count(model, outputs)
        if inspect is not None:
            inspect(ticket, outputs)
        return outputs

    try:
        outputs = await service.compute(request, model, compute)
    except RegardError as error:
        raise _located(request, error, name) from None
    return outputs, list(located(warnings, name))


def _described(outputs: list[list[Output]]) -> list[list[OutputBody]]:
    return [[_output(output) for output in best] for best in outputs]


def _output(output: Output) -> OutputBody:
    # MISSING has a score of minus infinity, which JSON cannot store.
    score, log_prob = (None if value == float("-inf") else value for value in (output.score, output.log_prob))
    return OutputBody(text=output.text, score=score, log_prob=log_prob, tokens=list(output.tokens), ended=output.ended)


def _located(request: Request, error: RegardError, name: str) -> RegardError:
    """Return an error about `line 3` as an error about `texts[2]`, and an error about `--n-best` as about `n_best`."""
    if isinstance(error, RequestError | ClientGoneError):
        return error
    (sentence,) = located([str(error)], name)
    if sentence.startswith("--"):
        option, colon, rest = sentence.partition(":")
        sentence = option.removeprefix("--").replace("-", "_") + colon + rest
    known = refused(request.url.path, error)
    return RequestError(known.status, sentence, known.field)
