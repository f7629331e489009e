"""Load on the server of `regard serve`: dynamic batching, full queues, SIGTERM, and clients that disconnect.

    make bench-serve
    python bench/serving.py --run runs/mine --texts test.en

All traffic stays on 127.0.0.1. The script exits with code 1 if an answer is lost or differs from the offline
translation, or if batching is less than 4 times as fast as one request at a time.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import regard

WORDS = {
    "one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs", "seven": "sieben",
    "eight": "acht", "nine": "neun", "big": "groß", "red": "rot", "house": "Haus",
}  # fmt: skip
TARGET = 4.0  # times the throughput of one request at a time


def pairs(count: int, seed: int, most: int = 8) -> list[tuple[str, str]]:
    """A toy language: every word has a translation, and the order is reversed."""
    rng = random.Random(seed)
    chosen = [rng.choices(list(WORDS), k=rng.randint(1, most)) for _ in range(count)]
    return [(" ".join(words), " ".join(WORDS[word] for word in reversed(words))) for words in chosen]


def trained(folder: Path) -> Path:
    """Train a small translator in about half a minute."""
    examples = pairs(4000, 1)
    for side, name in enumerate(("train.en", "train.de")):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in examples), encoding="utf-8")
    changes = (
        "model.d_model=128", "model.encoder.depth=2", "model.decoder.depth=2", "data.tokenizer.vocab=300",
        "data.batching.tokens=1000", "train.steps=250", "train.optimizer.learning_rate=2e-3",
        "train.schedule.warmup=20", "train.decode=8", "model.dropout=0.0",
    )  # fmt: skip
    source, target = folder / "train.en", folder / "train.de"
    return regard.train(folder / "toy", source=source, target=target, changes=changes, device="cpu").path


@contextmanager
def server(run: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `regard serve` on a free port of the loopback address."""
    command = [sys.executable, "-m", "regard", "serve", str(run), "--port", "0", "--pair", "en:de", *options]
    env = {**os.environ, "NO_COLOR": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
            if found:
                yield process, int(found[1])
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


@dataclass
class Client:
    """A connection that is kept open between requests."""

    port: int
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, value: object = None) -> tuple[int, dict[str, str], bytes]:
        """Send a request, and return the status, the headers and the body of the answer."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        body = b"" if value is None else json.dumps(value).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): text for name, _, text in (line.partition(": ") for line in lines[1:] if line)}
        content = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1]), headers, content

    def close(self) -> None:
        """Close the connection."""
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


@dataclass
class Results:
    """The outcome of a number of requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0  # connections that ended before the answer
    took: float = 0.0

    def percentile(self, share: float) -> float:
        """Return a percentile of the latency in milliseconds."""
        ordered = sorted(self.seconds)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def load(
    port: int, texts: Sequence[str], expected: Sequence[str], clients: int, retry: bool = False, until: float = 0.0
) -> Results:
    """Send every text once, from several clients at the same time; with `until`, send texts for so many seconds."""
    results, begin = Results(), time.perf_counter()
    numbers = iter(range(len(texts)) if not until else range(10**9))

    async def work() -> None:
        client = Client(port)
        for number in numbers:
            if until and time.perf_counter() - begin > until:
                break
            if not await one(client, number % len(texts)):
                break
        client.close()

    async def one(client: Client, number: int) -> bool:
        while True:
            start = time.perf_counter()
            try:
                body = {"q": texts[number], "source": "en", "target": "de"}
                status, headers, content = await client.send("POST", "/translate", body)
            except (OSError, asyncio.IncompleteReadError):
                results.lost += 1
                return False
            results.statuses[status] += 1
            if status == 200:
                results.seconds.append(time.perf_counter() - start)
                results.wrong += json.loads(content)["translatedText"] != expected[number]
            if status != 429 or not retry:
                return True
            await asyncio.sleep(float(headers["retry-after"]) * random.random())

    await asyncio.gather(*(work() for _ in range(clients)))
    results.took = time.perf_counter() - begin
    return results


def throughput(run: Path, texts: Sequence[str], expected: Sequence[str], clients: int, share: int) -> list[str]:
    """Compare one request at a time with many clients. Return what went wrong."""
    with server(run) as (_, port):
        asyncio.run(load(port, texts[:50], expected, 8))  # warm up
        few = len(texts) // share
        alone = asyncio.run(load(port, texts[:few], expected, 1))
        many = asyncio.run(load(port, texts, expected, clients))
    slow, fast = few / alone.took, len(texts) / many.took
    for name, rate, results in (("1 client", slow, alone), (f"{clients} clients", fast, many)):
        print(
            f"{name:<11} {rate:7.1f} requests/s   p50 {results.percentile(0.5):6.1f} ms   p99 "
            f"{results.percentile(0.99):6.1f} ms   statuses {dict(results.statuses)}   wrong {results.wrong}   "
            f"lost {results.lost}"
        )
    print(f"throughput of {clients} clients: {fast / slow:.1f} times one request at a time")
    bad = [r for r in (alone, many) if r.wrong or r.lost or set(r.statuses) != {200}]
    return ["an answer was lost, refused or wrong"] * bool(bad) + ["batching is too slow"] * (fast < TARGET * slow)


