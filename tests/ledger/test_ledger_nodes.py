"""Nodes, nonces, relays, refusals."""

import pytest
from sqlalchemy import func, select

from coordinator.ledger import clock, nodes
from coordinator.ledger.database import Ledger, get_meta, set_meta
from coordinator.ledger.tables import allowlist, nonces, refusals
from coordinator.ledger.tables import nodes as table
from protocol.messages import Heartbeat, RegisterNode
from protocol.reasons import Reason, Refusal
from protocol.runspec import RunSpec
from tests.ledger import builders

A, B = builders.digest("a"), builders.digest("b")
BODY = RegisterNode(software="1", engine="hf", device="cpu")


def test_only_the_allowlist_registers(ledger: Ledger) -> None:
    with ledger.write() as tx:
        with pytest.raises(Refusal) as caught:
            nodes.register(tx, A, BODY, now=1.0)
        assert caught.value.reason is Reason.NOT_ON_ALLOWLIST
        nodes.allow(tx, A, "ours")
        nodes.allow(tx, A, "again")
        with pytest.raises(Refusal) as caught:
            nodes.require(tx, A)
        assert caught.value.reason is Reason.UNKNOWN_NODE
        nodes.register(tx, A, BODY, now=1.0)
        nodes.require(tx, A)
        assert tx.execute(select(allowlist.c.label)).scalars().all() == ["ours"]


def test_registering_again_describes_anew(ledger: Ledger) -> None:
    with ledger.write() as tx:
        nodes.allow(tx, A, "ours")
        nodes.register(tx, A, BODY, now=1.0)
        nodes.register(tx, A, RegisterNode(software="2", engine="vllm", device="gpu"), now=5.0)
        (row,) = tx.execute(select(table)).all()
    assert (row.software, row.engine, row.device, row.registered_at, row.last_seen) == ("2", "vllm", "gpu", 1.0, 5.0)


def test_banned_nodes_neither_register_nor_work(ledger: Ledger) -> None:
    with ledger.write() as tx:
        builders.admit(tx, "a")
        tx.execute(allowlist.update().values(banned=True))
        for attempt in (lambda: nodes.require(tx, A), lambda: nodes.register(tx, A, BODY, now=1.0)):
            with pytest.raises(Refusal) as caught:
                attempt()
            assert caught.value.reason is Reason.NODE_BANNED


def refused_nonce(ledger: Ledger, key: str, nonce: str, expires: float, now: float) -> Reason | None:
    try:
        with ledger.write() as tx:
            nodes.remember_nonce(tx, key, nonce, expires, now=now)
    except Refusal as refusal:
        return refusal.reason
    return None


def test_nonce_replay_until_it_can_no_longer_be_accepted(ledger: Ledger) -> None:
    assert refused_nonce(ledger, A, "n", 90.0, 0.0) is None
    for now in (0.0, 45.0, 90.0):
        assert refused_nonce(ledger, A, "n", 90.0, now) is Reason.NONCE_REPLAYED
    assert refused_nonce(ledger, B, "n", 90.0, 1.0) is None, "nonces belong to their key"
    assert refused_nonce(ledger, A, "m", 90.0, 1.0) is None
    assert refused_nonce(ledger, A, "n", 180.1, 90.1) is None


def test_nonce_survives_a_restart(ledger: Ledger) -> None:
    assert refused_nonce(ledger, A, "n", 90.0, 0.0) is None
    ledger.engine.dispose()
    assert refused_nonce(ledger, A, "n", 90.0, 1.0) is Reason.NONCE_REPLAYED


