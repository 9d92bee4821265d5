"""Claims, verdicts, and what they mean for slot, group and credit."""

from collections.abc import Mapping

import pytest
from sqlalchemy import select

from coordinator.ledger import clock, leases, verdicts
from coordinator.ledger.credits import check_balance
from coordinator.ledger.database import Ledger
from coordinator.ledger.states import IllegalTransition, RolloutState
from coordinator.ledger.tables import credits, events, rollouts
from coordinator.ledger.tables import verdicts as table
from coordinator.ledger.transitions import begin, move, states_of
from coordinator.ledger.verdicts import CLAIM_SECONDS, MAX_ATTEMPTS, Job, claim, give_back, record
from protocol.runspec import RunSpec
from tests.ledger import builders
from tests.ledger.builders import decide, digest, group_states, lease, slot_states, states, submit, verify

S = RolloutState


def by_slot(outcomes: Mapping[int, RolloutState]) -> builders.Rule:
    """Outcome by slot number, else accepted with a reward that varies."""
    return lambda job: (outcomes.get(job.slot, S.ACCEPTED), float(job.slot % 2))


def submitted(ledger: Ledger, spec: RunSpec, slots: int = 4) -> None:
    """A node `a` that has returned `slots` slots; a node `b` with nothing."""
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        submit(tx, "a", lease(tx, spec, "a", slots))


def test_claim_hands_out_everything_a_verdict_needs(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        jobs = claim(tx, "v", 3, now=2.0)
        assert states(tx) == ["verifying"] * 3 + ["submitted"]
    assert [job.rollout_id for job in jobs] == [1, 2, 3]
    job = jobs[1]
    assert (job.group_id, job.problem_id, job.environment, job.slot) == (1, "toy-0", "toy", 1)
    assert (job.version, job.node_id, job.blob, job.position) == (0, digest("a"), digest("blob"), 1)
    assert (job.attempts, job.prompt, job.gold) == (1, builders.problem(0).prompt, {"answer": 1})


def test_two_verifiers_never_hold_the_same_job(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        first, second, third = (claim(tx, name, 2, now=2.0) for name in "vwx")
    assert [[job.rollout_id for job in jobs] for jobs in (first, second, third)] == [[1, 2], [3, 4], []]


def test_oldest_version_first_and_one_version_at_a_time(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec, 1)
    with ledger.write() as tx:
        builders.publish(tx, spec, 1, now=3.0)
        submit(tx, "b", lease(tx, spec, "b", 4, versions=(1,), now=3.0), now=4.0)
        submit(tx, "a", lease(tx, spec, "a", 2, versions=(0,), now=4.0), now=5.0)
        found = [[(job.version, job.slot) for job in claim(tx, "v", 100, now=6.0)] for _ in range(3)]
    assert found == [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2), (1, 3)], []]


def test_accepted_is_paid_and_recorded(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec, 1)
    with ledger.write() as tx:
        verify(tx, spec, lambda job: (S.ACCEPTED, 0.5), now=7.0)
        row = tx.execute(select(rollouts)).one()
        verdict = tx.execute(select(table)).one()
        credit = tx.execute(select(credits)).one()
        assert slot_states(tx, 1) == ["closed", "open", "open", "open"] and group_states(tx) == ["open"]
    assert (row.state, row.reward, row.tokens, row.price, row.decided_at) == ("accepted", 0.5, 5, 13, 7.0)
    assert (row.code, row.token_identical, row.evidence) == (None, True, digest("evidence"))
    assert (verdict.rollout_id, verdict.attempt, verdict.outcome, verdict.receipt) == (1, 1, "accepted", "{}")
    assert (credit.rollout_id, credit.node_id, credit.amount) == (1, digest("a"), 13)


