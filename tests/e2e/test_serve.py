"""The server: its answers, its clients, its limits, and what it does when it is stopped."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import schemathesis
import torch
import uvicorn
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from libretranslatepy import LibreTranslateAPI
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

import regard as package
from regard.serving.app import create_app
from regard.serving.settings import Pair, Settings
from regard.serving.ticket import Ticket

from .conftest import complaint, regard, reversed_pairs, write

KEY = "a-key-for-tests"
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
TEXTS = list(dict.fromkeys(source for source, _ in reversed_pairs(40, 9)))
SHORT = tuple(
    f"--set={change}" for change in ("model.d_model=24", "train.steps=30", "train.decode=2", "data.tokenizer.vocab=300")
)


def quick(folder: Path, *words: str) -> package.TrainedModel:
    result = regard("train", *words, "--out", str(folder), *SHORT)
    assert result.returncode == 0, result.stderr
    return package.load(folder)


@pytest.fixture(scope="module")
def models(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, package.TrainedModel]:
    """A translator, a language model and a classifier."""
    folder = tmp_path_factory.mktemp("served")
    pairs = reversed_pairs(300, 5)
    text = write(folder / "novel.txt", [f"{source} {target}" for source, target in pairs])
    labelled = write(folder / "l.tsv", [f"{'good' if 'one' in source else 'bad'}\t{source}" for source, _ in pairs])
    return {
        "toy": package.load(run),
        "novel": quick(folder / "novel", "--text", text),
        "reviews": quick(folder / "reviews", "--labelled", labelled),
    }


def settings_of(**changes: Any) -> Settings:
    return Settings(**{"pairs": {"toy": Pair("en", "de")}, **changes})


@pytest.fixture(scope="module")
def http(models: dict[str, package.TrainedModel]) -> Iterator[TestClient]:
    app = create_app(models, settings_of(max_texts=20, max_chars=2000, max_new_tokens=64))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


@contextmanager
def started(models: dict[str, package.TrainedModel], **changes: Any) -> Iterator[tuple[str, Any]]:
    """Run a server with uvicorn in a thread, on a free port of the loopback address."""
    app = create_app(models, settings_of(**changes))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.service
        finally:
            server.should_exit = True
            thread.join(30)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_translations_equal_those_of_the_command(http: TestClient, models: dict[str, package.TrainedModel]) -> None:
    toy = models["toy"]
    answer = http.post("/v1/translate", json={"texts": TEXTS[:20]}).json()
    assert [best[0]["text"] for best in answer["translations"]] == toy.translate(TEXTS[:20])
    answer = http.post("/v1/translate", json={"texts": TEXTS[0], "n_best": 3, "beam": 4}).json()
    (expected,) = toy.translations([TEXTS[0]], n_best=3, beam=4)
    names = ("text", "score", "log_prob", "tokens", "ended")
    assert answer["translations"] == [[json.loads(json.dumps({n: getattr(o, n) for n in names})) for o in expected]]
    options: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_len": 6}
    answer = http.post("/v1/translate", json={"texts": TEXTS[:5], **options}).json()
    assert [best[0]["text"] for best in answer["translations"]] == toy.translate(TEXTS[:5], **options)
    several: list[dict[str, Any]] = [{"required": ["Haus"]}, {"banned": ["Haus"]}, {"prefix": "Haus", "no_repeat": 2}]
    for options in several:
        answer = http.post("/v1/translate", json={"texts": TEXTS[:5], **options}).json()
        assert [best[0]["text"] for best in answer["translations"]] == toy.translate(TEXTS[:5], **options)


def test_requests_with_other_options_at_the_same_time_do_not_mix(models: dict[str, package.TrainedModel]) -> None:
    toy = models["toy"]
    options: list[dict[str, Any]] = [
        {},
        {"beam": 1},
        {"beam": 3, "required": ["rot"]},
        {"temperature": 0.9, "seed": 3},
        {"max_len": 2},
    ]
    expected = [[toy.translate(text, **each) for text in TEXTS[:4]] for each in options]
    found: dict[tuple[int, int], str] = {}
    with started(models) as (url, _):

        def send(row: int, column: int) -> None:
            body = {"texts": TEXTS[column], **options[row]}
            found[row, column] = post(url + "/v1/translate", body)["translations"][0][0]["text"]

        threads = [threading.Thread(target=send, args=(r, c)) for r in range(len(options)) for c in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {(r, c): expected[r][c] for r in range(len(options)) for c in range(4)}


def post(url: str, body: object, **headers: str) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def test_ctranslate2_computes_the_batches(models: dict[str, package.TrainedModel]) -> None:
    toy = models["toy"]
    engine = toy.engine("ctranslate2")
    assert engine is not None
    app = create_app({"toy": toy}, settings_of(), {"toy": engine})
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        answer = client.post("/v1/translate", json={"texts": TEXTS[:10]}).json()
        assert [best[0]["text"] for best in answer["translations"]] == toy.translate(TEXTS[:10], engine=engine)
        refused = client.post("/v1/translate", json={"texts": "one", "temperature": 1.0})
        assert refused.status_code == 422
        assert "ctranslate2" in refused.json()["error"]


def test_alignment_and_attention_are_returned_on_request(
    http: TestClient, models: dict[str, package.TrainedModel]
) -> None:
    answer = http.post("/v1/translate", json={"texts": "big red house", "alignment": True, "attention": True}).json()
    expected = models["toy"].attention("big red house")
    assert answer["attention"]["tokens"] == {side: list(names) for side, names in expected.tokens.items()}
    weights = expected.weights["decoder.cross"][-1]
    answered = torch.tensor(answer["attention"]["weights"]["decoder.cross"][-1])
    assert torch.allclose(answered, weights, rtol=0.0, atol=1e-6)
    (alignment,) = answer["alignments"]
    assert len(alignment["pairs"]) == len(alignment["target"])
    mean = weights.mean(0)
    for place, index in alignment["pairs"]:
        assert mean[index, place] == mean[index, : len(alignment["source"])].max()


def test_alignment_is_that_of_the_tokens_of_the_output(http: TestClient) -> None:
    texts = ["big red house", "", "one two " * 200]  # the last is cut at data.max_len
    answer = http.post("/v1/translate", json={"texts": texts, "alignment": True})
    assert answer.status_code == 200, answer.text
    for best, alignment in zip(answer.json()["translations"], answer.json()["alignments"], strict=True):
        assert alignment["target"][: len(best[0]["tokens"])] == best[0]["tokens"]
        assert len(alignment["target"]) == len(best[0]["tokens"])
    assert answer.json()["alignments"][1] == {"source": [], "target": [], "pairs": []}


def test_continuations_equal_those_of_the_command(http: TestClient, models: dict[str, package.TrainedModel]) -> None:
    novel, prompts = models["novel"], ["one two", "house"]
    options = {"temperature": 0.8, "seed": 5, "max_len": 12}
    answer = http.post("/v1/generate", json={"prompts": prompts, **options}).json()
    assert [best[0]["text"] for best in answer["outputs"]] == [
        best[0].text for best in novel.generate(prompts, **options)
    ]
    answer = http.post("/v1/generate", json={"prompts": "one", "stream": True, **options})
    events = re.findall(r"^data: (.*)$", answer.text, re.MULTILINE)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "".join(json.loads(data).get("text", "") for data in events) == "".join(novel.stream("one", **options))
    assert "event: end\n" in answer.text
    refused = http.post("/v1/generate", json={"prompts": "one", "stream": True, "beam": 4})
    assert (refused.status_code, refused.json()["error"].startswith("beam_size: 4 beams")) == (422, True)


def test_classes_equal_those_of_the_command(http: TestClient, models: dict[str, package.TrainedModel]) -> None:
    answer = http.post("/v1/classify", json={"texts": [*TEXTS[:9], ""]}).json()
    expected = models["reviews"].classify([*TEXTS[:9], ""])
    assert [each["label"] for each in answer["predictions"]] == [each.label for each in expected]
    for each, prediction in zip(answer["predictions"], expected, strict=True):
        assert each["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-6)
    long = http.post("/v1/classify", json={"texts": ["one", "two " * 400]}).json()
    assert [warning[:8] for warning in long["warnings"]] == ["texts[1]"]


def test_openai_client_works(models: dict[str, package.TrainedModel]) -> None:
    novel = models["novel"]
    with started(models, keys=(KEY,)) as (url, _):
        wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
            wrong.models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            check_openai(client, novel)


def check_openai(client: openai.OpenAI, novel: package.TrainedModel) -> None:
    assert {model.id for model in client.models.list()} == {"toy", "novel", "reviews"}
    assert client.models.retrieve("novel").owned_by == "regard"
    greedy = novel.generate("one two", beam=1, max_len=10)[0]
    answer = client.completions.create(model="novel", prompt="one two", max_tokens=10, temperature=0, logprobs=0)
    (choice,) = answer.choices
    assert choice.text == greedy.text.removeprefix("one two")
    assert choice.finish_reason == ("stop" if greedy.ended else "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(greedy.read), len(greedy.ids))
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert sum(choice.logprobs.token_logprobs or []) == pytest.approx(greedy.log_prob, abs=1e-4) or greedy.ended
    sampled = novel.generate(["one", "two"], temperature=0.7, top_p=0.9, seed=4, max_len=8)
    answer = client.completions.create(
        model="novel", prompt=["one", "two"], max_tokens=8, temperature=0.7, top_p=0.9, seed=4, echo=True
    )
    assert [choice.text for choice in answer.choices] == [best[0].text for best in sampled]
    whole = client.completions.create(model="novel", prompt="one", max_tokens=8, seed=4, n=3)
    parts: dict[int, str] = {}
    usage = None
    for chunk in client.completions.create(
        model="novel", prompt="one", max_tokens=8, seed=4, n=3, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
        usage = chunk.usage
    assert parts == {choice.index: choice.text for choice in whole.choices}
    assert usage == whole.usage
    text = greedy.text.removeprefix("one two")
    stop = text[2:4]
    for stream in (False, True):
        answer: Any = client.completions.create(
            model="novel", prompt="one two", max_tokens=10, temperature=0, stop=[stop], stream=stream
        )
        choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"
    with pytest.raises(openai.NotFoundError, match="there is no model 'nothing'"):
        client.completions.create(model="nothing", prompt="one")
    with pytest.raises(openai.BadRequestError, match="suffix: this server does not support it"):
        client.completions.create(model="novel", prompt="one", suffix="two")
    with pytest.raises(openai.BadRequestError, match="max_tokens: 9999 is above the limit"):
        client.completions.create(model="novel", prompt="one", max_tokens=9999)


def test_libretranslate_client_works(models: dict[str, package.TrainedModel]) -> None:
    with started(models, keys=(KEY,)) as (url, _):
        client = LibreTranslateAPI(url, KEY)
        assert client.translate("one two. big house.", "en", "de", timeout=60) is not None
        assert client.translate("one two", "en", "de") == models["toy"].translate("one two")
        assert client.translate("one two", "auto", "de") == models["toy"].translate("one two")
        assert client.languages() == [{"code": "en", "name": "English", "targets": ["de"]}]
        assert client.detect("this is English")[0]["language"] == "en"
        for key, status in ((None, 400), ("wrong", 403)):
            with pytest.raises(urllib.error.HTTPError) as raised:
                LibreTranslateAPI(url, key).translate("one", "en", "de")
            assert raised.value.code == status
            assert set(json.loads(raised.value.read())) == {"error"}


def test_libretranslate_contract(http: TestClient, models: dict[str, package.TrainedModel]) -> None:
    toy, pair = models["toy"], {"source": "en", "target": "de"}
    one, two = toy.translate(["one two", "big house"])
    text = http.post("/translate", json={"q": "one two\n\n  big house\n", **pair}).json()
    assert text == {"translatedText": f"{one}\n\n  {two}\n"}
    form = http.post("/translate", data={"q": "one two", **pair, "alternatives": "2"}).json()
    best = toy.translate("one two", n_best=3)
    assert (form["translatedText"], form["alternatives"]) == (best[0], best[1:])
    listed = http.post("/translate", json={"q": ["one two", "big house"], **pair, "source": "auto"}).json()
    assert listed["translatedText"] == [one, two]
    assert listed["detectedLanguage"] == [{"confidence": 100.0, "language": "en"}] * 2
    page = http.post("/translate", json={"q": "<p id='x'>one two</p><script>one</script>", **pair, "format": "html"})
    assert page.json() == {"translatedText": f"<p id='x'>{one}</p><script>one</script>"}
    assert http.request("GET", "/languages", content=b"api_key=x").status_code == 200
    assert http.get("/frontend/settings").json()["language"]["source"] == {"code": "en", "name": "English"}
    parts = http.post("/translate", files={name: (None, value) for name, value in {"q": "one two", **pair}.items()})
    assert parts.json() == {"translatedText": one}


def test_language_of_the_text_chooses_among_several_models(models: dict[str, package.TrainedModel]) -> None:
    toy = models["toy"]
    two = {"first": toy, "second": toy}
    app = create_app(two, Settings(pairs={"first": Pair("en", "de"), "second": Pair("fr", "de")}))
    texts = ["This is a sentence in the English language.", "Ceci est une phrase dans la langue de Paris."]
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        answer = client.post("/translate", json={"q": texts, "source": "auto", "target": "de"}).json()
        assert [each["language"] for each in answer["detectedLanguage"]] == ["en", "fr"]
        assert answer["translatedText"] == toy.translate(texts)
        found = client.post("/detect", data={"q": texts[1]}).json()
        assert [each["language"] for each in found] == ["fr", "en"]
        assert found[0]["confidence"] > 50
        assert [each["code"] for each in client.get("/languages").json()] == ["en", "fr"]
        named = client.post("/v1/translate", json={"texts": "one"})
        assert named.json() == {"error": "2 models can translate; name one: 'first', 'second'"}


def test_pages_of_allowed_origins_may_read_the_answers(models: dict[str, package.TrainedModel]) -> None:
    origin = {"origin": "https://my.example"}
    for allowed in ((), ("https://my.example",)):
        app = create_app({"toy": models["toy"]}, settings_of(allow_origins=allowed))
        with TestClient(app, base_url="http://127.0.0.1") as client:
            answer = client.get("/languages", headers=origin)
            assert answer.status_code == (200 if allowed else 403)
            assert answer.headers.get("access-control-allow-origin") == ("https://my.example" if allowed else None)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"source": "en", "target": "de"}, 400, "missing q"),
        ({"q": "one", "source": "en"}, 400, "missing target"),
        ({"q": "one", "source": "fr", "target": "de"}, 400, "fr is not supported"),
        ({"q": "one", "source": "de", "target": "de"}, 400, "de is not supported"),
        ({"q": "one", "source": "en", "target": "de", "format": "pdf"}, 400, "format"),
        ({"q": "one", "source": "en", "target": "de", "format": ["text"]}, 400, "format"),
        ({"q": "one", "source": "en", "target": "de", "alternatives": "many"}, 400, "not a number"),
        ({"q": "one", "source": "en", "target": "de", "alternatives": 1000}, 400, "must be <="),
        ({"q": {"a": 1}, "source": "en", "target": "de"}, 400, "needs a string"),
        ({"q": "one", "source": "en", "target": "de", "surce": 1}, 400, "'source'"),
        ({"q": "a\0b", "source": "en", "target": "de"}, 400, "NUL"),
        ({"q": "\ud800", "source": "en", "target": "de"}, 400, "surrogate"),
        ({"q": "x" * 100_000, "source": "en", "target": "de"}, 400, "100,000 characters"),
        ({"q": ["x"] * 500, "source": "en", "target": "de"}, 400, "500 texts"),
        ({"q": "<a " * 600, "source": "en", "target": "de", "format": "html"}, 400, "without an end"),
        ([1, 2], 400, "JSON object"),
    ],
)
def test_libretranslate_errors_are_one_sentence(http: TestClient, body: object, status: int, sentence: str) -> None:
    answer = http.post("/translate", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert sentence in answer.json()["error"]


@pytest.mark.parametrize(
    "path", ["/v1/translate", "/v1/generate", "/v1/classify", "/v1/completions", "/translate", "/detect"]
)
@pytest.mark.parametrize(
    ("content", "statuses"),
    [
        (b'{"texts": ', {400}),
        (b"", {400, 422}),
        (b"[" * 200_000, {400}),
        (b"\xff\xfe", {400}),
        (b'"one"', {400, 422}),
        (b'{"texts": NaN, "prompts": 1e999, "prompt": -1, "q": []}', {400, 422}),
        (b'{"\\ud800": 1}', {400, 422}),
        (b'{"texts": "\\ud800", "prompts": "\\ud800", "prompt": "\\ud800", "model": "novel"}', {400, 422}),
        (b'{"texts": "a\\u0000"}', {400, 422}),
        (b"x" * 10_000_000, {413}),
    ],
    ids=["cut", "empty", "deep", "bytes", "string", "numbers", "name", "surrogate", "nul", "long"],
)  # fmt: skip
def test_malformed_bodies_are_refused(http: TestClient, path: str, content: bytes, statuses: set[int]) -> None:
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in statuses
    error = answer.json()["error"]
    assert "\n" not in (error["message"] if isinstance(error, dict) else error)


def test_errors_name_the_field(http: TestClient) -> None:
    def error(path: str, **body: Any) -> str:
        answer = http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 422
        return answer.json()["error"]

    assert error("translate", text="one") == "'text' is no field of this request; did you mean 'texts'?"
    assert error("translate", texts=["one", 2]).startswith("texts[1]: ")
    assert error("translate", texts="one", beam=0).startswith("beam: ")
    assert error("translate", texts="one", beam=99) == "beam: 99 is above the limit of this server, 16; lower it"
    assert error("translate", texts="one", model="novel").startswith("the model 'novel' is used with generate")
    assert error("translate", texts="one", beam=2, n_best=3).startswith("n_best: beam size 2 is too small")
    assert error("translate", texts=["one"] * 21) == "texts: 21 texts are more than 20; send them in several requests"
    assert http.post("/v1/translate", json={"texts": "one", "model": "../toy"}).status_code == 404
    assert http.get("/nothing").json() == {"error": "there is nothing at '/nothing'"}


def test_health_and_metrics_describe_the_load(http: TestClient, models: dict[str, package.TrainedModel]) -> None:
    health = http.get("/health").json()["models"]
    assert health["toy"]["weights"] == models["toy"].weights_sha256
    assert health["toy"]["languages"] == ["en", "de"]
    http.post("/v1/translate", json={"texts": ["one", "two"]})
    page = http.get("/metrics").text
    assert re.search(r'regard_requests_total\{route="/v1/translate",status="200"\} [1-9]', page)
    assert re.search(r'regard_output_tokens_total\{model="toy"\} [1-9]', page)
    assert 'regard_running_rows{model="toy"} 0.0' in page


def test_full_queue_refuses_and_recovers(models: dict[str, package.TrainedModel]) -> None:
    with started({"toy": models["toy"]}, queue=2) as (url, service):
        model, gate = service.models["toy"], threading.Event()
        blocker = threading.Thread(target=model.call, args=(gate.wait,))
        blocker.start()
        results: list[Any] = []

        def send() -> None:
            results.append(post(url + "/v1/translate", {"texts": "one"}))

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: model.active == 2)
        with pytest.raises(urllib.error.HTTPError) as raised:
            post(url + "/v1/translate", {"texts": "one"})
        assert raised.value.code == 429
        assert int(raised.value.headers["Retry-After"]) >= 1
        assert "send the request again in" in json.loads(raised.value.read())["error"]
        gate.set()
        for thread in (blocker, *threads):
            thread.join()
        assert len(results) == 2
        assert post(url + "/v1/translate", {"texts": "one"})["translations"]


def test_request_that_takes_too_long_is_dropped(models: dict[str, package.TrainedModel]) -> None:
    with started({"toy": models["toy"]}, timeout=0.3) as (url, service):
        model, gate = service.models["toy"], threading.Event()
        blocker = threading.Thread(target=model.call, args=(gate.wait,))
        blocker.start()
        with pytest.raises(urllib.error.HTTPError) as raised:
            post(url + "/v1/translate", {"texts": "one"})
        assert raised.value.code == 503
        assert "within 0.3 seconds" in json.loads(raised.value.read())["error"]
        until(lambda: model.active == 0)
        gate.set()
        blocker.join()
        until(lambda: model.scheduler.sizes == (0, 0))


def test_stream_that_takes_too_long_is_no_client_that_left(models: dict[str, package.TrainedModel]) -> None:
    with started({"novel": models["novel"]}, pairs={}, timeout=0.3) as (url, service):
        model, gate = service.models["novel"], threading.Event()
        blocker = threading.Thread(target=model.call, args=(gate.wait,))
        blocker.start()
        with pytest.raises(urllib.error.HTTPError) as raised:
            post(url + "/v1/completions", {"model": "novel", "prompt": "one", "stream": True})
        assert raised.value.code == 503
        assert "within 0.3 seconds" in json.loads(raised.value.read())["error"]["message"]
        gate.set()
        blocker.join()
        until(lambda: model.active == 0)
        page = service.metrics.page().decode()
        assert 'regard_timeouts_total{model="novel"} 1.0' in page
        assert "regard_disconnects_total{" not in page


@pytest.mark.parametrize("path", ["/v1/translate", "/v1/completions"])
def test_client_that_leaves_frees_its_rows(models: dict[str, package.TrainedModel], path: str) -> None:
    bodies = {
        "/v1/translate": {"texts": ["one two"] * 50, "min_len": 2000, "max_len": 2000},
        "/v1/completions": {"model": "novel", "prompt": "one", "max_tokens": 2000, "stream": True, "n": 4},
    }
    with started(models) as (url, service):
        model = service.models["toy" if path == "/v1/translate" else "novel"]
        body = json.dumps(bodies[path]).encode()
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: model.scheduler.sizes[1] > 0)
        until(lambda: model.scheduler.sizes == (0, 0) and model.active == 0)


def test_functions_of_other_pages_run_between_the_steps(models: dict[str, package.TrainedModel]) -> None:
    app = create_app({"toy": models["toy"]}, settings_of())
    model = app.state.service.models["toy"]
    assert model.call(lambda: threading.current_thread().name) == "scheduler"
    with pytest.raises(ZeroDivisionError):
        model.call(lambda: 1 // 0)
    ticket = Ticket()
    ticket.cancel(KeyError("gone"))
    with pytest.raises(KeyError):
        model.call(lambda: 1, ticket)
    app.state.service.close()


async def storm(port: int, process: subprocess.Popen[str]) -> tuple[list[tuple[int, str]], int]:
    """Send texts from 16 connections until the server is stopped; return (index, translation) of every answer."""
    answers: list[tuple[int, str]] = []
    others = 0

    async def client(first: int) -> None:
        nonlocal others
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for number in range(first, 10**6, 16):
                body = json.dumps({"q": TEXTS[number % len(TEXTS)], "source": "en", "target": "de"}).encode()
                head = "POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                header = (await reader.readuntil(b"\r\n\r\n")).decode()
                content = await reader.readexactly(int(re.findall(r"content-length: (\d+)", header)[0]))
                others += " 200 " not in header[:20]
                answers.append((number % len(TEXTS), json.loads(content).get("translatedText", "")))
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    asyncio.get_running_loop().call_later(1.0, process.send_signal, signal.SIGTERM)
    await asyncio.gather(*(client(first) for first in range(16)))
    return answers, others


def test_command_answers_all_accepted_requests_after_sigterm(run: Path) -> None:
    words = [sys.executable, "-m", "regard", "serve", str(run), "--port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        begin = next(line for line in lines if "listening on" in line)
        answers, others = asyncio.run(storm(int(begin.split(":")[-1].split()[0]), process))
        rest = "".join(lines)
        assert process.wait(60) == 0
    expected = package.load(run).translate(TEXTS)
    assert answers
    assert not others
    assert all(text == expected[index] for index, text in answers)
    assert f"stopped: {len(answers):,} requests received, {len(answers):,} answered" in rest


def test_command_refuses_what_cannot_work(run: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} of 127.0.0.1 cannot be used" in complaint("serve", str(run), "--port", port)
    serve = ("serve", str(run), "--port", "0")
    assert "'xx' is not a language code" in complaint(*serve, "--pair", "en:xx")
    assert "write RUN=en:de" in complaint(*serve, "--pair", "toy=en")
    assert "did you mean 'toy'" in complaint(*serve, "--pair", "tooy=en:de")
    assert "the API keys cannot be read" in complaint(*serve, "--api-key-file", str(tmp_path / "none"))
    (tmp_path / "keys").write_text("\n")
    assert "contains no API key" in complaint(*serve, "--api-key-file", str(tmp_path / "keys"))
    assert "at least 8" in complaint("serve", str(run), "--port", "0", "--api-key-file", write(tmp_path / "k", ["abc"]))
    assert "computes on the CPU" in complaint(*serve, "--engine", "ctranslate2", "--device", "cuda")
    assert "applies only to the native engine" in complaint(*serve, "--engine", "ctranslate2", "--plain")
    assert "'torch' is not known" in complaint(*serve, "--engine", "torch")
    assert "have the same name" in complaint("serve", str(run), str(run), "--port", "0")
    assert "does not exist" in complaint("serve", str(tmp_path / "nothing"), "--port", "0")


def test_no_request_of_the_schema_fails_inside_the_server(models: dict[str, package.TrainedModel]) -> None:
    """schemathesis sends random requests that fit the server's own OpenAPI description."""
    limits = {"max_texts": 4, "max_chars": 60, "max_new_tokens": 8, "max_beam": 3}
    app = create_app(models, settings_of(allow_hosts=("testserver",), **limits))
    statuses: dict[str, set[int]] = {}
    for operation in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations():
        case = cast(Any, operation).ok().as_strategy()

        @given(case)
        @settings(max_examples=15, deadline=None, suppress_health_check=SLOW, database=None)
        def sends(case: schemathesis.Case) -> None:
            response = case.call()
            statuses.setdefault(case.path, set()).add(response.status_code)
            assert response.status_code < 500, response.text
            assert response.status_code < 400 or "error" in response.json()
            case.validate_response(response, checks=[response_schema_conformance, status_code_conformance])

        sends()
    assert {path for path, seen in statuses.items() if 200 in seen} >= {
        "/health",
        "/metrics",
        "/languages",
        "/v1/classify",
    }
    app.state.service.close()
