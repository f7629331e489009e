"""The checks of every request before it is routed: host, origin, API key and size."""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import json
import socket
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.serving.errors import LIBRETRANSLATE, RequestError, body
from regard.serving.settings import Settings

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN = frozenset({"/health", *LIBRETRANSLATE})  # paths without a key; /translate and /detect check `api_key` themselves


def host_of(header: str) -> str | None:
    """Return the host name of a Host header in lower case, without the port; None if the header is malformed."""
    try:
        parts = urlsplit(f"//{header}")
        parts.port  # noqa: B018  # raises ValueError if it is no number
    except ValueError:
        return None
    if parts.hostname is None or parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return canonical(parts.hostname.rstrip("."))


def canonical(host: str) -> str:
    """Return an address in its shortest form, such as "::1" for "0:0:0:0:0:0:0:1", and a name in lower case."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


def is_address(host: str) -> bool:
    """Return whether `host` is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Return whether a server that binds to `host` listens on all addresses, as with "0.0.0.0", "::", "::0" or "0"."""
    flags = socket.AI_PASSIVE | socket.AI_NUMERICHOST  # as the server binds, but without asking a name server
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=flags)
        address = ipaddress.ip_address(str(found[0][4][0]))
    except (OSError, ValueError):
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified


def allowed_host(host: str, settings: Settings) -> bool:
    """Return whether a request for this host name is answered.

    A web page can let a name of its own resolve to 127.0.0.1 (DNS rebinding). The browser then sends that name in the
    Host header. A server that binds to all addresses also accepts addresses, which cannot be rebound.
    """
    return allowed_name(host, settings) or (is_address(host) and is_wildcard(settings.host))


def allowed_name(host: str, settings: Settings) -> bool:
    """Return whether a host is the loopback address, that of the server, or one that the operator has named."""
    return host in LOOPBACK or host in {canonical(name) for name in (settings.host, *settings.allow_hosts)}


def right_key(given: str, keys: Iterable[str]) -> bool:
    """Return whether `given` is one of the API keys, compared in constant time."""
    encoded = given.encode("utf-8", "surrogatepass")
    return sum(hmac.compare_digest(encoded, key.encode()) for key in keys) > 0  # unlike `any`, compares with all keys


def key_in(headers: Mapping[str, str]) -> str | None:
    """Return the API key in the header `Authorization`: the token of `Bearer`, or the password of `Basic`."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return None


class Guard:
    """ASGI middleware that refuses requests for other hosts, from other origins, without a key, or that are too long.

    The body is read here, up to the limit, and then passed on in one piece.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request with an error, or pass it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # there are no WebSockets: the server closes the connection
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self.check_host(headers)
            self.check_key(scope, headers)
            content = await self.read(headers, receive)
        except RequestError as error:
            await answer(scope["path"], error, send)
            return
        if content is None:  # the client left before the end of the body
            return
        await self.app(scope, Replay(content, receive), send)

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError for a Host or Origin header that is not allowed."""
        host = host_of(headers.get("host", ""))
        if host is None:
            raise RequestError(400, "the request has no valid Host header; send one")
        if not allowed_host(host, self.settings):
            hint = f"start the server with --allow-host {host[:80]}"
            raise RequestError(403, f"the server does not answer requests for the host {host[:80]!r}; {hint}")
        origin = headers.get("origin")
        if origin is None or origin in self.settings.allow_origins:
            return
        other = host_of(origin.partition("://")[2])
        if other is None or not (other == host or allowed_name(other, self.settings)):
            hint = "start the server with --allow-origin"
            raise RequestError(403, f"pages of {origin[:80]!r} may not use this server; {hint} {origin[:80]}")

    def check_key(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raise RequestError for a request without a right API key, if the server has keys."""
        keys, path = self.settings.keys, scope["path"]
        if not keys or path in OPEN or scope["method"] == "OPTIONS":
            return
        given = key_in(headers)
        if given is not None and right_key(given, keys):
            return
        scheme = "Bearer" if path.startswith("/v1") or path == "/metrics" else 'Basic realm="regard", charset="UTF-8"'
        message = "the API key is wrong; ask the operator of the server for one"
        if given is None:
            message = "an API key is needed; send it in the header Authorization: Bearer KEY"
        raise RequestError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": scheme})

    async def read(self, headers: Mapping[str, str], receive: Receive) -> bytes | None:
        """Return the body, or None if the client closes the connection early; raise RequestError if it is too long."""
        limit = self.settings.max_body
        error = RequestError(413, f"the request has more than {limit:,} bytes; send less text at a time")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit:
            raise error
        content = bytearray()
        deadline = asyncio.get_running_loop().time() + self.settings.timeout
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), left)
            except TimeoutError:
                raise RequestError(408, "the body of the request did not arrive in time; send it again") from None
            if message["type"] == "http.disconnect":
                return None
            content += message.get("body", b"")
            if len(content) > limit:
                raise error
            if not message.get("more_body", False):
                return bytes(content)


class Replay:
    """ASGI `receive` that replays a request body that was read before, and then passes on all further messages."""

    def __init__(self, content: bytes, receive: Receive) -> None:
        self.content: bytes | None = content
        self.receive = receive

    async def __call__(self) -> Message:
        """Return the next message."""
        if self.content is None:
            return await self.receive()
        content, self.content = self.content, None
        return {"type": "http.request", "body": content, "more_body": False}


async def answer(path: str, error: RequestError, send: Send) -> None:
    """Send an error as JSON. The connection is closed, because the rest of the body may not have been read."""
    content = json.dumps(body(path, error)).encode()
    headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
