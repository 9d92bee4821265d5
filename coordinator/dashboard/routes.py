"""The dashboard's HTTP edge: the page, its two files, and a stream of server-sent events that all viewers share.

The page is for anyone, so what is shown here is made for everyone: totals, trained steps, shortened node ids.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from protocol.reasons import ADVICE, Reason
from protocol.runspec import RunSpec

from ..ledger.database import Ledger
from ..ledger.report import Count, NodeReport, Overview, PassRate, Series, overview, series
from ..live import SHORT_ID, bottleneck

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 10.0
SEND_SECONDS = 20.0  # a viewer that takes no bytes for this long is let go
MAX_STREAMS = 100
RETRY_MILLISECONDS = 2000

_LOG = logging.getLogger(__name__)
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def document(ledger: Ledger, spec: RunSpec, now: float) -> dict[str, Any]:
    """What the page shows, as JSON values. Holds no time of day but that of heartbeats, so that it is equal to the
    last one exactly when there is nothing new to see."""
    with ledger.read() as tx:
        return to_document(overview(tx, spec, now=now), series(tx), spec)


def to_document(found: Overview, curves: Series, spec: RunSpec) -> dict[str, Any]:
    """The public part of an overview. The mean reward of fresh rollouts is not in it: from its changes one could read
    off the reward of a single answer while its problem is still in use. Trained steps are shown instead."""
    limiting = bottleneck(found)
    return {
        "run": spec.run_id,
        "spec": spec.digest[:SHORT_ID],
        "step": found.steps_confirmed,
        "version": found.newest_version,
        "reward": _rounded(found.step_reward),
        "first_pass": _pass_rate(found.first_pass),
        "latest_pass": _pass_rate(found.latest_pass),
        "staleness": None
        if found.staleness is None
        else {
            "mean": _rounded(found.staleness.mean),
            "max": found.staleness.maximum,
            "in_flight": _rounded(found.staleness.in_flight),
            "limit": found.max_staleness,
        },
        "queue": {"ready": found.ready, "capacity": found.capacity, "fill": _rounded(found.queue_fill)},
        "accepted": found.accepted,
        "rejected": found.rejected,
        "rejections": [_reason(count) for count in found.rejections],
        "refusals": [_reason(count) for count in found.refusals],
        "bytes_published": found.bytes_published,
        "tokens_per_second": round(found.tokens_per_second),
        "bottleneck": {"verdict": limiting.verdict.value, "advice": limiting.advice},
        "nodes": [_node(node) for node in found.nodes],
        "relays": {"known": len(found.relays), "alive": sum(relay.alive for relay in found.relays)},
        "series": {
            "reward": [[step, _rounded(value)] for step, value in curves.reward],
            "pass_rate": [[result.version, _rounded(result.rate)] for result in curves.pass_rate],
        },
    }


def router(
    read_overview: Callable[[], dict[str, Any]], *, stopping: Callable[[], bool] = lambda: False
) -> APIRouter:
    """Routes of the dashboard.

    `read_overview` gives the document; it is called in a thread, at most every 500 ms however many watch, and not at
    all while nobody does. `stopping` tells that the server shuts down (for uvicorn: `lambda: server.should_exit`);
    streams then end at once instead of holding the server open.
    """
    page, script, style = (
        (files(__package__) / name).read_bytes() for name in ("page.html", "app.js", "style.css")
    )
    feed = _Feed(read_overview, stopping)
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def get_page() -> Response:
        return Response(page, media_type="text/html", headers=_HEADERS)

    @routes.get("/dashboard/app.js")
    async def get_script() -> Response:
        return Response(script, media_type="text/javascript", headers=_HEADERS)

    @routes.get("/dashboard/style.css")
    async def get_style() -> Response:
        return Response(style, media_type="text/css", headers=_HEADERS)

    @routes.get("/favicon.ico")
    async def get_icon() -> Response:
        return Response(status_code=204, headers={"Cache-Control": "max-age=86400"})

    @routes.get("/events")
    async def get_events(request: Request) -> Response:
        if feed.streams >= MAX_STREAMS or stopping():
            return _unavailable()
        return _EventStream(feed)

    return routes


class _Feed:
    """One reader for all streams: runs while somebody watches. `number` goes up when the document has changed."""

    def __init__(self, read: Callable[[], dict[str, Any]], stopping: Callable[[], bool]):
        self.read = read
        self.stopping = stopping
        self.streams = 0
        self.number = 0
        self.data = ""
        self.changed = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None

    def enter(self) -> None:
        """Count a stream in; the first one starts the reader."""
        self.streams += 1
        if self._reader is None or self._reader.done():
            self.data = ""  # whatever is left from the last viewers may be hours old
            self._reader = asyncio.create_task(self._run())

    def leave(self) -> None:
        """Count a stream out."""
        self.streams -= 1

    async def _run(self) -> None:
        while self.streams > 0 and not self.stopping():
            try:
                data = json.dumps(await asyncio.to_thread(self.read), allow_nan=False, separators=(",", ":"))
            except Exception:  # a busy database must not end what viewers look at
                _LOG.exception("the dashboard could not read the ledger")
            else:
                if data != self.data:
                    self.data, self.number = data, self.number + 1
            async with self.changed:
                self.changed.notify_all()
            await asyncio.sleep(POLL_SECONDS)
        async with self.changed:
            self.changed.notify_all()


class _EventStream(Response):
    """`text/event-stream` (HTML standard, 9.2): the document at once, then whenever it has changed, and comments in
    between. Ends when the viewer leaves, stops reading, or the server shuts down."""

    def __init__(self, feed: _Feed):
        super().__init__(media_type="text/event-stream")
        self.feed = feed
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        for name, value in {**_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}.items():
            self.headers[name] = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: serve the stream until it ends."""
        self.feed.enter()
        gone = asyncio.create_task(_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, f"retry: {RETRY_MILLISECONDS}\n\n")
            await self._follow(send, gone)
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            _LOG.info("a viewer of the dashboard stopped reading")
        finally:
            self.feed.leave()
            gone.cancel()

    async def _follow(self, send: Send, gone: asyncio.Task[None]) -> None:
        feed, seen, said = self.feed, 0, time.monotonic()
        if feed.data:  # at once; the reader has it fresh
            seen = feed.number
            await self._send(send, f"id: {seen}\ndata: {feed.data}\n\n")
        while not gone.done() and not feed.stopping():
            try:
                async with asyncio.timeout(POLL_SECONDS), feed.changed:
                    await feed.changed.wait()
            except TimeoutError:
                pass
            if feed.number != seen:
                seen, said = feed.number, time.monotonic()
                await self._send(send, f"id: {seen}\ndata: {feed.data}\n\n")
            elif time.monotonic() - said >= HEARTBEAT_SECONDS:
                said = time.monotonic()
                await self._send(send, ": still here\n\n")

    @staticmethod
    async def _send(send: Send, text: str) -> None:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _unavailable() -> Response:
    """RFC 9457 problem details: too many viewers, or shutting down."""
    code = Reason.UNAVAILABLE
    problem = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": ADVICE[code]}
    return Response(
        json.dumps({**problem, "code": code.value}),
        status_code=503,
        media_type="application/problem+json",
        headers={"Retry-After": "10", "Cache-Control": "no-store"},
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _pass_rate(result: PassRate | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "version": result.version, "passed": result.passed, "total": result.total, "rate": _rounded(result.rate)
    }


def _reason(count: Count) -> dict[str, Any]:
    known = count.code in Reason.__members__.values()
    return {"code": count.code, "count": count.count, "advice": ADVICE[Reason(count.code)] if known else ""}


def _node(node: NodeReport) -> dict[str, Any]:
    return {
        "id": node.id[:SHORT_ID],
        "label": node.label,
        "state": node.status if node.status == "banned" else node.state if node.online else "offline",
        "version": node.loaded_version,
        "tokens_per_second": round(node.tokens_per_second),
        "pending": node.pending,
        "accepted": node.accepted,
        "rejected": node.rejected,
        "last_reason": node.last_reason,
        "token_identical": node.token_identical,
        "credit": node.credit,
        "last_seen": round(node.last_seen),
    }
