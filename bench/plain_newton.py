"""Newton interpolation over GF(65497) as a textbook has it, at the speed of C: what a proof's encoding is measured
against. Divided differences in place with one inverse by the extended Euclidean algorithm for each of k(k-1)/2 pairs,
then the expansion to monomials; all in 64-bit integers."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

P = 65497


_U = np.uint64(P)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _inverse(value: Any) -> Any:
    a, b, u, v = value, _U, np.int64(1), np.int64(0)
    while a != 1:
        quotient = b // a
        a, b, u, v = b - quotient * a, a, v - np.int64(quotient) * u, u
    return np.uint64(u + P if u < 0 else u)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def interpolate(x: Any, y: Any) -> Any:
    """x, y: uint64 [k], the x distinct -> ascending coefficients, uint64 [k]."""
    k = len(x)
    newton = y.copy()
    for step in range(1, k):
        for i in range(k - 1, step - 1, -1):
            gap = (x[i] + _U - x[i - step]) % _U
            newton[i] = (newton[i] + _U - newton[i - 1]) * _inverse(gap) % _U
    result = np.zeros(k, np.uint64)
    for i in range(k - 1, -1, -1):
        for j in range(k - 1, 0, -1):
            result[j] = (result[j - 1] + result[j] * (_U - x[i])) % _U
        result[0] = (newton[i] + result[0] * (_U - x[i])) % _U
    return result
