"""The edge itself: bodies with limits, signatures, nonces, problem documents, signed answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request, Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from protocol import signatures
from protocol.canonical import parse_json
from protocol.messages import Problem
from protocol.reasons import Reason, Refusal
from protocol.signed import Strict

from ..ledger import nodes
from ..run import Run

log = logging.getLogger("farflung.api")
BODY_SECONDS = 60.0
JSON_BYTES = 64 << 10  # the longest honest one has 2 KiB; a schema error per byte of 1 MiB takes a second to report
WATCH_SECONDS = 0.025
PACING = frozenset({Reason.QUEUE_FULL, Reason.QUOTA_EXHAUSTED, Reason.VERSION_BEHIND, Reason.NOT_READY})
"""Answers that are no refusal of anything wrong: they say when to come again, and are not counted."""

Body = TypeVar("Body", bound=Strict)


class Watch:
    """Wakes waiting requests when anybody has committed to the ledger. One cheap question to the database every 25 ms
    serves all of them."""

    def __init__(self, ask: Callable[[], int]):
        self._ask = ask
        self._event = asyncio.Event()
        self.closing = False

    async def run(self) -> None:
        """The background task; ends when cancelled."""
        last = self._ask()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            marker = self._ask()
            if marker != last:
                last = marker
                event, self._event = self._event, asyncio.Event()
                event.set()

    def close(self) -> None:
        """Send every waiter home."""
        self.closing = True
        self._event.set()

    def pending(self) -> asyncio.Event:
        """The event of the next change: take it before looking, wait on it after having found nothing."""
        return self._event

    @staticmethod
    async def wait(event: asyncio.Event, seconds: float) -> None:
        """Wait for the change, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)


@dataclass
class Edge:
    """What every route needs."""

    run: Run
    watch: Watch
    clock: Callable[[], float] = time.time
    head: tuple[int, float, bytes] | None = field(default=None)

    async def body(self, request: Request, limit: int) -> bytes:
        """Read a body in pieces. Raises Refusal (`body_too_large`, `unsupported_media_type`, `malformed_request`)."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refusal(Reason.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are refused")
        received = bytearray()

        async def read() -> None:
            async for chunk in request.stream():
                received.extend(chunk)
                if len(received) > limit:
                    raise Refusal(Reason.BODY_TOO_LARGE, f"more than {limit} bytes")

        try:
            await asyncio.wait_for(read(), BODY_SECONDS)
        except TimeoutError:
            raise Refusal(Reason.MALFORMED_REQUEST, f"the body took longer than {BODY_SECONDS:.0f} s") from None
        except ClientDisconnect:
            raise Refusal(Reason.MALFORMED_REQUEST, "the body ended early") from None
        return bytes(received)

    async def signer(self, request: Request, body: bytes, *, registered: bool = True) -> str:
        """The id of whoever signed the request; the nonce is used up. Raises Refusal."""

        def check() -> str:
            now = self.clock()
            parts = signatures.RequestParts(request.method, str(request.url), request.headers)
            who = signatures.verify_request(parts, body, self.run.spec.run_id, now=now)
            with self.run.ledger.write() as tx:
                if registered:
                    nodes.require(tx, who.node_id)
                nodes.remember_nonce(tx, who.node_id, who.nonce, who.expires, now=now)
            return who.node_id

        return await run_in_threadpool(check)

    async def signed_body(self, request: Request, model: type[Body], *, registered: bool = True) -> tuple[str, Body]:
        """Who asks, and the JSON body. Raises Refusal."""
        body = await self.body(request, JSON_BYTES)
        node_id = await self.signer(request, body, registered=registered)
        return node_id, parse(body, model)

    def answer(self, request: Request, document: Strict, status: int = 200) -> Response:
        """A JSON answer, signed by the run key and bound to the request."""
        return self.sign(request, Response(document.model_dump_json(), status, media_type="application/json"))

    def sign(self, request: Request, response: Response) -> Response:
        """Sign an answer that is complete. Raises Refusal(`malformed_request`) where the request cannot be bound to."""
        asked = signatures.RequestParts(request.method, str(request.url), request.headers)
        parts = signatures.ResponseParts(response.status_code, response.headers, asked)
        try:
            signatures.sign_response(parts, bytes(response.body), self.run.key, self.run.spec.run_id, now=self.clock())
        except Exception as error:  # the library refuses addresses that are no URL, such as `?%zz`
            raise Refusal(Reason.MALFORMED_REQUEST, f"the request cannot be bound to: {error}"[:200]) from None
        return response

    async def problem(self, request: Request, refusal: Refusal) -> Response:
        """The answer to a refused request; counts it, changes nothing else."""
        if refusal.reason not in PACING:

            def count() -> None:
                with self.run.ledger.write() as tx:
                    nodes.count_refusal(tx, refusal.reason)

            await run_in_threadpool(count)
        document = Problem(
            type=f"urn:farflung:reason:{refusal.reason.value}",
            title=refusal.reason.value.replace("_", " "),
            status=refusal.status,
            detail=refusal.detail[:500],
            code=refusal.reason,
        )
        response = Response(document.model_dump_json(), refusal.status, media_type="application/problem+json")
        if refusal.retry_after is not None:
            response.headers["Retry-After"] = str(max(1, round(refusal.retry_after)))
        with contextlib.suppress(Exception):  # a request too broken to be bound to is answered unsigned
            self.sign(request, response)
        return response


def parse(body: bytes, model: type[Body]) -> Body:
    """A strict JSON body. Raises Refusal(`malformed_request`)."""
    parse_json(body)  # duplicate keys, NaN, depth; pydantic then reads the same bytes
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refusal(Reason.MALFORMED_REQUEST, f"{where}: {first['msg']}"[:300]) from None


def http_refusal(error: HTTPException) -> Refusal:
    """Starlette's own refusals in our terms."""
    reason = {404: Reason.NOT_FOUND, 405: Reason.METHOD_NOT_ALLOWED, 413: Reason.BODY_TOO_LARGE}
    return Refusal(reason.get(error.status_code, Reason.MALFORMED_REQUEST))
