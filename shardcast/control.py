"""The few calls of the control plane that relays and fetchers make, and how the run key is found and pinned."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import httpx
from pydantic import ValidationError

from protocol.canonical import canonical_json, parse_json
from protocol.identity import Key, public_key
from protocol.messages import RegisterRelay, RunInfo
from protocol.reasons import Reason, Refusal
from protocol.signatures import ResponseParts, sign_request, verify_response
from protocol.signed import Strict

from .client import source_url

MAX_ANSWER_BYTES = 1 << 20
Answer = TypeVar("Answer", bound=Strict)


class ControlFailed(Exception):
    """The coordinator could not be reached, or said no for now. `status` is that of its answer, if there was one."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def new_client() -> httpx.AsyncClient:
    """A client that follows no redirect and no proxy of the environment."""
    return httpx.AsyncClient(timeout=httpx.Timeout(15.0, connect=5.0), follow_redirects=False, trust_env=False)


def fragment_key(url: str) -> str | None:
    """The run key in the fragment `#run=<hex>` of a URL. Raises Refusal(`weak_key`) for anything else in there."""
    fragment = urlsplit(url).fragment
    if not fragment:
        return None
    values = parse_qs(fragment, keep_blank_values=True)
    if set(values) != {"run"} or len(values["run"]) != 1:
        raise Refusal(Reason.WEAK_KEY, "a fragment is #run=<64 hex characters>")
    public_key(values["run"][0])
    return values["run"][0]


def is_loopback(url: str) -> bool:
    """True for an address that never leaves this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def first_use_allowed(url: str) -> bool:
    """True if a key may be taken on first use from here: TLS, or loopback."""
    return urlsplit(url).scheme == "https" or is_loopback(url)


async def _send(client: httpx.AsyncClient, request: httpx.Request) -> tuple[httpx.Response, bytes]:
    """The answer and its body, never more than 1 MiB of it. Raises ControlFailed."""
    request.headers["Accept-Encoding"] = "identity"
    try:
        response = await client.send(request, stream=True)
        try:
            body = b""
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise ControlFailed(f"{request.url}: more than {MAX_ANSWER_BYTES} bytes")
        finally:
            await response.aclose()
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise ControlFailed(f"{request.url}: {type(error).__name__}: {error}"[:200]) from None
    if not response.is_success:
        text = body[:200].decode(errors="replace")
        raise ControlFailed(f"{request.url}: status {response.status_code}: {text!r}", response.status_code)
    return response, body


def _parse(model: type[Answer], body: bytes) -> Answer:
    try:
        value: Any = parse_json(body, max_bytes=MAX_ANSWER_BYTES)
        return model.model_validate_json(canonical_json(value), strict=True)
    except (ValidationError, Refusal) as error:
        raise ControlFailed(f"not a {model.__name__}: {str(error)[:160]}") from None


def _verify(response: httpx.Response, body: bytes, run_key: str, run_id: str) -> None:
    parts = ResponseParts(response.status_code, response.headers, response.request)
    verify_response(parts, body, run_key, run_id)


async def get_run(client: httpx.AsyncClient, url: str, run_key: str | None) -> RunInfo:
    """`GET /v1/run`, signed by `run_key`; with None by the key that it names itself (first use: TLS or loopback only).

    Raises ControlFailed (unreachable, or not the answer of a coordinator) and Refusal(`run_key_changed`: a hard stop).
    """
    if run_key is None and not first_use_allowed(url):
        raise Refusal(Reason.FORBIDDEN, f"{url} is neither https nor loopback: pin the run key")
    response, body = await _send(client, client.build_request("GET", f"{url}/v1/run"))
    info = _parse(RunInfo, body)
    if run_key is not None and info.run_key != run_key:
        raise Refusal(Reason.RUN_KEY_CHANGED, f"pinned {run_key}, now {info.run_key}")
    _verify(response, body, info.run_key, info.run_spec.run_id)
    if info.run_spec.digest != info.run_spec_digest:
        raise Refusal(Reason.RUN_SPEC_MISMATCH, "the run spec is not the one that its digest names")
    return info


async def register(
    client: httpx.AsyncClient, url: str, *, key: Key, run_key: str, run_id: str, public_url: str, now: float
) -> None:
    """`POST /v1/relays`, signed by the relay's key: I serve at `public_url`. Raises as `get_run`."""
    body = canonical_json(RegisterRelay(url=public_url).model_dump(mode="json"))
    headers = {"Content-Type": "application/json"}
    request = client.build_request("POST", f"{url}/v1/relays", content=body, headers=headers)
    sign_request(request, body, key, run_id, now=now, nonce=os.urandom(16).hex())
    response, answer = await _send(client, request)
    _verify(response, answer, run_key, run_id)


def pinned_key(option: str | None, urls: list[str], stored: str | None) -> str | None:
    """The run key that option, URL fragments and folder agree on; None if none of them names one.

    Raises Refusal(`run_key_changed`) if they contradict each other, `weak_key` for something that is no key.
    """
    if option is not None:
        public_key(option)
    named = [key for key in (option, *map(fragment_key, urls), stored) if key is not None]
    if len(set(named)) > 1:
        raise Refusal(Reason.RUN_KEY_CHANGED, f"several run keys: {', '.join(dict.fromkeys(named))}")
    return named[0] if named else None


def base_urls(texts: list[str]) -> list[str]:
    """URLs without their fragments, each once. Raises ValueError."""
    return list(dict.fromkeys(source_url(text) for text in texts))


def private_folder(path: Path) -> Path:
    """Make a folder for keys and state, readable by its owner only."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path
