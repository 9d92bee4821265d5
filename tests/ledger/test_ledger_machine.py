"""Random interleavings of everything that may happen to a ledger, and what has to hold after each of them."""

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import Connection, select

from coordinator.ledger import clock, leases, training, verdicts
from coordinator.ledger.credits import check_balance
from coordinator.ledger.leases import Granted
from coordinator.ledger.states import EDGES, PAID, RolloutState
from coordinator.ledger.submissions import Item, submit
from coordinator.ledger.tables import events, groups, metadata, rollouts, slots
from coordinator.ledger.training import Batch
from coordinator.ledger.verdicts import MAX_ATTEMPTS, Job
from protocol.reasons import Reason, Refusal
from tests.ledger import builders
from tests.ledger.builders import digest

S = RolloutState
NODES = ("a", "b", "c")
VERIFIERS = ("v", "w")
OUTCOMES = (S.ACCEPTED,) * 24 + (S.REJECTED, S.INCONCLUSIVE, S.UNVERIFIED, S.UNVERIFIABLE)
LIVE = {S.LEASED, S.SUBMITTED, S.VERIFYING, S.INCONCLUSIVE}
WAITING = LIVE - {S.LEASED}
REFUSED_LEASE = {Reason.QUEUE_FULL, Reason.QUOTA_EXHAUSTED, Reason.VERSION_BEHIND}
REFUSED_ITEM = {None, Reason.DUPLICATE, Reason.LEASE_EXPIRED, Reason.LEASE_LOST, Reason.LEASE_VOID}


class Crash(Exception):
    """The process dies before its commit."""


