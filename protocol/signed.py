"""Signed documents (manifests, heads, receipts): the exact bytes that were signed travel with the signature."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from . import identity
from .canonical import canonical_json, parse_json
from .reasons import Reason, Refusal

Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Hex128 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]


class Strict(BaseModel):
    """Base of every JSON document: frozen, no coercion, no unknown field, no NaN."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


Document = TypeVar("Document", bound=Strict)


class Signed(Strict):
    """An envelope: `payload` is the JSON text that was signed, under a label that names its kind."""

    kind: Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,32}$")]
    payload: str
    key: Hex64
    signature: Hex128


def _message(kind: str, payload: str) -> bytes:
    return f"farflung/{kind}/1\n".encode() + payload.encode()


def sign_document(kind: str, document: Strict, key: identity.Key) -> Signed:
    """Sign `document` as `kind` (the label keeps a signature of one kind from serving as another)."""
    payload = canonical_json(document.model_dump(mode="json")).decode()
    return Signed(kind=kind, payload=payload, key=key.id, signature=key.sign(_message(kind, payload)).hex())


def open_document(
    data: bytes, kind: str, model: type[Document], run_key: str, *, max_bytes: int = 16 << 20
) -> Document:
    """Verify an envelope and parse what it holds. Raises Refusal(`manifest_invalid`) for anything wrong."""
    try:
        envelope = Signed.model_validate(parse_json(data, max_bytes=max_bytes))
        if envelope.kind != kind or envelope.key != run_key:
            raise Refusal(Reason.MANIFEST_INVALID, f"not a {kind} signed by the run key")
        if not identity.verify(run_key, bytes.fromhex(envelope.signature), _message(kind, envelope.payload)):
            raise Refusal(Reason.MANIFEST_INVALID, "the signature does not verify")
        payload = envelope.payload.encode()
        return model.model_validate_json(canonical_json(parse_json(payload, max_bytes=max_bytes)), strict=True)
    except ValidationError as error:
        raise Refusal(Reason.MANIFEST_INVALID, str(error)[:200]) from None
    except Refusal as refusal:
        if refusal.reason in (Reason.MALFORMED_REQUEST, Reason.BODY_TOO_LARGE):
            raise Refusal(Reason.MANIFEST_INVALID, refusal.detail) from None
        raise
