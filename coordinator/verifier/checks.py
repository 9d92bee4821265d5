"""The cheap checks, made on every completion before any arithmetic on it. Pure functions over untrusted bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from protocol.completion import Completion
from protocol.reasons import Reason
from protocol.runspec import RunSpec
from toploc import Check, MalformedProof, Proof, decode

REASON_OF: Mapping[Check, Reason] = {
    Check.MALFORMED_PROOF: Reason.MALFORMED_PROOF,
    Check.TERMINATION: Reason.BAD_TERMINATION,
    Check.SAMPLING: Reason.SAMPLING_MISMATCH,
    Check.ACTIVATION: Reason.ACTIVATION_MISMATCH,
    Check.LOGPROB: Reason.LOGPROB_MISMATCH,
    Check.VERIFIER: Reason.UNVERIFIED,
}
"""The one table from the proof library's checks to reason codes."""


@dataclass(frozen=True)
class Fault:
    """A check that failed: the reason, what was measured, and the limit where there is one."""

    reason: Reason
    detail: str
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Parsed:
    """A completion whose numbers can be used: n token ids, n finite log-probs, one proof per chunk of rows."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    proofs: tuple[Proof, ...]


def inspect(completion: Completion, spec: RunSpec, version: int, weights_digest: str) -> Parsed | Fault:
    """Parse an untrusted completion, or say what is wrong with it."""
    if completion.run_spec_digest != spec.digest:
        return Fault(Reason.RUN_SPEC_MISMATCH, "generated under another run spec")
    if completion.version != version or completion.weights_digest != weights_digest:
        return Fault(Reason.VERSION_MISMATCH, f"claims version {completion.version}, the lease names {version}")
    tokens = _tokens(completion.tokens, spec)
    if isinstance(tokens, Fault):
        return tokens
    logprobs = _logprobs(completion.logprobs, len(tokens))
    if isinstance(logprobs, Fault):
        return logprobs
    termination = check_termination(tokens, completion.finish_reason, spec)
    if termination is not None:
        return termination
    try:
        proofs = decode(
            completion.commitment,
            rows=len(tokens),
            chunk_rows=spec.proof.chunk_rows,
            top_k=spec.proof.top_k,
            hidden_size=spec.model.hidden_size,
        )
    except MalformedProof as error:
        return Fault(Reason.MALFORMED_PROOF, str(error)[:200])
    return Parsed(tokens, logprobs, tuple(proofs))


def _tokens(data: bytes, spec: RunSpec) -> tuple[int, ...] | Fault:
    if not data or len(data) % 4:
        return Fault(Reason.MALFORMED_TOKENS, f"{len(data)} bytes are no int32 token ids")
    count, limit = len(data) // 4, spec.sampling.max_tokens
    if count > limit:
        return Fault(Reason.MALFORMED_TOKENS, "more tokens than the limit", count, limit)
    tokens = struct.unpack(f"<{count}i", data)
    outside = [token for token in tokens if not 0 <= token < spec.model.vocab_size]
    if outside:
        return Fault(Reason.MALFORMED_TOKENS, "token outside the vocabulary", outside[0], spec.model.vocab_size - 1)
    return tokens


def _logprobs(data: bytes, count: int) -> tuple[float, ...] | Fault:
    if len(data) != 4 * count:
        return Fault(Reason.MALFORMED_NUMBERS, "not one log-probability per token", len(data) / 4, count)
    values = struct.unpack(f"<{count}f", data)
    if not all(math.isfinite(value) and value <= 1e-3 for value in values):
        return Fault(Reason.MALFORMED_NUMBERS, "a log-probability is not finite or above zero")
    return values


def check_termination(tokens: tuple[int, ...], finish_reason: str, spec: RunSpec) -> Fault | None:
    """A completion ends with its first end-of-sequence token, or at exactly the token limit without any."""
    eos: Collection[int] = spec.model.eos_token_ids
    limit = spec.sampling.max_tokens
    first = next((position for position, token in enumerate(tokens) if token in eos), None)
    if first is None:
        if len(tokens) != limit:
            return Fault(Reason.BAD_TERMINATION, "ends without an end-of-sequence token", len(tokens), limit)
        expected = "length"
    elif first != len(tokens) - 1:
        return Fault(Reason.BAD_TERMINATION, "goes on after the end-of-sequence token", len(tokens), first + 1)
    else:
        expected = "stop"
    if finish_reason != expected:
        return Fault(Reason.BAD_TERMINATION, f"says {finish_reason!r} where it ended by {expected!r}")
    return None
