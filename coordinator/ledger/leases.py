"""Leases: which slots a node gets. Re-leases come before new groups; pacing decides whether a group may open."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, func, select

from protocol.reasons import Reason, Refusal
from protocol.runspec import RunSpec

from . import transitions
from .states import COUNTED, GroupState, RolloutState, SlotState, is_stale, may_open_group
from .tables import checkpoints, groups, problems, rollouts, slots


@dataclass(frozen=True)
class NewProblem:
    """A problem as the ledger keeps it: prompt token ids (int32, little-endian) and the gold, as JSON text."""

    id: str
    environment: str
    environment_version: str
    messages: str
    prompt: bytes
    gold: str


@dataclass(frozen=True)
class GrantedSlot:
    """A leased slot and its fencing number."""

    index: int
    fencing: int


@dataclass(frozen=True)
class Granted:
    """A lease of slots of one group. `prompt` as in NewProblem; `deadline` in Unix seconds."""

    lease_id: str
    group_id: int
    problem_id: str
    version: int
    weights_digest: str
    prompt: bytes
    slots: tuple[GrantedSlot, ...]
    deadline: float


@dataclass(frozen=True)
class Ask:
    """What a node wants: the versions it has loaded, how many slots, and how many it may hold open (its quota)."""

    node_id: str
    versions: tuple[int, ...]
    slots: int
    quota: int


def lease_seconds(spec: RunSpec) -> float:
    """A lease is long enough for the longest answer at the slowest admitted speed."""
    return max(spec.lease_seconds, spec.sampling.max_tokens / spec.minimum_tokens_per_second)


def newest_checkpoint(tx: Connection) -> tuple[int, float] | None:
    """Newest sealed version and when it was sealed, or None."""
    query = select(checkpoints.c.version, checkpoints.c.sealed_at).order_by(checkpoints.c.version.desc()).limit(1)
    row = tx.execute(query).one_or_none()
    return None if row is None else (row.version, row.sealed_at)


def counted_rollouts(tx: Connection) -> int:
    """Rollouts that are being generated for, ready, assigned or trained: what pacing counts, derived every time."""
    states = [state.value for state in COUNTED]
    query = select(func.coalesce(func.sum(groups.c.size), 0)).where(groups.c.state.in_(states))
    return int(tx.execute(query).scalar_one())


def open_slots_of(tx: Connection, node_id: str) -> int:
    """Slots that a node holds and has not returned."""
    query = select(func.count()).where(rollouts.c.node_id == node_id, rollouts.c.state == RolloutState.LEASED.value)
    return int(tx.execute(query).scalar_one())


def grant(
    tx: Connection, spec: RunSpec, ask: Ask, new_problem: Callable[[int], NewProblem], *, now: float
) -> tuple[Granted, ...]:
    """Lease up to `ask.slots` slots. `new_problem(n)` makes the n-th problem of the run.

    Raises Refusal: `not_ready` (no version yet), `quota_exhausted`, `version_behind` (the node's newest version may
    open no group and has no slot to offer), `queue_full`.
    """
    newest = newest_checkpoint(tx)
    if newest is None:
        raise Refusal(Reason.NOT_READY, retry_after=1)
    wanted = min(ask.slots, ask.quota - open_slots_of(tx, ask.node_id))
    if wanted <= 0:
        raise Refusal(Reason.QUOTA_EXHAUSTED, retry_after=1)
    chosen = _open_slots(tx, spec, ask, newest[0], wanted, now)
    version = _opens_on(spec, ask.versions, newest, now)
    while version is not None and len(chosen) < wanted:
        counted = counted_rollouts(tx)
        if not may_open_group(counted, spec.group_size, version, spec.max_staleness, spec.rollouts_per_version):
            break
        group = _open_group(tx, spec, version, new_problem, now)
        chosen += [(group, index) for index in range(spec.group_size)][: wanted - len(chosen)]
    if not chosen:
        if version is None:
            raise Refusal(Reason.VERSION_BEHIND, f"the newest version is {newest[0]}")
        raise Refusal(Reason.QUEUE_FULL, retry_after=1)
    return _lease(tx, spec, ask.node_id, chosen, now)


def _opens_on(spec: RunSpec, held: Sequence[int], newest: tuple[int, float], now: float) -> int | None:
    """The version on which a node may open groups, or None: the newest that it holds, if that is the newest of the run,
    or was so until less than the propagation grace ago and is young enough to train."""
    known = [version for version in held if version <= newest[0]]  # some may not be in the ledger yet
    if not known:
        return None
    version = max(known)
    in_grace = version == newest[0] - 1 and now - newest[1] < spec.propagation_grace
    fresh = in_grace and not is_stale(newest[0], version, spec.max_staleness)
    return version if version == newest[0] or fresh else None


def _open_slots(
    tx: Connection, spec: RunSpec, ask: Ask, newest: int, limit: int, now: float
) -> list[tuple[int, int]]:
    """Open slots on the node's versions, oldest group first; none on which this node has failed within a lease's time:
    others go first, but a slot that only this node is left to answer is not closed to it for ever."""
    failed = (
        select(rollouts.c.id)
        .where(
            rollouts.c.group_id == slots.c.group_id,
            rollouts.c.slot == slots.c.number,
            rollouts.c.node_id == ask.node_id,
            rollouts.c.state == RolloutState.REJECTED.value,
            rollouts.c.decided_at > now - lease_seconds(spec),
        )
        .exists()
    )
    live = [known for known in ask.versions if known <= newest and not is_stale(newest, known, spec.max_staleness)]
    query = (
        select(slots.c.group_id, slots.c.number)
        .join(groups, groups.c.id == slots.c.group_id)
        .where(
            slots.c.state == SlotState.OPEN.value,
            groups.c.state == GroupState.OPEN.value,
            groups.c.version.in_(live),
            ~failed,
        )
        .order_by(slots.c.group_id, slots.c.number)
        .limit(limit)
    )
    return [(row.group_id, row.number) for row in tx.execute(query)]


def _open_group(
    tx: Connection, spec: RunSpec, version: int, new_problem: Callable[[int], NewProblem], now: float
) -> int:
    number = int(tx.execute(select(func.coalesce(func.max(problems.c.number), -1))).scalar_one()) + 1
    problem = new_problem(number)
    tx.execute(problems.insert().values(number=number, **vars(problem)))
    group = tx.execute(
        groups.insert()
        .values(
            problem_id=problem.id,
            version=version,
            size=spec.group_size,
            state=GroupState.OPEN.value,
            opened_at=now,
        )
        .returning(groups.c.id)
    ).scalar_one()
    tx.execute(
        slots.insert(),
        [
            {"group_id": group, "number": index, "state": SlotState.OPEN.value, "fencing": 0}
            for index in range(spec.group_size)
        ],
    )
    return int(group)


def _lease(
    tx: Connection, spec: RunSpec, node_id: str, chosen: Sequence[tuple[int, int]], now: float
) -> tuple[Granted, ...]:
    deadline = now + lease_seconds(spec)
    by_group: dict[int, list[int]] = defaultdict(list)
    for group, index in chosen:
        by_group[group].append(index)
    granted = []
    rows = []
    for group, indices in by_group.items():
        here = and_(slots.c.group_id == group, slots.c.number.in_(indices))
        tx.execute(slots.update().where(here).values(state=SlotState.LEASED.value, fencing=slots.c.fencing + 1))
        fencing = {row.number: row.fencing for row in tx.execute(select(slots.c.number, slots.c.fencing).where(here))}
        about = tx.execute(
            select(groups.c.version, groups.c.problem_id, problems.c.prompt, checkpoints.c.weights_digest)
            .join(problems, problems.c.id == groups.c.problem_id)
            .join(checkpoints, checkpoints.c.version == groups.c.version)
            .where(groups.c.id == group)
        ).one()
        lease_id = secrets.token_hex(16)
        granted.append(
            Granted(
                lease_id,
                group,
                about.problem_id,
                about.version,
                about.weights_digest,
                about.prompt,
                tuple(GrantedSlot(index, fencing[index]) for index in indices),
                deadline,
            )
        )
        rows += [
            {
                "group_id": group,
                "slot": index,
                "fencing": fencing[index],
                "version": about.version,
                "node_id": node_id,
                "lease_id": lease_id,
                "leased_at": now,
                "deadline": deadline,
            }
            for index in indices
        ]
    transitions.begin(tx, rows, now=now, actor=f"node {node_id[:16]}")
    return tuple(granted)
