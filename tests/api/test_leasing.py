"""Work: when it is given, when it is refused, and how long a question may wait."""

from __future__ import annotations

import json
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import func, select

from coordinator.ledger import tables
from protocol.messages import LeaseAnswer, LeaseRequest
from protocol.reasons import Reason, Refusal
from protocol.seeds import slot_seed
from protocol.signatures import sign_request
from tests.api.world import Node, World, check_problem, check_signed, completion, eventually

pytestmark = pytest.mark.network

GOOD = {"versions": [0], "slots": 4, "wait_seconds": 0.0}


def test_a_lease_holds_what_the_run_says_and_the_slots_own_seeds(world: World, node: Node) -> None:
    response = world.signed(node.key, "POST", "/v1/leases", json.dumps(GOOD).encode())
    check_signed(world, response)
    (lease,) = LeaseAnswer.model_validate_json(response.content, strict=True).leases
    run = world.run
    with run.ledger.read() as tx:
        rows = tx.execute(select(tables.rollouts).where(tables.rollouts.c.lease_id == lease.lease_id)).all()
        group = tx.execute(select(tables.groups).where(tables.groups.c.id == rows[0].group_id)).one()
    assert {row.node_id for row in rows} == {node.key.id}
    assert lease.weights_digest == run.spec.model.base_weights_digest and lease.run_spec_digest == run.spec.digest
    assert (lease.temperature, lease.max_tokens) == (run.spec.sampling.temperature, run.spec.sampling.max_tokens)
    for slot in lease.slots:
        seed = slot_seed(run.seed_key, run.spec.run_id, group.problem_id, group.id, 0, slot.index)
        assert slot.seed == f"{seed:016x}"
    assert {slot.fencing for slot in lease.slots} == {1}
    assert lease.deadline == rows[0].deadline


@pytest.mark.parametrize(
    "body",
    [
        GOOD | {"slots": "4"},
        GOOD | {"slots": 4.0},
        GOOD | {"slots": True},
        GOOD | {"slots": 0},
        GOOD | {"slots": -1},
        GOOD | {"slots": 513},
        GOOD | {"slots": 2**70},
        GOOD | {"versions": []},
        GOOD | {"versions": list(range(65))},
        GOOD | {"versions": [-1]},
        GOOD | {"versions": [2**53]},
        GOOD | {"versions": ["0"]},
        GOOD | {"versions": [None]},
        GOOD | {"versions": 0},
        GOOD | {"wait_seconds": 20.5},
        GOOD | {"wait_seconds": -1},
        GOOD | {"wait_seconds": float("nan")},
        GOOD | {"wait_seconds": float("inf")},
        GOOD | {"wait_seconds": "1"},
        GOOD | {"priority": 1},
        GOOD | {"possession": "x" * 129},
        {"slots": 4},
        [GOOD],
        None,
    ],
    ids=range(24),
)
def test_a_question_of_another_form_is_refused(world: World, node: Node, body: object) -> None:
    with world.only_counts(Reason.MALFORMED_REQUEST):
        response = world.signed(node.key, "POST", "/v1/leases", json.dumps(body).encode())
    check_problem(response, Reason.MALFORMED_REQUEST)


@pytest.mark.parametrize(
    "body",
    [
        b'{"versions":[0],"slots":4,"slots":4,"wait_seconds":0}',
        b'{"versions":[0],"slots":4,"wait_seconds":0,"versions":[1]}',
        b'{"versions":[0],"slots":4,"wait_seconds":1e999}',
        b'{"versions":[0],"slots":4,"wait_seconds":-NaN}',
        b'{"versions":[0,],"slots":4,"wait_seconds":0}',
        b'{"versions":[0],"slots":' + b"4" * 5000 + b',"wait_seconds":0}',
        b'{"versions":[0],"slots":4,"wait_seconds":0,"\\ud800":1}',
        b'{"versions":[0],"slots":4,"wait_seconds":0,"x":' + b"[" * 4000 + b"]" * 4000 + b"}",
    ],
    ids=range(8),
)
def test_json_that_two_readers_could_read_differently_is_refused(world: World, node: Node, body: bytes) -> None:
    with world.only_counts(Reason.MALFORMED_REQUEST):
        check_problem(world.signed(node.key, "POST", "/v1/leases", body), Reason.MALFORMED_REQUEST)


def test_a_node_holds_no_more_than_its_quota(world: World, node: Node) -> None:
    held = node.lease(16)
    assert sum(len(lease.slots) for lease in held) == 16
    before = world.snapshot()
    with pytest.raises(Refusal) as refused:
        node.lease(1)
    assert refused.value.reason is Reason.QUOTA_EXHAUSTED and (refused.value.retry_after or 0) >= 1
    assert world.snapshot() == before


def test_a_full_queue_says_when_to_come_again(narrow: World, tmp_path: Path) -> None:
    node = narrow.node(tmp_path)
    assert len(node.lease(16)[0].slots) == 4
    with narrow.only_counts():
        response = narrow.signed(node.key, "POST", "/v1/leases", json.dumps(GOOD).encode())
    check_problem(response, Reason.QUEUE_FULL)
    check_signed(narrow, response)
    assert int(response.headers["retry-after"]) >= 1


