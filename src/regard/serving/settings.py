"""The settings of the server."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from regard.errors import SpecError, nearest
from regard.nn.checks import check_count
from regard.serving.languages import NAMES

HOST = re.compile(
    r"(?:[\w-]+\.)*[\w-]+|[0-9a-f:.]+", re.ASCII | re.IGNORECASE
)  # a name, or an address without brackets
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:(?:[a-z0-9_-]+\.)*[a-z0-9_-]+|\[[0-9a-f:.]+\])(?::\d+)?")


@dataclass(frozen=True, slots=True)
class Pair:
    """The source and the target language of a translation model, as ISO 639-1 codes such as `en`."""

    source: str
    target: str

    def __post_init__(self) -> None:
        """Raise SpecError for a code that is not known."""
        for code in (self.source, self.target):
            if code not in NAMES:
                raise SpecError("--pair", f"{code!r} is not a language code of ISO 639-1; {nearest(code, NAMES)}")
        if self.source == self.target:
            raise SpecError("--pair", f"{self.source}:{self.target} has the same language twice; write en:de")

    def __str__(self) -> str:
        return f"{self.source}:{self.target}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The limits of the server, and who may use it."""

    host: str = "127.0.0.1"  # the address that the server binds to
    pairs: Mapping[str, Pair] = field(default_factory=lambda: MappingProxyType({}))  # name of a model -> its languages
    keys: tuple[str, ...] = field(default=(), repr=False)  # API keys; (): no key is needed
    allow_hosts: tuple[str, ...] = ()  # further names in the Host header that are accepted
    allow_origins: tuple[str, ...] = ()  # web pages of other origins that may use the server (CORS)
    queue: int = 256  # maximum number of requests per model that wait or run
    max_batch: int = 64  # maximum number of texts per model that are decoded together
    timeout: float = 60.0  # seconds until an unanswered request is dropped
    max_body: int = 1 << 20  # maximum number of bytes of a request
    max_texts: int = 128  # maximum number of texts in a request
    max_chars: int = 10_000  # maximum number of characters of a text
    max_beam: int = 16  # maximum beam size, and maximum number of outputs for a text
    max_new_tokens: int = 2048  # maximum number of tokens of an output that a request can ask for

    def __post_init__(self) -> None:
        """Raise SpecError for a limit below 1, and for a host, origin or key that no request can have."""
        for name in ("queue", "max_batch", "max_body", "max_texts", "max_chars", "max_beam", "max_new_tokens"):
            check_count(name, getattr(self, name))
        if not 0 < self.timeout < math.inf:
            raise SpecError("timeout", f"must be a number above 0, not {self.timeout}")
        for name in self.allow_hosts:
            if not HOST.fullmatch(name):
                raise SpecError("--allow-host", f"{name!r} is not a host name; give it without scheme, port and path")
        for origin in self.allow_origins:
            if origin != "null" and not ORIGIN.fullmatch(origin):
                message = (
                    f"{origin!r} is not an origin, such as https://my.example:8080, in small letters, without a path"
                )
                raise SpecError("--allow-origin", message)
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() for key in self.keys):
            raise SpecError("keys", "an API key needs at least 8 printable ASCII characters; choose a longer one")
