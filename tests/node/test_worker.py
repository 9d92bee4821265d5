"""The worker's loops, with a coordinator and an engine in the same process."""

import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from node import worker as worker_module
from node.client import Unreachable
from node.worker import FATAL, Stopped, batches
from protocol.completion import MAX_BATCH_BYTES, MAX_BATCH_ITEMS, encode_batch
from protocol.reasons import Reason, Refusal
from tests.ledger.builders import digest
from tests.node.fakes import SPEC, FakeClient, FakeEngine, gone, make_lease
from tests.node.worker_world import ABOUT, SECONDS, World
from tests.verifier.test_checks import completion


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "BACKOFF_SECONDS", (0.002, 0.05))
    monkeypatch.setattr(worker_module, "HEARTBEAT_SECONDS", 0.02)


def indices(client: FakeClient) -> list[tuple[str, int]]:
    return [(item.lease_id, item.index) for item in client.received]


def test_leases_become_completions(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1), make_lease(2))
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: len(client.received) == 8)
    world.finish()
    assert sorted(indices(client)) == [(f"lease-{n}", index) for n in (1, 2) for index in range(4)]
    for item in client.received:
        seed = 16 * int(item.lease_id[-1]) + item.index
        assert struct.unpack("<3i", item.tokens) == (3 + seed % 16, 3 + seed % 16, 1)
        assert struct.unpack("<3f", item.logprobs) == (-0.5,) * 3 and len(item.commitment) == 258
        assert item.fencing == 1 and item.version == 0 and item.weights_digest == digest("weights 0")
        assert item.run_spec_digest == SPEC.digest and item.finish_reason == "stop"
    assert {(r.max_tokens, r.temperature, r.prompt) for r in world.engine.asked} == {(4, 1.0, (5, 6))}
    assert client.calls[0] == "register" and len(world.spool) == 0
    assert client.beats and client.beats[0].loaded_versions == (0,) and world.sync.relays == ()


@pytest.mark.parametrize("capacity", [1, 2, 4, 600])
def test_every_capacity_gets_work(tmp_path: Path, capacity: int) -> None:
    """Also one that is smaller than a group, or larger than what a request may ask for."""
    client = FakeClient(make_lease(1, min(capacity, 4)))
    world = World(tmp_path, client, capacity=capacity)
    world.start()
    world.wait(lambda: len(client.received) == min(capacity, 4))
    world.finish()
    assert all(1 <= ask.slots <= min(capacity, 512) for ask in client.asked)


def test_no_more_is_leased_than_can_be_held(tmp_path: Path) -> None:
    """Capacity in generation, and as much ahead."""
    gate = threading.Event()
    engine = FakeEngine(0)
    engine.during = lambda: gate.wait(SECONDS) and None
    client = FakeClient(*(make_lease(number, 8) for number in range(1, 8)))
    world = World(tmp_path, client, engine)
    world.start()
    world.wait(lambda: len(client.leases) <= 5)
    world.wait(lambda: world.worker._room() < 4)
    leased = 8 * (7 - len(client.leases))
    assert leased <= 24
    gate.set()
    world.wait(lambda: len(client.received) == 56)
    world.finish()


def test_slots_that_cannot_be_returned_in_time_are_dropped(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1, seconds=-1.0), make_lease(2), make_lease(3, seconds=0.0))
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: client.idle.is_set() and client.received)
    world.finish()
    assert {lease for lease, _ in indices(client)} == {"lease-2"} and len(world.engine.asked) == 4


def test_deadlines_are_by_the_servers_clock(tmp_path: Path) -> None:
    """Only the time from the server's `now` to the deadline counts, not what this machine's clock says."""
    client = FakeClient()
    lease = client.lease
    world = World(tmp_path, client)
    client.leases = [make_lease(1, seconds=60.0, now=5e9), make_lease(2, seconds=60.0, now=5.0)]
    nows = iter((5e9, 5.0))

    def answer(body: Any) -> Any:
        found = lease(body)
        return found.model_copy(update={"now": next(nows)})

    client.lease = answer  # type: ignore[method-assign]
    world.start()
    world.wait(lambda: len(client.received) == 8)
    world.finish()


def test_slots_of_versions_that_are_gone_are_dropped(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1, version=3), make_lease(2, version=0))
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: len(client.received) == 4)
    world.finish()
    assert {item.version for item in client.received} == {0}


def test_a_version_unloaded_under_the_engine_costs_its_slots_only(tmp_path: Path) -> None:
    engine = FakeEngine(0, 1)
    client = FakeClient(make_lease(1, version=0), make_lease(2, version=1), make_lease(3, version=1))
    world = World(tmp_path, client, engine)
    asked = 0

    def unload() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            engine.unload(0)

    engine.during = unload
    world.start()
    world.wait(lambda: len([1 for lease, _ in indices(client) if lease == "lease-3"]) == 4)
    world.finish()
    done = indices(client)
    assert ("lease-1", 0) in done and ("lease-1", 1) in done  # what was finished before is kept


