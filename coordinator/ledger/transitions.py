"""The one place where a rollout changes state: the row and its event in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, select

from .states import START, IllegalTransition, RolloutState, check
from .tables import events, rollouts

_CHUNK = 400  # SQLite's limit on variables of a statement is generous, not endless


def begin(tx: Connection, rows: Sequence[Mapping[str, Any]], *, now: float, actor: str) -> list[int]:
    """Insert new rollouts in the start state. Returns their ids in order."""
    if not rows:
        return []
    values = [{**row, "state": START.value} for row in rows]
    ids = list(tx.execute(rollouts.insert().returning(rollouts.c.id, sort_by_parameter_order=True), values).scalars())
    tx.execute(
        events.insert(),
        [_event(rollout, now, None, START, actor, "") for rollout in ids],
    )
    return ids


def move(
    tx: Connection,
    changes: Mapping[int, RolloutState],
    *,
    now: float,
    actor: str,
    detail: str = "",
    values: Mapping[int, Mapping[str, Any]] | None = None,
) -> None:
    """Move rollouts (id -> new state), setting further columns of each from `values` (the same columns for all).

    Raises IllegalTransition if an edge does not exist or a rollout is missing; then the transaction must roll back.
    """
    if not changes:
        return
    before = states_of(tx, list(changes))
    missing = changes.keys() - before.keys()
    if missing:
        raise IllegalTransition(f"no such rollout: {sorted(missing)[:5]}")
    for rollout, after in changes.items():
        check(before[rollout], after)
    columns = sorted(next(iter(values.values()))) if values else []
    statement = (
        rollouts.update()
        .where(rollouts.c.id == bindparam("_id"))
        .values(state=bindparam("_state"), **{name: bindparam(f"_{name}_") for name in columns})
    )
    tx.execute(
        statement,
        [
            {"_id": rollout, "_state": after.value}
            | ({f"_{name}_": values[rollout][name] for name in columns} if values else {})
            for rollout, after in changes.items()
        ],
    )
    tx.execute(
        events.insert(),
        [_event(rollout, now, before[rollout], after, actor, detail) for rollout, after in changes.items()],
    )


def states_of(tx: Connection, ids: Sequence[int]) -> dict[int, RolloutState]:
    """Current state of each rollout."""
    found: dict[int, RolloutState] = {}
    for start in range(0, len(ids), _CHUNK):
        part = ids[start : start + _CHUNK]
        query = select(rollouts.c.id, rollouts.c.state).where(rollouts.c.id.in_(part))
        found.update({row.id: RolloutState(row.state) for row in tx.execute(query)})
    return found


def _event(
    rollout: int, now: float, before: RolloutState | None, after: RolloutState, actor: str, detail: str
) -> dict[str, Any]:
    return {
        "rollout_id": rollout,
        "at": now,
        "before": before.value if before else None,
        "after": after.value,
        "actor": actor[:80],
        "detail": detail[:256],
    }
