"""What a node may know: its own verdicts, and nothing of golds, secret keys or other nodes."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import httpx
import pytest

from coordinator.ledger import verdicts
from coordinator.ledger.states import RolloutState
from protocol.messages import Receipt
from protocol.reasons import Reason, Refusal
from protocol.signed import open_document, sign_document
from tests.api.world import Answer, Node, World, check_problem, completion, golds, leaks
from tests.ledger.builders import decide, digest

pytestmark = pytest.mark.network


def judge(world: World) -> dict[str, int]:
    """Reject whatever waits, with signed receipts. Returns the newest rollout of each node."""
    run = world.run
    with run.ledger.write() as tx:
        jobs = verdicts.claim(tx, "test", 1000, now=time.time())
        decisions = []
        for job in jobs:
            receipt = Receipt(
                run_id=run.spec.run_id, run_spec_digest=run.spec.digest, rollout_id=job.rollout_id,
                node_id=job.node_id, payload_hash=job.payload_hash, verdict="rejected",
                code=Reason.SAMPLING_MISMATCH, value=9.0, limit=1.0, price=0, evidence_sha256=digest("e"),
                salt=digest("s"), created=time.time(),
            )  # fmt: skip
            signed = sign_document("receipt", receipt, run.key).model_dump_json()
            decisions.append(dataclasses.replace(decide(job, RolloutState.REJECTED), receipt=signed, price=0))
        verdicts.record(tx, run.spec, decisions, "test", 4, now=time.time())
    return {job.node_id: job.rollout_id for job in jobs}


def test_a_receipt_is_signed_and_only_for_its_node(world: World, node: Node, other: Node) -> None:
    for who in (node, other):
        assert who.submit(*who.completions()).status_code == 200
    newest = judge(world)
    mine = newest[node.key.id]
    envelope = node.client.receipt(mine).receipt
    receipt = open_document(envelope.model_dump_json().encode(), "receipt", Receipt, world.run.key.id)
    assert (receipt.rollout_id, receipt.node_id, receipt.code) == (mine, node.key.id, Reason.SAMPLING_MISMATCH)
    assert node.client.account().rejected == 4
    absent, foreign = (world.signed(other.key, "GET", f"/v1/receipts/{number}") for number in (10**9, mine))
    assert absent.content == foreign.content, "a receipt of somebody else looks like one that is not there"
    with world.only_counts(Reason.NOT_FOUND):
        check_problem(world.signed(other.key, "GET", f"/v1/receipts/{mine}"), Reason.NOT_FOUND)
    with world.only_counts(Reason.SIGNATURE_MISSING):
        check_problem(world.http.get(f"{world.url}/v1/receipts/{mine}"), Reason.SIGNATURE_MISSING)


def test_a_rollout_without_a_verdict_has_no_receipt(world: World, node: Node) -> None:
    acknowledged = node.submit(*node.completions()).json()["items"][0]
    with pytest.raises(Refusal, match="not_found"):
        node.client.receipt(acknowledged["rollout_id"])


@pytest.mark.parametrize("name", ["-1", "0", "1.5", "1e3", "x", "9" * 15, "9" * 16, "+1", "1_0"])
def test_names_that_are_no_receipts(world: World, node: Node, name: str) -> None:
    with world.only_counts(Reason.NOT_FOUND):
        check_problem(world.signed(node.key, "GET", f"/v1/receipts/{name}"), Reason.NOT_FOUND)


@pytest.mark.parametrize("path", ["/v1/receipts/1", "/v1/nodes/me"])
def test_questions_have_no_body(world: World, node: Node, path: str) -> None:
    with world.only_counts(Reason.BODY_TOO_LARGE):
        check_problem(world.signed(node.key, "GET", path, b"x"), Reason.BODY_TOO_LARGE)


def test_no_answer_names_what_is_anothers(world: World, node: Node, other: Node) -> None:
    lease = other.lease(4)[0]
    acks = other.submit(*(completion(lease, number) for number in range(4))).json()["items"]
    judge(world)
    other.client.receipt(acks[0]["rollout_id"])
    told = len(world.answers)
    items = node.completions()
    node.submit(*items, completion(lease, 0))
    node.client.account()
    for number in (acks[0]["rollout_id"], acks[1]["rollout_id"]):
        world.signed(node.key, "GET", f"/v1/receipts/{number}")
    for path in ("/", "/v1/run", "/v1/head", "/healthz", "/readyz", "/v1/nodes", "/v1/nodes/" + other.key.id):
        world.http.get(world.url + path)
    with httpx.stream("GET", f"{world.url}/events", trust_env=False) as events:
        page = b""
        for chunk in events.iter_bytes():
            page += chunk
            if b"data:" in page:
                break
    secrets = [other.key.id, *(slot.seed for slot in lease.slots), acks[1]["payload_hash"]]
    answers = [answer.body for answer in world.answers[told:]] + [page]
    # its own lease id, sent back to it in the acknowledgement of what it sent, is not news
    assert [(text, body) for text in secrets[:-1] for body in answers if text.encode() in body] == []
    assert not any(secrets[-1].encode() in body for body in answers)


def test_the_search_for_secrets_finds_them(world: World) -> None:
    """So that nothing found means nothing there."""
    words = golds(world.run)
    assert len(words) > 20
    clean = World(world.run, world.url, world.server)
    clean.http.close()
    for body in (world.run.seed_key.hex().encode(), world.run.seed_key, f'{{"answer":"{words[0]}"}}'.encode()):
        clean.answers = [Answer("", "/v1/leases", 200, "", b"before" + body + b"after")]
        assert len(leaks(clean)) == 1
    clean.answers = [Answer("", "/v1/leases", 200, "x-gold: " + words[-1], b"")]
    assert len(leaks(clean)) == 1


def test_a_long_life_of_a_node_tells_no_secret(world: World, tmp_path: Path) -> None:
    """Through leases of many problems: the questions are told, the golds are not."""
    node = world.node(tmp_path)
    for _ in range(6):
        leases = node.lease(16)
        node.submit(*(completion(lease, number) for lease in leases for number in range(len(lease.slots))))
    judge(world)
    with world.run.ledger.read() as tx:
        told = tx.exec_driver_sql("select count(*) from problems").scalar_one()
    assert told >= 24
    assert any(answer.who == node.key.id and "/v1/leases" in answer.url for answer in world.answers)
    assert leaks(world) == []
    check_problem(httpx.get(f"{world.url}/keys/seed.key", trust_env=False), Reason.NOT_FOUND)
