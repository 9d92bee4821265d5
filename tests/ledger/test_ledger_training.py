"""Assignment, confirmation, versions, ageing, the clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, select
from sqlalchemy.exc import NoResultFound

from coordinator.ledger import clock, leases, training
from coordinator.ledger.credits import check_balance
from coordinator.ledger.database import Ledger
from coordinator.ledger.states import RolloutState
from coordinator.ledger.tables import checkpoints, evaluations, groups, outages, rollouts, samples, steps
from coordinator.ledger.training import Batch, assign, confirm, enter_version, evaluated
from protocol.reasons import Refusal
from protocol.runspec import RunSpec
from tests.ledger import builders
from tests.ledger.builders import group_states, lease, published, states, submit, verify, work


@contextmanager
def started(ledger: Ledger, spec: RunSpec) -> Iterator[Connection]:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        yield tx


def groups_of(batch: Batch | None) -> list[int]:
    assert batch is not None
    return sorted({member.group_id for member in batch.rollouts})


def test_no_batch_while_too_little_is_ready(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        assert assign(tx, spec, 1, now=0.0) is None, "no version yet"
    with started(ledger, spec) as tx:
        assert assign(tx, spec, 1, now=0.0) is None
        work(tx, spec, "a", 4)
        work(tx, spec, "a", 4, builders.alike)
        assert assign(tx, spec, 1, now=0.0) is None and tx.execute(select(steps)).all() == []
        work(tx, spec, "a", 4)
        batch = assign(tx, spec, 1, now=5.0)
        assert groups_of(batch) == [1, 3]
        assert states(tx) == ["assigned"] * 4 + ["surplus"] * 4 + ["assigned"] * 4


def test_a_batch_says_what_the_trainer_needs(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec) as tx:
        work(tx, spec, "a", 8)
        batch = assign(tx, spec, 1, now=5.0)
    assert batch is not None and (batch.step, batch.version, len(batch.rollouts)) == (1, 0, 8)
    one = batch.rollouts[5]
    assert (one.rollout_id, one.group_id, one.version, one.reward) == (6, 2, 0, 1.0)
    assert (one.evidence, one.position, one.staleness) == (builders.digest("evidence"), 1, 0)
    assert one.prompt == builders.problem(1).prompt


def test_the_same_step_always_gets_the_same_batch(tmp_path: Path, spec: RunSpec) -> None:
    path = tmp_path / "ledger.db"
    ledger = builders.open_ledger(path)
    with started(ledger, spec) as tx:
        work(tx, spec, "a", 8)
        first = assign(tx, spec, 1, now=5.0)
        work(tx, spec, "a", 8)
    ledger.close()
    ledger = builders.open_ledger(path)
    with ledger.write() as tx:
        assert assign(tx, spec, 1, now=50.0) == first
        confirm(tx, spec, 1, {"loss": 0.5}, published(1), now=60.0)
        assert assign(tx, spec, 1, now=70.0) == first, "also when it is trained and another version is newest"
        second = assign(tx, spec, 2, now=70.0)
        assert groups_of(second) == [3, 4] and second is not None and second.version == 1
        assert {member.staleness for member in second.rollouts} == {1}
        confirm(tx, spec, 2, {}, published(2), now=80.0)
        assert assign(tx, spec, 2, now=90.0) == second
    ledger.close()


def test_two_steps_at_once_share_nothing(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec) as tx:
        work(tx, spec, "a", 16)
        assert [groups_of(assign(tx, spec, step, now=5.0)) for step in (1, 2)] == [[1, 2], [3, 4]]
        assert assign(tx, spec, 3, now=5.0) is None


def test_oldest_version_first(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec) as tx:
        early = lease(tx, spec, "a", 4, versions=(0,))
        builders.publish(tx, spec, 1, now=1.0)
        work(tx, spec, "b", 8, version=1, now=2.0)
        submit(tx, "a", early, now=3.0)
        verify(tx, spec, now=4.0)
        work(tx, spec, "b", 4, version=0, now=5.0)
        versions = tx.execute(select(groups.c.id, groups.c.version).order_by(groups.c.id)).all()
        assert versions == [(1, 0), (2, 1), (3, 1), (4, 0)]
        assert groups_of(assign(tx, spec, 1, now=6.0)) == [1, 4]


def test_staleness_in_flight_and_in_queue(ledger: Ledger) -> None:
    spec = builders.make_spec(max_staleness=4)
    with started(ledger, spec) as tx:
        granted = lease(tx, spec, "a", 8)
        builders.publish(tx, spec, 1, now=10.0)
        builders.publish(tx, spec, 2, now=20.0)
        submit(tx, "a", granted, now=20.0)
        builders.publish(tx, spec, 3, now=30.0)
        verify(tx, spec, now=31.0)
        batch = assign(tx, spec, 1, now=32.0)
        assert batch is not None and {member.staleness for member in batch.rollouts} == {3}
        assert set(tx.execute(select(rollouts.c.staleness_in_flight)).scalars()) == {2}


def test_several_steps_make_a_version(ledger: Ledger) -> None:
    spec = builders.make_spec(publish_every=2, max_staleness=0)
    with started(ledger, spec) as tx:
        work(tx, spec, "a", 8)
        assert groups_of(assign(tx, spec, 1, now=1.0)) == [1]
        confirm(tx, spec, 1, {}, None, now=2.0)
        assert leases.newest_checkpoint(tx) == (0, 0.0)
        with pytest.raises(Refusal):
            lease(tx, spec, "a", 1)
        assert groups_of(assign(tx, spec, 2, now=3.0)) == [2]
        confirm(tx, spec, 2, {}, published(1), now=4.0)
        assert leases.newest_checkpoint(tx) == (1, 4.0)
        assert len(lease(tx, spec, "a", 8, versions=(1,), now=5.0)) == 2


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_short_groups_fill_their_place(ledger: Ledger, staleness: int) -> None:
    """Groups that lost a member to the coordinator count in full on both sides, or the run would wait for itself."""
    spec = builders.make_spec(max_staleness=staleness)

    def unlucky(job: builders.Job) -> tuple[RolloutState, float]:
        lost = job.slot == 0 and job.group_id % 2
        return RolloutState.UNVERIFIABLE if lost else builders.ACCEPTED, float(job.slot % 2)

    with started(ledger, spec) as tx:
        for version in range(6):
            now = 100.0 * version
            granted = lease(tx, spec, "a", 1000, versions=(version,), now=now)
            submit(tx, "a", granted, now=now)
            while verify(tx, spec, unlucky, min_group=3, now=now):
                pass
            batch = assign(tx, spec, version, now=now + 1)
            assert batch is not None, f"blocked at version {version}"
            assert len(batch.rollouts) == 7
            confirm(tx, spec, version, {}, published(version + 1), now=now + 2)
        assert check_balance(tx).balanced


def test_confirm_is_idempotent(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec) as tx:
        work(tx, spec, "a", 8)
        assign(tx, spec, 1, now=5.0)
        confirm(tx, spec, 1, {"loss": 0.5}, published(1), now=6.0)
        before = [tx.execute(select(table)).all() for table in (rollouts, groups, steps, checkpoints)]
        confirm(tx, spec, 1, {"loss": 9.9}, published(1), now=60.0)
        confirm(tx, spec, 1, {}, None, now=61.0)
        assert [tx.execute(select(table)).all() for table in (rollouts, groups, steps, checkpoints)] == before
        step = tx.execute(select(steps)).one()
        assert states(tx) == ["trained"] * 8 and group_states(tx) == ["trained"] * 2
    assert (step.confirmed_at, step.metrics) == (6.0, '{"loss": 0.5}')


def test_confirm_then_publish(ledger: Ledger, spec: RunSpec) -> None:
    """A crash between the two: the trainer confirms again, with the version."""
    with started(ledger, spec) as tx:
        work(tx, spec, "a", 8)
        assign(tx, spec, 1, now=5.0)
        confirm(tx, spec, 1, {}, None, now=6.0)
        assert leases.newest_checkpoint(tx) == (0, 0.0)
        confirm(tx, spec, 1, {}, published(1), now=7.0)
        assert leases.newest_checkpoint(tx) == (1, 7.0)


def test_only_assigned_steps_are_confirmed(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec):
        pass
    with pytest.raises(NoResultFound), ledger.write() as tx:
        confirm(tx, spec, 1, {}, published(1), now=6.0)
    with ledger.read() as tx:
        assert leases.newest_checkpoint(tx) == (0, 0.0)


def test_versions_are_entered_once_and_in_order(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        with pytest.raises(ValueError, match="does not follow"):
            enter_version(tx, spec, published(1), now=1.0)
        enter_version(tx, spec, published(0), now=1.0)
        enter_version(tx, spec, published(1), now=2.0)
        for version in (0, 1):
            enter_version(tx, spec, published(version), now=9.0)
            with pytest.raises(ValueError, match="other weights"):
                enter_version(tx, spec, published(version, "other"), now=9.0)
        with pytest.raises(ValueError, match="does not follow"):
            enter_version(tx, spec, published(3), now=9.0)
        assert leases.newest_checkpoint(tx) == (1, 2.0)


@pytest.mark.parametrize("staleness", [0, 4])
def test_exactly_s_is_kept_and_older_work_ends(ledger: Ledger, staleness: int) -> None:
    spec = builders.make_spec(max_staleness=staleness)
    with started(ledger, spec) as tx:
        work(tx, spec, "a", 4)
        (mixed,) = lease(tx, spec, "b", 4)
        submit(tx, "b", [replace(mixed, slots=mixed.slots[:3])])
        verify(tx, spec, limit=1)
        verify(tx, spec, lambda job: (builders.REJECTED, 0.0), limit=1)
        for version in range(1, staleness + 1):
            builders.publish(tx, spec, version, now=10.0 + version)
        clock.tick(tx, spec, 4, now=20.0)
        assert group_states(tx) == ["ready", "open"]
        assert states(tx) == ["ready"] * 4 + ["accepted", "rejected", "submitted", "leased"]
        builders.publish(tx, spec, staleness + 1, now=30.0)
        assert group_states(tx) == ["stale", "stale"]
        assert states(tx) == ["stale"] * 4 + ["stale", "rejected", "submitted", "void"]
        assert builders.slot_states(tx, 2) == ["closed"] * 4
        assert leases.counted_rollouts(tx) == 0 and check_balance(tx).balanced
        verify(tx, spec, now=31.0)
        assert states(tx)[6] == "stale" and check_balance(tx).credited == 6 * 13, "late, but paid"
        assert assign(tx, spec, 1, now=32.0) is None


@pytest.mark.parametrize("staleness", [0, 4])
def test_the_trainer_takes_exactly_s(ledger: Ledger, staleness: int) -> None:
    spec = builders.make_spec(max_staleness=staleness)
    with started(ledger, spec) as tx:
        work(tx, spec, "a", 8)
        for version in range(1, staleness + 1):
            builders.publish(tx, spec, version, now=10.0)
        batch = assign(tx, spec, 1, now=11.0)
        assert batch is not None and {member.staleness for member in batch.rollouts} == {staleness}
        builders.publish(tx, spec, staleness + 1, now=12.0)
        assert states(tx) == ["assigned"] * 8, "assigned batches stay"
        confirm(tx, spec, 1, {}, None, now=13.0)


def test_a_lowered_staleness_ages_at_the_next_tick(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec) as tx:
        work(tx, spec, "a", 8)
        builders.publish(tx, spec, 1, now=10.0)
        lowered = spec.model_copy(update={"max_staleness": 0})
        assert assign(tx, lowered, 1, now=11.0) is None
        clock.tick(tx, lowered, 4, now=12.0)
        assert group_states(tx) == ["stale", "stale"]


def test_tick_before_anything_is_there(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        clock.tick(tx, spec, 4, now=0.0)
        clock.tick(tx, spec, 4, now=1000.0)
        assert len(tx.execute(select(outages)).all()) == 1


def test_leases_run_out(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec) as tx:
        lease(tx, spec, "a", 4)
        submit(tx, "a", [])
        lease(tx, spec, "b", 1, now=20.0)
        for now in (0.0, 25.0, 50.0, 75.0, 100.0):
            clock.tick(tx, spec, 4, now=now)
        assert states(tx) == ["leased"] * 5, "to the second"
        clock.tick(tx, spec, 4, now=100.1)
        assert states(tx) == ["expired"] * 4 + ["leased"]
        assert builders.slot_states(tx, 1) == ["open"] * 4
        assert tx.execute(select(outages)).all() == []


def test_an_outage_extends_deadlines_before_anything_runs_out(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec) as tx:
        granted = lease(tx, spec, "a", 4)
        clock.tick(tx, spec, 4, now=10.0)
        clock.tick(tx, spec, 4, now=1010.0)
        assert states(tx) == ["leased"] * 4
        assert tx.execute(select(outages.c.started, outages.c.ended)).all() == [(10.0, 1010.0)]
        assert [result.code for result in submit(tx, "a", granted, now=1100.0)] == [None] * 4


def test_thirty_seconds_are_no_outage(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec) as tx:
        lease(tx, spec, "a", 4)
        for turn in range(5):
            clock.tick(tx, spec, 4, now=30.0 * turn)
        assert states(tx) == ["expired"] * 4 and tx.execute(select(outages)).all() == []


def test_a_clock_that_goes_back_does_no_harm(ledger: Ledger, spec: RunSpec) -> None:
    with started(ledger, spec) as tx:
        lease(tx, spec, "a", 4)
        for now in (50.0, 10.0, 20.0, 99.0):
            clock.tick(tx, spec, 4, now=now)
        assert states(tx) == ["leased"] * 4


def test_evaluations_and_samples(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        evaluated(tx, 0, 3, 10, now=1.0)
        evaluated(tx, 0, 9, 10, now=2.0)
        training.add_sample(tx, "trainer", {"step_seconds": 1.5}, now=3.0)
        assert tx.execute(select(evaluations)).all() == [(0, 1.0, 3, 10)]
        assert tx.execute(select(samples.c.at, samples.c.source, samples.c.data)).all() == [
            (3.0, "trainer", '{"step_seconds": 1.5}')
        ]