def test_completions_survive_an_outage_of_the_coordinator(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1), make_lease(2))
    client.always["submit"] = gone()
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: client.idle.is_set() and client.calls.count("submit") > 5)
    assert not client.received and len(world.spool) >= 1
    del client.always["submit"]
    world.wait(lambda: len(client.received) == 8)
    world.finish()
    assert len(set(indices(client))) == 8 and len(world.spool) == 0


def test_completions_survive_the_worker(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1))
    client.always["submit"] = gone()
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: len(world.spool) == 1)
    world.finish()
    assert not client.received and len(world.spool) == 1
    later = FakeClient()
    again = World(tmp_path, later)
    again.start()
    again.wait(lambda: len(later.received) == 4)
    again.finish()


def test_outage_while_leasing_and_registering(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1))
    client.script = {name: [gone() for _ in range(3)] for name in ("register", "lease", "heartbeat")}
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: len(client.received) == 4 and client.beats)
    world.finish()
    assert client.calls.count("register") == 4


@pytest.mark.parametrize("reason", sorted(FATAL))
@pytest.mark.parametrize("call", ["register", "lease", "submit", "heartbeat"])
def test_a_final_no_ends_the_worker_with_its_reason(tmp_path: Path, call: str, reason: Reason) -> None:
    client = FakeClient(make_lease(1))
    client.always[call] = Refusal(reason)
    world = World(tmp_path, client)
    world.start()
    raised = world.ended()
    assert isinstance(raised, Stopped) and raised.reason is reason
    assert call != "submit" or len(world.spool) == 1  # nothing finished is thrown away


@pytest.mark.parametrize(
    "reason", [Reason.NONCE_REPLAYED, Reason.NONCE_LIMIT, Reason.CLOCK_SKEW, Reason.UNAVAILABLE, Reason.UNKNOWN_NODE]
)
def test_a_no_for_now_keeps_the_batch(tmp_path: Path, reason: Reason) -> None:
    client = FakeClient(make_lease(1))
    client.script["submit"] = [Refusal(reason), Refusal(reason)]
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: len(client.received) == 4)
    world.finish()
    assert client.calls.count("submit") == 3


@pytest.mark.parametrize(
    "reason", [Reason.MALFORMED_REQUEST, Reason.LEASE_EXPIRED, Reason.DUPLICATE, Reason.LEASE_VOID]
)
def test_a_batch_that_is_refused_for_good_makes_room_for_the_next(tmp_path: Path, reason: Reason) -> None:
    client = FakeClient(make_lease(1, 8), make_lease(2, 8))
    client.script["submit"] = [Refusal(reason)]
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: client.received)
    world.finish()
    assert len(world.spool) == 0 and 0 < len(client.received) < 16


def test_items_refused_one_by_one_settle_the_batch(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1))
    client.codes = [Reason.LEASE_EXPIRED]
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: client.received and len(world.spool) == 0)
    world.finish()
    assert client.calls.count("submit") == 1


def test_unknown_node_registers_again(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1))
    client.script["lease"] = [Refusal(Reason.UNKNOWN_NODE)]
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: len(client.received) == 4)
    world.finish()
    assert client.calls.count("register") == 2


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.NOT_READY, Reason.QUOTA_EXHAUSTED])
def test_a_coordinator_that_does_not_hold_its_answers_back_is_not_hammered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Reason
) -> None:
    """The pause comes from this side; counted in pauses, since no clock may decide a test."""
    client = FakeClient()
    client.always["lease"] = Refusal(reason, retry_after=1)
    world = World(tmp_path, client)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        if threading.current_thread().name == "lease":
            pauses.append(seconds)
            if len(pauses) == 20:
                world.worker.halt()
        else:
            world.worker.stop.wait(0.01)

    monkeypatch.setattr(world.worker, "_sleep", sleep)
    world.start()
    assert world.ended() is None
    assert client.calls.count("lease") <= len(pauses) + 1 and min(pauses) > 0


def test_version_behind_asks_again_with_the_new_one(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1, version=1))
    client.script["lease"] = [Refusal(Reason.VERSION_BEHIND)]
    world = World(tmp_path, client)
    refused = world.worker._refused

    def load(refusal: Refusal, versions: tuple[int, ...]) -> None:
        if refusal.reason is Reason.VERSION_BEHIND:
            world.engine.loaded[1] = Path(".")
            world.worker.wake(1)
        refused(refusal, versions)

    world.worker._refused = load  # type: ignore[method-assign]
    world.start()
    world.wait(lambda: len(client.received) == 4)
    world.finish()
    assert client.asked[0].versions == (0,) and client.asked[1].versions == (0, 1)


