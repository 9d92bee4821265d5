"""Reason codes: one enumeration for server, worker, relay, audit, receipts and documentation.

A code is stable once published. `STATUS` gives the HTTP status of a refusal, `ADVICE` one sentence on what to do.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a request was refused, a rollout rejected, or a download given up."""

    # requests
    MALFORMED_REQUEST = "malformed_request"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    SIGNATURE_MISSING = "signature_missing"
    SIGNATURE_INVALID = "signature_invalid"
    CLOCK_SKEW = "clock_skew"
    NONCE_REPLAYED = "nonce_replayed"
    NONCE_LIMIT = "nonce_limit"
    WEAK_KEY = "weak_key"
    UNKNOWN_NODE = "unknown_node"
    NOT_ON_ALLOWLIST = "not_on_allowlist"
    NODE_BANNED = "node_banned"
    FORBIDDEN = "forbidden"
    ADDRESS_REFUSED = "address_refused"
    UNAVAILABLE = "unavailable"
    # leases
    QUEUE_FULL = "queue_full"
    QUOTA_EXHAUSTED = "quota_exhausted"
    VERSION_BEHIND = "version_behind"
    NOT_READY = "not_ready"
    RUN_ENDED = "run_ended"
    LEASE_UNKNOWN = "lease_unknown"
    LEASE_NOT_YOURS = "lease_not_yours"
    LEASE_EXPIRED = "lease_expired"
    LEASE_LOST = "lease_lost"
    LEASE_VOID = "lease_void"
    LEASE_INDEX = "lease_index"
    DUPLICATE = "duplicate"
    # verdicts
    MALFORMED_PROOF = "malformed_proof"
    MALFORMED_TOKENS = "malformed_tokens"
    MALFORMED_NUMBERS = "malformed_numbers"
    VERSION_MISMATCH = "version_mismatch"
    RUN_SPEC_MISMATCH = "run_spec_mismatch"
    BAD_TERMINATION = "bad_termination"
    SAMPLING_MISMATCH = "sampling_mismatch"
    ACTIVATION_MISMATCH = "activation_mismatch"
    LOGPROB_MISMATCH = "logprob_mismatch"
    UNVERIFIED = "unverified"
    UNVERIFIABLE = "unverifiable"
    # weights
    MANIFEST_INVALID = "manifest_invalid"
    MANIFEST_WRONG_RUN = "manifest_wrong_run"
    MANIFEST_ROLLBACK = "manifest_rollback"
    MANIFEST_EXPIRED = "manifest_expired"
    SHARD_MISMATCH = "shard_mismatch"
    TENSORS_MISMATCH = "tensors_mismatch"
    CANARY_MISMATCH = "canary_mismatch"
    RUN_KEY_CHANGED = "run_key_changed"


STATUS: dict[Reason, int] = {
    Reason.MALFORMED_REQUEST: 400,
    Reason.BODY_TOO_LARGE: 413,
    Reason.UNSUPPORTED_MEDIA_TYPE: 415,
    Reason.NOT_FOUND: 404,
    Reason.METHOD_NOT_ALLOWED: 405,
    Reason.SIGNATURE_MISSING: 401,
    Reason.SIGNATURE_INVALID: 401,
    Reason.CLOCK_SKEW: 401,
    Reason.NONCE_REPLAYED: 401,
    Reason.NONCE_LIMIT: 429,
    Reason.WEAK_KEY: 400,
    Reason.UNKNOWN_NODE: 401,
    Reason.NOT_ON_ALLOWLIST: 403,
    Reason.NODE_BANNED: 403,
    Reason.FORBIDDEN: 403,
    Reason.ADDRESS_REFUSED: 403,
    Reason.UNAVAILABLE: 503,
    Reason.QUEUE_FULL: 429,
    Reason.QUOTA_EXHAUSTED: 429,
    Reason.VERSION_BEHIND: 409,
    Reason.NOT_READY: 425,
    Reason.RUN_ENDED: 410,
    Reason.LEASE_UNKNOWN: 404,
    Reason.LEASE_NOT_YOURS: 403,
    Reason.LEASE_EXPIRED: 409,
    Reason.LEASE_LOST: 409,
    Reason.LEASE_VOID: 409,
    Reason.LEASE_INDEX: 422,
    Reason.DUPLICATE: 409,
}
"""HTTP status of every refusal; a reason that is not here never ends a request."""

