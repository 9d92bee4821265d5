"""The life of a rollout as a pure state machine. Nothing here knows the database or the time of day.

A rollout is one lease of one slot (slot, fencing number). These tables are the only place that says which state may
follow which; `transitions.move` is the only place that changes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class RolloutState(StrEnum):
    """Where a rollout is."""

    LEASED = "leased"
    SUBMITTED = "submitted"
    VERIFYING = "verifying"
    INCONCLUSIVE = "inconclusive"
    ACCEPTED = "accepted"
    READY = "ready"
    ASSIGNED = "assigned"
    TRAINED = "trained"
    SURPLUS = "surplus"
    STALE = "stale"
    QUARANTINED = "quarantined"
    REJECTED = "rejected"
    OVERTURNED = "overturned"
    EXPIRED = "expired"
    VOID = "void"
    UNVERIFIED = "unverified"
    UNVERIFIABLE = "unverifiable"


class SlotState(StrEnum):
    """A slot is open (anyone may lease it), leased, or closed (it has its answer or will never get one)."""

    OPEN = "open"
    LEASED = "leased"
    CLOSED = "closed"


class GroupState(StrEnum):
    """A group waits for its members, then for the trainer; or it ends without training."""

    OPEN = "open"
    READY = "ready"
    ASSIGNED = "assigned"
    TRAINED = "trained"
    SURPLUS = "surplus"
    STALE = "stale"


_R = RolloutState
EDGES: dict[RolloutState, frozenset[RolloutState]] = {
    _R.LEASED: frozenset({_R.SUBMITTED, _R.EXPIRED, _R.VOID}),
    _R.SUBMITTED: frozenset({_R.VERIFYING}),
    _R.VERIFYING: frozenset({_R.SUBMITTED, _R.ACCEPTED, _R.REJECTED, _R.INCONCLUSIVE, _R.UNVERIFIABLE}),
    _R.INCONCLUSIVE: frozenset({_R.VERIFYING, _R.UNVERIFIED}),
    _R.ACCEPTED: frozenset({_R.READY, _R.SURPLUS, _R.STALE, _R.QUARANTINED}),
    _R.READY: frozenset({_R.ASSIGNED, _R.STALE, _R.QUARANTINED, _R.ACCEPTED}),
    _R.ASSIGNED: frozenset({_R.TRAINED}),
    _R.REJECTED: frozenset({_R.OVERTURNED}),
    _R.TRAINED: frozenset(),
    _R.SURPLUS: frozenset({_R.QUARANTINED}),
    _R.STALE: frozenset({_R.QUARANTINED}),
    _R.QUARANTINED: frozenset(),
    _R.OVERTURNED: frozenset(),
    _R.EXPIRED: frozenset(),
    _R.VOID: frozenset(),
    _R.UNVERIFIED: frozenset(),
    _R.UNVERIFIABLE: frozenset(),
}
"""Which state may follow which."""

START = RolloutState.LEASED
REOPENS_SLOT = frozenset({_R.EXPIRED, _R.REJECTED, _R.QUARANTINED})
CLOSES_SLOT = frozenset({_R.ACCEPTED, _R.UNVERIFIED, _R.UNVERIFIABLE, _R.VOID})
PAID = frozenset({_R.ACCEPTED, _R.READY, _R.ASSIGNED, _R.TRAINED, _R.SURPLUS, _R.STALE, _R.OVERTURNED})
COORDINATOR_LOSSES = frozenset({_R.UNVERIFIED, _R.UNVERIFIABLE})
COUNTED = frozenset({GroupState.OPEN, GroupState.READY, GroupState.ASSIGNED, GroupState.TRAINED})
"""Groups that count against the pacing of admission. Surplus and stale work never does."""


class IllegalTransition(Exception):
    """A bug, never a consequence of input: the caller asked for an edge that does not exist."""


def check(before: RolloutState, after: RolloutState) -> None:
    """Raise IllegalTransition unless `after` may follow `before`."""
    if after not in EDGES[before]:
        raise IllegalTransition(f"{before} -> {after}")


def may_open_group(counted: int, group_size: int, version: int, max_staleness: int, per_version: int) -> bool:
    """Pacing at admission: may a group on `version` open, `counted` rollouts being trained, assigned, ready or
    reserved? With S = 0 this admits exactly B rollouts per version, with S it lets generation run S versions ahead."""
    return counted + group_size <= (max_staleness + version + 1) * per_version


def is_stale(newest: int, version: int, max_staleness: int) -> bool:
    """Exactly S versions old is kept."""
    return newest - version > max_staleness


@dataclass(frozen=True)
class Member:
    """One slot of a group: the state of its latest rollout (None if never leased) and its reward."""

    state: RolloutState | None
    reward: float | None


def settle_group(members: Sequence[Member], min_group: int) -> GroupState:
    """What a group becomes when a member has changed: still open, ready, surplus (no variance), or stale when the
    coordinator itself lost too many members for the group ever to train."""
    accepted = [member for member in members if member.state is RolloutState.ACCEPTED]
    lost = sum(member.state in COORDINATOR_LOSSES for member in members)
    if len(accepted) + lost < len(members):
        return GroupState.OPEN
    if len(accepted) < max(min_group, 1):
        return GroupState.STALE
    rewards = {member.reward for member in accepted}
    return GroupState.READY if len(rewards) > 1 else GroupState.SURPLUS


MEMBER_STATE = {
    GroupState.READY: RolloutState.READY,
    GroupState.SURPLUS: RolloutState.SURPLUS,
    GroupState.STALE: RolloutState.STALE,
}
"""What accepted members become when their group leaves `open`."""
