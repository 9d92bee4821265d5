import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from toploc import (
    Calibration,
    Check,
    Headroom,
    Measures,
    NotAdmitted,
    Outcome,
    Sample,
    Setting,
    Thresholds,
    cheap_forgeries,
    commit_many,
    derive,
    distances_many,
    judge,
    logprobs,
    margins,
    sample,
)
from toploc.calibration import (
    CEILING,
    ERROR_FLOOR,
    FLOAT32_FLOOR,
    SCORES,
    Distribution,
    _poisson_tail,
    poisson_upper_bound,
)

SETTING = Setting("sha256:00", "float32", "engine-1", "cpu")
VOCAB, SIZE = 96, 128


class Toy:
    """Stands for a model: a table of heavy-tailed hidden states, and a projection to logits."""

    def __init__(self, rollouts: int = 24) -> None:
        generator = torch.Generator().manual_seed(11)
        gain = torch.randn(SIZE, generator=generator).exp()
        self.lengths = [1 + i % 10 for i in range(rollouts - 1)] + [70]
        self.hidden = [torch.randn(n, SIZE, generator=generator) * gain for n in self.lengths]
        self.head = torch.randn(SIZE, VOCAB, generator=generator) * 0.05

    def drifted(self, relative: float, seed: int) -> list[torch.Tensor]:
        """The same states as other weights, or another order of summation, would give them."""
        generator = torch.Generator().manual_seed(seed)
        return [h * (1 + relative * torch.randn(h.shape, generator=generator)) for h in self.hidden]

    def run(self, hidden: list[torch.Tensor]) -> list[Sample]:
        """An engine with these states, measured by a verifier with the toy's own."""
        scores = distances_many(commit_many(hidden), self.hidden)
        forged = cheap_forgeries(self.hidden)
        samples = []
        for i, (theirs, ours) in enumerate(zip(hidden, self.hidden, strict=True)):
            engine, verifier = theirs @ self.head, ours @ self.head
            keys = ([1000 + i] * len(ours), list(range(len(ours))))
            tokens = sample(engine, *keys, 1.0)
            measures = Measures.of(
                margins(verifier, tokens, *keys, 1.0),
                scores[i],
                logprobs(engine, tokens, 1.0),
                logprobs(verifier, tokens, 1.0),
            )
            deviation = float((engine - verifier).abs().max())
            samples.append(Sample(measures, deviation, {name: f[i] for name, f in forged.items()}))
        return samples


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="module")
def honest(toy: Toy) -> list[Sample]:
    return toy.run(toy.drifted(1e-6, seed=1))


@pytest.fixture(scope="module")
def calibration(honest: list[Sample]) -> Calibration:
    return derive(honest, setting=SETTING)


def test_honest_rollouts_pass_their_own_and_fresh(
    toy: Toy, honest: list[Sample], calibration: Calibration
) -> None:
    fresh = toy.run(toy.drifted(1e-6, seed=2))
    for one in honest + fresh:
        assert judge(one.measures, calibration.thresholds).outcome is Outcome.PASS


def test_limits_in_float32(calibration: Calibration) -> None:
    limits = calibration.thresholds
    assert FLOAT32_FLOOR <= limits.margin_max < 1e-3 and FLOAT32_FLOOR <= limits.logprob_gap < 1e-3
    assert limits.margin_max >= 20 * calibration.honest["logit_deviation"].maximum
    assert 3 <= limits.exponent_mismatches <= 8 and 3 <= limits.sign_mismatches <= 8
    assert limits.mantissa_mean < 2 and limits.relative_error == ERROR_FLOOR


@pytest.mark.parametrize(("relative", "caught"), [(0.03, 1.0), (0.005, 0.9), (0.002, 0.5)])
def test_drifted_weights_fail(toy: Toy, calibration: Calibration, relative: float, caught: float) -> None:
    """States a few per cent off are what weights a few versions old give; ten times less is still seen."""
    drifted = toy.run(toy.drifted(relative, seed=3))
    activation_only = [
        Measures([0.0] * s.measures.tokens, s.measures.chunks, [0.0] * s.measures.tokens) for s in drifted
    ]
    verdicts = [judge(m, calibration.thresholds) for m in activation_only]
    failing = [v for v in verdicts if v.outcome is Outcome.FAIL]
    assert len(failing) >= caught * len(verdicts)
    assert {v.check for v in failing} == {Check.ACTIVATION}


