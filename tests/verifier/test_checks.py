"""Truth table of the cheap checks on untrusted completions."""

import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.verifier.checks import REASON_OF, Fault, Parsed, inspect
from protocol.completion import Completion
from protocol.reasons import Reason
from tests.ledger.builders import digest, make_spec
from toploc import Check

SPEC = make_spec()  # vocabulary 64, hidden 32, end of sequence 1, 32 tokens at most
CHUNK = 2 + 2 * SPEC.proof.top_k
WEIGHTS = digest("weights 3")
NAN = struct.unpack("<f", b"\x01\x00\xc0\x7f")[0]


def proof(chunks: int = 1, modulus: int = 65497, coefficients: tuple[int, ...] = (7,)) -> bytes:
    padded = (*coefficients, *(0,) * (SPEC.proof.top_k - len(coefficients)))
    return struct.pack(f">{1 + SPEC.proof.top_k}H", modulus, *padded) * chunks


def completion(ids: tuple[int, ...] = (5, 6, 1), /, **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "lease_id": "a" * 32,
        "fencing": 1,
        "index": 0,
        "run_spec_digest": SPEC.digest,
        "version": 3,
        "weights_digest": WEIGHTS,
        "tokens": struct.pack(f"<{len(ids)}i", *ids),
        "logprobs": struct.pack(f"<{len(ids)}f", *(-0.5 for _ in ids)),
        "commitment": proof(-(-len(ids) // 32)),
        "finish_reason": "stop" if ids and ids[-1] == 1 else "length",
        "engine": "hf",
        "engine_version": "1",
        "generate_seconds": 1.0,
    }
    return Completion(**values | changes)


def look(item: Completion, spec: Any = SPEC) -> Parsed | Fault:
    return inspect(item, spec, 3, WEIGHTS)


@pytest.mark.parametrize(
    "tokens", [(1,), (5, 1), (5,) * 31 + (1,), (5,) * 32, (0, 63, 1)], ids=["eos", "two", "eos last", "limit", "edges"]
)
def test_sound_completions_are_parsed(tokens: tuple[int, ...]) -> None:
    found = look(completion(tokens))
    assert isinstance(found, Parsed)
    assert found.tokens == tokens and found.logprobs == (-0.5,) * len(tokens)
    assert [item.to_bytes() for item in found.proofs] == [proof()]


def test_two_chunks() -> None:
    spec = make_spec(sampling=SPEC.sampling.model_copy(update={"max_tokens": 40}))
    item = completion((5,) * 40, run_spec_digest=spec.digest)
    found = inspect(item, spec, 3, WEIGHTS)
    assert isinstance(found, Parsed) and len(found.proofs) == 2


def logprobs(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


TABLE: dict[str, tuple[Completion, Reason]] = {
    "another spec": (completion(run_spec_digest=digest("other")), Reason.RUN_SPEC_MISMATCH),
    "empty spec digest": (completion(run_spec_digest=""), Reason.RUN_SPEC_MISMATCH),
    "older version": (completion(version=2), Reason.VERSION_MISMATCH),
    "newer version": (completion(version=4), Reason.VERSION_MISMATCH),
    "other weights": (completion(weights_digest=digest("weights 2")), Reason.VERSION_MISMATCH),
    "upper case digest": (completion(weights_digest=WEIGHTS.upper()), Reason.VERSION_MISMATCH),
    "no tokens": (completion(tokens=b"", logprobs=b"", commitment=b""), Reason.MALFORMED_TOKENS),
    "odd bytes": (completion(tokens=b"\x05\0\0\0\1"), Reason.MALFORMED_TOKENS),
    "too many": (completion((5,) * 33), Reason.MALFORMED_TOKENS),
    "too many, ends right": (completion((5,) * 32 + (1,)), Reason.MALFORMED_TOKENS),
    "negative id": (completion((-1, 1)), Reason.MALFORMED_TOKENS),
    "id = vocabulary": (completion((64, 1)), Reason.MALFORMED_TOKENS),
    "huge id": (completion((2**31 - 1, 1)), Reason.MALFORMED_TOKENS),
    "big-endian": (completion(tokens=struct.pack(">3i", 5, 6, 1)), Reason.MALFORMED_TOKENS),
    "one log-prob less": (completion(logprobs=logprobs(-1, -1)), Reason.MALFORMED_NUMBERS),
    "one more": (completion(logprobs=logprobs(-1, -1, -1, -1)), Reason.MALFORMED_NUMBERS),
    "odd log-probs": (completion(logprobs=logprobs(-1, -1, -1)[:-1]), Reason.MALFORMED_NUMBERS),
    "no log-probs": (completion(logprobs=b""), Reason.MALFORMED_NUMBERS),
    "NaN": (completion(logprobs=logprobs(-1, math.nan, -1)), Reason.MALFORMED_NUMBERS),
    "other NaN": (completion(logprobs=logprobs(-1, NAN, -1)), Reason.MALFORMED_NUMBERS),
    "-inf": (completion(logprobs=logprobs(-math.inf, -1, -1)), Reason.MALFORMED_NUMBERS),
    "+inf": (completion(logprobs=logprobs(-1, -1, math.inf)), Reason.MALFORMED_NUMBERS),
    "above zero": (completion(logprobs=logprobs(-1, 0.01, -1)), Reason.MALFORMED_NUMBERS),
    "no end": (completion((5, 6, 7)), Reason.BAD_TERMINATION),
    "no end, says stop": (completion((5, 6, 7), finish_reason="stop"), Reason.BAD_TERMINATION),
    "one short of the limit": (completion((5,) * 31), Reason.BAD_TERMINATION),
    "goes on": (completion((5, 1, 6)), Reason.BAD_TERMINATION),
    "end twice": (completion((5, 1, 1)), Reason.BAD_TERMINATION),
    "end first": (completion((1, 5)), Reason.BAD_TERMINATION),
    "end within, at the limit": (completion((5, 1) + (5,) * 30), Reason.BAD_TERMINATION),
    "stop called length": (completion((5, 1), finish_reason="length"), Reason.BAD_TERMINATION),
    "limit called stop": (completion((5,) * 32, finish_reason="stop"), Reason.BAD_TERMINATION),
    "end at the limit called length": (completion((5,) * 31 + (1,), finish_reason="length"), Reason.BAD_TERMINATION),
    "no proof": (completion(commitment=b""), Reason.MALFORMED_PROOF),
    "short proof": (completion(commitment=proof()[:-1]), Reason.MALFORMED_PROOF),
    "long proof": (completion(commitment=proof() + b"\0"), Reason.MALFORMED_PROOF),
    "a chunk more": (completion(commitment=proof(2)), Reason.MALFORMED_PROOF),
    "null proof": (completion(commitment=bytes(CHUNK)), Reason.MALFORMED_PROOF),
    "modulus too small": (completion(commitment=proof(modulus=2**15)), Reason.MALFORMED_PROOF),
    "modulus too large": (completion(commitment=proof(modulus=65498)), Reason.MALFORMED_PROOF),
    "modulus not canonical": (completion(commitment=proof(modulus=65496)), Reason.MALFORMED_PROOF),
    "coefficient = field": (completion(commitment=proof(coefficients=(65497,))), Reason.MALFORMED_PROOF),
    "degree too high": (completion((1,), commitment=proof(coefficients=(0,) * 32 + (1,))), Reason.MALFORMED_PROOF),
}


@pytest.mark.parametrize(("item", "reason"), TABLE.values(), ids=TABLE.keys())
def test_faults_and_their_reasons(item: Completion, reason: Reason) -> None:
    found = look(item)
    assert isinstance(found, Fault) and found.reason is reason and found.detail
    assert all(value is None or math.isfinite(value) for value in (found.value, found.limit))


def test_zero_rounded_up_passes_as_log_probability() -> None:
    """A log-softmax in float32 can end a hair above zero."""
    assert isinstance(look(completion(logprobs=logprobs(1e-6, 0.0, -0.0))), Parsed)


def test_both_ends_of_sequence_stop_at_either() -> None:
    spec = make_spec(model=SPEC.model.model_copy(update={"eos_token_ids": (1, 9)}))
    for tokens, good in [((5, 9), True), ((5, 1), True), ((9, 1), False), ((1, 9), False)]:
        item = completion(tokens, run_spec_digest=spec.digest, finish_reason="stop")
        assert isinstance(inspect(item, spec, 3, WEIGHTS), Parsed) is good


def test_every_check_of_the_proof_library_has_a_reason() -> None:
    assert set(REASON_OF) == set(Check) and len(set(REASON_OF.values())) == len(Check)


@given(st.binary(max_size=140), st.binary(max_size=140), st.binary(max_size=2 * CHUNK + 2))
def test_no_bytes_make_it_crash(tokens: bytes, numbers: bytes, data: bytes) -> None:
    found = look(completion(tokens=tokens, logprobs=numbers, commitment=data))
    assert isinstance(found, Parsed | Fault)


@given(st.lists(st.integers(0, 63), min_size=1, max_size=32), st.sampled_from(["stop", "length"]))
def test_exactly_one_termination_is_accepted(tokens: list[int], reason: str) -> None:
    found = look(completion(tuple(tokens), finish_reason=reason))
    ends = 1 in tokens
    good = (tokens.index(1) == len(tokens) - 1 and reason == "stop") if ends else len(tokens) == 32
    good = good and (ends or reason == "length")
    assert isinstance(found, Parsed) is good
    assert good or (isinstance(found, Fault) and found.reason is Reason.BAD_TERMINATION)
