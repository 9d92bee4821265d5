"""The HTTP side of a relay: head with long poll, manifests, shards (`sendfile`), and proof of its own identity.

A path of a request is matched against a digest or a version name and never reaches the file system otherwise. The
coordinator's API answers the same paths, so that relays and workers can follow either.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import web

from protocol.canonical import canonical_json
from protocol.identity import Key
from protocol.messages import Problem, RelayChallenge
from protocol.reasons import Reason, Refusal
from protocol.signed import sign_document

from .store import ShardStore, is_version_name

log = logging.getLogger("farflung.shardcast")
MAX_WAIT_SECONDS = 20.0
RELAY = "relay"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ServeLimits:
    """Connections in all, seconds in which request headers must be complete (and a kept connection be used again), and
    the slowest reader that is served, in bytes per second after `grace` seconds."""

    connections: int = 512
    header_seconds: float = 15.0
    grace: float = 30.0
    minimum_speed: float = 16 << 10


@dataclass
class ServeState:
    """What is visible. `expected_*` are known from a verified manifest but not here yet (503 instead of 404)."""

    key: Key | None = None
    url: str | None = None
    version: int | None = None
    head: bytes | None = None
    expected_shards: frozenset[str] = frozenset()
    expected_manifests: frozenset[str] = frozenset()
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, head: bytes, version: int) -> None:
        """Make a version the newest, or renew its head, and wake whoever waits for it."""
        self.head, self.version = head, version
        self._changed.set()
        self._changed = asyncio.Event()

    def expect(self, manifests: Iterable[str], shards: Iterable[str]) -> None:
        """Replace what is known but not here yet."""
        self.expected_manifests, self.expected_shards = frozenset(manifests), frozenset(shards)

    def newer(self, after: int | None) -> bool:
        """True if there is a head, and one newer than `after`."""
        return self.version is not None and (after is None or self.version > after)

    async def wait_newer(self, after: int | None, seconds: float) -> bool:
        """Wait for a head newer than `after` (None: for any)."""
        try:
            async with asyncio.timeout(seconds):
                while not self.newer(after):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.newer(after)


STORE = web.AppKey("store", ShardStore)
STATE = web.AppKey("state", ServeState)
LIMITS = web.AppKey("limits", ServeLimits)


def make_app(store: ShardStore, state: ServeState, limits: ServeLimits | None = None) -> web.Application:
    """The application. `state` belongs to the event loop that runs it."""
    app = web.Application(middlewares=[_problems], client_max_size=1)
    app[STORE], app[STATE], app[LIMITS] = store, state, limits or ServeLimits()
    app.router.add_get("/v1/head", _head)
    app.router.add_get("/v1/manifests/{name}", _manifest)
    app.router.add_get("/v1/shards/{sha256}", _shard)
    app.router.add_get("/v1/relay", _relay)
    app.router.add_get("/healthz", _healthz)
    return app


def problem(refusal: Refusal) -> web.Response:
    """RFC 9457 problem details of a refusal."""
    document = Problem(
        type="about:blank",
        title=HTTPStatus(refusal.status).phrase,
        status=refusal.status,
        detail=refusal.detail,
        code=refusal.reason,
    )
    response = web.Response(
        status=refusal.status,
        body=canonical_json(document.model_dump(mode="json")),
        content_type="application/problem+json",
    )
    if refusal.retry_after is not None:
        response.headers["Retry-After"] = f"{refusal.retry_after:.0f}"
    return response


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if request.can_read_body:
            raise Refusal(Reason.BODY_TOO_LARGE, "requests have no body here")
        return await handler(request)
    except Refusal as refusal:
        response = problem(refusal)
    except web.HTTPMethodNotAllowed as error:
        response = problem(Refusal(Reason.METHOD_NOT_ALLOWED))
        response.headers["Allow"] = error.headers["Allow"]
    except web.HTTPException:
        response = problem(Refusal(Reason.NOT_FOUND))
    except OSError as error:
        log.error("%s: %s", request.path, error)
        response = problem(Refusal(Reason.UNAVAILABLE, "storage", retry_after=5))
    if request.can_read_body:
        response.force_close()
    return response


class _File(web.FileResponse):
    """A file, within a time that a reader of the slowest admitted speed needs."""

    def __init__(self, path: Any, size: int, limits: ServeLimits, content_type: str):
        super().__init__(
            path,
            headers={"Content-Type": content_type, "Cache-Control": "public, max-age=31536000, immutable"},
        )
        self._seconds = limits.grace + size / limits.minimum_speed

    async def prepare(self, request: web.BaseRequest) -> Any:
        try:
            async with asyncio.timeout(self._seconds):
                return await super().prepare(request)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the reader is too slow") from None


async def _head(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    after = _number(request, "after", r"[0-9]{1,15}")
    wait = _number(request, "wait", r"[0-9]{1,2}(\.[0-9]{1,6})?") or 0.0
    if wait > MAX_WAIT_SECONDS:
        raise Refusal(Reason.MALFORMED_REQUEST, f"wait is at most {MAX_WAIT_SECONDS:.0f} seconds")
    version = None if after is None else int(after)
    if not await state.wait_newer(version, wait):
        if state.head is None and version is None:
            raise Refusal(Reason.UNAVAILABLE, "no version is published yet", retry_after=1)
        return web.Response(status=HTTPStatus.NO_CONTENT)
    return web.Response(body=state.head, content_type="application/json", headers={"Cache-Control": "no-store"})


def _number(request: web.Request, name: str, pattern: str) -> float | None:
    values = request.query.getall(name, [])
    if not values:
        return None
    if len(values) > 1 or not re.fullmatch(pattern, values[0]):
        raise Refusal(Reason.MALFORMED_REQUEST, f"{name}: one plain number")
    return float(values[0])


async def _manifest(request: web.Request) -> web.StreamResponse:
    store, state, name = request.app[STORE], request.app[STATE], request.match_info["name"]
    if not is_version_name(name):
        raise Refusal(Reason.NOT_FOUND)
    path = store.manifest_path(name)
    if not path.is_file():
        raise _absent(name in state.expected_manifests)
    return _File(path, path.stat().st_size, request.app[LIMITS], "application/json")


async def _shard(request: web.Request) -> web.StreamResponse:
    store, state, sha256 = request.app[STORE], request.app[STATE], request.match_info["sha256"]
    try:
        size = store.size(sha256)
    except ValueError:
        raise Refusal(Reason.NOT_FOUND) from None
    if size is None:
        raise _absent(sha256 in state.expected_shards)
    return _File(store.path(sha256), size, request.app[LIMITS], "application/octet-stream")


def _absent(expected: bool) -> Refusal:
    if expected:
        return Refusal(Reason.UNAVAILABLE, "known, but not here yet", retry_after=1)
    return Refusal(Reason.NOT_FOUND)


async def _relay(request: web.Request) -> web.StreamResponse:
    state, nonces = request.app[STATE], request.query.getall("nonce", [])
    if state.key is None or state.url is None:
        raise Refusal(Reason.NOT_FOUND)
    if len(nonces) != 1 or not re.fullmatch(r"[A-Za-z0-9_-]{16,64}", nonces[0]):
        raise Refusal(Reason.MALFORMED_REQUEST, "one nonce of 16 to 64 letters, digits, - and _")
    challenge = RelayChallenge(relay_id=state.key.id, url=state.url, nonce=nonces[0])
    signed = sign_document(RELAY, challenge, state.key)
    return web.Response(
        body=canonical_json(signed.model_dump(mode="json")),
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


async def _healthz(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    return web.Response(text=json.dumps({"status": "ok", "version": state.version}), content_type="application/json")


class _Refuse(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class RelayServer:
    """A listening application with a bound on connections. `url` is where it listens."""

    def __init__(self, app: web.Application):
        self._app = app
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=app[LIMITS].header_seconds,
            lingering_time=0,
            shutdown_timeout=0.2,
            max_line_size=4096,
            max_field_size=4096,
        )
        self._listener: asyncio.Server | None = None
        self.url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. Raises OSError."""
        await self._runner.setup()
        server, limit = self._runner.server, self._app[LIMITS].connections
        assert server is not None

        def accept() -> asyncio.Protocol:
            return _Refuse() if len(server.connections) >= limit else server()

        self._listener = await asyncio.get_running_loop().create_server(accept, host, port, backlog=64)
        port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening, cut what is under way after 0.2 s."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