ADVICE: dict[Reason, str] = {
    Reason.MALFORMED_REQUEST: "The body does not follow the schema: unknown, missing or mistyped field.",
    Reason.BODY_TOO_LARGE: "Send fewer completions per request.",
    Reason.UNSUPPORTED_MEDIA_TYPE: "Send the content type of the call, without compression.",
    Reason.NOT_FOUND: "There is nothing at this address.",
    Reason.METHOD_NOT_ALLOWED: "Use the method of the call.",
    Reason.SIGNATURE_MISSING: "Sign the request with HTTP Message Signatures (RFC 9421).",
    Reason.SIGNATURE_INVALID: "The signature does not cover the required components or does not verify.",
    Reason.CLOCK_SKEW: "Set the clock: the server accepts 30 seconds of difference.",
    Reason.NONCE_REPLAYED: "Every request needs a fresh nonce.",
    Reason.NONCE_LIMIT: "Too many signed requests within a minute; slow down.",
    Reason.WEAK_KEY: "Make a new Ed25519 key; this one is of small order or not canonical.",
    Reason.UNKNOWN_NODE: "Register first.",
    Reason.NOT_ON_ALLOWLIST: "Ask the operator of the run to put this node's id on the list.",
    Reason.NODE_BANNED: "The operator has banned this node.",
    Reason.FORBIDDEN: "Not for this key.",
    Reason.ADDRESS_REFUSED: "The run does not allow this address; use a public one or ask the operator.",
    Reason.UNAVAILABLE: "Not here yet; try again after Retry-After.",
    Reason.QUEUE_FULL: "The trainer has all the work it can take for now; wait Retry-After.",
    Reason.QUOTA_EXHAUSTED: "This node holds as many open slots as it may; return them first.",
    Reason.VERSION_BEHIND: "Fetch the newest weights and ask again.",
    Reason.NOT_READY: "No version is published yet.",
    Reason.RUN_ENDED: "The run has ended; nothing more to do.",
    Reason.LEASE_UNKNOWN: "No such lease.",
    Reason.LEASE_NOT_YOURS: "The lease belongs to another node.",
    Reason.LEASE_EXPIRED: "The answer came after the deadline; the slot goes to somebody else.",
    Reason.LEASE_LOST: "The slot was leased again; this fencing number is no longer valid.",
    Reason.LEASE_VOID: "The group was closed before the answer came; no fault of the node.",
    Reason.LEASE_INDEX: "The lease has no slot of this index.",
    Reason.DUPLICATE: "Another answer for this slot has been acknowledged already.",
    Reason.MALFORMED_PROOF: "The activation commitment does not have the required form.",
    Reason.MALFORMED_TOKENS: "Token ids are missing, too many, or outside the vocabulary.",
    Reason.MALFORMED_NUMBERS: "Log-probabilities are missing, not finite or not one per token.",
    Reason.VERSION_MISMATCH: "Generated with other weights than the lease names.",
    Reason.RUN_SPEC_MISMATCH: "Generated under another run specification.",
    Reason.BAD_TERMINATION: "Ends neither with the first end-of-sequence token nor at the token limit.",
    Reason.SAMPLING_MISMATCH: "A token is not what the slot's seed selects under the version's weights.",
    Reason.ACTIVATION_MISMATCH: "The committed hidden states are not those of the version's weights.",
    Reason.LOGPROB_MISMATCH: "The engine's log-probabilities are not those of the version's weights.",
    Reason.UNVERIFIED: "Could not be decided in three tries; not paid, no fault of the node.",
    Reason.UNVERIFIABLE: "The verifier failed on it repeatedly; not paid, no fault of the node.",
    Reason.MANIFEST_INVALID: "The manifest is not signed by the run key or is malformed.",
    Reason.MANIFEST_WRONG_RUN: "The manifest belongs to another run.",
    Reason.MANIFEST_ROLLBACK: "A version older than one already seen was offered.",
    Reason.MANIFEST_EXPIRED: "The pointer to the newest version has expired: stale relay or wrong clock.",
    Reason.SHARD_MISMATCH: "A relay served bytes that do not match their digest.",
    Reason.TENSORS_MISMATCH: "The assembled tensors do not match the manifest.",
    Reason.CANARY_MISMATCH: "The engine does not reproduce the manifest's canary with these weights.",
    Reason.RUN_KEY_CHANGED: "The coordinator answers with another run key than the pinned one: stop.",
}


class Refusal(Exception):
    """A request that is answered with a problem document (RFC 9457) and changes nothing.

    Attributes: `reason`, `detail` (a sentence for people), `retry_after` (seconds, or None).
    """

    def __init__(self, reason: Reason, detail: str = "", *, retry_after: float | None = None):
        super().__init__(f"{reason.value}: {detail or ADVICE[reason]}")
        self.reason = reason
        self.detail = detail or ADVICE[reason]
        self.retry_after = retry_after

    @property
    def status(self) -> int:
        """HTTP status of this refusal."""
        return STATUS.get(self.reason, 400)
