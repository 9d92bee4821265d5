"""The decision table, row by row."""

import pytest

from coordinator.diagnosis import Verdict, diagnose

V = Verdict


@pytest.mark.parametrize(
    ("wait", "queue", "backpressure", "backlog", "verdict"),
    [
        # published runs: queue and wait as measured there
        (0.02 / 22.9, 476 / 512, 0.65, 0.0, V.TRAINER_BOUND),
        (0.04 / 5.9, 420 / 512, 0.20, 0.0, V.TRAINER_BOUND),
        (0.60 / 5.7, 71 / 512, 0.0, 0.0, V.GENERATION_BOUND),
        (0.03 / 4.8, 690 / 768, 0.5, 0.0, V.TRAINER_BOUND),
        # the rows of the table, and their edges
        (None, 0.9, 0.9, 0.9, V.STARTING),
        (0.5, 0.0, 0.0, 0.5, V.VERIFIER_BOUND),
        (0.5, 0.0, 0.0, 0.49, V.GENERATION_BOUND),
        (0.5, 0.1, 0.9, 0.8, V.VERIFIER_BOUND),  # a full pipeline holds nodes back too
        (0.5, 0.1, 0.5, 0.1, V.ALTERNATING),
        (0.5, 0.5, 0.49, 0.1, V.GENERATION_BOUND),
        (0.10, 0.1, 0.0, 0.0, V.BALANCED),
        (0.1001, 0.1, 0.0, 0.0, V.GENERATION_BOUND),
        (0.02, 0.8, 0.0, 0.0, V.TRAINER_BOUND),
        (0.021, 0.8, 0.3, 0.0, V.BALANCED),
        (0.0, 0.5, 0.051, 0.0, V.TRAINER_BOUND),
        (0.0, 0.5, 0.05, 0.0, V.BALANCED),
        (0.0, 0.2, 0.9, 0.0, V.BALANCED),
        (0.05, 0.5, 0.0, 0.9, V.BALANCED),  # nobody waits for the verifier
    ],
)
def test_golden_rows(wait: float | None, queue: float, backpressure: float, backlog: float, verdict: Verdict) -> None:
    assert diagnose(wait, queue, backpressure, backlog).verdict is verdict


def test_every_verdict_has_its_own_advice() -> None:
    rows = [(None, 0, 0, 0), (1, 0, 0, 1), (1, 0, 1, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0.5, 0, 0)]
    found = [diagnose(*row) for row in rows]
    assert {diagnosis.verdict for diagnosis in found} == set(Verdict)
    assert len({diagnosis.advice for diagnosis in found}) == len(Verdict)
    assert all(diagnosis.advice.endswith(".") for diagnosis in found)