def test_a_node_that_is_behind_is_told_so(narrow: World, tmp_path: Path) -> None:
    node = narrow.node(tmp_path)
    narrow.publish(1)
    with narrow.only_counts():
        response = narrow.signed(node.key, "POST", "/v1/leases", json.dumps(GOOD).encode())
    assert "the newest version is 1" in check_problem(response, Reason.VERSION_BEHIND).detail
    with narrow.only_counts():
        response = narrow.signed(node.key, "POST", "/v1/leases", json.dumps(GOOD | {"versions": [2**53 - 1]}).encode())
    check_problem(response, Reason.VERSION_BEHIND)
    assert {lease.version for lease in node.lease(4, versions=(0, 1, 77))} == {1}


def test_a_patient_question_is_answered_when_work_appears(narrow: World, tmp_path: Path) -> None:
    """Nothing but the new version can end this wait before its time."""
    first, second = narrow.node(tmp_path), narrow.node(tmp_path)
    first.lease(4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.lease, 4, versions=(0, 1), wait=20.0)
        narrow.wait_for_nonces(second.key, 2)
        assert not waiting.done()
        narrow.publish(1)
        (lease,) = waiting.result()
    assert lease.version == 1 and len(lease.slots) == 4
    with narrow.run.ledger.read() as tx:
        waited = tx.execute(select(tables.nodes.c.backpressure_seconds).where(tables.nodes.c.id == second.key.id))
        assert waited.scalar_one() > 0


def test_a_patient_question_is_refused_when_its_time_is_over(narrow: World, tmp_path: Path) -> None:
    node = narrow.node(tmp_path)
    node.lease(4)
    with pytest.raises(Refusal, match="queue_full"):
        node.lease(4, wait=0.3)


def test_who_has_hung_up_gets_no_lease(narrow: World, tmp_path: Path) -> None:
    """A lease given to a closed connection would run out, and count as dropped."""
    holder, gone, here = narrow.node(tmp_path), narrow.node(tmp_path), narrow.node(tmp_path)
    holder.lease(4)
    body = json.dumps(GOOD | {"versions": [0, 1], "wait_seconds": 20.0}).encode()
    request = narrow.http.build_request("POST", f"{narrow.url}/v1/leases", content=body)
    nonce = secrets.token_hex(16)
    sign_request(request, body, gone.key, narrow.run.spec.run_id, now=time.time(), nonce=nonce)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with narrow.connect() as connection:
        connection.sendall(b"POST /v1/leases HTTP/1.1\r\n" + head.encode() + b"\r\n" + body)
        narrow.wait_for_nonces(gone.key, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(here.lease, 4, versions=(0, 1), wait=20.0)
        narrow.wait_for_nonces(here.key, 2)
        narrow.publish(1)
        assert len(waiting.result()[0].slots) == 4
    eventually(lambda: not narrow.server.server_state.tasks)  # the other question has come to its end as well
    with narrow.run.ledger.read() as tx:
        mine = select(func.count()).where(tables.rollouts.c.node_id == gone.key.id)
        assert tx.execute(mine).scalar_one() == 0


def test_many_patient_questions_block_nobody(narrow: World, tmp_path: Path) -> None:
    """More of them than the server has threads."""
    holder, many = narrow.node(tmp_path), narrow.node(tmp_path)
    holder.lease(4)
    go = threading.Event()

    def wait() -> Reason:
        go.set()
        with pytest.raises(Refusal) as refused:
            many.client.lease(LeaseRequest(versions=(0,), slots=4, wait_seconds=3.0))
        return refused.value.reason

    with ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(wait) for _ in range(60)]
        go.wait()
        narrow.wait_for_nonces(many.key, 61)
        assert narrow.serves() and holder.client.account().node_id == holder.key.id
        assert any(not question.done() for question in waiting)
        assert {question.result() for question in waiting} == {Reason.QUEUE_FULL}


def test_two_nodes_never_hold_the_same_slot(world: World, tmp_path: Path) -> None:
    crowd = [world.node(tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        leases = [lease for found in pool.map(lambda node: node.lease(6), crowd) for lease in found]
    seeds = [slot.seed for lease in leases for slot in lease.slots]
    assert len(seeds) == len(set(seeds)) == 24


def test_a_slot_that_ran_out_goes_to_another_with_the_same_seed(narrow: World, tmp_path: Path) -> None:
    slow, quick = narrow.node(tmp_path), narrow.node(tmp_path)
    (old,) = slow.lease(4)
    with narrow.run.ledger.write() as tx:
        tx.execute(tables.rollouts.update().values(deadline=time.time() - 1))
    (new,) = quick.lease(4, wait=20.0)
    assert [slot.seed for slot in new.slots] == [slot.seed for slot in old.slots]
    assert {slot.fencing for slot in new.slots} == {2} and new.lease_id != old.lease_id and new.prompt == old.prompt
    with narrow.only_counts(Reason.LEASE_LOST):
        check_problem(slow.submit(completion(old, 0)), Reason.LEASE_LOST)
    assert quick.submit(completion(new, 0)).status_code == 200
    eventually(lambda: slow.client.account().dropped == 4)
