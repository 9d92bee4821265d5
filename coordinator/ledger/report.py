"""What the ledger says about a run: read-only queries that aggregate in the database, for dashboard, terminal and API.

Every function takes an open read transaction and the clock. None reads events, and none keeps anything between calls,
so that what is shown is always what is written.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, func, select

from protocol.runspec import RunSpec

from .nodes import RELAY_LIFE_SECONDS
from .states import PAID, RolloutState
from .tables import allowlist, checkpoints, credits, evaluations, nodes, refusals, relays, rollouts, steps, verdicts

RATE_SECONDS = 60.0  # window of throughput figures
RATE_ROWS = 4096  # verdicts read at most for them
RECENT_ROLLOUTS = 256  # decided rollouts whose rewards are averaged
RECENT_STEPS = 20  # window of the bottleneck figures
MIN_STEPS = 3  # below, there is no bottleneck to speak of
ONLINE_SECONDS = 30.0  # a node that was silent for longer is shown as offline
OPEN_WAIT_SECONDS = 300.0  # a wait or step under way counts up to this: a run that lies idle is not starving

Key = TypeVar("Key")
_R = RolloutState
PENDING = (_R.SUBMITTED, _R.VERIFYING, _R.INCONCLUSIVE)
_SUBMITTED = frozenset(_R) - {_R.LEASED, _R.EXPIRED, _R.VOID}


@dataclass(frozen=True)
class PassRate:
    """A greedy held-out evaluation of a version."""

    version: int
    passed: int
    total: int

    @property
    def rate(self) -> float:
        """Passed share, in [0, 1]; 0 for an empty evaluation."""
        return self.passed / self.total if self.total else 0.0


@dataclass(frozen=True)
class Staleness:
    """Staleness in versions over the rollouts of one step; `in_flight` is the mean of the part before submission."""

    step: int
    mean: float
    maximum: int
    in_flight: float


@dataclass(frozen=True)
class Count:
    """How often a reason code occurred."""

    code: str
    count: int


@dataclass(frozen=True)
class NodeReport:
    """One node. `tokens_per_second` counts its accepted tokens; `reported_tokens_per_second` is what it claims."""

    id: str
    label: str
    status: str
    state: str
    online: bool
    loaded_version: int | None
    tokens_per_second: float
    reported_tokens_per_second: float
    pending: int
    accepted: int
    rejected: int
    dropped: int
    last_reason: str | None
    token_identical: int
    credit: int
    last_seen: float


@dataclass(frozen=True)
class RelayReport:
    """One relay, without its address."""

    id: str
    alive: bool
    last_seen: float


@dataclass(frozen=True)
class Overview:
    """A run at one moment. Times in Unix seconds; None where nothing has been measured yet.

    `capacity` is (S + 1)·B rollouts. Shares are in [0, 1]: `queue_fill` of what the queue can hold while the assigned
    batch is out, `wait_share` of the trainer's time over the last steps, `backpressure_share` of the nodes' time since
    they registered, `verifier_backlog_share` of the untrained rollouts that wait for a verdict.
    """

    at: float
    started_at: float | None
    newest_version: int | None
    steps_confirmed: int
    first_pass: PassRate | None
    latest_pass: PassRate | None
    recent_reward: float | None
    step_reward: float | None
    max_staleness: int
    staleness: Staleness | None
    states: Mapping[str, int]
    ready: int
    capacity: int
    accepted: int
    rejected: int
    rejections: tuple[Count, ...]
    refusals: tuple[Count, ...]
    bytes_published: int
    tokens_per_second: float
    nodes: tuple[NodeReport, ...]
    relays: tuple[RelayReport, ...]
    wait_share: float | None
    queue_fill: float
    backpressure_share: float
    verifier_backlog_share: float


@dataclass(frozen=True)
class Series:
    """Curves: (step, mean reward) and the held-out evaluations, oldest first, thinned evenly when long."""

    reward: tuple[tuple[int, float], ...]
    pass_rate: tuple[PassRate, ...]


@dataclass(frozen=True)
class Account:
    """What became of a node's submissions. `token_identical`: accepted with exactly the verifier's own tokens."""

    node_id: str
    submitted: int
    accepted: int
    token_identical: int
    rejected: tuple[Count, ...]


def overview(tx: Connection, spec: RunSpec, *, now: float) -> Overview:
    """All figures of a run, consistent with each other (one transaction)."""
    tallies = _tallies(tx)
    states = _total(tally.states for tally in tallies.values())
    what = (func.max(checkpoints.c.version), func.min(checkpoints.c.sealed_at), func.sum(checkpoints.c.bytes))
    sealed = tx.execute(select(*what)).one()
    rates = _token_rates(tx, sealed[1], now)
    evaluated = _ends(tx)
    recent = _recent_steps(tx)
    ready, capacity = states.get(_R.READY, 0), (spec.max_staleness + 1) * spec.rollouts_per_version
    return Overview(
        at=now,
        started_at=sealed[1],
        newest_version=sealed[0],
        steps_confirmed=_steps_confirmed(tx),
        first_pass=evaluated[0],
        latest_pass=evaluated[1],
        recent_reward=_recent_reward(tx),
        step_reward=next((r for row in recent if (r := _number(_metrics(row), "reward_mean")) is not None), None),
        max_staleness=spec.max_staleness,
        staleness=_staleness(tx),
        states={state.value: count for state, count in sorted(states.items())},
        ready=ready,
        capacity=capacity,
        accepted=sum(states.get(state, 0) for state in PAID),
        rejected=states.get(_R.REJECTED, 0),
        rejections=_sorted(_total(tally.rejected for tally in tallies.values())),
        refusals=_sorted({code: count for code, count in tx.execute(select(refusals.c.code, refusals.c.count))}),
        bytes_published=int(sealed[2] or 0),
        tokens_per_second=sum(rates.values()),
        nodes=_nodes(tx, tallies, rates, now),
        relays=tuple(
            RelayReport(row.id, row.last_seen >= now - RELAY_LIFE_SECONDS, row.last_seen)
            for row in tx.execute(select(relays.c.id, relays.c.last_seen).order_by(relays.c.registered_at))
        ),
        wait_share=_wait_share(recent, now),
        queue_fill=min(1.0, ready / max(1, capacity - states.get(_R.ASSIGNED, 0))),
        backpressure_share=_backpressure(tx),
        verifier_backlog_share=_backlog(states),
    )


def series(tx: Connection, *, points: int = 400) -> Series:
    """The curves. At most about `points` each; the newest point is always there."""
    last = tx.execute(select(func.max(steps.c.step)).where(steps.c.confirmed_at.is_not(None))).scalar_one()
    stride = 1 if last is None else max(1, math.ceil((last + 1) / points))
    query = select(steps.c.step, steps.c.metrics).where(steps.c.confirmed_at.is_not(None)).order_by(steps.c.step)
    if stride > 1:
        query = query.where(steps.c.step % stride == last % stride)
    reward = [(row.step, _number(_metrics(row), "reward_mean")) for row in tx.execute(query)]
    tested = [
        PassRate(row.version, row.passed, row.total)
        for row in tx.execute(select(evaluations).order_by(evaluations.c.version))
    ]
    every = max(1, math.ceil(len(tested) / points))
    return Series(
        tuple((step, value) for step, value in reward if value is not None), tuple(tested[::-1][::every][::-1])
    )


def cheater_accounts(tx: Connection) -> tuple[Account, ...]:
    """Per node, what it submitted and what became of it, by node id. Nodes without a submission are left out."""
    return tuple(
        Account(node_id, submitted, tally.sum(PAID), tally.identical, _sorted(tally.rejected))
        for node_id, tally in sorted(_tallies(tx).items())
        if (submitted := tally.sum(_SUBMITTED))
    )


@dataclass
class _Tally:
    """Counts of one node, filled while the grouped rows are read."""

    states: dict[RolloutState, int]
    rejected: dict[str, int]
    identical: int = 0
    newest_rejection: int = -1
    last_reason: str | None = None

    def sum(self, states: Iterable[RolloutState]) -> int:
        """Rollouts in any of the states."""
        return sum(self.states.get(state, 0) for state in states)


def _tallies(tx: Connection) -> dict[str, _Tally]:
    """One pass over the rollouts; an index on (node_id, state, code, token_identical) answers it alone."""
    what = (rollouts.c.node_id, rollouts.c.state, rollouts.c.code, rollouts.c.token_identical)
    found: dict[str, _Tally] = defaultdict(lambda: _Tally(defaultdict(int), defaultdict(int)))
    for node_id, name, code, identical, count, newest in tx.execute(
        select(*what, func.count(), func.max(rollouts.c.id)).group_by(*what)
    ):
        tally, state = found[node_id], RolloutState(name)
        tally.states[state] += int(count)
        if identical and state in PAID:
            tally.identical += int(count)
        if state is _R.REJECTED:
            tally.rejected[code or ""] += int(count)
            if newest > tally.newest_rejection:
                tally.newest_rejection, tally.last_reason = newest, code
    return found


def _total(parts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total: dict[Key, int] = defaultdict(int)
    for part in parts:
        for key, count in part.items():
            total[key] += count
    return total


def _sorted(counts: Mapping[str, int]) -> tuple[Count, ...]:
    return tuple(Count(code, count) for code, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _token_rates(tx: Connection, started: float | None, now: float) -> dict[str, float]:
    """Accepted completion tokens per second and node over the last minute, or since the run began if that is less."""
    newest = tx.execute(select(func.max(verdicts.c.id))).scalar_one()
    if newest is None or started is None:
        return {}
    window = (verdicts.c.id > newest - RATE_ROWS, verdicts.c.at > now - RATE_SECONDS)
    query = (
        select(rollouts.c.node_id, func.sum(rollouts.c.tokens), func.min(verdicts.c.at), func.min(verdicts.c.id))
        .join(rollouts, rollouts.c.id == verdicts.c.rollout_id)
        .where(*window, verdicts.c.outcome == _R.ACCEPTED.value)
        .group_by(rollouts.c.node_id)
    )
    rows = tx.execute(query).all()
    begin = max(started, now - RATE_SECONDS)
    if rows and newest > RATE_ROWS and min(row[3] for row in rows) == newest - RATE_ROWS + 1:
        begin = max(begin, min(row[2] for row in rows))  # more verdicts in the window than are read
    seconds = max(1.0, now - begin)
    return {row[0]: int(row[1] or 0) / seconds for row in rows}


def _ends(tx: Connection) -> tuple[PassRate | None, PassRate | None]:
    ends = []
    for order in (evaluations.c.version, evaluations.c.version.desc()):
        row = tx.execute(select(evaluations).order_by(order).limit(1)).one_or_none()
        ends.append(None if row is None else PassRate(row.version, row.passed, row.total))
    return ends[0], ends[1]


def _recent_reward(tx: Connection) -> float | None:
    latest = select(verdicts.c.rollout_id).order_by(verdicts.c.id.desc()).limit(RECENT_ROLLOUTS).subquery()
    query = select(func.avg(rollouts.c.reward)).join(latest, latest.c.rollout_id == rollouts.c.id)
    mean = tx.execute(query).scalar_one()
    return None if mean is None else float(mean)


def _steps_confirmed(tx: Connection) -> int:
    query = select(func.count()).select_from(steps).where(steps.c.confirmed_at.is_not(None))
    return int(tx.execute(query).scalar_one())


def _recent_steps(tx: Connection) -> Sequence[Any]:
    """The last steps, newest first, one more than the window."""
    return tx.execute(select(steps).order_by(steps.c.step.desc()).limit(RECENT_STEPS + 1)).all()


def _staleness(tx: Connection) -> Staleness | None:
    last = tx.execute(select(func.max(steps.c.step))).scalar_one()
    if last is None:
        return None
    query = select(
        func.avg(rollouts.c.staleness), func.max(rollouts.c.staleness), func.avg(rollouts.c.staleness_in_flight)
    )
    row = tx.execute(query.where(rollouts.c.step == last)).one()
    return None if row[0] is None else Staleness(int(last), float(row[0]), int(row[1]), float(row[2] or 0.0))


def _metrics(row: Any) -> Mapping[str, Any]:
    found = json.loads(row.metrics) if row.metrics else {}
    return found if isinstance(found, dict) else {}


def _number(metrics: Mapping[str, Any], key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _wait_share(recent: Sequence[Any], now: float) -> float | None:
    """Share of the trainer's time in which it waited for rollouts: over the last steps by its own metrics, by the
    ledger's times where those are missing, and with what is under way now. The very first step is left out."""
    confirmed = [row for row in recent if row.confirmed_at is not None]
    waited, worked, known = 0.0, 0.0, 0
    for row, before in zip(confirmed, confirmed[1:], strict=False):
        metrics = _metrics(row)
        wait, work = _number(metrics, "wait_seconds"), _number(metrics, "seconds")
        waited += max(0.0, row.assigned_at - before.confirmed_at) if wait is None else wait
        worked += max(0.0, row.confirmed_at - row.assigned_at) if work is None else work
        known += 1
    if known < MIN_STEPS:
        return None
    newest = recent[0]
    if newest.confirmed_at is None:
        worked += min(OPEN_WAIT_SECONDS, max(0.0, now - newest.assigned_at))
    else:
        waited += min(OPEN_WAIT_SECONDS, max(0.0, now - newest.confirmed_at))
    return waited / (waited + worked) if waited + worked > 0 else 0.0


