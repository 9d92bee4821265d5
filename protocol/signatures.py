"""HTTP Message Signatures (RFC 9421) with Ed25519 and Content-Digest (RFC 9530), both directions.

Requests cover `@method`, `@authority`, `@path`, `@query` and `content-digest`; answers cover the status and the digest,
and bind themselves to the request's signature, so that an answer cannot be replayed for another question.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from http_message_signatures import HTTPMessageSigner, HTTPMessageVerifier, HTTPSignatureKeyResolver, algorithms
from http_message_signatures.exceptions import HTTPMessageSignaturesException

from .identity import Key, is_hex64, public_key
from .reasons import Reason, Refusal

LABEL = "farflung"
REQUEST_COMPONENTS = ("@method", "@authority", "@path", "@query", "content-digest")
RESPONSE_COMPONENTS = ("@status", '"@method";req', '"@path";req', '"@query";req', "content-digest")
VALID_SECONDS = 60
SKEW_SECONDS = 30


class Message(Protocol):
    """A request as the library reads it (httpx.Request fits); an answer has `status_code` and `request` instead."""

    @property
    def headers(self) -> Any: ...


@dataclass(frozen=True)
class RequestParts:
    """A server's view of a request: method, absolute URL, headers."""

    method: str
    url: str
    headers: Any


@dataclass(frozen=True)
class ResponseParts:
    """An answer about to be sent or just received."""

    status_code: int
    headers: Any
    request: Any


@dataclass(frozen=True)
class Authenticated:
    """Who signed, and the nonce to be remembered until `expires` (Unix seconds)."""

    node_id: str
    nonce: str
    expires: float


class _Resolver(HTTPSignatureKeyResolver):
    def __init__(self, key: Key | None = None, only: str | None = None):
        self.key, self.only = key, only

    def resolve_private_key(self, key_id: str) -> Ed25519PrivateKey:
        assert self.key is not None
        return self.key.private

    def resolve_public_key(self, key_id: str) -> Ed25519PublicKey:
        if self.only is not None and key_id != self.only:
            raise HTTPMessageSignaturesException("signed by another key")
        return public_key(key_id)


class _Verifier(HTTPMessageVerifier):
    """The library judges ages by the machine's clock; here the caller passes the clock in and judges itself."""

    def validate_created_and_expires(self, sig_input: Any, max_age: Any = None) -> None:
        pass


def _response_components(request: Any) -> tuple[str, ...]:
    """Answers to signed requests cover the request's signature, and with it its nonce."""
    signed = "signature" in {name.lower() for name in request.headers}
    return (*RESPONSE_COMPONENTS, '"signature";req') if signed else RESPONSE_COMPONENTS


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def sign_request(request: Message, body: bytes, key: Key, run_id: str, *, now: float, nonce: str) -> None:
    """Sign in place; `nonce` must be fresh (16 random bytes as hex)."""
    signer = HTTPMessageSigner(signature_algorithm=algorithms.ED25519, key_resolver=_Resolver(key))
    signer.sign(
        request,
        key_id=key.id,
        created=_time(now),
        expires=_time(now + VALID_SECONDS),
        nonce=nonce,
        tag=run_id,
        label=LABEL,
        body=body,
        covered_component_ids=REQUEST_COMPONENTS,
    )


def verify_request(request: Message, body: bytes, run_id: str, *, now: float) -> Authenticated:
    """Check signature, digest, age and tag of a request. The nonce is the caller's to remember.

    Raises Refusal (`signature_missing`, `signature_invalid`, `clock_skew`, `weak_key`).
    """
    headers = {name.lower() for name in request.headers}
    if not {"signature", "signature-input", "content-digest"} <= headers:
        raise Refusal(Reason.SIGNATURE_MISSING)
    verifier = _Verifier(signature_algorithm=algorithms.ED25519, key_resolver=_Resolver())
    try:
        results = verifier.verify(
            request,
            max_age=None,
            expect_tag=run_id,
            require_components=REQUEST_COMPONENTS,
            body=body,
        )
    except HTTPMessageSignaturesException as error:
        if isinstance(error.__cause__, Refusal):  # the library wraps what the key resolver raises
            raise error.__cause__ from None
        raise Refusal(Reason.SIGNATURE_INVALID, str(error)[:160]) from None
    except Exception as error:  # the library's parsers on hostile headers
        raise Refusal(Reason.SIGNATURE_INVALID, type(error).__name__) from None
    if len(results) != 1:
        raise Refusal(Reason.SIGNATURE_INVALID, "exactly one signature is expected")
    parameters = results[0].parameters
    created, expires = parameters.get("created"), parameters.get("expires")
    nonce, node_id = parameters.get("nonce"), parameters.get("keyid")
    if not (isinstance(created, int) and isinstance(expires, int) and created < expires <= created + VALID_SECONDS):
        raise Refusal(Reason.SIGNATURE_INVALID, f"created and expires span at most {VALID_SECONDS} seconds")
    if not created - SKEW_SECONDS <= now <= expires + SKEW_SECONDS:
        raise Refusal(Reason.CLOCK_SKEW, f"server time {now:.0f}")
    if not (isinstance(nonce, str) and 16 <= len(nonce) <= 64) or not is_hex64(node_id):
        raise Refusal(Reason.SIGNATURE_INVALID, "a nonce of 16 to 64 characters and the node's id are required")
    return Authenticated(str(node_id), nonce, float(expires + SKEW_SECONDS))


def sign_response(response: ResponseParts, body: bytes, key: Key, run_id: str, *, now: float) -> None:
    """Sign an answer with the run key, bound to the request that it answers."""
    signer = HTTPMessageSigner(signature_algorithm=algorithms.ED25519, key_resolver=_Resolver(key))
    signer.sign(
        response,
        key_id=key.id,
        created=_time(now),
        tag=run_id,
        label=LABEL,
        body=body,
        covered_component_ids=_response_components(response.request),
    )


def verify_response(response: ResponseParts, body: bytes, run_key: str, run_id: str) -> None:
    """Check that the run key signed this answer to this request. Raises Refusal(`run_key_changed`)."""
    verifier = _Verifier(signature_algorithm=algorithms.ED25519, key_resolver=_Resolver(only=run_key))
    try:
        verifier.verify(
            response,
            max_age=None,
            expect_tag=run_id,
            require_components=_response_components(response.request),
            body=body,
        )
    except Exception as error:
        raise Refusal(Reason.RUN_KEY_CHANGED, f"the answer is not signed by the run key: {error}"[:200]) from None