def test_nonces_of_a_key_are_bounded_and_never_evicted_early(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MAX_NONCES", 3)
    assert [refused_nonce(ledger, A, f"n{n}", 90.0 + n, 0.0) for n in range(4)] == [None] * 3 + [Reason.NONCE_LIMIT]
    assert refused_nonce(ledger, A, "n0", 90.0, 1.0) is Reason.NONCE_REPLAYED
    assert refused_nonce(ledger, B, "n0", 90.0, 1.0) is None
    assert refused_nonce(ledger, A, "n3", 180.0, 90.5) is None, "one has run out"
    with ledger.read() as tx:
        assert tx.execute(select(func.count()).select_from(nonces)).scalar_one() == 3


def test_heartbeat_is_recorded(ledger: Ledger) -> None:
    body = Heartbeat(
        state="generating", loaded_versions=(3, 2**53 - 1), open_leases=1, spooled=0, tokens_per_second=9.5
    )
    with ledger.write() as tx:
        builders.admit(tx, "a")
        nodes.heartbeat(tx, A, body, now=7.0)
        nodes.add_backpressure(tx, A, 1.5)
        nodes.add_backpressure(tx, A, 0.5)
        row = tx.execute(select(table)).one()
        nodes.heartbeat(tx, A, body.model_copy(update={"loaded_versions": ()}), now=8.0)
        after = tx.execute(select(table)).one()
    assert (row.state, row.loaded_version, row.last_seen) == ("generating", 2**53 - 1, 7.0)
    assert (row.backpressure_seconds, after.loaded_version, after.last_seen) == (2.0, None, 8.0)


def test_account_counts_what_became_of_the_work(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        with pytest.raises(Refusal) as caught:
            nodes.account(tx, A)
        assert caught.value.reason is Reason.UNKNOWN_NODE
        builders.begin(tx, spec, "a", "b")
        builders.work(tx, spec, "a", 4)
        builders.work(tx, spec, "a", 3, lambda job: (builders.REJECTED, 0.0))
        builders.submit(tx, "a", builders.lease(tx, spec, "b", 2))
        builders.submit(tx, "a", builders.lease(tx, spec, "a", 2))
        mine, other = nodes.account(tx, A), nodes.account(tx, B)
    assert (mine.accepted, mine.rejected, mine.pending, mine.dropped, mine.credit) == (4, 3, 2, 0, 4 * 13)
    assert (other.accepted, other.pending, other.credit, other.status) == (0, 0, 0, "active")


def test_history_of_a_node(ledger: Ledger, spec: RunSpec) -> None:
    reject = lambda job: (builders.REJECTED, 0.0)  # noqa: E731
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        assert nodes.history(tx, A) == nodes.History(0, 0, 0, 0)
        builders.work(tx, spec, "a", 4, now=1.0)
        assert nodes.history(tx, A) == nodes.History(0, 0, 4, 0)
        builders.work(tx, spec, "a", 1, reject, now=2.0)
        builders.lease(tx, spec, "a", 2, now=2.0)
        assert nodes.history(tx, A) == nodes.History(1, 0, 5, 0), "what is still out is neither"
        for now in (30.0, 60.0, 90.0, 103.0):
            clock.tick(tx, spec, 4, now=now)
        builders.work(tx, spec, "a", 3, now=104.0)
        assert nodes.history(tx, A) == nodes.History(1, 3, 8, 2)
        assert nodes.history(tx, B) == nodes.History(0, 0, 0, 0)


def test_work_that_was_called_off_is_no_drop(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        builders.lease(tx, spec, "a", 4)
        for version in (1, 2):
            builders.publish(tx, spec, version)
        assert nodes.history(tx, A) == nodes.History(0, 0, 0, 0)


def test_history_forgets_all_but_the_last_hundred(ledger: Ledger) -> None:
    spec = builders.make_spec(max_staleness=0, rollouts_per_version=200)
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
        builders.lease(tx, spec, "a", 30)
        for turn in range(5):
            clock.tick(tx, spec, 4, now=turn * 29.0)
        builders.work(tx, spec, "a", 90, now=120.0)
        assert nodes.history(tx, A) == nodes.History(0, 0, 90, 10)


def test_relays_that_fall_silent_are_left_out(ledger: Ledger) -> None:
    with ledger.write() as tx:
        nodes.register_relay(tx, A, "https://a", now=0.0)
        nodes.register_relay(tx, B, "https://b", now=1.0)
        assert nodes.relay_urls(tx, now=50.0) == ("https://a", "https://b")
        nodes.register_relay(tx, A, "https://a2", now=60.0)
        assert nodes.relay_urls(tx, now=91.5) == ("https://a2",)
        assert nodes.relay_urls(tx, now=151.0) == ()


def test_refusals_are_counted(ledger: Ledger) -> None:
    with ledger.write() as tx:
        for reason in (Reason.DUPLICATE, Reason.DUPLICATE, Reason.LEASE_LOST):
            nodes.count_refusal(tx, reason)
        counted = {code: count for code, count in tx.execute(select(refusals))}
    assert counted == {"duplicate": 2, "lease_lost": 1}


def test_meta(ledger: Ledger) -> None:
    with ledger.write() as tx:
        assert get_meta(tx, "x") is None
        set_meta(tx, "x", {"a": 1.5})
        set_meta(tx, "x", [1])
        assert get_meta(tx, "x") == [1]