def full_queue(run: Path, texts: Sequence[str], expected: Sequence[str], clients: int) -> list[str]:
    """Send more requests than the queue takes; later, all are answered."""
    with server(run, "--queue", "8") as (_, port):
        refused = asyncio.run(load(port, texts, expected, clients))
        again = asyncio.run(load(port, texts[:200], expected, clients, retry=True))
        after = asyncio.run(load(port, texts[:50], expected, 4))
    print(f"queue of 8: {dict(refused.statuses)}, wrong {refused.wrong}")
    print(
        f"  with retries after Retry-After: {dict(again.statuses)}, wrong {again.wrong}; later {dict(after.statuses)}"
    )
    fine = set(refused.statuses) == {200, 429} and again.statuses[200] == 200 and set(after.statuses) == {200}
    wrong = refused.wrong + again.wrong + after.wrong + refused.lost + again.lost + after.lost
    return [] if fine and not wrong else ["the full queue did not behave as it should"]


def stop_under_load(run: Path, texts: Sequence[str], expected: Sequence[str], clients: int) -> list[str]:
    """Send SIGTERM while many clients send requests; every accepted request is answered."""

    async def both(process: subprocess.Popen[str], port: int) -> Results:
        asyncio.get_running_loop().call_later(2.0, process.send_signal, signal.SIGTERM)
        return await load(port, texts, expected, clients, until=30.0)

    with server(run) as (process, port):
        results = asyncio.run(both(process, port))
        assert process.stderr is not None
        rest = process.stderr.read()
        code = process.wait(60)
    stopped = re.search(r"stopped: ([\d,]+) requests received, ([\d,]+) answered", rest)
    accepted, answered = (int(text.replace(",", "")) for text in stopped.groups()) if stopped else (-1, -1)
    received = sum(results.statuses.values())
    print(
        f"SIGTERM under load: {accepted:,} accepted, {answered:,} answered, {received:,} received by the clients, "
        f"wrong {results.wrong}, exit code {code}"
    )
    fine = accepted == answered == received and not results.wrong and code == 0 and set(results.statuses) == {200}
    return [] if fine else ["SIGTERM lost a request"]


def disconnect(run: Path) -> list[str]:
    """Close the connections of long requests; the rows that they occupied are free again."""

    async def leave(port: int) -> float:
        body = {
            "texts": [" ".join(["one two three four five six"] * 4)] * 100,
            "min_len": 500,
            "max_len": 500,
            "beam": 8,
        }
        clients = [Client(port) for _ in range(4)]
        waiting = [asyncio.ensure_future(client.send("POST", "/v1/translate", body)) for client in clients]
        probe = Client(port)
        await asyncio.sleep(1.5)
        before = await state(probe)
        for task, client in zip(waiting, clients, strict=True):
            task.cancel()
            client.close()
        begin = time.perf_counter()
        while any((await state(probe)).values()):
            if time.perf_counter() - begin > 60:
                return float("inf")
            await asyncio.sleep(0.02)
        print(f"4 clients left with {before}; all rows were free {time.perf_counter() - begin:.2f} s later")
        return time.perf_counter() - begin

    async def state(client: Client) -> dict[str, int]:
        _, _, content = await client.send("GET", "/health")
        (model,) = json.loads(content)["models"].values()
        return {name: model[name] for name in ("active", "waiting", "running")}

    with server(run, "--max-new-tokens", "500") as (_, port):
        took = asyncio.run(leave(port))
    return [] if took < 5 else ["rows of clients that had left were not freed"]


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a translator; default: a small one is trained")
    parser.add_argument("--texts", type=Path, help="file of texts, one per line, for --run")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or trained(Path(folder))
        lines = given.texts.read_text(encoding="utf-8").splitlines() if given.texts else [s for s, _ in pairs(1000, 2)]
        lines = [line for line in lines if line.strip()]
        texts = [lines[i % len(lines)] for i in range(given.requests)]
        offline = dict(zip(lines, regard.load(run, "cpu").translate(lines), strict=True))
        expected = [offline[text] for text in texts]
        problems = throughput(run, texts, expected, given.clients, share=10)
        problems += full_queue(run, texts[:1000], expected, given.clients)
        problems += stop_under_load(run, texts, expected, given.clients)
        problems += disconnect(run)
    for problem in problems:
        print(f"FAILED: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
