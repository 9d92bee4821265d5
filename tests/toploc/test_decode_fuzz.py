"""A million proofs from someone who means harm: each is parsed exactly, or malformed, and nothing else happens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from toploc import MalformedProof, commit, decode, distances

SHAPES = [(1, 4, 32, 8), (33, 40, 32, 8), (5, 3000, 32, 16), (64, 2500, 32, 128), (2, 3, 1, 128)]  # rows, hidden, …
Change = Callable[[random.Random, bytes], object]


def flip(source: random.Random, data: bytes) -> object:
    """One bit."""
    place = source.randrange(8 * len(data))
    return (int.from_bytes(data, "big") ^ (1 << place)).to_bytes(len(data), "big")


def word(source: random.Random, data: bytes) -> object:
    """A 16-bit word at the edges of what is allowed."""
    place = 2 * source.randrange(len(data) // 2)
    value = source.choice((0, 1, 0x7FFF, 0x8000, 0x8001, 65496, 65497, 65498, 0xFFFF, source.randrange(1 << 16)))
    return data[:place] + value.to_bytes(2, "big") + data[place + 2 :]


def cut(source: random.Random, data: bytes) -> object:
    """Too short or too long."""
    return (data + data)[: source.randrange(2 * len(data))]


def noise(source: random.Random, data: bytes) -> object:
    """Bytes of the right length."""
    return source.randbytes(len(data))


def swap(source: random.Random, data: bytes) -> object:
    """Two pieces in each other's place."""
    place = source.randrange(len(data))
    return data[place:] + data[:place]


def other(source: random.Random, data: bytes) -> object:
    """Not bytes at all, or bytes of another kind."""
    return source.choice(
        (None, 0, -1, data.hex(), [*data], bytearray(data), memoryview(data), memoryview(data)[::2], b"")
    )


CHANGES: list[Change] = [flip, word, word, cut, noise, swap, other]


def examine(seed: int, cases: int) -> tuple[int, int]:
    """How many were parsed, and how many malformed."""
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    honest = []
    for rows, hidden_size, chunk_rows, top_k in SHAPES:
        hidden = torch.randn(rows, hidden_size, generator=generator)
        honest.append((hidden, commit(hidden, chunk_rows=chunk_rows, top_k=top_k)))
    parsed = malformed = 0
    for case in range(cases):
        (rows, hidden_size, chunk_rows, top_k), (hidden, data) = source.choice(list(zip(SHAPES, honest, strict=True)))
        sent = source.choice(CHANGES)(source, data)
        known = source.choice((None, hidden_size))
        try:
            proofs = decode(sent, rows=rows, chunk_rows=chunk_rows, top_k=top_k, hidden_size=known)
        except MalformedProof:
            malformed += 1
            continue
        parsed += 1
        assert b"".join(proof.to_bytes() for proof in proofs) == bytes(sent)  # type: ignore[arg-type]
        if known and case % 50 == 0:
            for chunk in distances(proofs, hidden, chunk_rows=chunk_rows, top_k=top_k):
                assert 0 <= chunk.exponent_mismatches <= chunk.points and 0 <= chunk.relative_error <= 1
    return parsed, malformed


def test_twenty_thousand_cases() -> None:
    parsed, malformed = examine(1, 20_000)
    assert parsed > 2_000 and malformed > 2_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_cases() -> None:
    parsed, malformed = examine(2, 1_000_000)
    assert parsed > 100_000 and malformed > 100_000
