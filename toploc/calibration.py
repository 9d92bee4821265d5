"""Thresholds from measurements: honest rollouts and cheap forgeries in, limits and their error bound out.

A calibration holds for one model, dtype, engine and device family. Its thresholds follow from its own figures
by `derive_thresholds`; constructing or loading one whose thresholds do not follow, or admit a cheap forgery,
raises.

What a limit allows, beyond the honest maximum:
- margin_max: a margin cannot exceed twice the largest deviation of logits / T between the two sides. Twice
  that, times `Headroom.sampling` (10: logits and so deviations grow while a policy sharpens), at least
  FLOAT32_FLOOR.
- logprob_gap: the honest maximum times `Headroom.sampling`, at least FLOAT32_FLOOR.
- disagreements: the 95 % upper bound of the honest rate times `Headroom.disagreement` per token, and
  MIN_COUNT more.
- exponent_mismatches, sign_mismatches: the largest of the honest maximum times `Headroom.activation` (1.5,
  the margin that TOPLOC's authors left), MIN_COUNT, and the count that a Poisson variable at the 95 % upper
  bound of the honest rate exceeds once in a million chunks: a near-tie at the rank boundary swaps one entry,
  which then counts.
- mantissa_mean: the honest maximum times `Headroom.activation`, at least one swapped entry whose exponent
  agrees by chance (up to 127 units) and MIN_UNITS rounding flips of one unit, spread over top_k entries:
  about 1.05.
- mantissa_median: the honest maximum times `Headroom.activation`, at least 1.
- relative_error: the honest maximum times `Headroom.activation`, at least ERROR_FLOOR.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from toploc.distance import ChunkDistance
from toploc.field import P
from toploc.judge import ACTIVATION_FIGURES, Measures, Thresholds

FLOAT32_FLOOR = 2.0**-14
"""Nats: eight units in the last place of a float32 score in [64, 128); rounding alone can cost this."""

ERROR_FLOOR = 2.0**-11
"""Relative error of one chunk: an eighth of the entries off by one bfloat16 unit, in the mean 2^-8 of the
value."""

MIN_COUNT = 3
MIN_UNITS = 8
FALSE_ALARM = 1e-6
CEILING = 1.0
"""Nats: a margin or log-prob limit from here on leaves the token all but free; such a calibration is not
admitted."""

ROLLOUT_SCORES = ("logit_deviation", "largest_margin", "disagreements", "logprob_gap")
SCORES = ROLLOUT_SCORES + ACTIVATION_FIGURES
LEVELS = (0.5, 0.9, 0.99, 0.999)


class NotAdmitted(ValueError):
    """Thresholds that would let a cheap forgery pass."""


@dataclass(frozen=True)
class Setting:
    """What a calibration holds for. model_digest: of the weights; dtype, engine, device_family: free names; the
    sampling temperature, by which deviations of the logits are divided; and the proof's shape."""

    model_digest: str
    dtype: str
    engine: str
    device_family: str
    chunk_rows: int = 32
    top_k: int = 128
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not _is_float(self.temperature) or self.temperature == 0:
            raise ValueError("temperature must be a finite float > 0")
        for name in ("model_digest", "dtype", "engine", "device_family"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} must be a non-empty string")
        _positive_ints(self, ("chunk_rows", "top_k"))
        if self.top_k > P:
            raise ValueError(f"top_k must not exceed {P}, the order of the field")


@dataclass(frozen=True)
class Headroom:
    """Factors over the honest maxima, each finite and >= 1; the module says what each multiplies."""

    sampling: float = 10.0
    disagreement: float = 3.0
    activation: float = 1.5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, float) or not (math.isfinite(value) and value >= 1.0):
                raise ValueError(f"headroom {field.name} must be a finite float >= 1, not {value!r}")


@dataclass(frozen=True)
class Counts:
    """How much was measured."""

    rollouts: int
    tokens: int
    chunks: int

    def __post_init__(self) -> None:
        _positive_ints(self, ("rollouts", "tokens", "chunks"))
        if self.tokens < self.rollouts or self.chunks < self.rollouts:
            raise ValueError("a rollout has at least one token and one chunk")

    @property
    def false_positives_per_rollout(self) -> float:
        """95 % upper bound of the honest failure rate: no failure in n tries bounds it by 3/n (rule of
        three)."""
        return min(1.0, 3.0 / self.rollouts)

    @property
    def false_positives_per_chunk(self) -> float:
        return min(1.0, 3.0 / self.chunks)


