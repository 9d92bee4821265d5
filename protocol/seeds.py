"""Sampling seeds: fixed by the slot for ever, unpredictable without the run's secret key."""

from __future__ import annotations

import hashlib
import hmac

_LABEL = b"farflung/seed/1"


def slot_seed(key: bytes, run_id: str, problem_id: str, group: int, version: int, index: int) -> int:
    """64-bit seed of a slot: first 8 bytes, big-endian, of HMAC-SHA-256 over length-prefixed fields (RFC 2104)."""
    if len(key) < 32:
        raise ValueError("the seed key has at least 32 bytes")
    fields = [_LABEL, run_id.encode(), problem_id.encode()]
    fields += [value.to_bytes(8, "big") for value in (group, version, index)]
    message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return int.from_bytes(hmac.digest(key, message, hashlib.sha256)[:8], "big")
