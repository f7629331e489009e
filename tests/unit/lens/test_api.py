import asyncio
import json
import threading
import time
from typing import Any

import pytest

pytest.importorskip("fastapi")
import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient

from regard.lens import api
from regard.lens.decode import Read
from regard.lens.request import LensRequest
from regard.lens.serve import add_lens
from regard.lens.session import Lens
from regard.serving.app import create_app
from regard.serving.settings import Settings
from tests.unit.lens.conftest import Make


@pytest.fixture
def client(make: Make) -> TestClient:
    app = FastAPI()
    app.include_router(api.router({"a": make("translator"), "b": make("recurrent")}))
    return TestClient(app)


def test_page_and_its_files_load_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in api.files():
        file = client.get(f"/lens/page/{name}")
        assert file.status_code == 200
        code = file.text.replace("http://www.w3.org/2000/svg", "")
        if "vendor" not in name:
            assert "http:" not in code
            assert "https:" not in code
            assert "innerHTML" not in code


@pytest.mark.parametrize("path", ["../api.py", "..%2fapi.py", "nothing.js", "%2fetc%2fpasswd", "vendor", ""])
def test_no_path_reaches_the_file_system(client: TestClient, path: str) -> None:
    assert client.get(f"/lens/page/{path}").status_code == 404


def test_models_are_described(client: TestClient) -> None:
    assert [model["name"] for model in client.get("/lens/api/models").json()["models"]] == ["a", "b"]


def test_inspect_answers_for_the_named_model(client: TestClient) -> None:
    answers = {name: client.post("/lens/api/inspect", json={"model": name, "text": "one two"}).json() for name in "ab"}
    assert answers["a"]["model"] == "a"
    assert len(answers["b"]["attention"]["decoder.cross"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"null", 422, "JSON object"),
        (json.dumps({"text": "one", "model": "c"}).encode(), 422, "there is no model 'c'"),
        (json.dumps({"text": "one", "model": ["c"]}).encode(), 422, "there is no model"),
        (json.dumps({"text": "one\ud800"}).encode(), 422, "half a character"),
        (json.dumps({"text": "one", "t\ud800xt": 1}).encode(), 422, "is not a key of a lens request"),
        (json.dumps({"text": "x" * 300_000}).encode(), 413, "bytes"),
    ],
)
def test_wrong_request_is_one_sentence(client: TestClient, body: bytes, status: int, message: str) -> None:
    response = client.post("/lens/api/inspect", content=body)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_nul_character_is_text(client: TestClient) -> None:
    assert client.post("/lens/api/inspect", json={"text": "one \0 two"}).status_code == 200


def test_too_many_waiting_requests_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> dict[str, Any]:
        entered.set()
        go_on.wait(10)
        return {}

    monkeypatch.setattr(Lens, "inspect", wait)
    monkeypatch.setattr(api, "WAITING", 1)
    app = FastAPI()
    app.include_router(api.router({"a": make("translator")}))
    with TestClient(app) as client:
        first = threading.Thread(target=lambda: client.post("/lens/api/inspect", json={"text": "one"}))
        first.start()
        entered.wait(10)
        assert client.post("/lens/api/inspect", json={"text": "one"}).status_code == 429
        go_on.set()
        first.join()
        assert client.post("/lens/api/inspect", json={"text": "one"}).status_code == 200