@dataclass(frozen=True)
class Distribution:
    """Of one score: extremes, mean, and the observed values at or just above the quantiles LEVELS."""

    count: int
    minimum: float
    mean: float
    quantiles: tuple[float, ...]
    maximum: float

    def __post_init__(self) -> None:
        _positive_ints(self, ("count",))
        ordered = (self.minimum, *self.quantiles, self.maximum)
        if len(self.quantiles) != len(LEVELS) or not all(_is_float(v) for v in (*ordered, self.mean)):
            raise ValueError(f"a distribution needs {len(LEVELS)} quantiles, and finite floats >= 0")
        slack = 1e-9 * self.maximum  # of the mean's rounding
        if list(ordered) != sorted(ordered) or not self.minimum - slack <= self.mean <= self.maximum + slack:
            raise ValueError("quantiles out of order")

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        """Raises ValueError for no values, or values not finite and >= 0."""
        data = np.asarray(values, dtype=np.float64)
        if data.size == 0 or not bool((np.isfinite(data) & (data >= 0)).all()):
            raise ValueError("a distribution needs finite values >= 0")
        levels = np.quantile(data, LEVELS, method="higher")
        return cls(
            len(data), float(data.min()), float(data.mean()), tuple(levels.tolist()), float(data.max())
        )


@dataclass(frozen=True)
class Sample:
    """One honest rollout: its measures, the largest |engine - verifier| over all logits / T (nats), and the
    distances of forged proofs on its chunks, by the forgery's name (`forgery.cheap_forgeries`)."""

    measures: Measures
    logit_deviation: float
    forged: Mapping[str, Sequence[ChunkDistance]]


@dataclass(frozen=True)
class Calibration:
    """honest: SCORES -> distribution, the first four per rollout, the others per chunk. forgeries: name ->
    activation figure -> distribution over the same chunks. Raises NotAdmitted or ValueError as the module
    says."""

    setting: Setting
    headroom: Headroom
    counts: Counts
    honest: Mapping[str, Distribution]
    forgeries: Mapping[str, Mapping[str, Distribution]]
    thresholds: Thresholds

    def __post_init__(self) -> None:
        if set(self.honest) != set(SCORES):
            raise ValueError(f"honest scores must be {SCORES}")
        if not self.forgeries or any(set(f) != set(ACTIVATION_FIGURES) for f in self.forgeries.values()):
            raise ValueError(f"at least one forgery with {ACTIVATION_FIGURES} is needed")
        for score in SCORES:
            expected = self.counts.rollouts if score in ROLLOUT_SCORES else self.counts.chunks
            if self.honest[score].count != expected:
                raise ValueError(f"{score} was measured {self.honest[score].count} times, not {expected}")
        most = dict.fromkeys(("exponent_mismatches", "sign_mismatches"), self.setting.top_k)
        for score, limit in {**most, "disagreements": self.counts.tokens}.items():
            if self.honest[score].maximum > limit:
                raise ValueError(f"{score} cannot exceed {limit}")
        derived = derive_thresholds(self.setting, self.headroom, self.counts, self.honest)
        for field in fields(Thresholds):
            ours, theirs = getattr(derived, field.name), getattr(self.thresholds, field.name)
            if not math.isclose(ours, theirs, rel_tol=1e-9):
                raise ValueError(f"threshold {field.name} is {theirs}, but the measurements give {ours}")
        _admit(self.thresholds, self.forgeries)

    def to_json(self) -> str:
        """Canonical text: sorted keys, finite numbers; `from_json` gives an equal calibration."""
        from toploc.calibration_json import dumps

        return dumps(self)

    @staticmethod
    def from_json(text: str | bytes) -> "Calibration":
        """Strict: exactly the known keys, exact types, no duplicates. Raises ValueError, also for what is not
        admitted."""
        from toploc.calibration_json import loads

        return loads(text)


def derive(samples: Sequence[Sample], *, setting: Setting, headroom: Headroom | None = None) -> Calibration:
    """A calibration from honest rollouts, every one with the same forgeries scored on its chunks.

    Raises ValueError for no samples or figures that are not finite, NotAdmitted where a limit would not stay
    below the best score of a cheap forgery.
    """
    if not samples:
        raise ValueError("no samples")
    measures = [sample.measures for sample in samples]
    chunks = [chunk for m in measures for chunk in m.chunks]
    rollout_values: dict[str, list[float]] = {
        "logit_deviation": [float(sample.logit_deviation) for sample in samples],
        **{score: [float(getattr(m, score)) for m in measures] for score in ROLLOUT_SCORES[1:]},
    }
    honest = {score: Distribution.of(values) for score, values in rollout_values.items()} | _figures(chunks)
    counts = Counts(len(samples), sum(m.tokens for m in measures), len(chunks))
    chosen = headroom if headroom is not None else Headroom()
    thresholds = derive_thresholds(setting, chosen, counts, honest)
    return Calibration(setting, chosen, counts, honest, _forgeries(samples), thresholds)


