"""Verification jobs and their outcome: claims, verdicts, credit, and what a verdict means for slot and group."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, and_, select

from protocol.reasons import Reason
from protocol.runspec import RunSpec

from . import transitions
from .credits import Payment, pay
from .leases import newest_checkpoint
from .states import (
    CLOSES_SLOT,
    MEMBER_STATE,
    REOPENS_SLOT,
    GroupState,
    Member,
    RolloutState,
    SlotState,
    is_stale,
    settle_group,
)
from .tables import groups, problems, rollouts, slots, verdicts

CLAIM_SECONDS = 120.0
MAX_ATTEMPTS = 3  # the first try and two re-verifications


@dataclass(frozen=True)
class Job:
    """A submitted rollout with all that a verdict needs. `prompt` int32 little-endian; `gold` JSON."""

    rollout_id: int
    group_id: int
    problem_id: str
    environment: str
    slot: int
    version: int
    node_id: str
    blob: str
    position: int
    payload_hash: str
    attempts: int
    prompt: bytes
    gold: Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """The outcome of one job. `receipt` is the signed receipt as JSON; `evidence` names a blob in the store."""

    job: Job
    state: RolloutState
    code: str | None
    value: float | None
    limit: float | None
    tokens: int
    reward: float | None
    price: int
    token_identical: bool | None
    measures: Mapping[str, Any]
    receipt: str
    evidence: str | None
    evidence_position: int | None


def claim(tx: Connection, verifier: str, limit: int, *, now: float) -> list[Job]:
    """Claim up to `limit` waiting rollouts of one version, the oldest version first.

    A rollout on its last try comes alone: one that kills every verifier takes no other with it.
    """
    waiting = (RolloutState.SUBMITTED.value, RolloutState.INCONCLUSIVE.value)
    here = rollouts.c.state.in_(waiting)
    version = tx.execute(
        select(rollouts.c.version).where(here).order_by(rollouts.c.version).limit(1)
    ).scalar_one_or_none()
    if version is None:
        return []
    query = (
        select(rollouts, groups.c.problem_id, problems.c.environment, problems.c.prompt, problems.c.gold)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .join(problems, problems.c.id == groups.c.problem_id)
        .where(here, rollouts.c.version == version)
        .order_by(rollouts.c.id)
        .limit(limit)
    )
    rows = list(tx.execute(query).all())
    last_try = MAX_ATTEMPTS - 1
    rows = rows[:1] if rows[0].attempts >= last_try else [row for row in rows if row.attempts < last_try]
    claimed = {"claimed_by": verifier, "claim_deadline": now + CLAIM_SECONDS}
    transitions.move(
        tx,
        {row.id: RolloutState.VERIFYING for row in rows},
        now=now,
        actor=f"verifier {verifier}",
        values={row.id: claimed | {"attempts": row.attempts + 1} for row in rows},
    )
    return [
        Job(
            row.id,
            row.group_id,
            row.problem_id,
            row.environment,
            row.slot,
            row.version,
            row.node_id,
            row.blob,
            row.position,
            row.payload_hash,
            row.attempts + 1,
            row.prompt,
            json.loads(row.gold),
        )
        for row in rows
    ]


def give_back(tx: Connection, verifier: str, *, now: float, detail: str) -> int:
    """Return the jobs that a verifier holds (it restarts, or it gave up on a batch). Returns how many.

    Those that were on their last try are left to the clock, whose next tick ends them as `unverifiable`.
    """
    mine = and_(rollouts.c.state == RolloutState.VERIFYING.value, rollouts.c.claimed_by == verifier)
    held = tx.execute(select(rollouts.c.id, rollouts.c.attempts).where(mine)).all()
    changes = {row.id: RolloutState.SUBMITTED for row in held if row.attempts < MAX_ATTEMPTS}
    transitions.move(tx, changes, now=now, actor=f"verifier {verifier}", detail=detail)
    tx.execute(rollouts.update().where(mine).values(claimed_by=None, claim_deadline=0.0))
    return len(held)


def record(
    tx: Connection, spec: RunSpec, decisions: Sequence[Decision], verifier: str, min_group: int, *, now: float
) -> None:
    """Write verdicts: states, receipts, credit, slots and groups, all in this transaction.

    A decision whose rollout is no longer ours to decide (the claim ran out and another verifier took it) is dropped.
    `inconclusive` on the last try is written as `unverified`.
    """
    mine = select(rollouts.c.id, rollouts.c.attempts).where(
        rollouts.c.state == RolloutState.VERIFYING.value, rollouts.c.claimed_by == verifier
    )
    held = {row.id: row.attempts for row in tx.execute(mine)}
    decisions = [
        _final(decision, held[decision.job.rollout_id]) for decision in decisions if decision.job.rollout_id in held
    ]
    if not decisions:
        return
    unverified = {
        decision.job.rollout_id: RolloutState.UNVERIFIED
        for decision in decisions
        if decision.state is RolloutState.UNVERIFIED
    }
    transitions.move(
        tx,
        {decision.job.rollout_id: decision.state for decision in decisions}
        | dict.fromkeys(unverified, RolloutState.INCONCLUSIVE),
        now=now,
        actor=f"verifier {verifier}",
        values={
            decision.job.rollout_id: {
                "decided_at": now,
                "tokens": decision.tokens,
                "reward": decision.reward,
                "code": decision.code,
                "price": decision.price,
                "token_identical": decision.token_identical,
                "evidence": decision.evidence,
                "evidence_position": decision.evidence_position,
            }
            for decision in decisions
        },
    )
    transitions.move(tx, unverified, now=now, actor=f"verifier {verifier}", detail="the last try")
    tx.execute(
        verdicts.insert(),
        [
            {
                "rollout_id": decision.job.rollout_id,
                "attempt": decision.job.attempts,
                "at": now,
                "outcome": decision.state.value,
                "code": decision.code,
                "value": decision.value,
                "limit_value": decision.limit,
                "measures": json.dumps(decision.measures),
                "receipt": decision.receipt,
            }
            for decision in decisions
        ],
    )
    accepted = [decision for decision in decisions if decision.state is RolloutState.ACCEPTED]
    payments = [
        Payment(decision.job.rollout_id, decision.job.node_id, "price", decision.price) for decision in accepted
    ]
    pay(tx, payments, now=now)
    answered = ((d.job.group_id, d.job.slot, d.state) for d in decisions)
    settle_slots(tx, answered)
    settle_groups(tx, spec, {d.job.group_id for d in decisions}, min_group, now=now)


def _final(decision: Decision, attempts: int) -> Decision:
    if decision.state is RolloutState.INCONCLUSIVE and attempts >= MAX_ATTEMPTS:
        return replace(decision, state=RolloutState.UNVERIFIED, code=Reason.UNVERIFIED.value)
    return decision


def settle_slots(tx: Connection, ended: Iterable[tuple[int, int, RolloutState]]) -> None:
    """Close or re-open the slots (group, number) whose rollout has ended in the given state."""
    by_target: dict[tuple[int, SlotState], list[int]] = defaultdict(list)
    for group, number, state in ended:
        if state in CLOSES_SLOT:
            by_target[group, SlotState.CLOSED].append(number)
        elif state in REOPENS_SLOT:
            by_target[group, SlotState.OPEN].append(number)
    for (group, target), numbers in by_target.items():
        tx.execute(
            slots.update()
            .where(
                slots.c.group_id == group,
                slots.c.number.in_(numbers),
                slots.c.state != SlotState.CLOSED.value,
            )
            .values(state=target.value)
        )


def settle_groups(tx: Connection, spec: RunSpec, changed: Iterable[int], min_group: int, *, now: float) -> None:
    """Let each changed group become ready, surplus or stale where its members say so."""
    newest = newest_checkpoint(tx)
    for group in sorted(changed):
        about = tx.execute(select(groups.c.state, groups.c.version).where(groups.c.id == group)).one()
        latest: dict[int, Member] = {}
        accepted: list[int] = []
        query = select(rollouts.c.id, rollouts.c.slot, rollouts.c.state, rollouts.c.reward)
        for row in tx.execute(query.where(rollouts.c.group_id == group).order_by(rollouts.c.fencing)):
            state = RolloutState(row.state)
            latest[row.slot] = Member(state, row.reward)
            if state is RolloutState.ACCEPTED:
                accepted.append(row.id)
        if about.state != GroupState.OPEN.value:  # a late verdict for a group that has aged out
            moves = {rollout: RolloutState.STALE for rollout in accepted}
            transitions.move(tx, moves, now=now, actor="ledger", detail="the group had aged out")
            continue
        members = [latest.get(number, Member(None, None)) for number in range(spec.group_size)]
        outcome = settle_group(members, min_group)
        if outcome is GroupState.OPEN:
            continue
        if newest is not None and is_stale(newest[0], about.version, spec.max_staleness):
            outcome = GroupState.STALE
        close_group(tx, group, outcome, accepted, now=now)


def close_group(tx: Connection, group: int, outcome: GroupState, accepted: Sequence[int], *, now: float) -> None:
    """Move a group out of `open`, and its accepted members with it; its open slots close."""
    tx.execute(groups.update().where(groups.c.id == group).values(state=outcome.value, settled_at=now))
    tx.execute(
        slots.update()
        .where(slots.c.group_id == group, slots.c.state == SlotState.OPEN.value)
        .values(state=SlotState.CLOSED.value)
    )
    target = MEMBER_STATE[outcome]
    transitions.move(tx, {rollout: target for rollout in accepted}, now=now, actor="ledger", detail=f"group {outcome}")
