"""JSON as signed and hashed: one canonical form out, a strict parser in."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NoReturn

from .reasons import Reason, Refusal

MAX_DEPTH = 32
_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)  # a whole string, or one bracket


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces and no NaN. Raises ValueError or TypeError for what JSON cannot hold."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def sha256_hex(data: bytes) -> str:
    """Lowercase hex SHA-256, the one hash of the system."""
    return hashlib.sha256(data).hexdigest()


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("duplicate key")
    return out


def parse_json(data: bytes, *, max_bytes: int = 1 << 20) -> Any:
    """Parse untrusted JSON. Refuses duplicate keys, NaN, a byte order mark, lone surrogates and deep nesting.

    Raises Refusal (`malformed_request` or `body_too_large`).
    """
    if len(data) > max_bytes:
        raise Refusal(Reason.BODY_TOO_LARGE, f"more than {max_bytes} bytes")
    depth = deepest = 0
    for token in _BRACKET.finditer(data):
        first = token[0][:1]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first in b"]}":
            depth -= 1
    if deepest > MAX_DEPTH:
        raise Refusal(Reason.MALFORMED_REQUEST, f"nested deeper than {MAX_DEPTH}")
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
        canonical_json(value)  # lone surrogates and infinities (1e999) have no canonical form
    except (ValueError, RecursionError) as error:
        raise Refusal(Reason.MALFORMED_REQUEST, f"not JSON: {str(error)[:120]}") from None
    return value