class Chance(Random):
    """Dice that say with which seed they are thrown again."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number

    def __repr__(self) -> str:
        return f"Chance({self.number})"


CHANCE = st.integers(0, 2**16).map(Chance)


class LedgerMachine(RuleBasedStateMachine):
    """Nodes, verifiers and a trainer on one ledger, with crashes of all of them."""

    @initialize(
        staleness=st.sampled_from([0, 1, 4]), min_group=st.sampled_from([2, 3]), publish_every=st.sampled_from([1, 2])
    )
    def begin(self, staleness: int, min_group: int, publish_every: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.db"
        self.spec = builders.make_spec(
            group_size=3, rollouts_per_version=6, max_staleness=staleness, publish_every=publish_every
        )
        self.min_group = min_group
        self.ledger = builders.open_ledger(self.path)
        self.now, self.version, self.step = 0.0, 0, 0
        self.granted: list[tuple[str, Granted]] = []
        self.claimed: dict[str, list[Job]] = {name: [] for name in VERIFIERS}
        self.batches: dict[int, Batch] = {}
        with self.ledger.write() as tx:
            builders.begin(tx, self.spec, *NODES)
            clock.tick(tx, self.spec, min_group, now=0.0)

    def write(self, act: Callable[[Connection], Any], dies: bool = False) -> Any:
        """A transaction; where the process dies at its end, nothing of it may be left, and it is done again."""
        if dies:
            with self.ledger.read() as tx:
                before = [list(tx.execute(select(table))) for table in metadata.sorted_tables]
            try:
                with self.ledger.write() as tx:
                    act(tx)
                    raise Crash
            except (Crash, Refusal):
                pass
            self.reopen()
            with self.ledger.read() as tx:
                assert before == [list(tx.execute(select(table))) for table in metadata.sorted_tables]
        with self.ledger.write() as tx:
            return act(tx)

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = builders.open_ledger(self.path)

    @rule(chance=CHANCE)
    def lease(self, chance: Random) -> None:
        """Any node with any versions loaded: old ones, and one that the ledger does not know yet."""
        name, count, quota = chance.choice(NODES), chance.randint(1, 9), chance.randint(1, 18)
        held = sorted({max(0, self.version + chance.choice([-2, -1, 0, 0, 0, 1])) for _ in range(3)})
        try:
            granted = self.write(
                lambda tx: builders.lease(tx, self.spec, name, count, versions=held, quota=quota, now=self.now),
                chance.random() < 0.1,
            )
        except Refusal as refusal:
            assert refusal.reason in REFUSED_LEASE
            return
        assert 0 < sum(len(part.slots) for part in granted) <= min(count, quota)
        assert all(part.version in held for part in granted)
        self.granted += [(name, part) for part in granted]

    @rule(chance=CHANCE)
    def submit(self, chance: Random) -> None:
        """Everything of a lease or some of it, however old; other bytes now and then, or by somebody else."""
        if not self.granted:
            return
        name, part = chance.choice(self.granted[-8:])
        if chance.random() < 0.5:
            self.granted.remove((name, part))
        items = builders.items([part], chance.choice("xxxy"))
        chosen = items if chance.random() < 0.7 else chance.choices(items, k=2)
        thief = chance.choice([name] * 6 + list(NODES))
        dies = chance.random() < 0.1
        results = self.write(lambda tx: submit(tx, digest(thief), chosen, digest("blob"), now=self.now), dies)
        if thief != name:
            assert {result.code for result in results} == {Reason.LEASE_NOT_YOURS}
            return
        assert {result.code for result in results} <= REFUSED_ITEM
        again = self.write(lambda tx: submit(tx, digest(name), chosen, digest("blob"), now=self.now))
        assert again == results
        wrong = [Item(item.lease_id, item.fencing + 1, item.index, item.payload_hash) for item in chosen]
        refused = self.write(lambda tx: submit(tx, digest(name), wrong, digest("blob"), now=self.now))
        assert {result.code for result in refused} == {Reason.LEASE_LOST}

    @rule(chance=CHANCE)
    def work(self, chance: Random) -> None:
        """All of the above and below once, so that most runs get somewhere."""
        for act in (self.lease, self.submit, self.lease, self.submit, self.claim, self.record, self.claim, self.record):
            act(chance)

    @rule(chance=CHANCE)
    def train(self, chance: Random) -> None:
        for _ in range(2):
            self.assign(chance)
            self.confirm(chance)

    @rule(chance=CHANCE)
    def claim(self, chance: Random) -> None:
        verifier, limit = chance.choice(VERIFIERS), chance.randint(1, 12)
        jobs = self.write(lambda tx: verdicts.claim(tx, verifier, limit, now=self.now), chance.random() < 0.1)
        assert len(jobs) <= limit and len({job.version for job in jobs}) <= 1
        assert all(job.attempts <= MAX_ATTEMPTS for job in jobs)
        self.claimed[verifier] += jobs

    @rule(chance=CHANCE)
    def record(self, chance: Random) -> None:
        """Verdicts on everything that a verifier has claimed, also on what it no longer holds; some of it twice."""
        verifier = chance.choice(VERIFIERS)
        jobs = {job.rollout_id: job for job in self.claimed[verifier]}
        rewards = [1.0] if chance.random() < 0.2 else [0.0, 1.0]
        decisions = [builders.decide(job, chance.choice(OUTCOMES), chance.choice(rewards)) for job in jobs.values()]
        self.write(
            lambda tx: verdicts.record(tx, self.spec, decisions, verifier, self.min_group, now=self.now),
            chance.random() < 0.1,
        )
        if chance.random() < 0.8:
            self.claimed[verifier] = []

    @rule(chance=CHANCE)
    def restart_verifier(self, chance: Random) -> None:
        verifier = chance.choice(VERIFIERS)
        self.write(lambda tx: verdicts.give_back(tx, verifier, now=self.now, detail="restart"))
        if chance.random() < 0.5:
            self.claimed[verifier] = []

    @rule(seconds=st.sampled_from([29.0, 1.0, 0.0, 31.0, 125.0, 1000.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.write(lambda tx: clock.tick(tx, self.spec, self.min_group, now=self.now), seconds == 1.0)

    @rule(chance=CHANCE)
    def assign(self, chance: Random) -> None:
        dies = chance.random() < 0.3
        batch = self.write(lambda tx: training.assign(tx, self.spec, self.step + 1, now=self.now), dies)
        if batch is not None:
            assert self.batches.setdefault(self.step + 1, batch) == batch
            assert all(0 <= member.staleness <= self.spec.max_staleness for member in batch.rollouts)

    @rule(chance=CHANCE)
    def confirm(self, chance: Random) -> None:
        """The trainer's step is durable; a version comes out of every `publish_every`-th."""
        step, due = self.step + 1, (self.step + 1) % self.spec.publish_every == 0
        if step not in self.batches:
            return
        sealed = builders.published(self.version + 1) if due else None
        dies = chance.random() < 0.3
        for _ in range(chance.randint(1, 2)):
            self.write(lambda tx: training.confirm(tx, self.spec, step, {}, sealed, now=self.now), dies)
        self.step, self.version = step, self.version + due

    # What always holds

    @invariant()
    def holds(self) -> None:
        with self.ledger.read() as tx:
            balance = check_balance(tx)
            assert balance.balanced, balance.problems
            newest = leases.newest_checkpoint(tx)
            assert newest is not None and newest[0] == self.version
            ahead = self.spec.max_staleness + newest[0] + 1
            assert leases.counted_rollouts(tx) <= ahead * self.spec.rollouts_per_version
            self._rollouts_follow_their_events(tx)
            self._slots_follow_their_rollouts(tx)
        for step, batch in self.batches.items():
            assert self.write(lambda tx, step=step: training.assign(tx, self.spec, step, now=self.now)) == batch
        trained = Counter(member.rollout_id for batch in self.batches.values() for member in batch.rollouts)
        assert set(trained.values()) <= {1}, "nothing is trained twice"

    def _rollouts_follow_their_events(self, tx: Connection) -> None:
        last: dict[int, str | None] = {}
        for event in tx.execute(select(events).order_by(events.c.id)):
            assert event.before == last.get(event.rollout_id), "every change has its event"
            if event.before is not None:
                assert RolloutState(event.after) in EDGES[RolloutState(event.before)]
            last[event.rollout_id] = event.after
        assert dict(tx.execute(select(rollouts.c.id, rollouts.c.state)).all()) == last  # type: ignore[arg-type]

    def _slots_follow_their_rollouts(self, tx: Connection) -> None:
        about = {row.id: row for row in tx.execute(select(groups))}
        members: dict[tuple[int, int], list[Any]] = {}
        for row in tx.execute(select(rollouts).order_by(rollouts.c.fencing)):
            members.setdefault((row.group_id, row.slot), []).append(row)
            assert row.version == about[row.group_id].version, "a slot's version is fixed"
            expected = {"ready": S.READY, "assigned": S.ASSIGNED, "trained": S.TRAINED, "surplus": S.SURPLUS}
            if row.state in (S.READY, S.ASSIGNED, S.TRAINED, S.SURPLUS):
                assert expected[about[row.group_id].state] == row.state, "members move with their group"
        for slot in tx.execute(select(slots)):
            tries = members.get((slot.group_id, slot.number), [])
            assert [row.fencing for row in tries] == list(range(1, slot.fencing + 1))
            assert sum(row.state in PAID for row in tries) <= 1, "no slot has two paid answers"
            assert all(row.state not in LIVE for row in tries[:-1]), "only the last lease can be answered"
            last = tries[-1].state if tries else None
            if slot.state == "open":
                assert about[slot.group_id].state == "open" and last in (None, S.EXPIRED, S.REJECTED)
            elif slot.state == "leased":
                assert last in LIVE
            elif about[slot.group_id].state == "open":
                assert last in (S.ACCEPTED, S.UNVERIFIED, S.UNVERIFIABLE), "an open group closes only what is answered"

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        try:
            self._time_ends_what_is_leased_or_claimed()
            self._an_honest_node_brings_the_run_forward()
            self.holds()
        finally:
            self.ledger.close()
            self.folder.cleanup()

    def _time_ends_what_is_leased_or_claimed(self) -> None:
        for _ in range(12):  # twelve ticks of half a minute: no outage, longer than any lease or claim
            self.tick(29.0)
        with self.ledger.read() as tx:
            assert not {S.LEASED, S.VERIFYING} & set(builders.states(tx))
        while True:
            with self.ledger.write() as tx:
                if not builders.verify(tx, self.spec, min_group=self.min_group, now=self.now):
                    break
        with self.ledger.read() as tx:
            assert not WAITING & set(builders.states(tx))

    def _an_honest_node_brings_the_run_forward(self) -> None:
        """Wherever chance has left it, the run is not stuck: two more versions come out in a bounded time."""
        goal, chance = self.version + 2, Random(0)
        with self.ledger.write() as tx:
            builders.admit(tx, "honest", now=self.now)
        for _ in range(30):
            held = range(max(0, self.version - self.spec.max_staleness), self.version + 1)
            with self.ledger.write() as tx:
                try:
                    granted = builders.lease(tx, self.spec, "honest", 100, versions=held, now=self.now)
                except Refusal:
                    granted = ()
                builders.submit(tx, "honest", granted, now=self.now)
                while builders.verify(tx, self.spec, min_group=self.min_group, now=self.now):
                    pass
            self.assign(chance)
            self.confirm(chance)
            if self.version >= goal:
                return
            self.tick(29.0)
        raise AssertionError(f"stuck at version {self.version}")


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=12, stateful_step_count=25)


