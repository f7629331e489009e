"""The texts and search settings of a request: their checks, and their decoding with a served model."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from regard.errors import nearest
from regard.inference.text import Output
from regard.runs.decode import TextDecoder, text_decoder
from regard.serving.errors import RequestError
from regard.serving.service import ServedModel
from regard.serving.settings import Settings
from regard.serving.ticket import Ticket

SURROGATE = re.compile("[\ud800-\udfff]")
LINE = re.compile(r"^line (\d+): ")


def clean(text: Any) -> Any:
    """Return `text`; raise ValueError for a string with a NUL character or a lone surrogate."""
    if isinstance(text, str):
        if "\0" in text:
            raise ValueError("contains a NUL character (U+0000); remove it")
        if SURROGATE.search(text):
            raise ValueError("contains half a character (a lone surrogate); repair it")
    return text


def listed(texts: Any) -> Any:
    """Return `texts`, or a list with one element if `texts` is a string."""
    return [texts] if isinstance(texts, str) else texts


Text = Annotated[str, BeforeValidator(clean)]
Texts = Annotated[list[Text], BeforeValidator(listed, json_schema_input_type=str | list[str])]


class Body(BaseModel):
    """Base class of request bodies. Unknown fields raise an error."""

    model_config = ConfigDict(extra="forbid")  # for the OpenAPI description; `known_fields` has the better message

    @model_validator(mode="before")
    @classmethod
    def known_fields(cls, values: Any) -> Any:
        """Return `values`; raise an error for a field that is not known, with the most similar name."""
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                shown = str(name).encode("utf-8", "backslashreplace").decode()[:80]
                message = f"{shown!r} is no field of this request; {nearest(shown, cls.model_fields)}"
                raise PydanticCustomError("unknown_field", "{message}", {"message": message, "field": shown})
        return values


class SearchFields(Body):
    """The search settings and constraints of a request; they are those of `regard translate` and `generate`."""

    beam: int | None = Field(None, ge=1, description="Beam size; 1 is greedy search.")
    n_best: int | None = Field(None, ge=1, description="Number of outputs for every text, best first.")
    temperature: float | None = Field(None, gt=0, le=100, description="Sampling temperature; lower is conservative.")
    top_k: int | None = Field(None, ge=0, le=1 << 31, description="Sample only from the K most probable tokens.")
    top_p: float | None = Field(None, gt=0, le=1, description="Sample from the tokens with this total probability.")
    min_p: float | None = Field(None, ge=0, le=1, description="Sample from tokens at least this probable, relatively.")
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="Random seed for sampling.")
    min_len: int = Field(0, ge=0, description="Minimum length of an output in tokens.")
    max_len: int | None = Field(None, ge=1, description="Maximum length of an output in tokens.")
    prefix: Text = Field("", description="Text that every output begins with.")
    required: list[Text] = Field([], description="Words that every output must contain.")
    banned: list[Text] = Field([], description="Words that no output may contain.")
    no_repeat: int = Field(0, ge=0, le=64, description="Never repeat a sequence of N tokens; 0 allows repetition.")

    def options(self, settings: Settings) -> dict[str, Any]:
        """Return the options of `text_decoder`; raise RequestError if one is above a limit of the server."""
        for name in ("beam", "n_best"):
            check_most(name, getattr(self, name), settings.max_beam)
        for name in ("min_len", "max_len"):
            check_most(name, getattr(self, name), settings.max_new_tokens)
        for name, words in (("prefix", [self.prefix]), ("required", self.required), ("banned", self.banned)):
            check_texts(name, words, settings)
        given = {name: getattr(self, name) for name in SearchFields.model_fields}
        return {name: value for name, value in given.items() if value is not None}


def check_most(name: str, value: int | None, most: int) -> None:
    """Raise RequestError if `value` is above the limit `most` of the server."""
    if value is not None and value > most:
        raise RequestError(422, f"{name}: {value} is above the limit of this server, {most}; lower it", name)


def check_texts(name: str, texts: Sequence[str], settings: Settings, status: int = 422) -> None:
    """Raise RequestError for too many texts, or for a text that is too long."""
    if len(texts) > settings.max_texts:
        message = f"{name}: {len(texts)} texts are more than {settings.max_texts}; send them in several requests"
        raise RequestError(status, message, name)
    for index, text in enumerate(texts):
        if len(text) > settings.max_chars:
            where = f"{name}[{index}]" if len(texts) > 1 else name
            message = f"{where}: {len(text):,} characters are more than {settings.max_chars:,}; split the text"
            raise RequestError(status, message, name)


def decoder(model: ServedModel, ticket: Ticket, options: Mapping[str, Any], warnings: list[str]) -> TextDecoder:
    """Return the decoder of `regard.translate` and `regard.generate` with the engine that all requests share."""
    return text_decoder([model.run], engine=model.shared(ticket), warn=warnings.append, **options)


def decoded(
    model: ServedModel, ticket: Ticket, texts: Sequence[str], options: Mapping[str, Any], warnings: list[str]
) -> list[list[Output]]:
    """Return the outputs for every text, and add the warnings to `warnings`."""
    return list(decoder(model, ticket, options, warnings).outputs(texts))


def located(sentences: Sequence[str], name: str) -> Iterator[str]:
    """Yield messages about `line 3` as messages about `texts[2]`."""
    for sentence in sentences:
        yield LINE.sub(lambda match: f"{name}[{int(match[1]) - 1}]: ", sentence)
