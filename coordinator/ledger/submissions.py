"""Submissions: what a returned completion may do to the ledger before anybody has looked at its content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, select

from protocol.reasons import Reason

from . import transitions
from .states import RolloutState, SlotState
from .tables import rollouts, slots


@dataclass(frozen=True)
class Item:
    """One completion of a batch: which lease it answers, and its payload hash."""

    lease_id: str
    fencing: int
    index: int
    payload_hash: str


@dataclass(frozen=True)
class Result:
    """`rollout_id` if acknowledged (now or earlier, for the same bytes), else the reason why not."""

    rollout_id: int | None
    code: Reason | None


def submit(
    tx: Connection, node_id: str, items: Sequence[Item], blob: str, *, now: float
) -> list[Result]:
    """Acknowledge each item by itself, in order. `blob` is the signed body's name in the store, already durable."""
    results: list[Result] = []
    changes: dict[int, RolloutState] = {}
    values: dict[int, dict[str, Any]] = {}
    found = _find(tx, items)
    for position, item in enumerate(items):
        row = found.get((item.lease_id, item.index))
        code = _refusal(row, item, node_id, now, item.lease_id in {lease for lease, _ in found})
        if code is not None or row is None:
            results.append(Result(None, code))
            continue
        results.append(Result(row["id"], None))
        if row["state"] == RolloutState.LEASED.value:
            changes[row["id"]] = RolloutState.SUBMITTED
            values[row["id"]] = {
                "submitted_at": now,
                "payload_hash": item.payload_hash,
                "blob": blob,
                "position": position,
            }
            row["state"], row["payload_hash"] = RolloutState.SUBMITTED.value, item.payload_hash
    transitions.move(tx, changes, now=now, actor=f"node {node_id[:16]}", values=values)
    return results


def _find(tx: Connection, items: Sequence[Item]) -> dict[tuple[str, int], dict[str, Any]]:
    leases = sorted({item.lease_id for item in items})
    query = (
        select(
            rollouts.c.id,
            rollouts.c.lease_id,
            rollouts.c.slot,
            rollouts.c.fencing,
            rollouts.c.node_id,
            rollouts.c.state,
            rollouts.c.deadline,
            rollouts.c.payload_hash,
            slots.c.fencing.label("current"),
            slots.c.state.label("slot_state"),
        )
        .join(slots, and_(slots.c.group_id == rollouts.c.group_id, slots.c.number == rollouts.c.slot))
        .where(rollouts.c.lease_id.in_(leases))
    )
    return {(row.lease_id, row.slot): dict(row._mapping) for row in tx.execute(query)}


def _refusal(
    row: dict[str, Any] | None, item: Item, node_id: str, now: float, lease_known: bool
) -> Reason | None:
    if row is None:
        return Reason.LEASE_INDEX if lease_known else Reason.LEASE_UNKNOWN
    if row["node_id"] != node_id:
        return Reason.LEASE_NOT_YOURS
    if row["fencing"] != item.fencing:
        return Reason.LEASE_LOST
    state = row["state"]
    if state == RolloutState.LEASED.value:
        return None if now <= float(row["deadline"]) else Reason.LEASE_EXPIRED
    if state == RolloutState.VOID.value:
        return Reason.LEASE_VOID
    if state == RolloutState.EXPIRED.value:
        lost = row["current"] != item.fencing and row["slot_state"] != SlotState.OPEN.value
        return Reason.LEASE_LOST if lost else Reason.LEASE_EXPIRED
    return None if row["payload_hash"] == item.payload_hash else Reason.DUPLICATE
