"""How much a node may hold: pure arithmetic on its record."""

from __future__ import annotations

from dataclasses import dataclass

HISTORY = 64  # accepted rollouts in a row that end a probation
RETURN_RATIO = 0.8  # of ended leases, below which a node is held to one group


@dataclass(frozen=True)
class Record:
    """What the ledger knows of a node: rejected rollouts, those accepted since the last rejection, and of its last 100
    ended leases those returned and those dropped (expired without an outage)."""

    rejected: int
    accepted_since: int
    returned: int
    dropped: int


def quota(record: Record, group_size: int, open_slots: int) -> int:
    """Open slots that a node may hold: one group while a rejection is recent or it drops much, else `open_slots`."""
    if record.rejected and record.accepted_since < HISTORY:
        return group_size
    ended = record.returned + record.dropped
    if ended >= group_size and record.returned < RETURN_RATIO * ended:
        return group_size
    return open_slots