def test_back_off_doubles_with_jitter_from_the_given_rng(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "BACKOFF_SECONDS", (0.2, 5.0))
    client = FakeClient()
    world = World(tmp_path, client, rng=random.Random(42))
    client.script["register"] = [gone() for _ in range(8)]
    pauses: list[float] = []
    monkeypatch.setattr(world.worker, "_sleep", pauses.append)
    world.worker._patient(lambda: client.register(ABOUT))
    rng = random.Random(42)
    assert pauses == pytest.approx([min(5.0, 0.2 * 2**n) * (0.5 + rng.random()) for n in range(8)])


@pytest.mark.parametrize("reason", [Reason.NODE_BANNED, Reason.NOT_ON_ALLOWLIST, Reason.MALFORMED_REQUEST])
def test_registration_refused_for_good(tmp_path: Path, reason: Reason) -> None:
    client = FakeClient()
    client.script["register"] = [Refusal(reason)]
    world = World(tmp_path, client)
    world.start()
    raised = world.ended()
    assert isinstance(raised, Stopped) and raised.reason is reason and client.calls == ["register"]


class Bang(Exception):
    pass


@pytest.mark.parametrize("thread", ["sync", "lease", "upload", "heartbeat", "generate"])
def test_no_thread_dies_in_silence(tmp_path: Path, thread: str) -> None:
    client = FakeClient(make_lease(1))
    world = World(tmp_path, client)

    def bang(*_: Any) -> Any:
        raise Bang(thread)

    if thread == "sync":
        world.sync.serve = bang
    elif thread == "generate":
        world.engine.generate = bang  # type: ignore[method-assign]
    else:
        client.always[{"lease": "lease", "upload": "submit", "heartbeat": "heartbeat"}[thread]] = Bang(thread)
    world.start()
    raised = world.ended()
    assert isinstance(raised, Bang) and str(raised) == thread
    if thread == "upload":
        assert len(world.spool) == 1


def test_halt_before_the_start_and_while_waiting_for_the_coordinator(tmp_path: Path) -> None:
    world = World(tmp_path, FakeClient())
    world.worker.halt()
    world.start()
    assert world.ended() is None
    client = FakeClient()
    client.always["register"] = gone()
    waiting = World(tmp_path, client)
    waiting.start()
    waiting.wait(lambda: client.calls.count("register") > 3)
    waiting.finish()


def test_halt_ends_a_worker_that_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pause ends with the halt, however long it was meant to be."""
    monkeypatch.setattr(worker_module, "BACKOFF_SECONDS", (1000.0, 1000.0))
    monkeypatch.setattr(worker_module, "HEARTBEAT_SECONDS", 1000.0)
    client = FakeClient()
    client.always = {"lease": gone(), "heartbeat": gone()}
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: "lease" in client.calls and "heartbeat" in client.calls)
    world.finish()


def test_halt_sends_what_is_finished(tmp_path: Path) -> None:
    client = FakeClient(make_lease(1))
    client.script["submit"] = [gone() for _ in range(2)]
    world = World(tmp_path, client)
    put = world.spool.put

    def put_and_halt(items: Any) -> None:
        client.script["submit"] = []
        put(items)
        world.worker.halt()

    world.spool.put = put_and_halt  # type: ignore[method-assign]
    world.start()
    assert world.ended() is None
    assert len(client.received) >= 4 and len(world.spool) == 0


# what one upload holds


def test_batches_hold_what_the_coordinator_takes() -> None:
    assert list(batches([])) == []
    small = [completion(index=number) for number in range(MAX_BATCH_ITEMS + 3)]
    found = list(batches(small))
    assert [len(batch) for batch in found] == [MAX_BATCH_ITEMS, 3] and sum(found, []) == small


def test_long_completions_are_cut_by_size() -> None:
    """512 answers of 32,000 tokens weigh more than a request may."""
    heavy = [completion(index=number, tokens=bytes(1 << 20), logprobs=bytes(1 << 20)) for number in range(20)]
    found = list(batches(heavy))
    assert sum(found, []) == heavy and len(found) > 1
    assert all(len(encode_batch(batch)) <= MAX_BATCH_BYTES for batch in found)
    alone = [completion(tokens=bytes(MAX_BATCH_BYTES))]
    assert list(batches(alone)) == [alone]


def test_uploads_of_a_large_round_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "MAX_BATCH_ITEMS", 3)
    client = FakeClient(make_lease(1, 8))
    world = World(tmp_path, client)
    world.start()
    world.wait(lambda: len(client.received) == 8)
    world.finish()
    assert max(client.batch_sizes) <= 3 and len(set(indices(client))) == 8


def test_unreachable_is_no_refusal() -> None:
    assert not issubclass(Unreachable, Refusal)
