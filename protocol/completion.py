"""Finished completions on the wire: msgpack by msgspec, unknown fields refused, every length bounded."""

from __future__ import annotations

from typing import Literal

import msgspec

from .canonical import sha256_hex
from .reasons import Reason, Refusal

CONTENT_TYPE = "application/vnd.farflung.rollouts+msgpack"
MAX_BATCH_BYTES = 32 << 20
MAX_BATCH_ITEMS = 512


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer to one slot.

    `tokens` int32 and `logprobs` float32, little-endian, one per generated token; `logprobs` are those of the
    sampling distribution (temperature included, noise excluded). `commitment` holds one proof per 32 rows.
    """

    lease_id: str
    fencing: int
    index: int
    run_spec_digest: str
    version: int
    weights_digest: str
    tokens: bytes
    logprobs: bytes
    commitment: bytes
    finish_reason: Literal["stop", "length"]
    engine: str
    engine_version: str
    generate_seconds: float

    @property
    def payload_hash(self) -> str:
        """SHA-256 of this completion's own encoding: what an acknowledgement names."""
        return sha256_hex(msgspec.msgpack.encode(self))


class RolloutBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/rollouts`."""

    completions: tuple[Completion, ...]


_DECODER = msgspec.msgpack.Decoder(RolloutBatch)


def encode_batch(completions: tuple[Completion, ...] | list[Completion]) -> bytes:
    """The msgpack body of a batch."""
    return msgspec.msgpack.encode(RolloutBatch(tuple(completions)))


def decode_batch(data: bytes) -> tuple[Completion, ...]:
    """Parse an untrusted body. Raises Refusal (`malformed_request`, `body_too_large`)."""
    if len(data) > MAX_BATCH_BYTES:
        raise Refusal(Reason.BODY_TOO_LARGE, f"more than {MAX_BATCH_BYTES} bytes")
    try:
        batch = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(Reason.MALFORMED_REQUEST, f"not a batch of completions: {str(error)[:160]}") from None
    if not 1 <= len(batch.completions) <= MAX_BATCH_ITEMS:
        raise Refusal(Reason.MALFORMED_REQUEST, f"1 to {MAX_BATCH_ITEMS} completions, not {len(batch.completions)}")
    for item in batch.completions:
        texts = (item.lease_id, item.run_spec_digest, item.weights_digest, item.engine, item.engine_version)
        if any(len(text) > 128 or not text.isprintable() for text in texts):
            raise Refusal(Reason.MALFORMED_REQUEST, "a text field is longer than 128 characters or not printable")
        if not (0 <= item.fencing < 2**53 and 0 <= item.index < 2**31 and 0 <= item.version < 2**53):
            raise Refusal(Reason.MALFORMED_REQUEST, "a number is out of range")
        if not 0 <= item.generate_seconds < 2**31:  # NaN too
            raise Refusal(Reason.MALFORMED_REQUEST, "a number is out of range")
    return batch.completions
