"""The inner loops, compiled for the CPU by numba: arithmetic over GF(65497), and seeded noise without its logarithms.

Compiled at the first call and cached beside this file (or in the user's cache where that folder is read-only). All
arithmetic is on unsigned 64-bit integers or IEEE floats without reordering, so results are the same on every machine.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

_P = np.uint64(65497)
_MASK = np.uint64(0xFFFFFFFF)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_32 = np.uint64(32)
_V_MAX = np.float32(1.0 - 2.0**-24)
_HALF, _SCALE = np.float32(0.5), np.float32(2.0**-32)
_LN2 = np.float32(math.log(2.0) * (1.0 + 1e-6))  # rounded up: it only ever bounds

Elements = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Function = TypeVar("Function", bound=Callable[..., Any])


def _jit(function: Function) -> Function:
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


@_jit
def interpolate(x: Elements, y: Elements, inverse: Elements, coefficients: Elements) -> None:
    """x, y, coefficients: uint64 [n, k], each row's x distinct; inverse: uint64 [P]. Fills the ascending coefficients
    of the polynomial through each row's points: Newton's divided differences, expanded by Horner's rule."""
    n, k = x.shape
    newton = np.empty(k, np.uint64)
    terms = np.empty(k + 1, np.uint64)
    for row in range(n):
        points = x[row]
        newton[:] = y[row]
        for step in range(1, k):
            for i in range(k - 1, step - 1, -1):
                gap = points[i] + _P - points[i - step]
                gap = min(gap, gap - _P)  # wraps below zero: the smaller one is the residue
                newton[i] = (newton[i] + _P - newton[i - 1]) * inverse[gap] % _P
        terms[:] = np.uint64(0)
        terms[1] = newton[k - 1]  # terms[1:] holds the polynomial, terms[0] a zero below it
        for i in range(k - 2, -1, -1):
            negative = _P - points[i]
            for j in range(k - i, 1, -1):
                terms[j] = (terms[j] * negative + terms[j - 1]) % _P
            terms[1] = (terms[1] * negative + newton[i]) % _P
        coefficients[row] = terms[1:]


@_jit
def evaluate(coefficients: Elements, x: Elements, values: Elements) -> None:
    """coefficients: uint64 [n, k], ascending; x, values: uint64 [n, m]. Fills the values by Horner's rule."""
    n, k = coefficients.shape
    m = x.shape[1]
    value = np.empty(m, np.uint64)
    for row in range(n):
        value[:] = np.uint64(0)
        points = x[row]
        for i in range(k - 1, -1, -1):
            coefficient = coefficients[row, i]
            for j in range(m):
                value[j] = (value[j] * points[j] + coefficient) % _P
        values[row] = value


@_jit
def _philox(group: Any, position: Any, low: Any, high: Any) -> Any:
    """Philox4x32-10 with counter (group, position, 0, 0); every word a uint64 below 2^32."""
    c0, c1, c2, c3 = group, position, np.uint64(0), np.uint64(0)
    k0, k1 = low, high
    for _ in range(10):
        p0, p1 = (c0 & _MASK) * _M0, (c2 & _MASK) * _M1
        c0, c1 = (p1 >> _32) ^ c1 ^ k0, p1 & _MASK
        c2, c3 = (p0 >> _32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@_jit
def _row_words(low: Any, high: Any, position: Any, words: npt.NDArray[np.uint32]) -> None:
    """Fill a uint32 row, a multiple of four long, with the words of consecutive groups."""
    for group in range(len(words) // 4):
        a, b, c, d = _philox(np.uint64(group), position, low, high)
        words[4 * group] = a
        words[4 * group + 1] = b
        words[4 * group + 2] = c
        words[4 * group + 3] = d


@_jit
def _gumbel(word: Any) -> Any:
    """The noise of one word: float32 steps, then both logarithms in float64, rounded once."""
    v = np.float64(min((np.float32(word) + _HALF) * _SCALE, _V_MAX))
    return np.float32(-math.log(-math.log1p(-v)))


@_jit
def best_scores(
    logits: Floats,
    scale: np.float32,
    low: Elements,
    high: Elements,
    position: Elements,
    claimed: npt.NDArray[np.int64],
    best: Floats,
    token: npt.NDArray[np.int64],
    score: Floats,
) -> None:
    """logits: float32 [n, vocab]; scale: float32, the temperature; low, high, position: uint64 [n]; claimed: int64 [n],
    below 0 for none. Fills per row: best, the largest logit / T + noise (NaN where a logit is NaN); token, the first
    entry that has it; score, that of the claimed token.

    Most entries need no logarithm: -log1p(-v) >= v, so their noise is at most -log v, and where even that bound (from
    the binary exponent of v alone) leaves an entry below the best one so far, it cannot win.
    """
    n, vocab = logits.shape
    words = np.empty((vocab + 3) // 4 * 4, np.uint32)
    bounds = np.empty(vocab, np.float32)
    patterns = bounds.view(np.int32)
    for row in range(n):
        _row_words(low[row], high[row], position[row], words)
        scores = logits[row] / scale
        top, where, bad = np.float32(-np.inf), -1, False
        mine = claimed[row]
        if mine >= 0:
            score[row] = scores[mine] + _gumbel(words[mine])
            top, where = score[row], mine  # a first guess, and in honest rows the last
        for j in range(vocab):
            bounds[j] = (np.float32(words[j]) + _HALF) * _SCALE  # v
        for j in range(vocab):
            below = np.int32(127) - (patterns[j] >> np.int32(23))  # v >= 2^-below, so the noise is at most below · ln 2
            bounds[j] = scores[j] + np.float32(below) * _LN2
        for j in range(vocab):
            if bounds[j] < top:
                continue
            value = scores[j] + _gumbel(words[j])
            if value != value:
                bad = True
            elif value > top or (value == top and (where < 0 or j < where)):
                top, where = value, j
        best[row] = np.float32(np.nan) if bad else top
        token[row] = where
        if mine < 0:
            score[row] = best[row]
