"""How much a node may hold: pure arithmetic on its record."""

from __future__ import annotations

from dataclasses import dataclass

HISTORY = 64  # accepted rollouts in a row that end a probation


@dataclass(frozen=True)
class Record:
    """What the ledger knows of a node: rejected rollouts, and those accepted since the last rejection."""

    rejected: int
    accepted_since: int


def quota(record: Record, group_size: int, open_slots: int) -> int:
    """Open slots that a node may hold: one group while a rejection is recent, else `open_slots`."""
    if record.rejected and record.accepted_since < HISTORY:
        return group_size
    return open_slots
