import asyncio
import base64
import json
from typing import Any

import pytest

from regard.serving.guard import Guard, allowed_host, host_of, key_in, right_key
from regard.serving.settings import Settings

KEY = "secret-key-1"


def reply(settings: Settings, path: str = "/v1/models", body: bytes = b"", **headers: str) -> tuple[int, Any]:
    """Send a request through the guard to an application that answers 200 with the body of the request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(message["body"].decode()).encode()})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    parts = [{"type": "http.request", "body": body[i : i + 7], "more_body": True} for i in range(0, len(body), 7)]
    parts.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return parts.pop(0)

    named = {"host": "127.0.0.1:8000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    pairs = [(name.encode(), value.encode()) for name, value in named.items()]
    scope = {"type": "http", "path": path, "method": "POST", "headers": pairs}
    asyncio.run(Guard(app, settings)(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST:99", "localhost."])
def test_loopback_names_are_answered(host: str) -> None:
    assert reply(Settings(), host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.168.1.5", "localhost.evil.example:80"])
def test_other_names_are_refused_because_dns_may_be_rebound(host: str) -> None:
    status, body = reply(Settings(), "/health", host=host)
    assert status == 403
    assert "--allow-host" in body["error"]


@pytest.mark.parametrize("host", ["", "a b/c", "user@localhost", "localhost:port", "[::1"])
def test_malformed_hosts_are_refused(host: str) -> None:
    assert reply(Settings(), host=host)[0] in {400, 403}


def test_names_that_the_operator_allows_are_answered() -> None:
    settings = Settings(host="0.0.0.0", allow_hosts=("Models.example",))
    assert reply(settings, host="models.example:80")[0] == 200
    assert allowed_host("192.168.1.5", settings)  # an address cannot be rebound
    assert not allowed_host("other.example", settings)
    assert allowed_host("gpu7", Settings(host="gpu7"))


@pytest.mark.parametrize(
    "wildcard", ["", "0.0.0.0", "0", "::", "::0", "0::0", "0:0:0:0:0:0:0:0", "0000::", "::ffff:0.0.0.0"]
)
def test_server_on_all_addresses_answers_for_addresses(wildcard: str) -> None:
    settings = Settings(host=wildcard)
    assert reply(settings, host="192.168.1.5:8000")[0] == 200
    assert reply(settings, host="[fe80::1]:8000")[0] == 200
    assert reply(settings, host="evil.example")[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "10.0.0.5", "0.example", "wild.example", "::2"])
def test_server_on_one_address_answers_for_no_other(host: str) -> None:
    assert reply(Settings(host=host), host="192.168.1.5:8000")[0] == 403


def test_addresses_are_compared_in_their_shortest_form() -> None:
    assert reply(Settings(), host="[0:0:0:0:0:0:0:1]:8000")[0] == 200
    settings = Settings(host="FE80:0::1", allow_hosts=("2001:db8:0::7",))
    assert reply(settings, host="[fe80::1]:8000")[0] == 200
    assert reply(settings, host="[2001:DB8::7]")[0] == 200
    assert reply(settings, host="[2001:db8::8]")[0] == 403


def test_pages_of_other_origins_are_refused_unless_allowed() -> None:
    assert reply(Settings(), origin="http://localhost:3000")[0] == 200
    assert reply(Settings(), origin="https://evil.example")[0] == 403
    assert reply(Settings(), origin="null")[0] == 403
    assert reply(Settings(allow_origins=("https://my.example",)), origin="https://my.example")[0] == 200


def test_pages_of_other_addresses_are_refused_by_a_server_on_all_addresses() -> None:
    settings = Settings(host="0.0.0.0")
    assert reply(settings, host="10.0.0.5:8000", origin="http://10.0.0.5:8000")[0] == 200
    assert reply(settings, host="10.0.0.5:8000", origin="http://10.0.0.6")[0] == 403


@pytest.mark.parametrize("origin", ["http://[evil", "http://[::1", "http://a:port", "http://", "://", "[", ""])
def test_malformed_origins_are_refused(origin: str) -> None:
    assert reply(Settings(), origin=origin)[0] == 403


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"user:{key}".encode()).decode()


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {KEY}", 200), (f"bearer {KEY}", 200), (basic(KEY), 200), ("Bearer other-key", 401),
        (basic("other-key"), 401), ("Basic !!!", 401), (KEY, 401), ("", 401), ("Bearer ", 401),
    ],
)  # fmt: skip
def test_keys_are_checked(authorization: str, status: int) -> None:
    assert reply(Settings(keys=("first-key", KEY)), authorization=authorization)[0] == status


def test_errors_of_openai_paths_have_the_form_of_openai() -> None:
    _, body = reply(Settings(keys=(KEY,)))
    assert body["error"]["code"] == "invalid_api_key"
    assert body["error"]["type"] == "authentication_error"


def test_health_needs_no_key() -> None:
    assert reply(Settings(keys=(KEY,)), "/health")[0] == 200
    assert reply(Settings(keys=(KEY,)), "/metrics")[0] == 401


def test_keys_are_not_in_the_representation_of_the_settings() -> None:
    assert KEY not in repr(Settings(keys=(KEY,)))


def test_right_key_compares_whole_keys() -> None:
    assert right_key("abcdefgh", ["12345678", "abcdefgh"])
    assert not right_key("abcdefg", ["abcdefgh"])
    assert not right_key("äöü\ud800", ["abcdefgh"])
    assert key_in({}) is None


@pytest.mark.parametrize("length", [{}, {"content_length": "1000"}])
def test_long_bodies_are_refused_with_and_without_a_length(length: dict[str, str]) -> None:
    status, body = reply(Settings(max_body=100), "/translate", b"x" * 1000, **length)
    assert (status, body) == (413, {"error": "the request has more than 100 bytes; send less text at a time"})


def test_body_arrives_whole() -> None:
    assert reply(Settings(), body=b"some text in several parts") == (200, "some text in several parts")


def test_host_names_are_read_without_the_port() -> None:
    assert host_of("Example.com:80") == "example.com"
    assert host_of("[::1]:80") == "::1"
