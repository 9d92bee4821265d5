"""How far a proof lies from the verifier's own hidden states, chunk by chunk.

Four figures follow the TOPLOC reference (its tensor path): exponents that differ, and mean and median of the
mantissa error where they agree. The reference ignores the sign, and a mantissa error wraps at powers of two;
two more figures do not have these blind spots. All are measured at the verifier's own selected entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toploc.field import evaluate
from toploc.proof import CHUNK_ROWS, TOP_K, MalformedProof, Proof, check_canonical, decode
from toploc.selection import Selection, select

NOTHING_MATCHES = 2.0**64
"""Mantissa mean and median where no exponent agrees, as in the reference."""

TRIM = 16
"""One point in TRIM, those with the largest error, is left out of the relative error."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ChunkDistance:
    """Distances of one chunk; every figure grows with the distance, and all are 0 for the verifier's own
    proof.

    - rows: tokens in the chunk.
    - points: entries compared, min(top_k, rows · hidden).
    - exponent_mismatches: points whose exponent differs, 0..points; an entry that the prover did not select
      counts with probability 255/256.
    - mantissa_mean, mantissa_median: |difference| of the 7-bit mantissas over points whose exponent agrees,
      0..127; the median is the upper one; 2^64 where no exponent agrees.
    - sign_mismatches: points whose exponent agrees and whose sign differs, zeros apart.
    - relative_error: in [0, 1]. With the verifier's values v and the proof's y, e = min(|y - v|, |v|). The
      points//16 points of largest e are left out (a swap at the rank boundary or a rounding flip says
      nothing); sum(e) / sum(|v|) over the others is the error. Weighting by |v| keeps tiny entries, whose
      relative error is noise, from mattering. Scaling by 1 + s gives |s|, negation or a vanishing proof 1.
      Where all kept v are 0: 0 if every kept y is 0, else 1.
    """

    rows: int
    points: int
    exponent_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    sign_mismatches: int
    relative_error: float


def distances(
    proof: bytes | Sequence[Proof], hidden: torch.Tensor, *, chunk_rows: int = CHUNK_ROWS, top_k: int = TOP_K
) -> list[ChunkDistance]:
    """One `ChunkDistance` per chunk of a completion.

    proof: wire bytes or what `decode` gave; hidden: the verifier's [rows, hidden], any float dtype.
    Raises MalformedProof for a proof that does not fit the rows, ValueError for unusable hidden states.
    """
    return distances_many([proof], [hidden], chunk_rows=chunk_rows, top_k=top_k)[0]


def distances_many(
    proofs: Sequence[bytes | Sequence[Proof]],
    hiddens: Sequence[torch.Tensor],
    *,
    chunk_rows: int = CHUNK_ROWS,
    top_k: int = TOP_K,
) -> list[list[ChunkDistance]]:
    """`distances` for many completions in one pass. One malformed proof raises for all: `decode` each one
    first."""
    if len(proofs) != len(hiddens):
        raise ValueError(f"{len(proofs)} proofs for {len(hiddens)} completions")
    selection = select(hiddens, chunk_rows, top_k)
    flat: list[Proof] = []
    for proof, hidden, chunks in zip(proofs, hiddens, selection.per_completion, strict=True):
        flat.extend(_parsed(proof, hidden, chunks, chunk_rows, top_k))
    scored = iter(_score(flat, selection))
    return [[next(scored) for _ in range(chunks)] for chunks in selection.per_completion]


def _parsed(
    proof: bytes | Sequence[Proof], hidden: torch.Tensor, chunks: int, chunk_rows: int, top_k: int
) -> Sequence[Proof]:
    rows, size = int(hidden.shape[0]), int(hidden.shape[1])
    if not isinstance(proof, list | tuple):
        return decode(proof, rows=rows, chunk_rows=chunk_rows, top_k=top_k, hidden_size=size)
    if len(proof) != chunks or any(not isinstance(p, Proof) or len(p.coefficients) != top_k for p in proof):
        raise MalformedProof(f"expected {chunks} chunks of {top_k} coefficients")
    check_canonical(proof, rows=rows, hidden_size=size, chunk_rows=chunk_rows)
    return proof


def _score(proofs: Sequence[Proof], selection: Selection) -> list[ChunkDistance]:
    if not proofs:
        return []
    moduli = np.array([p.modulus for p in proofs], dtype=np.int64)
    coefficients = np.array([p.coefficients for p in proofs], dtype=np.int64)
    claimed = evaluate(coefficients, selection.indices % moduli[:, None])
    own, counts = selection.bits, selection.counts
    real = np.arange(own.shape[1])[None] < counts[:, None]
    same_exponent = real & (((claimed ^ own) & 0x7F80) == 0)
    mean, median = _mantissa_errors(claimed, own, same_exponent)
    nonzero = ((claimed | own) & 0x7FFF) != 0
    signs = (same_exponent & nonzero & (((claimed ^ own) & 0x8000) != 0)).sum(axis=1)
    exponents = counts - same_exponent.sum(axis=1)
    relative = _relative_error(claimed, own, real, counts)
    columns = (selection.rows, counts, exponents, mean, median, signs, relative)
    return [ChunkDistance(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def _mantissa_errors(claimed: _Array, own: _Array, matching: _Array) -> tuple[_Array, _Array]:
    errors = np.abs((claimed & 0x7F) - (own & 0x7F))
    n = matching.sum(axis=1)
    mean = np.where(n > 0, (errors * matching).sum(axis=1) / np.maximum(n, 1), NOTHING_MATCHES)
    ordered = np.sort(np.where(matching, errors, 128), axis=1)  # 128: after every real error
    upper = np.take_along_axis(ordered, np.minimum(n // 2, own.shape[1] - 1)[:, None], axis=1)[:, 0]
    return mean, np.where(n > 0, upper.astype(np.float64), NOTHING_MATCHES)


def _relative_error(claimed: _Array, own: _Array, real: _Array, counts: _Array) -> _Array:
    y, v = _as_float(claimed), _as_float(own)
    size = np.abs(v)
    error = np.minimum(np.abs(np.where(np.isfinite(y), y, np.inf) - v), size)
    order = np.argsort(np.where(real, -error, np.inf), axis=1, kind="stable")  # largest first, padding last
    rank = np.arange(own.shape[1])[None]
    kept = (rank >= (counts // TRIM)[:, None]) & (rank < counts[:, None])
    error, size, y = (np.take_along_axis(a, order, axis=1) * kept for a in (error, size, np.abs(y) > 0))
    whole = size.sum(axis=1)
    if_zero = y.any(axis=1).astype(np.float64)
    return np.where(whole > 0, error.sum(axis=1) / np.where(whole > 0, whole, 1.0), if_zero)


def _as_float(bits: _Array) -> _Array:
    """bfloat16 patterns -> float64 values; patterns of NaN come out as NaN."""
    with np.errstate(invalid="ignore"):  # a forged pattern may be a signalling NaN
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