def derive_thresholds(
    setting: Setting, headroom: Headroom, counts: Counts, honest: Mapping[str, Distribution]
) -> Thresholds:
    """The limits that follow from the honest distributions; the module says how."""
    top = {score: honest[score].maximum for score in SCORES}
    deviation = max(2.0 * top["logit_deviation"], top["largest_margin"])
    disagreeing = round(honest["disagreements"].mean * counts.rollouts)
    share = headroom.disagreement * poisson_upper_bound(disagreeing) / counts.tokens
    chance = (127.0 + MIN_UNITS) / setting.top_k
    return Thresholds(
        margin_max=max(headroom.sampling * deviation, FLOAT32_FLOOR),
        disagreements=float(MIN_COUNT),
        disagreement_share=min(share, 1.0),
        exponent_mismatches=_count_limit(honest["exponent_mismatches"], headroom.activation),
        mantissa_mean=max(headroom.activation * top["mantissa_mean"], chance),
        mantissa_median=max(headroom.activation * top["mantissa_median"], 1.0),
        sign_mismatches=_count_limit(honest["sign_mismatches"], headroom.activation),
        relative_error=max(headroom.activation * top["relative_error"], ERROR_FLOOR),
        logprob_gap=max(headroom.sampling * top["logprob_gap"], FLOAT32_FLOOR),
    )


def poisson_upper_bound(events: int) -> float:
    """95 % upper confidence bound of a Poisson mean after `events` events: 3 after none (rule of three), else
    the Wilson-Hilferty approximation of the chi-square quantile, within 1 %.
    """
    n = events + 1.0
    return max(3.0, n * (1.0 - 1.0 / (9.0 * n) + 1.6449 / (3.0 * math.sqrt(n))) ** 3)


def _poisson_tail(mean: float, count: int) -> float:
    """P(X > count), summed from the small end so that tiny tails keep their digits."""
    if mean <= 0.0:
        return 0.0
    terms = range(count + 1, count + 1 + int(20.0 * math.sqrt(mean) + mean + 100.0))
    return min(1.0, math.fsum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1.0)) for i in terms))


def _count_limit(honest: Distribution, headroom: float) -> float:
    events = round(honest.mean * honest.count)
    rate = poisson_upper_bound(events) / honest.count
    rare = math.floor(rate)
    while _poisson_tail(rate, rare) > FALSE_ALARM:
        rare += 1
    return float(max(math.ceil(headroom * honest.maximum), rare, MIN_COUNT))


def _admit(thresholds: Thresholds, forgeries: Mapping[str, Mapping[str, Distribution]]) -> None:
    """relative_error has no blind spot that a forgery could sit in, so it alone must refuse every forged
    chunk."""
    for name in ("margin_max", "logprob_gap"):
        if not getattr(thresholds, name) < CEILING:
            raise NotAdmitted(f"{name} {getattr(thresholds, name)} is not below {CEILING} nat")
    for name, figures in forgeries.items():
        best = figures["relative_error"].minimum
        if not thresholds.relative_error < best:
            raise NotAdmitted(
                f"relative error {thresholds.relative_error} admits the forgery {name} at {best}"
            )


def _figures(chunks: Sequence[ChunkDistance]) -> dict[str, Distribution]:
    return {name: Distribution.of([float(getattr(c, name)) for c in chunks]) for name in ACTIVATION_FIGURES}


def _forgeries(samples: Sequence[Sample]) -> dict[str, dict[str, Distribution]]:
    names = sorted(samples[0].forged)
    for sample in samples:
        shape = [(c.rows, c.points) for c in sample.measures.chunks]
        if sorted(sample.forged) != names or any(
            [(c.rows, c.points) for c in chunks] != shape for chunks in sample.forged.values()
        ):
            raise ValueError("every sample needs the same forgeries, scored on its own chunks")
    return {name: _figures([chunk for s in samples for chunk in s.forged[name]]) for name in names}


def _is_float(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0.0


def _positive_ints(owner: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**53:
            raise ValueError(f"{name} must be a positive int below 2^53")
