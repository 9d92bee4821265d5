"""Arithmetic over GF(65497), the field in which activation proofs are polynomials (TOPLOC, arXiv 2501.16007).

Elements are numpy int64 in [0, P); products stay below 2^32. The loops are compiled (`kernels`).
"""

import functools

import numpy as np
import numpy.typing as npt

from toploc import kernels

P = 65497
"""The field's order: a prime just below 2^16 and above the bit pattern of every finite bfloat16."""

Elements = npt.NDArray[np.int64]


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
    coefficients = np.empty(x.shape, dtype=np.uint64)
    kernels.interpolate(_unsigned(x), _unsigned(y), _unsigned(inverse_table()), coefficients)
    return coefficients.view(np.int64)


def evaluate(coefficients: Elements, x: Elements) -> Elements:
    """Values of n polynomials, each at its own m points.

    coefficients: int64 [n, k], ascending, entries in [0, P); x: int64 [n, m], entries in [0, P). Returns
    int64 [n, m].
    """
    if coefficients.ndim != 2 or x.ndim != 2 or len(coefficients) != len(x):
        raise ValueError(f"expected [n, k] and [n, m], not {coefficients.shape} and {x.shape}")
    values = np.empty(x.shape, dtype=np.uint64)
    kernels.evaluate(_unsigned(coefficients), _unsigned(x), values)
    return values.view(np.int64)


def _unsigned(elements: Elements) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(elements).view(np.uint64)
