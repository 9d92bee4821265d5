"""What time alone does to the ledger: leases run out, claims of dead verifiers come back, outages extend deadlines."""

from __future__ import annotations

from sqlalchemy import Connection, select

from protocol.runspec import RunSpec

from . import transitions
from .database import get_meta, set_meta
from .leases import newest_checkpoint
from .states import RolloutState
from .tables import outages, rollouts
from .training import age_out
from .verdicts import MAX_ATTEMPTS, settle_groups, settle_slots

OUTAGE_SECONDS = 30.0


def tick(tx: Connection, spec: RunSpec, min_group: int, *, now: float) -> None:
    """Called by the API about once a second. A gap between two ticks above 30 s is an outage: it is recorded and
    extends the deadline of every open lease, before any lease can run out."""
    last = get_meta(tx, "tick")
    if last is not None and now - last > OUTAGE_SECONDS:
        tx.execute(outages.insert().values(started=last, ended=now))
        tx.execute(
            rollouts.update()
            .where(rollouts.c.state == RolloutState.LEASED.value)
            .values(deadline=rollouts.c.deadline + (now - last))
        )
    set_meta(tx, "tick", now)
    _expire_leases(tx, now)
    _return_claims(tx, spec, min_group, now)
    newest = newest_checkpoint(tx)
    if newest is not None:
        age_out(tx, spec, newest[0], now=now)


def _expire_leases(tx: Connection, now: float) -> None:
    query = select(rollouts.c.id, rollouts.c.group_id, rollouts.c.slot).where(
        rollouts.c.state == RolloutState.LEASED.value, rollouts.c.deadline < now
    )
    rows = tx.execute(query).all()
    changes = {row.id: RolloutState.EXPIRED for row in rows}
    transitions.move(tx, changes, now=now, actor="clock", detail="the deadline passed")
    settle_slots(tx, ((row.group_id, row.slot, RolloutState.EXPIRED) for row in rows))


def _return_claims(tx: Connection, spec: RunSpec, min_group: int, now: float) -> None:
    query = select(rollouts.c.id, rollouts.c.group_id, rollouts.c.slot, rollouts.c.attempts).where(
        rollouts.c.state == RolloutState.VERIFYING.value, rollouts.c.claim_deadline < now
    )
    rows = tx.execute(query).all()
    changes = {
        row.id: RolloutState.UNVERIFIABLE if row.attempts >= MAX_ATTEMPTS else RolloutState.SUBMITTED for row in rows
    }
    transitions.move(tx, changes, now=now, actor="clock", detail="the verifier did not answer")
    lost = [row for row in rows if changes[row.id] is RolloutState.UNVERIFIABLE]
    settle_slots(tx, ((row.group_id, row.slot, RolloutState.UNVERIFIABLE) for row in lost))
    settle_groups(tx, spec, {row.group_id for row in lost}, min_group, now=now)