def test_forgeries_negations_and_scalings_fail(
    toy: Toy, honest: list[Sample], calibration: Calibration
) -> None:
    proofs = [commit_many([factor * h for h in toy.hidden]) for factor in (-1.0, 0.99, 1.01, 0.0)]
    chunks = [distances_many(p, toy.hidden) for p in proofs]
    chunks += [[list(s.forged[name]) for s in honest] for name in ("constant", "dimension_mean")]
    for per_rollout in chunks:
        for one in per_rollout:
            zeros = [0.0] * sum(c.rows for c in one)
            verdict = judge(Measures(zeros, tuple(one), zeros), calibration.thresholds)
            assert verdict.check is Check.ACTIVATION


def test_other_tokens_fail(toy: Toy, calibration: Calibration) -> None:
    keys = ([5] * 70, list(range(70)))
    logits = toy.hidden[-1] @ toy.head
    tokens = sample(logits, *keys, 0.7)  # another temperature
    chunks = distances_many(commit_many(toy.hidden[-1:]), toy.hidden[-1:])[0]
    same = logprobs(logits, tokens, 1.0)
    found = Measures.of(margins(logits, tokens, *keys, 1.0), chunks, same, same)
    assert judge(found, calibration.thresholds).check is Check.SAMPLING


def test_what_a_calibration_says(honest: list[Sample], calibration: Calibration) -> None:
    counts = calibration.counts
    assert counts.rollouts == len(honest) == 24 and counts.tokens == sum(s.measures.tokens for s in honest)
    assert counts.chunks == 26
    assert counts.false_positives_per_rollout == 3 / 24 and counts.false_positives_per_chunk == 3 / 26
    assert set(calibration.honest) == set(SCORES) and set(calibration.forgeries) == {
        "constant",
        "dimension_mean",
    }
    assert calibration.honest["largest_margin"].maximum == max(s.measures.largest_margin for s in honest)
    assert calibration.honest["relative_error"].count == 26


def test_json_round_trip(calibration: Calibration) -> None:
    text = calibration.to_json()
    assert Calibration.from_json(text) == calibration == Calibration.from_json(text.encode())
    assert Calibration.from_json(text).to_json() == text
    assert json.loads(text)["false_positives"]["rollout"] == 3 / 24


def _set(*path: str) -> Callable[[dict[str, Any], Any], None]:
    def edit(document: dict[str, Any], value: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "toploc-calibration/2"),
        (("extra",), 1),
        (("setting", "extra"), 1),
        (("setting", "dtype"), 7),
        (("setting", "dtype"), ""),
        (("setting", "top_k"), 0),
        (("setting", "top_k"), 2**40),
        (("setting", "chunk_rows"), 1.5),
        (("setting",), []),
        (("headroom", "sampling"), 0.5),
        (("headroom", "sampling"), 20.0),
        (("headroom", "sampling"), "10"),
        (("counts", "rollouts"), 25),
        (("counts", "rollouts"), True),
        (("counts", "tokens"), 10**400),
        (("counts", "tokens"), 1),
        (("honest", "relative_error"), None),
        (("honest", "surprise"), None),
        (("honest", "relative_error", "maximum"), 0.5),
        (("honest", "relative_error", "maximum"), float("nan")),
        (("honest", "relative_error", "minimum"), 9.0),
        (("honest", "relative_error", "quantiles"), [0.0]),
        (("honest", "relative_error", "quantiles"), "0000"),
        (("honest", "relative_error", "quantiles"), ["a", "b", "c", "d"]),
        (("honest", "exponent_mismatches", "maximum"), 1e300),
        (("honest", "disagreements", "maximum"), 1e300),
        (("forgeries",), {}),
        (("forgeries", "constant"), {}),
        (("forgeries", "constant", "relative_error", "minimum"), 0.0),
        (("thresholds", "margin_max"), 0.5),
        (("thresholds", "relative_error"), 1e-3),
        (("thresholds", "exponent_mismatches"), float("inf")),
        (("false_positives",), {"rollout": 0.0, "chunk": 0.0}),
    ],
)
def test_an_edited_calibration_is_refused(
    calibration: Calibration, path: tuple[str, ...], value: object
) -> None:
    document = json.loads(calibration.to_json())
    _set(*path)(document, value)
    with pytest.raises(ValueError):
        Calibration.from_json(json.dumps(document))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "{", '{"a": 1, "a": 1}', b"\xff", "[" * 10**5, None, "x" * 2**21]
)
def test_what_is_no_calibration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Calibration.from_json(text)


