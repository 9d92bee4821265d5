"""Activation proofs: 2 + 2·top_k bytes per chunk of rows, byte-compatible with the TOPLOC reference format.

One chunk is a modulus m and a polynomial over GF(65497), all big-endian unsigned 16-bit: m, c_0, …, c_{k-1}.
The polynomial maps (flat index mod m) to the bfloat16 pattern of the selected value (arXiv 2501.16007). A
proof is the concatenation of its chunks; shape parameters are not on the wire, so both sides must fix them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from toploc.field import P, interpolate
from toploc.selection import Selection, check_shape_parameters, select

CHUNK_ROWS = 32
TOP_K = 128
_MODULUS_FLOOR = 2**15


class MalformedProof(ValueError):
    """Bytes that no honest prover of this shape writes."""


@dataclass(frozen=True)
class Proof:
    """One chunk: modulus in (2^15, 65497] and ascending coefficients, each in [0, 65497)."""

    modulus: int
    coefficients: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _MODULUS_FLOOR < self.modulus <= P:
            raise MalformedProof(f"modulus {self.modulus} is outside ({_MODULUS_FLOOR}, {P}]")
        if not self.coefficients or min(self.coefficients) < 0 or max(self.coefficients) >= P:
            raise MalformedProof(f"coefficients must be present and in [0, {P})")

    def to_bytes(self) -> bytes:
        """The wire form, 2 + 2·len(coefficients) bytes."""
        return np.array((self.modulus, *self.coefficients), dtype=">u2").tobytes()


def chunk_count(rows: int, chunk_rows: int = CHUNK_ROWS) -> int:
    """Chunks of a completion of `rows` >= 1 tokens. Raises ValueError for anything else."""
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows must be a positive int, not {rows!r}")
    return -(-rows // chunk_rows)


def commit(hidden: torch.Tensor, *, chunk_rows: int = CHUNK_ROWS, top_k: int = TOP_K) -> bytes:
    """Proof bytes of one completion.

    hidden: [rows >= 1, hidden >= 1], any float dtype and device, rounded to bfloat16 nearest-even: the state
    after the final norm that produced each token's logits. A chunk of fewer than top_k values is committed
    whole. Raises ValueError for another shape or dtype and for values that are not finite in bfloat16.
    """
    return commit_many([hidden], chunk_rows=chunk_rows, top_k=top_k)[0]


def commit_many(
    hiddens: Sequence[torch.Tensor], *, chunk_rows: int = CHUNK_ROWS, top_k: int = TOP_K
) -> list[bytes]:
    """`commit` for many completions in one pass; the bytes do not depend on the company."""
    selection = select(hiddens, chunk_rows, top_k)
    words = encode_selection(selection, top_k)
    ends = np.cumsum(selection.per_completion, dtype=np.int64)
    return [
        words[end - n : end].tobytes() for n, end in zip(selection.per_completion, ends.tolist(), strict=True)
    ]


def encode_points(indices: Sequence[int], bits: Sequence[int]) -> bytes:
    """One chunk through the given points, with as many coefficients as points.

    indices: distinct ints >= 0; bits: ints in [0, 2^16), taken mod 65497. Raises ValueError for other input.
    """
    if len(indices) != len(bits) or not indices:
        raise ValueError("expected as many indices as values, and at least one")
    x = np.array([indices], dtype=np.int64)
    y = np.array([bits], dtype=np.int64)
    if int(x.min()) < 0 or int(y.min()) < 0 or int(y.max()) > 0xFFFF:
        raise ValueError("indices must be >= 0 and values 16-bit patterns")
    modulus = injective_modulus(x[0])
    words = np.concatenate(([modulus], interpolate(x % modulus, y % P)[0]))
    return words.astype(">u2").tobytes()


def decode(
    data: object,
    *,
    rows: int,
    chunk_rows: int = CHUNK_ROWS,
    top_k: int = TOP_K,
    hidden_size: int | None = None,
) -> list[Proof]:
    """Parse a proof from an untrusted side: one `Proof` per chunk, or MalformedProof. Exactly one encoding is
    accepted.

    data: bytes, bytearray or memoryview of ceil(rows / chunk_rows) · (2 + 2·top_k) bytes. With hidden_size
    given, also what follows from it is held: the modulus is 65497 where no index can reach it, and
    coefficients past the number of values in a chunk are 0. rows, chunk_rows, top_k and hidden_size are the
    verifier's own; ValueError if senseless.
    """
    check_shape_parameters(chunk_rows, top_k)
    chunks = chunk_count(rows, chunk_rows)
    if hidden_size is not None and hidden_size < 1:
        raise ValueError(f"hidden_size must be positive, not {hidden_size}")
    words = np.frombuffer(_own_bytes(data, chunks * (2 + 2 * top_k)), dtype=">u2").reshape(chunks, 1 + top_k)
    table = words.astype(np.int64)
    moduli, coefficients = table[:, 0], table[:, 1:]
    if bool((moduli == 0).any()):
        raise MalformedProof("null proof")
    if bool(((moduli <= _MODULUS_FLOOR) | (moduli > P)).any()):
        raise MalformedProof(f"modulus outside ({_MODULUS_FLOOR}, {P}]")
    if bool((coefficients >= P).any()):
        raise MalformedProof(f"coefficient not below {P}")
    proofs = [Proof(m, tuple(c)) for m, c in zip(moduli.tolist(), coefficients.tolist(), strict=True)]
    if hidden_size is not None:
        check_canonical(proofs, rows=rows, hidden_size=hidden_size, chunk_rows=chunk_rows)
    return proofs


def check_canonical(proofs: Sequence[Proof], *, rows: int, hidden_size: int, chunk_rows: int) -> None:
    """Raises MalformedProof where a proof breaks what the number of values in its chunk dictates."""
    for i, proof in enumerate(proofs):
        values = min(chunk_rows, rows - i * chunk_rows) * hidden_size
        if values <= P and proof.modulus != P:
            raise MalformedProof(f"modulus {proof.modulus} where no two of {values} indices collide")
        if any(proof.coefficients[values:]):
            raise MalformedProof(f"degree above what {values} values determine")


def injective_modulus(indices: npt.NDArray[np.int64]) -> int:
    """The largest modulus <= 65497 under which the indices (int64 [k]) stay distinct.

    Raises ValueError if none above 2^15 does, as with a repeated index.
    """
    for modulus in range(P, _MODULUS_FLOOR, -1):
        if bool(_distinct(indices[None] % modulus)[0]):
            return modulus
    raise ValueError("no modulus above 2^15 keeps the indices distinct")


def _distinct(points: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which rows of int64 [n, k] hold no value twice: bool [n]."""
    ordered = np.sort(points, axis=1)
    distinct: npt.NDArray[np.bool_] = (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
    return distinct


def encode_selection(selection: Selection, top_k: int) -> npt.NDArray[np.uint16]:
    """Big-endian words [chunks, 1 + top_k]."""
    words = np.zeros((len(selection.counts), 1 + top_k), dtype=">u2")
    for count in np.unique(selection.counts).tolist():
        members = np.flatnonzero(selection.counts == count)
        x, y = selection.indices[members, :count], selection.bits[members, :count]
        moduli = np.full(len(members), P, dtype=np.int64)
        for row in np.flatnonzero(~_distinct(x % P)).tolist():
            moduli[row] = injective_modulus(x[row])
        words[members, 0] = moduli
        words[members, 1 : 1 + count] = interpolate(x % moduli[:, None], y)
    return words


def _own_bytes(data: object, expected: int) -> bytes:
    """A private copy of exactly `expected` bytes; the length is looked at before anything is copied."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise MalformedProof(f"expected bytes, not {type(data).__name__}")
    try:
        length = data.nbytes if isinstance(data, memoryview) else len(data)
        copy = bytes(data) if length == expected else None
    except (ValueError, BufferError) as error:  # a released memoryview
        raise MalformedProof("unreadable buffer") from error
    if copy is None:
        raise MalformedProof(f"expected {expected} bytes, not {length}")
    return copy
