"""Arithmetic over GF(65497), the field in which activation proofs are polynomials (TOPLOC, arXiv 2501.16007).

Elements are numpy int64 in [0, P). Products stay below 2^32, and sums of up to 2^21 products stay exact in
float64, so inner products may go through BLAS before one reduction.
"""

import functools
import math

import numpy as np
import numpy.typing as npt

P = 65497
"""The field's order: a prime just below 2^16 and above the bit pattern of every finite bfloat16."""

Elements = npt.NDArray[np.int64]

_BLOCK = 64  # polynomials per pass: the working set of one pass stays in the cache


@functools.cache
def inverse_table() -> Elements:
    """int64 [P]: entry a holds 1/a for 0 < a < P; entry 0 holds 0. Read-only."""
    base = np.arange(P, dtype=np.int64)
    result = np.ones(P, dtype=np.int64)
    exponent = P - 2  # Fermat: a^(P-2) = 1/a
    while exponent:
        if exponent & 1:
            result = result * base % P
        base = base * base % P
        exponent >>= 1
    result[0] = 0
    result.flags.writeable = False
    return result


def interpolate(x: Elements, y: Elements) -> Elements:
    """Coefficients, ascending, of the polynomials of degree < k through (x_i, y_i).

    x, y: int64 [n, k], entries in [0, P), the x of a row distinct. Returns int64 [n, k].
    Raises ValueError for unequal shapes, entries out of range or a repeated x.
    """
    if x.ndim != 2 or x.shape != y.shape:
        raise ValueError(f"x and y must be [n, k] of one shape, not {x.shape} and {y.shape}")
    for values in (x, y):
        if values.size and (int(values.min()) < 0 or int(values.max()) >= P):
            raise ValueError(f"field elements must lie in [0, {P})")
    ordered = np.sort(x, axis=1)
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError("interpolation points must be distinct")
    coefficients = np.empty(x.shape, dtype=np.int64)
    for start in range(0, len(x), _BLOCK):
        block = slice(start, start + _BLOCK)
        # [k, n] in memory: every step below then works on contiguous rows.
        nodes = np.ascontiguousarray(x[block].T, dtype=np.int64)
        newton = _divided_differences(nodes, np.array(y[block].T, dtype=np.int64, order="C"))
        coefficients[block] = _newton_to_monomial(nodes, newton).T
    return coefficients


def evaluate(coefficients: Elements, x: Elements) -> Elements:
    """Values of n polynomials, each at its own m points.

    coefficients: int64 [n, k], ascending, entries in [0, P); x: int64 [n, m], entries in [0, P). Returns
    int64 [n, m]. Baby steps and giant steps: about 3·sqrt(k) reductions a point instead of Horner's k.
    """
    if coefficients.ndim != 2 or x.ndim != 2 or len(coefficients) != len(x):
        raise ValueError(f"expected [n, k] and [n, m], not {coefficients.shape} and {x.shape}")
    k = coefficients.shape[1]
    baby = max(1, math.isqrt(k))
    giant = -(-k // baby)
    padded = np.zeros((len(x), giant * baby), dtype=np.float64)
    padded[:, :k] = coefficients
    blocks = padded.reshape(len(x), giant, baby).transpose(0, 2, 1)
    result = np.empty(x.shape, dtype=np.int64)
    for start in range(0, len(x), _BLOCK):
        chosen = slice(start, start + _BLOCK)
        points = x[chosen]
        powers = np.empty((*points.shape, baby), dtype=np.float64)
        power = np.ones_like(points)
        for i in range(baby):
            powers[..., i] = power
            power = power * points % P
        partial = (powers @ blocks[chosen]).astype(np.int64) % P  # exact: below baby · 2^32
        value = np.zeros_like(points)
        for g in range(giant - 1, -1, -1):
            value = (value * power + partial[..., g]) % P  # power is now x^baby
        result[chosen] = value
    return result


def _divided_differences(x: Elements, y: Elements) -> Elements:
    """Newton coefficients; x, y: int64 [k, n]. Overwrites y."""
    inverse = inverse_table()
    for step in range(1, len(x)):
        gap = (x[step:] - x[:-step]) % P
        y[step:] = (y[step:] - y[step - 1 : -1]) * inverse[gap] % P
    return y


def _newton_to_monomial(x: Elements, newton: Elements) -> Elements:
    """Expand sum_i newton_i · prod_{j<i} (X - x_j) into ascending powers of X; all int64 [k, n]."""
    k = len(x)
    result = np.zeros_like(newton)
    if k == 0:
        return result
    result[0] = newton[k - 1]
    for i in range(k - 2, -1, -1):
        degree = k - 2 - i  # of what result holds now
        shifted = result[: degree + 1].copy()
        result[: degree + 1] = -shifted * x[i] % P
        result[1 : degree + 2] += shifted
        result[0] += newton[i]
        result[: degree + 2] %= P
    return result