def _backpressure(tx: Connection) -> float:
    query = select(
        func.sum(nodes.c.backpressure_seconds), func.sum(nodes.c.last_seen - nodes.c.registered_at)
    )
    held, present = tx.execute(query).one()
    return min(1.0, held / present) if held and present and present > 0 else 0.0


def _backlog(states: Mapping[RolloutState, int]) -> float:
    pending = sum(states.get(state, 0) for state in PENDING)
    others = sum(states.get(state, 0) for state in (_R.LEASED, _R.ACCEPTED, _R.READY))
    return pending / (pending + others) if pending else 0.0


def _nodes(
    tx: Connection, tallies: Mapping[str, _Tally], rates: Mapping[str, float], now: float
) -> tuple[NodeReport, ...]:
    nothing = _Tally({}, {})
    earned = select(credits.c.node_id, func.sum(credits.c.amount)).group_by(credits.c.node_id)
    credit = {node_id: int(amount) for node_id, amount in tx.execute(earned)}
    query = (
        select(nodes, allowlist.c.label, allowlist.c.banned)
        .join(allowlist, allowlist.c.id == nodes.c.id, isouter=True)
        .order_by(nodes.c.registered_at, nodes.c.id)
    )
    return tuple(
        NodeReport(
            id=row.id,
            label=row.label or "",
            status="banned" if row.banned else row.status,
            state=row.state,
            online=row.last_seen >= now - ONLINE_SECONDS,
            loaded_version=row.loaded_version,
            tokens_per_second=rates.get(row.id, 0.0),
            reported_tokens_per_second=row.tokens_per_second,
            pending=tally.sum(PENDING),
            accepted=tally.sum(PAID),
            rejected=tally.sum((_R.REJECTED,)),
            dropped=tally.sum((_R.EXPIRED,)),
            last_reason=tally.last_reason,
            token_identical=tally.identical,
            credit=credit.get(row.id, 0),
            last_seen=row.last_seen,
        )
        for row in tx.execute(query)
        for tally in [tallies.get(row.id, nothing)]
    )
