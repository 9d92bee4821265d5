import dataclasses
import math

import numpy as np
import pytest
import torch

from toploc import Check, ChunkDistance, Measures, Outcome, Thresholds, Verdict, judge
from toploc.distance import NOTHING_MATCHES

NAN, INF = float("nan"), float("inf")
LIMITS = Thresholds(
    margin_max=1e-4,
    disagreements=1.0,
    disagreement_share=0.1,
    exponent_mismatches=3.0,
    mantissa_mean=1.0,
    mantissa_median=1.0,
    sign_mismatches=3.0,
    relative_error=5e-4,
    logprob_gap=1e-4,
)
GOOD_CHUNK = ChunkDistance(3, 128, 0, 0.0, 0.0, 0, 0.0)


def measures(
    margins: tuple[float, ...] = (0.0, 0.0, 0.0),
    gaps: tuple[float, ...] = (0.0, 0.0, 0.0),
    **figures: float,
) -> Measures:
    chunk = dataclasses.replace(GOOD_CHUNK, rows=len(margins), **figures)  # type: ignore[arg-type]
    return Measures(np.array(margins), (chunk,), np.array(gaps))


def test_an_exact_completion_passes() -> None:
    assert judge(measures(), LIMITS) == Verdict(Outcome.PASS)
    assert measures().token_identical


def test_values_at_the_limits_pass() -> None:
    at = measures(
        (1e-4, 0.0, 0.0),
        (1e-4, 0.0, 0.0),
        exponent_mismatches=3,
        mantissa_mean=1.0,
        mantissa_median=1.0,
        sign_mismatches=3,
        relative_error=5e-4,
    )
    assert judge(at, LIMITS).outcome is Outcome.PASS
    assert not at.token_identical


FAULTS = [
    (measures((0.0, 2e-4, 0.0)), Check.SAMPLING, "largest_margin", 2e-4, 1e-4),
    (measures((1e-5, 1e-5, 0.0)), Check.SAMPLING, "disagreements", 2.0, 1.3),
    (measures(exponent_mismatches=4), Check.ACTIVATION, "exponent_mismatches", 4.0, 3.0),
    (measures(mantissa_mean=1.1), Check.ACTIVATION, "mantissa_mean", 1.1, 1.0),
    (measures(mantissa_mean=NOTHING_MATCHES), Check.ACTIVATION, "mantissa_mean", NOTHING_MATCHES, 1.0),
    (measures(mantissa_median=2.0), Check.ACTIVATION, "mantissa_median", 2.0, 1.0),
    (measures(sign_mismatches=4), Check.ACTIVATION, "sign_mismatches", 4.0, 3.0),
    (measures(relative_error=6e-4), Check.ACTIVATION, "relative_error", 6e-4, 5e-4),
    (measures(gaps=(0.0, 0.0, 2e-4)), Check.LOGPROB, "logprob_gap", 2e-4, 1e-4),
]


@pytest.mark.parametrize(("found", "check", "figure", "value", "limit"), FAULTS)
def test_each_figure_fails_its_check(
    found: Measures, check: Check, figure: str, value: float, limit: float
) -> None:
    verdict = judge(found, LIMITS)
    assert (verdict.outcome, verdict.check, verdict.figure) == (Outcome.FAIL, check, figure)
    assert (verdict.value, verdict.limit) == (pytest.approx(value), pytest.approx(limit))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_numbers_that_are_not_finite_fail_their_check(bad: float, place: int) -> None:
    column = tuple(bad if i == place else 0.0 for i in range(3))
    assert judge(measures(margins=column), LIMITS).check is Check.SAMPLING
    assert judge(measures(gaps=column), LIMITS).check is Check.LOGPROB
    for figure in ("mantissa_mean", "mantissa_median", "relative_error"):
        verdict = judge(measures(**{figure: bad}), LIMITS)
        assert (verdict.outcome, verdict.check, verdict.figure) == (Outcome.FAIL, Check.ACTIVATION, figure)


