"""Batches of completions: only a Refusal ever escapes the decoder."""

import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import completion
from protocol.completion import Completion, decode_batch, encode_batch
from protocol.reasons import Reason, Refusal

DIGEST = "ab" * 32
FIELDS: dict[str, Any] = {
    "lease_id": "5f" * 16,
    "fencing": 1,
    "index": 0,
    "run_spec_digest": DIGEST,
    "version": 3,
    "weights_digest": DIGEST,
    "tokens": struct.pack("<3i", 5, 6, 1),
    "logprobs": struct.pack("<3f", -0.5, -1.0, -0.25),
    "commitment": bytes(258),
    "finish_reason": "stop",
    "engine": "hf",
    "engine_version": "5.16",
    "generate_seconds": 1.5,
}


def body(*items: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({"completions": items})


def refused(data: bytes) -> Reason:
    with pytest.raises(Refusal) as caught:
        decode_batch(data)
    return caught.value.reason


def test_round_trip_and_stable_hash() -> None:
    one, two = Completion(**FIELDS), Completion(**FIELDS | {"index": 1})
    assert decode_batch(encode_batch([one, two])) == (one, two)
    assert decode_batch(body(FIELDS)) == (one,)
    assert one.payload_hash == decode_batch(encode_batch([one]))[0].payload_hash != two.payload_hash


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_field_is_in_the_hash(name: str) -> None:
    value = FIELDS[name]
    other = "length" if name == "finish_reason" else value + (b"\0" if isinstance(value, bytes) else type(value)(1))
    assert Completion(**FIELDS | {name: other}).payload_hash != Completion(**FIELDS).payload_hash


def test_order_of_keys_on_the_wire_is_not_in_the_hash() -> None:
    turned = decode_batch(body(dict(reversed(FIELDS.items()))))[0]
    assert turned.payload_hash == Completion(**FIELDS).payload_hash


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_missing_field(name: str) -> None:
    assert refused(body({key: value for key, value in FIELDS.items() if key != name})) is Reason.MALFORMED_REQUEST


WRONG = {
    str: [None, 5, b"ab", ["a"], 1.5, "x" * 129, "nul\0", "line\n", "\x1b[2J", "\x7f"],
    int: [None, "1", 1.5, -1, 2**53, 2**64 - 1, True, b"1"],
    bytes: [None, 5, [1], {"a": 1}],
    float: [None, "1.0", True, float("nan"), float("inf"), -float("inf"), -0.5, 1e300],
}


@pytest.mark.parametrize(
    "name,value", [(name, value) for name, good in FIELDS.items() for value in WRONG[type(good)]]
)
def test_wrong_type_or_range(name: str, value: object) -> None:
    assert refused(body(FIELDS | {name: value})) is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize("value", ["", "STOP", "eos", "stop\n"])
def test_finish_reason_is_one_of_two(value: str) -> None:
    assert refused(body(FIELDS | {"finish_reason": value})) is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\xc0",
        b"\xc1",
        b"\x93\x01\x02",
        body(),
        body(FIELDS | {"unknown": 1}),
        msgspec.msgpack.encode({"completions": [FIELDS], "more": 1}),
        msgspec.msgpack.encode([FIELDS]),
        msgspec.msgpack.encode({"completions": FIELDS}),
        msgspec.msgpack.encode({"completions": [FIELDS, None]}),
        msgspec.msgpack.encode({"completions": [[*FIELDS.values()]]}),
        body(FIELDS) + b"\x00",
        body(FIELDS).replace(b"5f5f", b"\xff\xfe5f"),
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xabcompletions\xdd\xff\xff\xff\xff",
        b"\x81\xabcompletions\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xabcompletions" + b"\x91" * 100_000,
    ],
)
def test_malformed(data: bytes) -> None:
    assert refused(data) is Reason.MALFORMED_REQUEST


def test_every_truncation_is_refused() -> None:
    data = body(FIELDS)
    for length in range(len(data)):
        assert refused(data[:length]) is Reason.MALFORMED_REQUEST


def test_number_of_completions_is_bounded() -> None:
    most = completion.MAX_BATCH_ITEMS
    assert len(decode_batch(body(*[FIELDS] * most))) == most
    assert refused(body(*[FIELDS] * (most + 1))) is Reason.MALFORMED_REQUEST


def test_length_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = body(FIELDS)
    monkeypatch.setattr(completion, "MAX_BATCH_BYTES", len(data))
    assert decode_batch(data)
    monkeypatch.setattr(completion, "MAX_BATCH_BYTES", len(data) - 1)
    assert refused(data) is Reason.BODY_TOO_LARGE


@dataclass(frozen=True)
class Edit:
    """Overwrite bytes of a good body, insert or cut."""

    at: int
    cut: int
    insert: bytes


EDITS = st.builds(Edit, st.integers(0, 1200), st.integers(0, 12), st.binary(max_size=6))
VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary()


def accepts_or_refuses(data: bytes) -> None:
    try:
        items = decode_batch(data)
    except Refusal as refusal:
        assert refusal.reason in (Reason.MALFORMED_REQUEST, Reason.BODY_TOO_LARGE)
    else:
        assert decode_batch(encode_batch(items)) == items


@settings(max_examples=300)
@given(st.lists(EDITS, max_size=4))
def test_damaged_batches(edits: list[Edit]) -> None:
    data = body(FIELDS, FIELDS | {"index": 1})
    for edit in edits:
        data = data[: edit.at] + edit.insert + data[edit.at + edit.cut :]
    accepts_or_refuses(data)


@settings(max_examples=300)
@given(st.binary(max_size=200) | st.dictionaries(st.sampled_from(["completions", "x"]), VALUES | st.lists(
    st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES).map(lambda some: FIELDS | some)
)).map(msgspec.msgpack.encode))
def test_arbitrary_batches(data: bytes) -> None:
    accepts_or_refuses(data)
