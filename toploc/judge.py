"""From measured distances to a verdict on one completion. Pure: no model, no clock, no history."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from toploc.distance import ChunkDistance

Floats = npt.NDArray[np.float64]


class Check(StrEnum):
    """What a completion can fail. A caller maps these to its own reason codes."""

    MALFORMED_PROOF = "malformed_proof"
    TERMINATION = "termination"
    SAMPLING = "sampling"
    ACTIVATION = "activation"
    LOGPROB = "logprob"
    VERIFIER = "verifier"
    """The verifier could not measure (it crashed or ran out of memory): inconclusive, never a fail."""


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, eq=False)
class Measures:
    """Everything measured on one completion of n >= 1 sampled tokens.

    margins: float64 [n], nats, see `sampling.margins`; chunks: the distances of all its chunks, together n
    rows; logprob_gaps: float64 [n], nats, |engine - verifier| per token. Array-likes are copied; the copies
    are read-only. Non-finite numbers are kept: `judge` fails on them. Raises ValueError where lengths
    disagree.
    """

    margins: Floats
    chunks: tuple[ChunkDistance, ...]
    logprob_gaps: Floats

    def __post_init__(self) -> None:
        object.__setattr__(self, "margins", _column(self.margins))
        object.__setattr__(self, "logprob_gaps", _column(self.logprob_gaps))
        object.__setattr__(self, "chunks", tuple(self.chunks))
        rows = sum(chunk.rows for chunk in self.chunks)
        if not len(self.margins) == len(self.logprob_gaps) == rows >= 1:
            found = f"{len(self.margins)} margins, {len(self.logprob_gaps)} gaps, {rows} committed rows"
            raise ValueError(f"expected one of each per token, not {found}")

    @classmethod
    def of(
        cls, margins: Any, chunks: Sequence[ChunkDistance], engine_logprobs: Any, verifier_logprobs: Any
    ) -> "Measures":
        """From both sides' log-probs [n] (tensors, arrays or sequences); a gap is NaN where either is not
        finite."""
        engine, verifier = _column(engine_logprobs), _column(verifier_logprobs)
        if engine.shape != verifier.shape:
            raise ValueError(f"{len(engine)} engine log-probs, {len(verifier)} of the verifier")
        finite = np.isfinite(engine) & np.isfinite(verifier)
        gaps = np.abs(np.where(finite, engine, np.nan) - np.where(finite, verifier, np.nan))
        return cls(_column(margins), tuple(chunks), gaps)

    @property
    def tokens(self) -> int:
        """Sampled tokens, n."""
        return len(self.margins)

    @property
    def token_identical(self) -> bool:
        """Whether every token is the verifier's own choice: every margin is exactly 0."""
        return self.disagreements == 0

    @property
    def disagreements(self) -> int:
        """Tokens whose margin is not exactly 0, NaN included."""
        return int((~(self.margins == 0.0)).sum())

    @property
    def largest_margin(self) -> float:
        """Nats; NaN if any margin is."""
        return float(self.margins.max())

    @property
    def margin_sum(self) -> float:
        """Nats; NaN if any margin is."""
        return float(self.margins.sum())

    @property
    def logprob_gap(self) -> float:
        """The largest, nats; NaN if any gap is."""
        return float(self.logprob_gaps.max())

    @property
    def exponent_mismatches(self) -> float:
        """Of the worst chunk, as are the four below."""
        return self._worst("exponent_mismatches")

    @property
    def mantissa_mean(self) -> float:
        return self._worst("mantissa_mean")

    @property
    def mantissa_median(self) -> float:
        return self._worst("mantissa_median")

    @property
    def sign_mismatches(self) -> float:
        return self._worst("sign_mismatches")

    @property
    def relative_error(self) -> float:
        return self._worst("relative_error")

    def _worst(self, figure: str) -> float:
        return float(np.max([float(getattr(chunk, figure)) for chunk in self.chunks]))  # carries NaN through


@dataclass(frozen=True)
class Thresholds:
    """The largest value of each figure that passes; finite and >= 0, ValueError otherwise. `calibration`
    derives them.

    margin_max, logprob_gap: nats, on any token. disagreements, disagreement_share: a completion of n tokens
    may hold disagreements + disagreement_share · n tokens with a margin above 0. The others: on any chunk.
    """

    margin_max: float
    disagreements: float
    disagreement_share: float
    exponent_mismatches: float
    mantissa_mean: float
    mantissa_median: float
    sign_mismatches: float
    relative_error: float
    logprob_gap: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0.0 <= value < float("inf")):
                raise ValueError(f"{field.name} must be finite and >= 0, not {value!r}")


@dataclass(frozen=True)
class Verdict:
    """outcome; and where it is not a pass, the check, the figure of that check, its value and the limit."""

    outcome: Outcome
    check: Check | None = None
    figure: str | None = None
    value: float | None = None
    limit: float | None = None


ACTIVATION_FIGURES = (
    "exponent_mismatches",
    "mantissa_mean",
    "mantissa_median",
    "sign_mismatches",
    "relative_error",
)


def judge(measures: Measures, thresholds: Thresholds) -> Verdict:
    """The first figure over its limit, in the order sampling, activation, log-prob; else a pass.

    A figure that is NaN or infinite fails. Length is no ground: a completion of one token is judged like any
    other.
    """
    for check, figure, value, limit in _comparisons(measures, thresholds):
        if not value <= limit:  # so written that NaN fails
            return Verdict(Outcome.FAIL, check, figure, value, limit)
    return Verdict(Outcome.PASS)


def _comparisons(measures: Measures, thresholds: Thresholds) -> list[tuple[Check, str, float, float]]:
    allowed = thresholds.disagreements + thresholds.disagreement_share * measures.tokens
    activation = [
        (Check.ACTIVATION, figure, float(getattr(measures, figure)), float(getattr(thresholds, figure)))
        for figure in ACTIVATION_FIGURES
    ]
    return [
        (Check.SAMPLING, "largest_margin", measures.largest_margin, thresholds.margin_max),
        (Check.SAMPLING, "disagreements", float(measures.disagreements), allowed),
        *activation,
        (Check.LOGPROB, "logprob_gap", measures.logprob_gap, thresholds.logprob_gap),
    ]


def _column(values: Any) -> Floats:
    """A read-only float64 [n] copy of a tensor (any device), array or sequence."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    column = np.array(values, dtype=np.float64)
    if column.ndim != 1:
        raise ValueError(f"expected one number per token, not shape {column.shape}")
    column.flags.writeable = False
    return column
