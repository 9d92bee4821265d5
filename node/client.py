"""The node's side of the control plane: signed requests, answers checked against the pinned run key."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import ValidationError

from protocol import signatures
from protocol.canonical import parse_json
from protocol.completion import CONTENT_TYPE
from protocol.identity import Key
from protocol.messages import (
    Directives,
    Heartbeat,
    LeaseAnswer,
    LeaseRequest,
    NodeAccount,
    Problem,
    ReceiptAnswer,
    RegisterNode,
    RolloutsAnswer,
    RunInfo,
)
from protocol.reasons import Reason, Refusal
from protocol.signed import Strict
from shardcast.control import first_use_allowed, fragment_key

log = logging.getLogger("farflung.node")
MAX_ANSWER = 32 << 20
Answer = TypeVar("Answer", bound=Strict)


class Unreachable(Exception):
    """The coordinator did not answer, or not in our terms; try again later."""


class Client:
    """Talks to one coordinator. Thread-safe, as httpx.Client is."""

    def __init__(self, url: str, key: Key, clock: Callable[[], float] = time.time):
        self.url = url.split("#")[0].rstrip("/")
        self.key, self.clock = key, clock
        self.run_key: str | None = None
        self.run_id = ""
        self._http = httpx.Client(
            timeout=httpx.Timeout(30.0, connect=5.0), follow_redirects=False, trust_env=False
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def connect(self, url: str, pin: Path) -> RunInfo:
        """Read the run's description and pin its key: from the URL's fragment, else from `pin`, else on first use (TLS
        or loopback only). Raises Refusal(`run_key_changed`), Unreachable."""
        pinned = (pin.read_text().strip() or None) if pin.exists() else None  # empty: a crash while it was written
        named = fragment_key(url)
        if pinned and named and pinned != named:
            raise Refusal(Reason.RUN_KEY_CHANGED, "the URL names another run key than the one pinned here")
        response = self._send("GET", "/v1/run", b"", signed=False)
        info = _parse(response.content, RunInfo)
        expected = named or pinned
        if expected is None:
            if not first_use_allowed(url):
                raise Refusal(Reason.RUN_KEY_CHANGED, "over plain HTTP the run key must be given: URL#run=<hex>")
            expected = info.run_key
        self.run_id = info.run_spec.run_id
        self._verify(response, expected)
        if info.run_key != expected or info.run_spec.digest != info.run_spec_digest:
            raise Refusal(Reason.RUN_KEY_CHANGED, "the coordinator describes another run")
        self.run_key = expected
        if pinned is None:
            pin.parent.mkdir(parents=True, exist_ok=True)
            pin.write_text(expected + "\n")
        return info

    def register(self, body: RegisterNode) -> NodeAccount:
        """POST /v1/nodes."""
        return self._post("/v1/nodes", body, NodeAccount)

    def heartbeat(self, body: Heartbeat) -> Directives:
        """POST /v1/heartbeat."""
        return self._post("/v1/heartbeat", body, Directives)

    def lease(self, body: LeaseRequest) -> LeaseAnswer:
        """POST /v1/leases."""
        return self._post("/v1/leases", body, LeaseAnswer)

    def submit(self, batch: bytes) -> RolloutsAnswer:
        """POST /v1/rollouts with an encoded batch."""
        response = self._send("POST", "/v1/rollouts", batch, content_type=CONTENT_TYPE)
        return _parse(response.content, RolloutsAnswer)

    def account(self) -> NodeAccount:
        """GET /v1/nodes/me."""
        return _parse(self._send("GET", "/v1/nodes/me", b"").content, NodeAccount)

    def receipt(self, rollout_id: int) -> ReceiptAnswer:
        """GET /v1/receipts/{id}."""
        return _parse(self._send("GET", f"/v1/receipts/{rollout_id}", b"").content, ReceiptAnswer)

    def _post(self, path: str, body: Strict, model: type[Answer]) -> Answer:
        return _parse(self._send("POST", path, body.model_dump_json().encode()).content, model)

    def _send(
        self, method: str, path: str, body: bytes, *, signed: bool = True, content_type: str = "application/json"
    ) -> httpx.Response:
        headers = {"accept-encoding": "identity"} | ({"content-type": content_type} if body else {})
        request = self._http.build_request(method, self.url + path, content=body, headers=headers)
        if signed:
            nonce = secrets.token_hex(16)
            signatures.sign_request(request, body, self.key, self.run_id, now=self.clock(), nonce=nonce)
        try:
            response = _read(self._http.send(request, stream=True))
        except httpx.HTTPError as error:
            raise Unreachable(f"{method} {path}: {type(error).__name__}: {error}"[:200]) from None
        if signed and "signature" in response.headers:
            assert self.run_key is not None
            self._verify(response, self.run_key)
        elif signed and response.status_code < 400:
            raise Refusal(Reason.RUN_KEY_CHANGED, f"{method} {path}: the answer is not signed")
        elif signed:  # anybody between here and there could have said so: it must not end a worker
            raise Unreachable(f"{method} {path}: status {response.status_code}, not signed")
        if response.status_code >= 400:
            raise _refusal(response)
        return response

    def _verify(self, response: httpx.Response, run_key: str) -> None:
        parts = signatures.ResponseParts(response.status_code, response.headers, response.request)
        signatures.verify_response(parts, response.content, run_key, self.run_id)


def _read(response: httpx.Response) -> httpx.Response:
    """The whole answer, never more than MAX_ANSWER of it. Raises Unreachable, httpx.HTTPError."""
    body = bytearray()
    try:
        if "content-encoding" in response.headers:
            raise Unreachable(f"{response.request.url}: the answer is compressed")
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > MAX_ANSWER:
                raise Unreachable(f"{response.request.url}: the answer is too large")
    finally:
        response.close()
    return httpx.Response(
        response.status_code, headers=response.headers, content=bytes(body), request=response.request
    )


def _parse(data: bytes, model: type[Answer]) -> Answer:
    try:
        parse_json(data, max_bytes=MAX_ANSWER)
        return model.model_validate_json(data, strict=True)
    except (ValidationError, Refusal) as error:
        raise Unreachable(f"not an answer: {str(error)[:200]}") from None


def _refusal(response: httpx.Response) -> Refusal | Unreachable:
    try:
        problem = _parse(response.content, Problem)
    except Unreachable:
        return Unreachable(f"status {response.status_code} without a problem document")
    wait = response.headers.get("retry-after", "")
    seconds = float(wait) if re.fullmatch("[0-9]{1,5}", wait) else None
    return Refusal(problem.code, problem.detail, retry_after=seconds)