def test_missing_keys_are_refused(calibration: Calibration) -> None:
    for key in json.loads(calibration.to_json()):
        document = json.loads(calibration.to_json())
        del document[key]
        with pytest.raises(ValueError, match="keys"):
            Calibration.from_json(json.dumps(document))


def test_thresholds_typed_by_hand_are_refused(calibration: Calibration) -> None:
    for field in dataclasses.fields(Thresholds):
        value = getattr(calibration.thresholds, field.name)
        by_hand = dataclasses.replace(calibration.thresholds, **{field.name: value * 1.1})
        with pytest.raises(ValueError, match=field.name):
            dataclasses.replace(calibration, thresholds=by_hand)


def test_limits_that_admit_a_forgery_are_refused(toy: Toy, honest: list[Sample]) -> None:
    lucky = [dataclasses.replace(s, forged={"lucky": s.measures.chunks}) for s in honest]
    with pytest.raises(NotAdmitted, match="lucky"):
        derive(lucky, setting=SETTING)
    far = toy.run(toy.drifted(0.05, seed=4))
    zeros = [[0.0] * s.measures.tokens for s in far]
    silent = [Measures(z, s.measures.chunks, z) for s, z in zip(far, zeros, strict=True)]
    noisy = [dataclasses.replace(h, measures=m) for h, m in zip(honest, silent, strict=True)]
    assert derive(noisy, setting=SETTING).thresholds.relative_error > ERROR_FLOOR
    with pytest.raises(NotAdmitted, match="relative error"):
        derive(noisy, setting=SETTING, headroom=Headroom(activation=100.0))


def test_limits_that_leave_the_token_free_are_refused(honest: list[Sample]) -> None:
    loose = [dataclasses.replace(s, logit_deviation=CEILING) for s in honest]
    with pytest.raises(NotAdmitted, match="margin_max"):
        derive(loose, setting=SETTING)


def test_identical_engines_still_leave_room_for_rounding(toy: Toy) -> None:
    limits = derive(toy.run(toy.hidden), setting=SETTING).thresholds
    assert limits.margin_max == limits.logprob_gap == FLOAT32_FLOOR
    assert limits.exponent_mismatches >= 3 and limits.relative_error > 0


@pytest.mark.parametrize("deviation", [math.nan, math.inf, -1.0])
def test_figures_that_are_not_finite_are_refused(honest: list[Sample], deviation: float) -> None:
    with pytest.raises(ValueError):
        derive([dataclasses.replace(honest[0], logit_deviation=deviation), *honest[1:]], setting=SETTING)


def test_samples_must_agree(honest: list[Sample]) -> None:
    with pytest.raises(ValueError, match="no samples"):
        derive([], setting=SETTING)
    for forged in ({}, {"constant": honest[0].forged["constant"]}, honest[1].forged):
        with pytest.raises(ValueError, match="forger"):
            derive([dataclasses.replace(honest[0], forged=forged), *honest[1:]], setting=SETTING)


@pytest.mark.parametrize(
    ("events", "exact"), [(0, 2.996), (1, 4.744), (3, 7.754), (10, 16.962), (100, 118.079)]
)
def test_poisson_bound_against_tables(events: int, exact: float) -> None:
    assert poisson_upper_bound(events) == pytest.approx(exact, rel=0.01)


def test_poisson_tail() -> None:
    assert _poisson_tail(2.0, 1) == pytest.approx(1 - 3 * math.exp(-2))
    assert _poisson_tail(0.01, 2) == pytest.approx(0.01**3 / 6, rel=0.01)
    assert _poisson_tail(100.0, 0) == pytest.approx(1.0) and _poisson_tail(0.0, 0) == 0.0


def test_rare_mismatches_set_the_floor(honest: list[Sample], calibration: Calibration) -> None:
    """Many chunks without a mismatch leave 3 allowed; few chunks say less, and leave more."""
    few = derive(honest[:2] + honest[-1:], setting=SETTING)
    assert few.counts.chunks == 5
    assert few.thresholds.exponent_mismatches > calibration.thresholds.exponent_mismatches >= 3


def test_distribution() -> None:
    found = Distribution.of([float(i) for i in range(1, 101)])
    assert (found.count, found.minimum, found.mean, found.maximum) == (100, 1.0, 50.5, 100.0)
    assert found.quantiles == (51.0, 91.0, 100.0, 100.0)
    for bad in ([], [math.nan], [-1.0]):
        with pytest.raises(ValueError):
            Distribution.of(bad)
