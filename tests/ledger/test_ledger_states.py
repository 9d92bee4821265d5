"""The state machine and the arithmetic of admission, without a database."""

import itertools
import random

import pytest

from coordinator.ledger.states import (
    CLOSES_SLOT,
    COORDINATOR_LOSSES,
    COUNTED,
    EDGES,
    MEMBER_STATE,
    PAID,
    REOPENS_SLOT,
    START,
    GroupState,
    IllegalTransition,
    Member,
    RolloutState,
    check,
    is_stale,
    may_open_group,
    settle_group,
)

S = RolloutState
# Written down from the drawing of a rollout's life, not from the code.
LIFE = """
leased: submitted expired void
submitted: verifying
verifying: submitted accepted rejected inconclusive unverifiable
inconclusive: verifying unverified
accepted: ready surplus stale quarantined
ready: assigned stale quarantined accepted
assigned: trained
rejected: overturned
surplus: quarantined
stale: quarantined
"""
ALLOWED = {
    (S(before), S(after))
    for line in LIFE.strip().splitlines()
    for before, afters in [line.split(":")]
    for after in afters.split()
}
PAIRS = [pytest.param(a, b, id=f"{a}-{b}") for a in S for b in S]


@pytest.mark.parametrize("before,after", PAIRS)
def test_every_edge(before: RolloutState, after: RolloutState) -> None:
    if (before, after) in ALLOWED:
        check(before, after)
    else:
        with pytest.raises(IllegalTransition):
            check(before, after)


def test_every_state_is_reached_and_every_waiting_state_is_left() -> None:
    reached, todo = set(), [START]
    while todo:
        state = todo.pop()
        if state not in reached:
            reached.add(state)
            todo += EDGES[state]
    assert reached == set(S) == set(EDGES)
    waiting = {S.LEASED, S.SUBMITTED, S.VERIFYING, S.INCONCLUSIVE, S.ACCEPTED, S.READY, S.ASSIGNED}
    assert all(EDGES[state] for state in waiting)


def test_sets_agree() -> None:
    assert not REOPENS_SLOT & CLOSES_SLOT and not PAID & (REOPENS_SLOT | COORDINATOR_LOSSES)
    assert not {MEMBER_STATE[state] for state in (GroupState.READY, GroupState.SURPLUS, GroupState.STALE)} - PAID
    assert COUNTED == set(GroupState) - {GroupState.SURPLUS, GroupState.STALE}


KINDS = [
    Member(None, None),
    Member(S.LEASED, None),
    Member(S.VERIFYING, None),
    Member(S.ACCEPTED, 0.0),
    Member(S.ACCEPTED, 1.0),
    Member(S.REJECTED, 0.0),
    Member(S.EXPIRED, None),
    Member(S.INCONCLUSIVE, 1.0),
    Member(S.UNVERIFIED, 1.0),
    Member(S.UNVERIFIABLE, None),
]


def expected(members: tuple[Member, ...], min_group: int) -> GroupState:
    accepted = [m.reward for m in members if m.state == "accepted"]
    lost = [m for m in members if m.state in ("unverified", "unverifiable")]
    if len(accepted) + len(lost) != len(members):
        return GroupState.OPEN  # a slot is still to be answered
    if not accepted or len(accepted) < min_group:
        return GroupState.STALE
    return GroupState.READY if min(accepted) != max(accepted) else GroupState.SURPLUS  # type: ignore[type-var]


@pytest.mark.parametrize("min_group", [0, 1, 2, 3])
def test_settle_group_truth_table(min_group: int) -> None:
    seen = set()
    for members in itertools.product(KINDS, repeat=3):
        outcome = settle_group(members, min_group)
        assert outcome is expected(members, min_group), members
        seen.add(outcome)
    assert seen == {GroupState.OPEN, GroupState.READY, GroupState.SURPLUS, GroupState.STALE}


@pytest.mark.parametrize("staleness", range(6))
def test_exactly_s_is_kept(staleness: int) -> None:
    assert not is_stale(10, 10 - staleness, staleness)
    assert is_stale(10, 10 - staleness - 1, staleness)
    assert not is_stale(3, 3, 0) and not is_stale(3, 4, 0)


@pytest.mark.parametrize("staleness,versions", [(0, 1), (4, 5)])
@pytest.mark.parametrize("version", [0, 1, 7])
def test_may_open_group_to_the_rollout(staleness: int, versions: int, version: int) -> None:
    room = (version + versions) * 16
    assert may_open_group(room - 8, 8, version, staleness, 16)
    assert not may_open_group(room - 7, 8, version, staleness, 16)
    assert not may_open_group(room, 8, version, staleness, 16)


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("share", [0.0, 0.9, 0.99])
def test_surplus_never_blocks(staleness: int, share: float) -> None:
    """A run in which most groups have no variance, by the pure functions alone: whenever no group may open, a batch is
    waiting for the trainer."""
    size, per_version, chance = 4, 16, random.Random(7)
    trained = ready = version = closed = 0
    while closed < 4000:
        if may_open_group(trained + ready, size, version, staleness, per_version):
            rewards = [1.0] * size if chance.random() < share else [0.0] + [1.0] * (size - 1)
            outcome = settle_group([Member(S.ACCEPTED, reward) for reward in rewards], size)
            closed += 1
            ready += size if outcome in COUNTED else 0
        else:
            assert ready >= per_version, f"blocked at version {version}"
            ready, trained, version = ready - per_version, trained + per_version, version + 1
            assert trained + ready <= (staleness + version + 1) * per_version
    assert version > 4000 * (1 - share) * size / per_version * 0.7 - staleness - 1
