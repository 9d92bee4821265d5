"""One canonical form out, a strict parser in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.canonical import MAX_DEPTH, canonical_json, parse_json, sha256_hex
from protocol.reasons import Reason, Refusal

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=12,
)


def refused(data: bytes, **limits: int) -> Reason:
    with pytest.raises(Refusal) as caught:
        parse_json(data, **limits)
    return caught.value.reason


def test_canonical_form_is_fixed() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"ü": "\u2028\n"}, "": -0.0}
    assert canonical_json(value) == '{"":-0.0,"a":{"ü":"\u2028\\n"},"b":[1,2.5,null,true]}'.encode()
    assert sha256_hex(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "\ud800", {"\udfff": 1}, b"x", {(1,): 1}])
def test_what_json_cannot_hold_has_no_canonical_form(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        canonical_json({"x": value})


@given(JSON)
def test_parse_inverts_canonical(value: object) -> None:
    data = canonical_json(value)
    assert parse_json(data) == value
    assert canonical_json(parse_json(data)) == data


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":1}',
        '{"a":1,"\\u0061":2}',
        '[{"x":{"a":1,"b":2,"a":3}}]',
        "NaN",
        "[Infinity]",
        '{"a":-Infinity}',
        "1e999",
        "[-1e999]",
        '"\\ud800"',
        '{"\\udc00":1}',
        "9" * 5000,
        "",
        "   ",
        "{",
        "[1,]",
        "{'a':1}",
        '{"a":01}',
        '"\t"',
        "1 2",
        "// no\n1",
        "\ufeff{}",
        '"unterminated',
        '"unterminated\\',
    ],
)
def test_strict(text: str) -> None:
    assert refused(text.encode()) is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize("data", [b"\xff", b'"\xc0\x80"', b'"\xed\xa0\x80"', '"a"'.encode("utf-16"), b'"\x00"'])
def test_only_utf8(data: bytes) -> None:
    assert refused(data) is Reason.MALFORMED_REQUEST


def test_depth_is_bounded() -> None:
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert refused(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1)) is Reason.MALFORMED_REQUEST
    assert refused(b'{"a":' * 40 + b"1" + b"}" * 40) is Reason.MALFORMED_REQUEST
    assert refused(b"[" * 100_000) is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize("hide", ['"]"', '"}}}"', '"\\"]"', '"\\\\\\"]]"'])
def test_brackets_in_strings_hide_no_depth(hide: str) -> None:
    deep = f"[{hide}," * 40 + hide + "]" * 40
    assert json.loads(deep)
    assert refused(deep.encode()) is Reason.MALFORMED_REQUEST


def test_brackets_in_strings_count_for_nothing() -> None:
    assert parse_json(b'["' + b"[{" * 200 + b'", "\\"[[' + b"[" * 50 + b'"]') is not None


def test_length_is_bounded() -> None:
    assert parse_json(b'"aaaa"', max_bytes=6) == "aaaa"
    assert refused(b'"aaaaa"', max_bytes=6) is Reason.BODY_TOO_LARGE


@pytest.mark.parametrize("piece", [b'"', b"\\", b'\\"', b'"\\"', b"[", b'"]['])
def test_hostile_repetition_is_read_in_one_pass(piece: bytes) -> None:
    """Quadratic work here would take hours (and run into the test's timeout)."""
    assert refused(piece * ((1 << 20) // len(piece))) is Reason.MALFORMED_REQUEST


@given(st.binary(max_size=60) | st.text('[]{}",:\\u0d8a1eE+-.NIatrufls \n', max_size=40).map(str.encode))
def test_only_refusals_escape(data: bytes) -> None:
    try:
        value = parse_json(data)
    except Refusal as refusal:
        assert refusal.reason is Reason.MALFORMED_REQUEST
    else:
        assert canonical_json(value)