def test_nan_in_one_of_many_chunks_is_not_lost() -> None:
    for order in ((0.0, NAN, 0.0), (NAN, 0.0, 0.0), (0.0, 0.0, NAN)):
        chunks = tuple(dataclasses.replace(GOOD_CHUNK, rows=1, relative_error=e) for e in order)
        verdict = judge(Measures(np.zeros(3), chunks, np.zeros(3)), LIMITS)
        assert verdict.figure == "relative_error" and verdict.value is not None and math.isnan(verdict.value)


def test_the_worst_chunk_decides() -> None:
    chunks = (GOOD_CHUNK, dataclasses.replace(GOOD_CHUNK, exponent_mismatches=9), GOOD_CHUNK)
    assert judge(Measures(np.zeros(9), chunks, np.zeros(9)), LIMITS).value == 9.0


def test_checks_come_in_order() -> None:
    everything = measures((1.0, 0.0, 0.0), (1.0, 0.0, 0.0), exponent_mismatches=100)
    assert judge(everything, LIMITS).check is Check.SAMPLING
    assert judge(measures(gaps=(1.0, 0.0, 0.0), exponent_mismatches=100), LIMITS).check is Check.ACTIVATION


def test_length_is_no_ground() -> None:
    assert judge(measures((0.0,), (0.0,)), LIMITS).outcome is Outcome.PASS
    assert judge(measures((1e-5,), (0.0,)), LIMITS).outcome is Outcome.PASS


def test_gaps_of_both_sides_log_probs() -> None:
    engine = torch.tensor([-1.0, -2.0, -3.0])
    found = Measures.of(torch.zeros(3), [GOOD_CHUNK], engine, [-1.0, -2.5, -3.0])
    assert found.logprob_gaps.tolist() == [0.0, 0.5, 0.0] and found.logprob_gap == 0.5
    for bad in (NAN, INF, -INF):
        found = Measures.of([0.0] * 3, [GOOD_CHUNK], [bad, -2.0, -3.0], [bad, -2.0, -3.0])
        assert judge(found, LIMITS).check is Check.LOGPROB
    with pytest.raises(ValueError, match="log-probs"):
        Measures.of([0.0] * 3, [GOOD_CHUNK], [0.0], [0.0] * 3)


def test_derived_figures() -> None:
    found = measures((0.0, 0.25, 0.5))
    assert (found.tokens, found.disagreements, found.largest_margin, found.margin_sum) == (3, 2, 0.5, 0.75)
    assert measures((NAN, 0.0, 0.0)).disagreements == 1 and not measures((NAN, 0.0, 0.0)).token_identical


def test_measures_are_copies_that_cannot_be_written() -> None:
    source = np.zeros(3)
    found = Measures(source, (GOOD_CHUNK,), np.zeros(3))
    source[0] = 9.0
    assert found.token_identical
    with pytest.raises(ValueError, match="read-only"):
        found.margins[0] = 1.0


@pytest.mark.parametrize(
    ("margins", "chunks", "gaps"),
    [
        (np.zeros(3), (), np.zeros(3)),
        (np.zeros(2), (GOOD_CHUNK,), np.zeros(3)),
        (np.zeros(3), (GOOD_CHUNK,), np.zeros(2)),
        (np.zeros(6), (GOOD_CHUNK,), np.zeros(6)),
        (np.zeros(0), (), np.zeros(0)),
        (np.zeros((1, 3)), (GOOD_CHUNK,), np.zeros(3)),
    ],
)
def test_one_of_each_per_token(
    margins: np.ndarray, chunks: tuple[ChunkDistance, ...], gaps: np.ndarray
) -> None:
    with pytest.raises(ValueError):
        Measures(margins, chunks, gaps)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Thresholds)])
def test_thresholds_are_finite_numbers(field: str) -> None:
    for bad in (NAN, INF, -1.0, True, "1", None):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(LIMITS, **{field: bad})
