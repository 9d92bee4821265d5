"""Steps and versions: assignment is idempotent and persistent, confirmation follows a durable checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from protocol.runspec import RunSpec

from . import transitions
from .leases import newest_checkpoint
from .states import GroupState, RolloutState, SlotState, is_stale
from .tables import checkpoints, evaluations, groups, problems, rollouts, samples, slots, steps
from .verdicts import close_group


@dataclass(frozen=True)
class TrainingRollout:
    """A member of an assigned batch. `evidence` and `position` name what the verifier recorded of it in the store."""

    rollout_id: int
    group_id: int
    version: int
    reward: float
    evidence: str
    position: int
    prompt: bytes
    staleness: int


@dataclass(frozen=True)
class Batch:
    """What a step trains on. `version` is the one that the trainer held when the batch was put together."""

    step: int
    version: int
    rollouts: tuple[TrainingRollout, ...]


@dataclass(frozen=True)
class Published:
    """A sealed checkpoint about to enter the ledger."""

    version: int
    step: int
    name: str
    kind: str
    weights_digest: str
    manifest_sha256: str
    bytes: int


def assign(tx: Connection, spec: RunSpec, step: int, *, now: float) -> Batch | None:
    """The batch of `step`: the same for ever once given; None while too little is ready.

    Whole groups, oldest version first, B / publish_every rollouts; none older than S versions.
    """
    given = tx.execute(select(steps.c.version).where(steps.c.step == step)).scalar_one_or_none()
    if given is None:
        newest = newest_checkpoint(tx)
        if newest is None:
            return None
        given = newest[0]
        chosen = _ready_groups(tx, spec, given, spec.rollouts_per_version // spec.publish_every)
        if chosen is None:
            return None
        _assign_groups(tx, step, given, chosen, now)
    query = (
        select(rollouts, problems.c.prompt)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .join(problems, problems.c.id == groups.c.problem_id)
        .where(rollouts.c.step == step)
        .order_by(rollouts.c.group_id, rollouts.c.slot)
    )
    members = tuple(
        TrainingRollout(
            row.id,
            row.group_id,
            row.version,
            row.reward,
            row.evidence,
            row.evidence_position,
            row.prompt,
            row.staleness,
        )
        for row in tx.execute(query)
    )
    return Batch(step, given, members)


def _ready_groups(tx: Connection, spec: RunSpec, newest: int, wanted: int) -> list[int] | None:
    query = (
        select(groups.c.id, groups.c.version, groups.c.size)
        .where(groups.c.state == GroupState.READY.value)
        .order_by(groups.c.version, groups.c.id)
    )
    chosen, total = [], 0
    for row in tx.execute(query):
        if is_stale(newest, row.version, spec.max_staleness):
            continue
        chosen.append(row.id)
        total += row.size  # as pacing counts it: a group that lost a member to the coordinator still fills its place
        if total >= wanted:
            return chosen
    return None


def _assign_groups(tx: Connection, step: int, version: int, chosen: Sequence[int], now: float) -> None:
    tx.execute(steps.insert().values(step=step, version=version, assigned_at=now))
    tx.execute(
        groups.update().where(groups.c.id.in_(chosen)).values(state=GroupState.ASSIGNED.value, step=step)
    )
    query = select(rollouts.c.id, rollouts.c.version, rollouts.c.submitted_at).where(
        rollouts.c.group_id.in_(chosen), rollouts.c.state == RolloutState.READY.value
    )
    rows = tx.execute(query).all()
    sealed = tx.execute(select(checkpoints.c.version, checkpoints.c.sealed_at).order_by(checkpoints.c.version)).all()
    values = {}
    for row in rows:
        # newest version at submission: the part of the staleness that arose in flight, the rest arose in the queue
        at_submission = max((v.version for v in sealed if v.sealed_at <= row.submitted_at), default=row.version)
        values[row.id] = {
            "step": step,
            "staleness": version - row.version,
            "staleness_in_flight": max(0, min(at_submission, version) - row.version),
        }
    transitions.move(
        tx, {row.id: RolloutState.ASSIGNED for row in rows}, now=now, actor="trainer", values=values
    )


def confirm(
    tx: Connection, spec: RunSpec, step: int, metrics: Mapping[str, Any], published: Published | None, *, now: float
) -> None:
    """Confirm a step whose checkpoint is durable, and enter the version that was published from it (idempotent)."""
    row = tx.execute(select(steps.c.confirmed_at).where(steps.c.step == step)).one()
    if row.confirmed_at is None:
        members = list(tx.execute(select(rollouts.c.id).where(rollouts.c.step == step)).scalars())
        transitions.move(tx, {member: RolloutState.TRAINED for member in members}, now=now, actor="trainer")
        tx.execute(groups.update().where(groups.c.step == step).values(state=GroupState.TRAINED.value))
        tx.execute(
            steps.update().where(steps.c.step == step).values(confirmed_at=now, metrics=json.dumps(dict(metrics)))
        )
    if published is not None:
        enter_version(tx, spec, published, now=now)


def enter_version(tx: Connection, spec: RunSpec, published: Published, *, now: float) -> None:
    """Make a sealed version the newest (idempotent). Versions go up by one; groups that it makes too old close."""
    known = select(checkpoints.c.weights_digest).where(checkpoints.c.version == published.version)
    digest = tx.execute(known).scalar_one_or_none()
    if digest is not None:
        if digest != published.weights_digest:
            raise ValueError(f"version {published.version} was published with other weights before")
        return
    newest = newest_checkpoint(tx)
    if published.version != (0 if newest is None else newest[0] + 1):
        raise ValueError(f"version {published.version} does not follow {newest}")
    tx.execute(checkpoints.insert().values(**vars(published), sealed_at=now))
    age_out(tx, spec, published.version, now=now)


def age_out(tx: Connection, spec: RunSpec, newest: int, *, now: float) -> None:
    """Close the groups that are more than S versions old: leases become void, accepted and ready members stale."""
    waiting = (GroupState.OPEN.value, GroupState.READY.value)
    query = select(groups.c.id).where(
        groups.c.state.in_(waiting), groups.c.version < newest - spec.max_staleness
    )
    for group in list(tx.execute(query).scalars()):
        members: dict[str, list[int]] = {}
        for row in tx.execute(select(rollouts.c.id, rollouts.c.state).where(rollouts.c.group_id == group)):
            members.setdefault(row.state, []).append(row.id)
        leased = members.get(RolloutState.LEASED.value, [])
        transitions.move(tx, {r: RolloutState.VOID for r in leased}, now=now, actor="ledger", detail="aged out")
        paid = members.get(RolloutState.ACCEPTED.value, []) + members.get(RolloutState.READY.value, [])
        close_group(tx, group, GroupState.STALE, paid, now=now)
        tx.execute(slots.update().where(slots.c.group_id == group).values(state=SlotState.CLOSED.value))


def evaluated(tx: Connection, version: int, passed: int, total: int, *, now: float) -> None:
    """Record a greedy held-out evaluation of a version (idempotent)."""
    if tx.execute(select(evaluations.c.version).where(evaluations.c.version == version)).one_or_none() is None:
        tx.execute(evaluations.insert().values(version=version, at=now, passed=passed, total=total))


def add_sample(tx: Connection, source: str, data: Mapping[str, Any], *, now: float) -> None:
    """Append a measurement of a process (shown on the dashboard, decides nothing)."""
    tx.execute(samples.insert().values(at=now, source=source, data=json.dumps(dict(data))))