@pytest.mark.parametrize(
    "staleness,min_group,publish_every", [(0, 2, 1), pytest.param(1, 3, 2, marks=pytest.mark.slow), (4, 2, 1)]
)
def test_long_walk(staleness: int, min_group: int, publish_every: int) -> None:
    """The same rules in proportions that let a run get somewhere: versions come out, groups age, nodes disappear."""
    machine, chance = LedgerMachine(), Random(staleness)
    machine.begin(staleness, min_group, publish_every)
    acts = [machine.lease, machine.submit, machine.claim, machine.record, machine.work, machine.train]
    try:
        for _ in range(130):
            turn = chance.random()
            if turn < 0.20:
                machine.tick(chance.choice([1.0, 29.0, 29.0, 29.0, 31.0, 125.0]))
            elif turn < 0.22:
                machine.restart_verifier(chance)
            elif turn < 0.23:
                machine.reopen()
            else:
                chance.choices(acts, weights=[2, 4, 2, 2, 5, 3])[0](chance)
            machine.holds()
        with machine.ledger.read() as tx:
            seen = set(tx.execute(select(events.c.after)).scalars())
        assert machine.version >= 1 and seen >= {"trained", "rejected", "expired"}, (machine.version, sorted(seen))
    finally:
        machine.teardown()


TestLedgerMachine = LedgerMachine.TestCase
# Shrinking takes minutes: add Phase.shrink to look into a failure.
TestLedgerMachine.settings = settings(max_examples=10, stateful_step_count=25, phases=(Phase.generate,))
