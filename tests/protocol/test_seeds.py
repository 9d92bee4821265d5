"""Seeds of slots against an independent computation."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.seeds import slot_seed

KEY = bytes(range(32))


def reference(key: bytes, run: str, problem: str, group: int, version: int, index: int) -> int:
    """HMAC by its definition (RFC 2104), fields packed with struct."""
    message = b""
    for field in (b"farflung/seed/1", run.encode(), problem.encode()):
        message += struct.pack(">I", len(field)) + field
    for number in (group, version, index):
        message += struct.pack(">IQ", 8, number)
    block = key if len(key) <= 64 else hashlib.sha256(key).digest()
    block = block.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block) + message).digest()
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block) + inner).digest()
    return struct.unpack(">Q", outer[:8])[0]


def test_vectors() -> None:
    """Fixed for ever: a run's seeds must not change under it."""
    assert slot_seed(KEY, "run", "math-1", 1, 0, 0) == 0xA0A809D273DE0DB6
    assert slot_seed(KEY, "run", "math-1", 2**40, 7, 15) == 0x719CA0565656CCCA
    assert slot_seed(bytes(100), "", "", 0, 0, 0) == 0x4E985186A174C5DF


@given(
    st.binary(min_size=32, max_size=100),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    *[st.integers(0, 2**64 - 1)] * 3,
)
def test_definition(key: bytes, run: str, problem: str, group: int, version: int, index: int) -> None:
    seed = slot_seed(key, run, problem, group, version, index)
    assert seed == reference(key, run, problem, group, version, index)
    assert 0 <= seed < 2**64


def test_fields_do_not_run_into_each_other() -> None:
    base = ("ab", "cd", 1, 2, 3)
    others = [
        ("a", "bcd", 1, 2, 3),
        ("abc", "d", 1, 2, 3),
        ("abcd", "", 1, 2, 3),
        ("", "abcd", 1, 2, 3),
        ("cd", "ab", 1, 2, 3),
        ("ab", "cd", 2, 1, 3),
        ("ab", "cd", 1, 3, 2),
        ("ab", "cd\0", 1, 2, 3),
        ("ab", "cd", 1 << 8, 2, 3),
        ("ab", "cd", 1, 2, 3 << 32),
    ]
    assert len({slot_seed(KEY, *fields) for fields in [base, *others]}) == len(others) + 1
    assert slot_seed(KEY[::-1], *base) != slot_seed(KEY, *base)


@pytest.mark.parametrize("key", [b"", bytes(31)])
def test_short_keys_are_refused(key: bytes) -> None:
    with pytest.raises(ValueError):
        slot_seed(key, "r", "p", 0, 0, 0)


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (2**64, 0, 0)])
def test_numbers_out_of_range_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(OverflowError):
        slot_seed(KEY, "r", "p", *numbers)
