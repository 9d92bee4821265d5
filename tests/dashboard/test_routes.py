"""The page and its event stream, served by a real uvicorn on the loopback."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from coordinator.dashboard import routes
from coordinator.dashboard.routes import document
from tests.dashboard.filled import HONEST, SPEC, Run

pytestmark = pytest.mark.network
DEADLINE = 30.0


@contextmanager
def serve(read: Callable[[], dict[str, Any]], **options: Any) -> Iterator[tuple[str, uvicorn.Server]]:
    """Serve the dashboard on a free port; leaving the block shuts the server down and waits for it."""
    app = FastAPI(openapi_url=None)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off", **options))
    app.include_router(routes.router(read, stopping=lambda: server.should_exit))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        assert not thread.is_alive(), "open streams held the server"


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_page_and_files() -> None:
    with serve(dict) as (url, _), httpx.Client(base_url=url) as client:
        page = client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        for path in re.findall(r'(?:href|src)="([^"]+)"', page.text):
            assert client.get(path).status_code == 200, path
        assert client.get("/dashboard/app.js").headers["content-type"].startswith("text/javascript")
        assert client.get("/dashboard/style.css").headers["content-type"].startswith("text/css")
        assert client.get("/favicon.ico").status_code == 204
        assert client.get("/dashboard/routes.py").status_code == 404


def test_page_needs_nothing_from_elsewhere() -> None:
    with serve(dict) as (url, _), httpx.Client(base_url=url) as client:
        for path in ("/", "/dashboard/app.js", "/dashboard/style.css"):
            text = client.get(path).text.replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|innerHTML|\son\w+=|style=", text), path


def test_stream_sends_at_once_and_when_something_changed(run: Run) -> None:
    with serve(lambda: document(run.ledger, SPEC, run.now)) as (url, _):
        with httpx.stream("GET", f"{url}/events", timeout=DEADLINE) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            received = events(answer.iter_lines())
            first = next(received)
            assert (first["accepted"], first["queue"]["ready"]) == (20, 4)
            run.judge()
            run.work(HONEST, 2, 2)
            run.judge()
            changed = next(event for event in received if event["accepted"] == 24)
            assert changed["queue"]["ready"] == 8


def test_unchanged_documents_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "POLL_SECONDS", 0.01)
    reads = iter(range(10**9))
    with serve(lambda: {"tens": next(reads) // 10}) as (url, _):
        with httpx.stream("GET", f"{url}/events", timeout=DEADLINE) as answer:
            received = events(answer.iter_lines())
            seen = [next(received)["tens"] for _ in range(5)]
    assert seen == sorted(set(seen))


def test_comments_keep_a_quiet_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(routes, "HEARTBEAT_SECONDS", 0.05)
    with serve(dict) as (url, _), httpx.stream("GET", f"{url}/events", timeout=DEADLINE) as answer:
        lines = [line for line, _ in zip(answer.iter_lines(), range(12), strict=False) if line]
    assert lines[0].startswith("retry: ")
    assert lines.count("data: {}") == 1
    assert lines.count(": still here") >= 3


def test_viewers_share_one_reader_and_nobody_means_no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "POLL_SECONDS", 0.02)
    running, most, reads = 0, 0, 0

    def read() -> dict[str, Any]:
        nonlocal running, most, reads
        running, reads = running + 1, reads + 1
        most = max(most, running)
        running -= 1
        return {"n": reads}

    async def watch(url: str) -> None:
        async with httpx.AsyncClient(timeout=DEADLINE) as client, client.stream("GET", f"{url}/events") as answer:
            count = 0
            async for line in answer.aiter_lines():
                count += line.startswith("data: ")
                if count == 5:
                    return

    async def many(url: str) -> None:
        await asyncio.gather(*(watch(url) for _ in range(20)))

    with serve(read) as (url, _):
        assert reads == 0
        asyncio.run(many(url))
        assert most == 1
        for _ in range(200):
            before = reads
            time.sleep(0.2)  # ten polls
            if before == reads:
                break
        else:
            pytest.fail("somebody still reads though nobody watches")


def test_streams_are_limited_and_places_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_STREAMS", 2)
    with serve(dict) as (url, _), httpx.Client(timeout=DEADLINE) as client:
        with client.stream("GET", f"{url}/events") as one, client.stream("GET", f"{url}/events") as two:
            assert next(one.iter_lines()) and next(two.iter_lines())
            refused = client.get(f"{url}/events")
            assert refused.status_code == 503
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["code"] == "unavailable"
            assert int(refused.headers["retry-after"]) > 0
        for _ in range(500):  # the server learns of the two that left
            with client.stream("GET", f"{url}/events") as again:
                if again.status_code == 200:
                    assert next(again.iter_lines())
                    break
        else:
            pytest.fail("the places of viewers who left never came back")


def test_shutdown_ends_open_streams() -> None:
    with serve(dict) as (url, server), httpx.stream("GET", f"{url}/events", timeout=DEADLINE) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("retry: ")
        server.should_exit = True
        assert list(lines)[-1] == ""  # the body ends in order: no protocol error


def test_a_failing_read_does_not_end_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routes, "POLL_SECONDS", 0.01)
    calls = iter(range(10**9))

    def read() -> dict[str, Any]:
        if next(calls) < 3:
            raise RuntimeError("database is locked")
        return {"fine": True}

    with serve(read) as (url, _), httpx.stream("GET", f"{url}/events", timeout=DEADLINE) as answer:
        assert next(events(answer.iter_lines())) == {"fine": True}
    assert "could not read the ledger" in caplog.text


def test_a_viewer_that_stops_reading_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Driven as ASGI: the transport takes the start of the answer and then nothing more."""
    monkeypatch.setattr(routes, "SEND_SECONDS", 0.05)

    async def scene() -> int:
        feed = routes._Feed(dict, lambda: False)

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async with asyncio.timeout(DEADLINE):
            await routes._EventStream(feed)({"type": "http"}, receive, send)
        return feed.streams

    assert asyncio.run(scene()) == 0
