"""Leases: who gets which slot, and when there is none."""

import dataclasses

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from coordinator.ledger import clock, leases
from coordinator.ledger.database import Ledger
from coordinator.ledger.leases import Granted
from coordinator.ledger.tables import events, groups, problems, rollouts
from protocol.reasons import Reason, Refusal
from protocol.runspec import RunSpec, SamplingSpec
from tests.ledger import builders
from tests.ledger.builders import lease


def places(granted: tuple[Granted, ...]) -> list[tuple[int, int, int]]:
    """(group, index, fencing) of every leased slot."""
    return [(part.group_id, slot.index, slot.fencing) for part in granted for slot in part.slots]


def test_before_version_0_there_is_nothing(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.admit(tx, "a")
        with pytest.raises(Refusal) as caught:
            lease(tx, spec, "a")
    assert caught.value.reason is Reason.NOT_READY and caught.value.retry_after


def test_a_lease_says_everything(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        (first,) = lease(tx, spec, "a", 3, now=5.0)
        second, third = lease(tx, spec, "b", 3, now=6.0)
        rows = tx.execute(select(rollouts)).all()
        history = tx.execute(select(events)).all()
    assert places((first,)) == [(1, 0, 1), (1, 1, 1), (1, 2, 1)]
    assert places((second, third)) == [(1, 3, 1), (2, 0, 1), (2, 1, 1)], "what is open goes first"
    assert (first.problem_id, first.version, first.deadline) == ("toy-0", 0, 105.0)
    assert (first.prompt, first.weights_digest) == (builders.problem(0).prompt, builders.published(0).weights_digest)
    assert len({first.lease_id, second.lease_id, third.lease_id}) == 3
    assert {row.state for row in rows} == {"leased"} and [event.after for event in history] == ["leased"] * 6


def test_lease_time_covers_the_longest_answer(spec: RunSpec) -> None:
    slow = spec.model_copy(
        update={"sampling": SamplingSpec(temperature=1.0, max_prompt_tokens=16, max_tokens=640)}
    )
    assert leases.lease_seconds(spec) == 100.0 and leases.lease_seconds(slow) == 640.0


@pytest.mark.parametrize("staleness,groups_", [(0, 2), (1, 4), (4, 10)])
def test_queue_is_full_at_exactly_the_capacity(ledger: Ledger, staleness: int, groups_: int) -> None:
    spec = builders.make_spec(max_staleness=staleness)
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        assert len(places(lease(tx, spec, "a", 1000))) == groups_ * 4 == (staleness + 1) * 8
        assert leases.counted_rollouts(tx) == groups_ * 4
        with pytest.raises(Refusal) as caught:
            lease(tx, spec, "a", 1)
        assert caught.value.reason is Reason.QUEUE_FULL and caught.value.retry_after


def test_surplus_makes_room_and_ready_does_not(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        for _ in range(10):
            builders.work(tx, spec, "a", 8, builders.alike)
        assert leases.counted_rollouts(tx) == 0
        builders.work(tx, spec, "a", 16)
        assert leases.counted_rollouts(tx) == 16
        with pytest.raises(Refusal):
            lease(tx, spec, "a", 1)


def test_quota(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        assert len(places(lease(tx, spec, "a", 8, quota=5))) == 5
        with pytest.raises(Refusal) as caught:
            lease(tx, spec, "a", 1, quota=5)
        assert caught.value.reason is Reason.QUOTA_EXHAUSTED
        assert leases.open_slots_of(tx, builders.digest("a")) == 5
        granted = lease(tx, spec, "b", 2, quota=5)
        builders.submit(tx, "b", granted)
        assert leases.open_slots_of(tx, builders.digest("b")) == 0, "what is returned is not held"
        assert len(places(lease(tx, spec, "b", 8, quota=5))) == 5


def test_dropped_slots_go_first_and_keep_what_their_seed_is_made_of(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        (dropped,) = lease(tx, spec, "a", 4)
        (kept,) = lease(tx, spec, "b", 4, now=50.0)
        clock.tick(tx, spec, 4, now=90.0)
        clock.tick(tx, spec, 4, now=101.0)
        again = lease(tx, spec, "b", 6, now=102.0)
    assert places(again) == [(1, 0, 2), (1, 1, 2), (1, 2, 2), (1, 3, 2), (3, 0, 1), (3, 1, 1)]
    same = ("group_id", "problem_id", "version", "weights_digest", "prompt")
    assert {name: getattr(again[0], name) for name in same} == {name: getattr(dropped, name) for name in same}
    assert again[0].lease_id != dropped.lease_id and again[0].deadline == 202.0 and kept.group_id == 2


def test_fencing_goes_up_with_every_lease(ledger: Ledger, spec: RunSpec) -> None:
    fencing = []
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        for turn in range(4):
            now = 29.0 * 4 * turn
            fencing += [slot[2] for slot in places(lease(tx, spec, "a", 1, now=now))]
            for part in range(1, 5):
                clock.tick(tx, spec, 4, now=now + 29.0 * part)
        rows = tx.execute(select(rollouts.c.group_id, rollouts.c.slot)).all()
    assert fencing == [1, 2, 3, 4] and set(rows) == {(1, 0)}


def test_a_rejected_slot_goes_to_others_first(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        builders.work(tx, spec, "a", 1, lambda job: (builders.REJECTED, 0.0))
        assert places(lease(tx, spec, "a", 4)) == [(1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 0, 1)]
        assert places(lease(tx, spec, "b", 1)) == [(1, 0, 2)]


def test_a_lone_node_gets_its_rejected_slot_back_in_the_end(ledger: Ledger) -> None:
    """With S = 0 nothing ages out while a slot of the current version is open: nobody else would ever answer it."""
    spec = builders.make_spec(max_staleness=0)
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        builders.work(tx, spec, "a", 8, lambda job: (builders.REJECTED, 0.0) if job.slot == 1 else builders.varied(job))
        with pytest.raises(Refusal) as caught:
            lease(tx, spec, "a", 8, now=99.0)
        assert caught.value.reason is Reason.QUEUE_FULL
        assert places(lease(tx, spec, "a", 8, now=101.0)) == [(1, 1, 2), (2, 1, 2)]


def test_a_new_group_takes_the_next_problem(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        lease(tx, spec, "a", 9)
        query = select(problems.c.number, problems.c.id, groups.c.id).join(groups).order_by(groups.c.id)
        rows = tx.execute(query).all()
    assert rows == [(0, "toy-0", 1), (1, "toy-1", 2), (2, "toy-2", 3)]


def test_new_groups_open_on_the_newest_version_or_within_the_grace(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        builders.publish(tx, spec, 1, now=50.0)
        (early,) = lease(tx, spec, "a", 4, versions=(0,), now=59.9)
        assert early.version == 0
        with pytest.raises(Refusal) as caught:
            lease(tx, spec, "a", 4, versions=(0,), now=60.0)
        assert caught.value.reason is Reason.VERSION_BEHIND
        (newest,) = lease(tx, spec, "a", 4, versions=(0, 1), now=60.0)
        assert newest.version == 1


def test_pacing_of_the_older_version_is_its_own(ledger: Ledger) -> None:
    spec = builders.make_spec(max_staleness=1)
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        builders.publish(tx, spec, 1, now=0.0)
        assert len(places(lease(tx, spec, "a", 1000, versions=(0,), now=1.0))) == 2 * 8
        assert len(places(lease(tx, spec, "a", 1000, versions=(1,), now=1.0))) == 3 * 8 - 2 * 8


@pytest.mark.parametrize("versions", [(0,), (0, 5), (5,), (2**53 - 1,)])
def test_within_the_grace_but_too_old_to_train(ledger: Ledger, versions: tuple[int, ...]) -> None:
    """With S = 0 nothing on version 0 can train any more: the node has to fetch, not to wait."""
    spec = builders.make_spec(max_staleness=0)
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        builders.publish(tx, spec, 1, now=50.0)
        with pytest.raises(Refusal) as caught:
            lease(tx, spec, "a", 4, versions=versions, now=51.0)
    assert caught.value.reason is Reason.VERSION_BEHIND


@pytest.mark.parametrize("versions", [(1,), (2**53 - 1,), (1, 2)])
def test_only_versions_that_the_ledger_does_not_know(ledger: Ledger, spec: RunSpec, versions: tuple[int, ...]) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        with pytest.raises(Refusal) as caught:
            lease(tx, spec, "a", 4, versions=versions)
        assert caught.value.reason is Reason.VERSION_BEHIND
        assert tx.execute(select(groups)).all() == []


def test_a_version_that_is_not_in_the_ledger_yet_hides_none_that_is(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        (granted,) = lease(tx, spec, "a", 4, versions=(0, 1))
    assert granted.version == 0


def test_open_slots_of_older_versions_go_to_nodes_that_hold_them(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b", "c")
        lease(tx, spec, "a", 2)
        builders.publish(tx, spec, 1, now=50.0)
        (old,) = lease(tx, spec, "b", 1, versions=(0,), now=99.0)
        assert (old.group_id, old.version) == (1, 0)
        (new,) = lease(tx, spec, "c", 1, versions=(1,), now=99.0)
        assert (new.group_id, new.version) == (2, 1)
        both = lease(tx, spec, "b", 2, versions=(0, 1), now=99.0)
        assert places(both) == [(1, 3, 1), (2, 1, 1)]


def test_two_slots_are_never_one(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b", "c")
        taken = [place for n in range(15) for place in places(lease(tx, spec, "abc"[n % 3], 1))]
    assert len(set(taken)) == 15


def test_unregistered_nodes_cannot_hold_a_slot(ledger: Ledger, spec: RunSpec) -> None:
    """The edge refuses them before; the database does so again."""
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
    with pytest.raises(IntegrityError), ledger.write() as tx:
        lease(tx, spec, "stranger")
    with ledger.read() as tx:
        assert tx.execute(select(groups)).all() == [] and tx.execute(select(rollouts)).all() == []


def test_grants_are_values(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        (granted,) = lease(tx, spec, "a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        granted.deadline = 1e9  # type: ignore[misc]
