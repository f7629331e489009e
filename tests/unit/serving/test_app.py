from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from regard.serving.app import create_app
from regard.serving.errors import ClientGoneError
from regard.serving.settings import Settings

KEY = {"Authorization": "Bearer a secret key"}


@pytest.fixture
def app() -> FastAPI:
    return create_app({}, Settings(keys=("a secret key",), max_body=100, allow_origins=("https://my.example",)))


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def counted(app: FastAPI) -> dict[tuple[str, str], float]:
    """Return the number of requests by route and status."""
    samples = [sample for family in app.state.service.metrics.requests.collect() for sample in family.samples]
    totals = [sample for sample in samples if sample.name.endswith("_total")]
    return {(sample.labels["route"], sample.labels["status"]): sample.value for sample in totals}


def test_request_that_fails_is_counted_as_answered_with_500(app: FastAPI, client: TestClient) -> None:
    @app.get("/broken")
    def broken() -> None:
        raise ZeroDivisionError

    assert client.get("/broken", headers=KEY).status_code == 500
    assert counted(app) == {("/broken", "500"): 1}
    assert (app.state.service.received, app.state.service.answered) == (1, 1)


def test_requests_that_the_guard_refuses_are_counted(app: FastAPI, client: TestClient) -> None:
    answers = [
        client.get("/health"),
        client.get("/health", headers={"Host": "other.example"}),
        client.get("/health", headers={"Origin": "https://other.example"}),
        client.get("/metrics"),
        client.post("/translate", content=b"x" * 101),
    ]
    assert [answer.status_code for answer in answers] == [200, 403, 403, 401, 413]
    expected = {("/health", "200"): 1, ("other", "403"): 2, ("other", "401"): 1, ("other", "413"): 1}
    assert counted(app) == expected
    assert (app.state.service.received, app.state.service.answered) == (5, 5)


def test_preflight_requests_of_browsers_are_counted(app: FastAPI, client: TestClient) -> None:
    asked = {"Origin": "https://my.example", "Access-Control-Request-Method": "POST"}
    assert client.options("/translate", headers=asked).status_code == 200
    assert counted(app) == {("other", "200"): 1}


def test_client_that_left_received_no_answer(app: FastAPI, client: TestClient) -> None:
    @app.get("/left")
    def left() -> None:
        raise ClientGoneError("the client has closed the connection")

    client.get("/left", headers=KEY)
    assert counted(app) == {("/left", "499"): 1}
    assert (app.state.service.received, app.state.service.answered) == (1, 0)


def test_answer_that_breaks_off_keeps_its_status(app: FastAPI, client: TestClient) -> None:
    def parts() -> Iterator[bytes]:
        yield b"one"
        raise ZeroDivisionError

    @app.get("/stream")
    def stream() -> StreamingResponse:
        return StreamingResponse(parts())

    client.get("/stream", headers=KEY)
    assert counted(app) == {("/stream", "200"): 1}
