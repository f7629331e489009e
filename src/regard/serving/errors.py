"""Errors of requests, with the status code and the sentence that the client receives."""

from collections.abc import Mapping
from typing import Any

from regard.errors import RegardError, lacks_memory

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
OPENAI = ("/v1/completions", "/v1/models")  # paths whose errors have the form of OpenAI
LIBRETRANSLATE = ("/translate", "/detect", "/languages", "/frontend/settings")


class RequestError(RegardError):
    """Raised for a request that is refused. The message is one sentence; `field` is the field of the request."""

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.headers = dict(headers or {})


class ClientGoneError(RegardError):
    """Raised in the computation for a request whose client has closed the connection."""


def busy(seconds: int) -> RequestError:
    """Return the error for a request that does not fit into the queue."""
    plural = "" if seconds == 1 else "s"
    sentence = f"all places of the queue are taken; send the request again in {seconds} second{plural}"
    return RequestError(429, sentence, code="queue_full", headers={"Retry-After": str(seconds)})


def timed_out(seconds: float) -> RequestError:
    """Return the error for a request that was not answered in time."""
    return RequestError(
        503, f"the request was not answered within {seconds:g} seconds; send less text at a time", code="timeout"
    )


def stopping() -> RequestError:
    """Return the error for a request that arrives while the server stops."""
    return RequestError(503, "the server is stopping; send the request to another one", code="stopping")


def refused(path: str, error: RegardError) -> RequestError:
    """Return the error for input that the model cannot process.

    The status is 400 for paths of OpenAI and LibreTranslate, as in their interfaces, and otherwise 422.
    """
    status = 400 if path.startswith((*OPENAI, *LIBRETRANSLATE)) else 422
    if isinstance(error, RequestError):
        if error.status == 422:
            error.status = status
        return error
    return RequestError(status, " ".join(str(error).split()), getattr(error, "path", None) or None)


def failed(error: BaseException) -> RequestError:
    """Return the error for a computation that failed for an internal reason, or because memory ran out."""
    if lacks_memory(error):
        return RequestError(503, "memory ran out; send less text, or use a smaller beam size", code="memory")
    return RequestError(500, "the server failed to compute an answer; its log contains the reason", code="internal")


def body(path: str, error: RequestError) -> dict[str, Any]:
    """Return the JSON object that describes an error, in the form of OpenAI for OpenAI's paths."""
    if not path.startswith(OPENAI):
        return {"error": error.message}
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}