class Stuck:
    """Replaces `Lens.inspect` by a function that waits until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running, self.go_on = 0, threading.Event()
        monkeypatch.setattr(Lens, "inspect", lambda *_: self.wait())

    def wait(self) -> dict[str, Any]:
        self.running += 1
        assert self.go_on.wait(20)
        return {}

    async def until_running(self, count: int) -> None:
        while self.running < count:
            await asyncio.sleep(0.01)


def http(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def test_requests_of_the_lens_delay_no_health_check(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, names, shared = Stuck(monkeypatch), "abcdef", 40  # the number of threads that other routes share
    app = create_app(dict.fromkeys(names, make("translator")))
    add_lens(app)

    async def statuses() -> list[int]:
        async with http(app) as client:
            bodies = [{"model": name, "text": "one"} for name in names] * api.WAITING
            waiting = [asyncio.ensure_future(client.post("/lens/api/inspect", json=body)) for body in bodies]
            try:
                async with asyncio.timeout(20):
                    await stuck.until_running(shared)
                    paths = ("/health", "/metrics", "/languages")
                    return [(await client.get(path)).status_code for path in paths]
            finally:
                stuck.go_on.set()
                await asyncio.gather(*waiting)

    assert len(names) * api.WAITING > shared
    assert asyncio.run(statuses()) == [200, 200, 200]


def test_full_thread_pool_delays_no_health_check(make: Make) -> None:
    app, go_on = create_app({"a": make("translator")}), threading.Event()
    running = list[int]()

    @app.get("/slow")
    def slow() -> None:
        running.append(1)
        assert go_on.wait(20)

    async def statuses() -> list[int]:
        async with http(app) as client:
            waiting = [asyncio.ensure_future(client.get("/slow")) for _ in range(60)]
            try:
                async with asyncio.timeout(20):
                    while len(running) < 40:
                        await asyncio.sleep(0.01)
                    return [(await client.get(path)).status_code for path in ("/health", "/metrics")]
            finally:
                go_on.set()
                await asyncio.gather(*waiting)

    assert asyncio.run(statuses()) == [200, 200]


def test_request_that_takes_too_long_is_refused_and_keeps_its_place(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(monkeypatch)
    monkeypatch.setattr(api, "WAITING", 1)
    app = create_app({"a": make("translator")}, Settings(timeout=0.2))
    add_lens(app)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        late = client.post("/lens/api/inspect", json={"text": "one"})
        assert (late.status_code, "within 0.2 seconds" in late.json()["error"]) == (503, True)
        full = client.post("/lens/api/inspect", json={"text": "one"})
        assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
        stuck.go_on.set()
        end = time.monotonic() + 20
        while (again := client.post("/lens/api/inspect", json={"text": "one"})).status_code == 429:
            assert time.monotonic() < end
        assert again.status_code == 200


def test_request_of_a_client_that_left_gives_up_its_place(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    read, texts = Lens._read, list[str]()

    def slow(lens: Lens, request: LensRequest, warnings: list[str]) -> Read:
        texts.append(request.text)
        begun.set()
        assert go.wait(20)
        return read(lens, request, warnings)

    monkeypatch.setattr(Lens, "_read", slow)
    monkeypatch.setattr(api, "WAITING", 2)
    app = FastAPI()
    app.include_router(api.router({"a": make("translator")}))

    async def post(text: str, leaves: bool) -> int:
        messages = [{"type": "http.request", "body": json.dumps({"text": text}).encode(), "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if not messages and not leaves:
                await asyncio.Event().wait()
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        path = "/lens/api/inspect"
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        await app(scope, receive, send)
        return sent[0]["status"]

    async def answers() -> tuple[int, int, int]:
        first = asyncio.ensure_future(post("one", False))
        await asyncio.to_thread(begun.wait, 20)
        left = await post("two", True)
        await asyncio.sleep(0.5)
        third = asyncio.ensure_future(post("three", False))
        await asyncio.sleep(0.1)
        go.set()
        return await first, left, await third

    assert asyncio.run(answers()) == (200, 499, 200)
    assert texts == ["one", "three"]


def test_lens_is_a_part_of_the_server_and_behind_its_checks(make: Make) -> None:
    app = create_app({"a": make("translator")}, Settings(keys=("a secret key",)))
    add_lens(app)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        key = {"Authorization": "Bearer a secret key"}
        assert client.get("/").status_code == 401
        assert client.get("/", headers=key).status_code == 200
        answer = client.post("/lens/api/inspect", json={"text": "one two"}, headers=key)
        assert answer.json()["model"] == "a"
        other = {**key, "Host": "attacker.example"}
        assert client.post("/lens/api/inspect", json={"text": "one"}, headers=other).status_code == 403
        assert client.get("/health").status_code == 200
    assert not any("lens" in path for path in app.openapi()["paths"])
