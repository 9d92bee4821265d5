"""Where a run loses its time, in words: a decision table over four shares, the first row that matches wins.

A cycle of generating, verifying and training is as fast as its slowest part; the others wait for it, and who waits
tells which one that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WAIT_LOW, WAIT_HIGH = 0.02, 0.10
QUEUE_LOW, QUEUE_HIGH = 0.2, 0.8
BACKPRESSURE_LOW, BACKPRESSURE_HIGH = 0.05, 0.5
BACKLOG_HIGH = 0.5


class Verdict(StrEnum):
    """What limits the run."""

    STARTING = "starting"
    TRAINER_BOUND = "trainer-bound"
    GENERATION_BOUND = "generation-bound"
    VERIFIER_BOUND = "verifier-bound"
    ALTERNATING = "alternating"
    BALANCED = "balanced"


@dataclass(frozen=True)
class Diagnosis:
    """A verdict and a sentence on what to do about it."""

    verdict: Verdict
    advice: str


_ADVICE = {
    Verdict.STARTING: "Too few steps to tell; wait for a few more.",
    Verdict.VERIFIER_BOUND: (
        "The trainer waits, and most of the untrained work waits for a verdict: start another verifier, give it a "
        "faster device, or raise its batch size."
    ),
    Verdict.ALTERNATING: (
        "Trainer and nodes take turns in waiting for each other: raise max_staleness so that they overlap, or lower "
        "max_tokens so that no group hangs on one long answer."
    ),
    Verdict.GENERATION_BOUND: (
        "The trainer waits for rollouts: add nodes, or let each node hold more slots at a time."
    ),
    Verdict.TRAINER_BOUND: (
        "Finished rollouts queue up for the trainer: raise token_budget, give it a faster device, or let some nodes go."
    ),
    Verdict.BALANCED: "Generation, verification and training keep pace; a small surplus of rollouts is right.",
}


def diagnose(
    wait_share: float | None, queue_fill: float, backpressure_share: float, verifier_backlog_share: float
) -> Diagnosis:
    """What limits a run, all shares in [0, 1].

    `wait_share`: of the trainer's time spent waiting for a batch (None: too few steps); `queue_fill`: of the queue of
    finished rollouts; `backpressure_share`: of the nodes' time in which they were refused work because the queue was
    full; `verifier_backlog_share`: of all untrained rollouts that wait for a verdict.
    """
    verdict = _verdict(wait_share, queue_fill, backpressure_share, verifier_backlog_share)
    return Diagnosis(verdict, _ADVICE[verdict])


def _verdict(wait: float | None, queue: float, backpressure: float, backlog: float) -> Verdict:
    if wait is None:
        return Verdict.STARTING
    if wait > WAIT_HIGH:
        if backlog >= BACKLOG_HIGH:
            return Verdict.VERIFIER_BOUND
        return Verdict.ALTERNATING if backpressure >= BACKPRESSURE_HIGH else Verdict.GENERATION_BOUND
    if wait <= WAIT_LOW and (queue >= QUEUE_HIGH or (queue > QUEUE_LOW and backpressure > BACKPRESSURE_LOW)):
        return Verdict.TRAINER_BOUND
    return Verdict.BALANCED