def test_rejected_is_not_paid_and_reopens_the_slot(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        verify(tx, spec, by_slot({2: S.REJECTED}))
        assert states(tx) == ["accepted", "accepted", "rejected", "accepted"]
        assert slot_states(tx, 1) == ["closed", "closed", "open", "closed"]
        assert check_balance(tx).credited == 3 * 13
        row = tx.execute(select(table).where(table.c.rollout_id == 3)).one()
        assert (row.code, row.value, row.limit_value) == ("sampling_mismatch", 9.0, 1.0)
        builders.work(tx, spec, "b", 1)
        assert group_states(tx) == ["ready"] and states(tx).count("ready") == 4
        assert check_balance(tx).balanced


@pytest.mark.parametrize(
    "outcomes,min_group,group,members",
    [
        ({}, 4, "ready", "ready"),
        ({0: S.UNVERIFIABLE}, 4, "stale", "stale"),
        ({0: S.UNVERIFIABLE}, 3, "ready", "ready"),
        ({0: S.UNVERIFIABLE, 1: S.UNVERIFIABLE}, 3, "stale", "stale"),
        ({0: S.UNVERIFIABLE, 2: S.UNVERIFIABLE}, 2, "surplus", "surplus"),
        ({0: S.REJECTED}, 1, "open", "accepted"),
        ({0: S.REJECTED, 1: S.UNVERIFIABLE}, 1, "open", "accepted"),
    ],
)
def test_groups_settle(
    ledger: Ledger, spec: RunSpec, outcomes: Mapping[int, RolloutState], min_group: int, group: str, members: str
) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        verify(tx, spec, by_slot(outcomes), min_group=min_group)
        assert group_states(tx) == [group]
        expected = [outcomes[slot].value if slot in outcomes else members for slot in range(4)]
        assert states(tx) == expected
        assert check_balance(tx).balanced, "losses are not paid, surplus and stale members are"
        if group != "open":
            assert slot_states(tx, 1) == ["closed"] * 4


def test_no_variance_is_surplus_and_paid(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        verify(tx, spec, builders.alike)
        assert group_states(tx) == ["surplus"] and states(tx) == ["surplus"] * 4
        assert check_balance(tx).credited == 4 * 13 and leases.counted_rollouts(tx) == 0


def test_last_verdict_after_the_group_aged_out(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        verify(tx, spec, limit=2)
        jobs = claim(tx, "v", 1, now=3.0)
        for version in (1, 2):
            builders.publish(tx, spec, version, now=4.0)
        assert states(tx) == ["stale", "stale", "verifying", "submitted"] and group_states(tx) == ["stale"]
        record(tx, spec, [decide(jobs[0])], "v", 4, now=5.0)
        verify(tx, spec, by_slot({3: S.REJECTED}), now=6.0)
        assert states(tx) == ["stale", "stale", "stale", "rejected"]
        assert slot_states(tx, 1) == ["closed"] * 4, "a late rejection re-opens nothing"
        assert check_balance(tx).balanced and check_balance(tx).rows == 3


def history(ledger: Ledger, rollout: int) -> list[str]:
    with ledger.read() as tx:
        query = select(events.c.after).where(events.c.rollout_id == rollout).order_by(events.c.id)
        return list(tx.execute(query).scalars())


def test_inconclusive_is_tried_twice_more_then_unverified(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    doubtful = by_slot({1: S.INCONCLUSIVE})
    with ledger.write() as tx:
        assert len(verify(tx, spec, doubtful, verifier="v")) == 4
        assert states(tx)[1] == "inconclusive" and slot_states(tx, 1)[1] == "leased"
        assert [job.attempts for job in verify(tx, spec, doubtful, verifier="w")] == [2]
        assert [job.attempts for job in verify(tx, spec, doubtful, verifier="v")] == [3]
        assert verify(tx, spec, doubtful) == []
        assert states(tx) == ["stale", "unverified", "stale", "stale"] and group_states(tx) == ["stale"]
        assert check_balance(tx).balanced and check_balance(tx).rows == 3
        attempts = tx.execute(select(table.c.attempt, table.c.outcome).where(table.c.rollout_id == 2)).all()
        assert tx.execute(select(rollouts.c.code).where(rollouts.c.id == 2)).scalar_one() == "unverified"
    assert attempts == [(1, "inconclusive"), (2, "inconclusive"), (3, "unverified")]
    again = ["verifying", "inconclusive"]
    assert history(ledger, 2) == ["leased", "submitted", *again, *again, *again, "unverified"]


def test_a_verifier_may_say_unverified_itself(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        verify(tx, spec, by_slot({3: S.UNVERIFIED}), min_group=3)
        assert group_states(tx) == ["ready"] and states(tx)[3] == "unverified"
    assert history(ledger, 4)[-2:] == ["inconclusive", "unverified"]


def test_inconclusive_may_end_well(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        verify(tx, spec, by_slot({1: S.INCONCLUSIVE}))
        verify(tx, spec)
        assert group_states(tx) == ["ready"] and check_balance(tx).rows == 4


def test_give_back(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        jobs, others = claim(tx, "v", 2, now=2.0), claim(tx, "w", 1, now=2.0)
        assert give_back(tx, "v", now=3.0, detail="restart") == 2
        assert states(tx) == ["submitted", "submitted", "verifying", "submitted"]
        assert give_back(tx, "v", now=3.0, detail="restart") == 0
        record(tx, spec, [decide(job) for job in jobs], "v", 4, now=4.0)
        assert states(tx)[:2] == ["submitted", "submitted"], "a verdict on what was given back is dropped"
        record(tx, spec, [decide(job) for job in others], "w", 4, now=4.0)
        assert states(tx)[2] == "accepted"
        assert [job.attempts for job in claim(tx, "v", 9, now=5.0)] == [2, 2, 1]


def test_a_claim_that_ran_out_and_was_taken_over(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        slow = claim(tx, "slow", 4, now=2.0)
        clock.tick(tx, spec, 4, now=2.0 + CLAIM_SECONDS)
        assert states(tx) == ["verifying"] * 4, "to the second"
        clock.tick(tx, spec, 4, now=2.1 + CLAIM_SECONDS)
        assert states(tx) == ["submitted"] * 4
        quick = claim(tx, "quick", 4, now=130.0)
        record(tx, spec, [decide(job, S.REJECTED) for job in slow], "slow", 4, now=131.0)
        assert states(tx) == ["verifying"] * 4
        record(tx, spec, [decide(job, reward=float(job.slot)) for job in quick], "quick", 4, now=132.0)
        record(tx, spec, [decide(job, reward=float(job.slot)) for job in quick], "quick", 4, now=132.0)
        record(tx, spec, [decide(job) for job in slow], "slow", 4, now=133.0)
        assert group_states(tx) == ["ready"] and check_balance(tx).rows == 4
        assert len(tx.execute(select(table)).all()) == 4


def crash(ledger: Ledger, spec: RunSpec, verifier: str, limit: int, kills: set[int], now: float) -> list[int]:
    """A verifier that dies of the rollouts in `kills`, and whose next start returns what it held."""
    with ledger.write() as tx:
        jobs = claim(tx, verifier, limit, now=now)
    with ledger.write() as tx:
        if kills & {job.rollout_id for job in jobs}:
            give_back(tx, verifier, now=now + 1, detail="restart")
        else:
            record(tx, spec, [decide(job, reward=float(job.slot)) for job in jobs], verifier, 3, now=now + 1)
    return [job.rollout_id for job in jobs]


def test_a_rollout_that_kills_every_verifier_ends_and_takes_no_other_with_it(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    claims = [crash(ledger, spec, "v", 100, {2}, now=10.0 * turn) for turn in range(MAX_ATTEMPTS - 1)]
    assert claims == [[1, 2, 3, 4]] * 2
    claims = [crash(ledger, spec, "v", 100, {2}, now=10.0 * turn) for turn in range(3, 8)]
    assert claims == [[1], [2], [3], [4], []]
    with ledger.write() as tx:
        assert states(tx) == ["accepted", "verifying", "accepted", "accepted"]
        clock.tick(tx, spec, 3, now=90.0)
        assert states(tx) == ["ready", "unverifiable", "ready", "ready"] and check_balance(tx).rows == 3


def test_verifiers_that_never_answer(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        now, claims = 0.0, []
        while any(state in ("submitted", "verifying") for state in states(tx)):
            claims += [job.attempts for job in claim(tx, "v", 100, now=now)]
            now += CLAIM_SECONDS + 1
            clock.tick(tx, spec, 4, now=now)
        assert claims == [1] * 4 + [2] * 4 + [3] * 4
        assert states(tx) == ["unverifiable"] * 4 and group_states(tx) == ["stale"]
        assert leases.counted_rollouts(tx) == 0 and check_balance(tx).rows == 0


def test_late_verdict_of_a_claim_that_was_given_back_on_the_last_try(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec, 1)
    with ledger.write() as tx:
        for _ in range(MAX_ATTEMPTS):
            (job,) = claim(tx, "v", 1, now=2.0)
            give_back(tx, "v", now=3.0, detail="restart")
        assert claim(tx, "v", 1, now=4.0) == []
        record(tx, spec, [decide(job)], "v", 4, now=4.0)
        assert states(tx) == ["verifying"]
        clock.tick(tx, spec, 4, now=5.0)
        assert states(tx) == ["unverifiable"]


def test_move_refuses_missing_edges_and_rollouts_and_the_transaction_rolls_back(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    for changes in ({1: S.VERIFYING, 2: S.ACCEPTED}, {1: S.VERIFYING, 99: S.VERIFYING}, {1: S.SUBMITTED}):
        with pytest.raises(IllegalTransition), ledger.write() as tx:
            submit(tx, "b", lease(tx, spec, "b", 2))
            move(tx, changes, now=3.0, actor="test")
    with ledger.read() as tx:
        assert states(tx) == ["submitted"] * 4
        assert len(tx.execute(select(events)).all()) == 8


def test_move_and_begin_write_events(ledger: Ledger, spec: RunSpec) -> None:
    submitted(ledger, spec)
    with ledger.write() as tx:
        assert begin(tx, [], now=0.0, actor="x") == []
        move(tx, {}, now=0.0, actor="x")
        move(tx, {3: S.VERIFYING, 1: S.VERIFYING}, now=3.0, actor="y" * 100, detail="z" * 300)
        *_, one, two = tx.execute(select(events).order_by(events.c.id)).all()
        assert states_of(tx, [1, 2, 3, 99]) == {1: S.VERIFYING, 2: S.SUBMITTED, 3: S.VERIFYING}
    assert {(e.rollout_id, e.before, e.after, e.at, e.actor, e.detail) for e in (one, two)} == {
        (n, "submitted", "verifying", 3.0, "y" * 80, "z" * 256) for n in (1, 3)
    }


def test_states_of_many(ledger: Ledger) -> None:
    spec = builders.make_spec(rollouts_per_version=512, max_staleness=1)
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        lease(tx, spec, "a", 1000)
        assert len(states_of(tx, list(range(1, 1001)))) == 1000


def test_nothing_is_decided_twice(ledger: Ledger, spec: RunSpec) -> None:
    """Whatever a verifier repeats after a crash between its commit and its memory of it."""
    submitted(ledger, spec)
    with ledger.write() as tx:
        jobs: list[Job] = verify(tx, spec)
        before = tx.execute(select(rollouts)).all()
        for state in (S.ACCEPTED, S.REJECTED, S.INCONCLUSIVE):
            verdicts.record(tx, spec, [decide(job, state) for job in jobs], "verifier", 4, now=9.0)
        assert tx.execute(select(rollouts)).all() == before and check_balance(tx).rows == 4
