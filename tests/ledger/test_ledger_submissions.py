"""What a returned completion may do before anybody has looked at it."""

from dataclasses import replace

import pytest
from sqlalchemy import select

from coordinator.ledger import clock, submissions
from coordinator.ledger.database import Ledger
from coordinator.ledger.submissions import Item, Result
from coordinator.ledger.tables import rollouts
from protocol.reasons import Reason
from protocol.runspec import RunSpec
from tests.ledger import builders
from tests.ledger.builders import digest, items, lease, states, submit

ACKNOWLEDGED = [Result(n, None) for n in (1, 2, 3, 4)]


def refused(code: Reason, times: int = 4) -> list[Result]:
    return [Result(None, code)] * times


def test_acknowledged_with_the_place_in_the_signed_body(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        granted = lease(tx, spec, "a")
        assert submissions.submit(tx, digest("a"), items(granted), digest("body"), now=9.0) == ACKNOWLEDGED
        rows = tx.execute(select(rollouts).order_by(rollouts.c.id)).all()
    assert [row.position for row in rows] == [0, 1, 2, 3]
    assert {(row.state, row.blob, row.submitted_at) for row in rows} == {("submitted", digest("body"), 9.0)}
    assert [row.payload_hash for row in rows] == [item.payload_hash for item in items(granted)]


def test_the_first_acknowledged_bytes_are_the_answer(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        granted = lease(tx, spec, "a")
        submit(tx, "a", granted)
        before = tx.execute(select(rollouts)).all()
        assert submit(tx, "a", granted, now=50.0) == ACKNOWLEDGED, "the same bytes get the same answer"
        assert submit(tx, "a", granted, now=1e9) == ACKNOWLEDGED, "however late"
        assert submit(tx, "a", granted, text="other") == refused(Reason.DUPLICATE)
        assert tx.execute(select(rollouts)).all() == before
        builders.verify(tx, spec)
        assert submit(tx, "a", granted) == ACKNOWLEDGED
        assert submit(tx, "a", granted, text="other") == refused(Reason.DUPLICATE)


def test_twice_in_one_batch(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        (item,) = items(lease(tx, spec, "a", 1))
        other = replace(item, payload_hash=digest("other"))
        found = submissions.submit(tx, digest("a"), [item, other, item], digest("body"), now=1.0)
        row = tx.execute(select(rollouts)).one()
    assert found == [Result(1, None), Result(None, Reason.DUPLICATE), Result(1, None)]
    assert (row.payload_hash, row.position) == (item.payload_hash, 0)


def test_each_item_for_itself(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        good, wrong_index, wrong_fencing, unknown = items(lease(tx, spec, "a"))
        (foreign,) = items(lease(tx, spec, "b", 1))
        batch = [
            replace(wrong_index, index=7),
            replace(wrong_fencing, fencing=2),
            replace(unknown, lease_id="0" * 32),
            foreign,
            replace(wrong_index, index=-1),
            Item("", 0, 0, ""),
            good,
        ]
        found = submissions.submit(tx, digest("a"), batch, digest("body"), now=1.0)
        assert states(tx) == ["submitted"] + ["leased"] * 4
    assert [result.code for result in found] == [
        Reason.LEASE_INDEX,
        Reason.LEASE_LOST,
        Reason.LEASE_UNKNOWN,
        Reason.LEASE_NOT_YOURS,
        Reason.LEASE_INDEX,
        Reason.LEASE_UNKNOWN,
        None,
    ]


def test_deadline_to_the_second(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        granted = lease(tx, spec, "a")
        late = submit(tx, "a", granted, now=100.001)
        assert late == refused(Reason.LEASE_EXPIRED) and states(tx) == ["leased"] * 4
        assert submit(tx, "a", granted, now=100.0) == ACKNOWLEDGED


def test_expired_and_lost(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        granted = lease(tx, spec, "a")
        clock.tick(tx, spec, 4, now=101.0)
        assert submit(tx, "a", granted, now=101.0) == refused(Reason.LEASE_EXPIRED)
        again = lease(tx, spec, "b", now=102.0)
        assert submit(tx, "a", granted, now=103.0) == refused(Reason.LEASE_LOST), "the slot is somebody else's"
        stolen = [replace(item, lease_id=granted[0].lease_id) for item in items(again)]
        found = submissions.submit(tx, digest("a"), stolen, digest("body"), now=103.0)
        assert found == refused(Reason.LEASE_LOST), "the new fencing number with the old lease"
        assert [result.code for result in submit(tx, "b", again, now=104.0)] == [None] * 4


def test_void(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        granted = lease(tx, spec, "a")
        for version in (1, 2):
            builders.publish(tx, spec, version, now=10.0)
        assert states(tx) == ["void"] * 4
        assert submit(tx, "a", granted, now=11.0) == refused(Reason.LEASE_VOID)


def test_the_largest_batch_in_as_many_leases(ledger: Ledger) -> None:
    spec = builders.make_spec(group_size=1, rollouts_per_version=512, max_staleness=0)
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        granted = lease(tx, spec, "a", 512)
        assert len({part.lease_id for part in granted}) == 512
        assert submit(tx, "a", granted) == [Result(n, None) for n in range(1, 513)]


@pytest.mark.parametrize("outcome", [builders.ACCEPTED, builders.REJECTED])
def test_after_the_verdict_nothing_changes(ledger: Ledger, spec: RunSpec, outcome: builders.RolloutState) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        granted = lease(tx, spec, "a")
        submit(tx, "a", granted)
        builders.verify(tx, spec, lambda job: (outcome, float(job.slot)))
        before = tx.execute(select(rollouts)).all()
        submit(tx, "a", granted)
        submit(tx, "a", granted, text="other")
        assert tx.execute(select(rollouts)).all() == before
