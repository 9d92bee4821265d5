"""Completions in, acknowledgements out; what is refused leaves nothing behind."""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from coordinator.ledger import clock, tables
from protocol.completion import MAX_BATCH_ITEMS, Completion, encode_batch
from protocol.messages import Acknowledgement, RolloutsAnswer
from protocol.reasons import Reason
from tests.api.world import Node, World, check_problem, check_signed, completion

pytestmark = pytest.mark.network

replace = msgspec.structs.replace


def acknowledged(world: World, node: Node, *items: Completion) -> tuple[Acknowledgement, ...]:
    """Send, and check form and signature of the answer."""
    response = node.submit(*items)
    check_signed(world, response)
    answer = RolloutsAnswer.model_validate_json(response.content, strict=True)
    assert [(ack.lease_id, ack.fencing, ack.index, ack.payload_hash) for ack in answer.items] == [
        (item.lease_id, item.fencing, item.index, item.payload_hash) for item in items
    ]
    return answer.items


def raw_batch(*items: Any, **more: Any) -> bytes:
    """A body that no honest encoder makes."""
    return msgspec.msgpack.encode({"completions": list(items)} | more)


def fields(item: Completion) -> dict[str, Any]:
    return msgspec.structs.asdict(item)


def test_an_acknowledged_completion_is_in_ledger_and_store(world: World, node: Node) -> None:
    items = node.completions()
    acks = acknowledged(world, node, *items)
    assert all(ack.code is None and ack.rollout_id is not None for ack in acks)
    with world.run.ledger.read() as tx:
        ids = [ack.rollout_id for ack in acks]
        rows = tx.execute(select(tables.rollouts).where(tables.rollouts.c.id.in_(ids))).all()
    assert {row.state for row in rows} == {"submitted"} and {row.position for row in rows} == {0, 1, 2, 3}
    (blob,) = {row.blob for row in rows}
    kept = msgspec.msgpack.decode(world.run.store.get(blob))
    assert kept["body"] == encode_batch(items) and set(kept["headers"]) == {
        "content-digest", "signature-input", "signature"
    }  # fmt: skip
    assert node.client.account().pending == 4
    assert node.client.submit(encode_batch(items)).items == acks, "through the node's own client"


def test_the_same_bytes_again_change_nothing_and_take_no_space(world: World, node: Node) -> None:
    items = node.completions()
    first = acknowledged(world, node, *items)
    with world.only_counts():
        assert acknowledged(world, node, *items) == first
        assert acknowledged(world, node, items[2]) == (first[2],)
        assert acknowledged(world, node, items[0], items[0]) == (first[0], first[0])


def test_other_bytes_for_the_same_slot_are_a_duplicate(world: World, node: Node) -> None:
    items = node.completions()
    acknowledged(world, node, *items)
    for change in ({"tokens": bytes(4)}, {"engine": "other"}, {"generate_seconds": 0.25}):
        with world.only_counts(Reason.DUPLICATE):
            check_problem(node.submit(replace(items[0], **change)), Reason.DUPLICATE)


def test_of_two_answers_in_one_batch_the_first_counts(world: World, node: Node) -> None:
    item = node.completions()[0]
    first, second = acknowledged(world, node, item, replace(item, engine="other"))
    assert first.code is None and second.code is Reason.DUPLICATE and second.rollout_id is None


def test_somebody_elses_lease(world: World, node: Node, other: Node) -> None:
    items = node.completions()
    with world.only_counts(Reason.LEASE_NOT_YOURS):
        check_problem(other.submit(*items), Reason.LEASE_NOT_YOURS)
    acknowledged(world, node, *items)
    with world.only_counts(Reason.LEASE_NOT_YOURS):
        check_problem(other.submit(*items), Reason.LEASE_NOT_YOURS)


def test_a_fencing_number_that_is_not_the_leases(world: World, node: Node) -> None:
    item = node.completions()[0]
    for fencing in (0, 2, 2**53 - 1):
        with world.only_counts(Reason.LEASE_LOST):
            check_problem(node.submit(replace(item, fencing=fencing)), Reason.LEASE_LOST)


def test_an_index_that_is_not_in_the_lease(world: World, node: Node) -> None:
    lease = node.lease(2)[0]
    item = completion(lease, 0)
    outside = max(slot.index for slot in lease.slots) + 1
    for index in (outside, 2**31 - 1):
        with world.only_counts(Reason.LEASE_INDEX):
            check_problem(node.submit(replace(item, index=index)), Reason.LEASE_INDEX)


@pytest.mark.parametrize("lease_id", ["", "0" * 32, "é" * 128, "' or 1=1 --", "%"])
def test_a_lease_that_never_was(world: World, node: Node, lease_id: str) -> None:
    item = node.completions()[0]
    with world.only_counts(Reason.LEASE_UNKNOWN):
        check_problem(node.submit(replace(item, lease_id=lease_id)), Reason.LEASE_UNKNOWN)


def test_a_lease_that_ran_out(narrow: World, tmp_path: Path) -> None:
    node = narrow.node(tmp_path)
    items = node.completions()
    with narrow.run.ledger.write() as tx:
        tx.execute(tables.rollouts.update().values(deadline=time.time() - 1))
        clock.tick(tx, narrow.run.spec, 4, now=time.time())
    with narrow.only_counts(Reason.LEASE_EXPIRED):
        check_problem(node.submit(*items), Reason.LEASE_EXPIRED)


def test_a_lease_whose_group_aged_out(narrow: World, tmp_path: Path) -> None:
    node = narrow.node(tmp_path)
    items = node.completions()
    narrow.publish(1)
    with narrow.run.ledger.write() as tx:
        clock.tick(tx, narrow.run.spec, 4, now=time.time())
    with narrow.only_counts(Reason.LEASE_VOID):
        check_problem(node.submit(*items), Reason.LEASE_VOID)


def test_each_item_of_a_batch_has_its_own_answer(world: World, node: Node, other: Node) -> None:
    mine, theirs = node.completions(), other.completions()[0]
    acknowledged(world, node, mine[0])
    batch = [
        mine[0],
        replace(mine[0], engine="other"),
        mine[1],
        replace(mine[2], fencing=7),
        replace(mine[2], index=99),
        replace(mine[2], lease_id="none"),
        theirs,
        mine[3],
    ]
    codes = [ack.code for ack in acknowledged(world, node, *batch)]
    assert codes == [
        None, Reason.DUPLICATE, None, Reason.LEASE_LOST, Reason.LEASE_INDEX, Reason.LEASE_UNKNOWN,
        Reason.LEASE_NOT_YOURS, None,
    ]  # fmt: skip
    assert node.client.account().pending == 3


def test_nonsense_in_the_right_form_is_acknowledged_for_the_verifier_to_reject(world: World, node: Node) -> None:
    items = node.completions()
    odd = [{"tokens": b"abc"}, {"commitment": b""}, {"run_spec_digest": "x"}, {"version": 9}]
    acks = acknowledged(world, node, *(replace(item, **change) for item, change in zip(items, odd, strict=True)))
    assert [ack.code for ack in acks] == [None] * 4


BAD = {
    "empty body": b"",
    "empty batch": raw_batch(),
    "garbage": bytes(range(256)),
    "json": b'{"completions": []}',
    "nil": b"\xc0",
    "array": b"\x90",
    "endless array": b"\x81\xabcompletions\xdd\xff\xff\xff\xff",
    "endless map": b"\xdf\xff\xff\xff\xff",
    "endless text": b"\x81\xdb\xff\xff\xff\xff",
    "deep": b"\x91" * 100_000,
    "deep in place": b"\x81\xabcompletions" + b"\x91" * 100_000,
    "extension": b"\xc7\xff\x00" + bytes(255),
    "not utf-8": b"\x81\xa4\xff\xfe\xfd\xfc\xc0",
}


@pytest.mark.parametrize("name", BAD)
def test_a_body_that_is_no_batch(world: World, node: Node, name: str) -> None:
    with world.only_counts(Reason.MALFORMED_REQUEST):
        response = world.submit(node.key, BAD[name])
    check_problem(response, Reason.MALFORMED_REQUEST)
    check_signed(world, response)


@pytest.mark.parametrize(
    "change",
    [
        {"reward": 1.0},
        {"index": -1},
        {"index": 2**31},
        {"index": 2**64 - 1},
        {"fencing": 2**53},
        {"version": -1},
        {"index": "0"},
        {"index": 0.0},
        {"index": True},
        {"generate_seconds": float("nan")},
        {"generate_seconds": float("inf")},
        {"generate_seconds": -1.0},
        {"finish_reason": "because"},
        {"tokens": "text"},
        {"tokens": [1, 2]},
        {"engine": "x" * 129},
        {"engine": "a\x00b"},
        {"engine": b"bytes"},
        {"engine": "\u2028"},
        {"lease_id": None},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_field_that_is_wrong_refuses_the_batch(world: World, node: Node, change: dict[str, Any]) -> None:
    items = node.completions()
    body = raw_batch(fields(items[0]), fields(items[1]) | change)
    with world.only_counts(Reason.MALFORMED_REQUEST):
        check_problem(world.submit(node.key, body), Reason.MALFORMED_REQUEST)


def test_a_batch_of_another_shape(world: World, node: Node) -> None:
    item = fields(node.completions()[0])
    absent = {name: value for name, value in item.items() if name != "commitment"}
    batch = raw_batch(item)
    bodies = [
        raw_batch(item, priority=1),
        raw_batch(absent),
        raw_batch(list(item.values())),
        batch + b"\xc0",
        batch[:-1],
        raw_batch(*[item] * (MAX_BATCH_ITEMS + 1)),
    ]
    for body in bodies:
        with world.only_counts(Reason.MALFORMED_REQUEST):
            check_problem(world.submit(node.key, body), Reason.MALFORMED_REQUEST)


def test_the_largest_batch_is_taken(world: World, node: Node) -> None:
    item = node.completions()[0]
    assert len(acknowledged(world, node, *[item] * MAX_BATCH_ITEMS)) == MAX_BATCH_ITEMS


@pytest.mark.parametrize("content_type", ["application/json", "application/msgpack", "", "text/plain; charset=utf-8"])
def test_another_content_type(world: World, node: Node, content_type: str) -> None:
    body = encode_batch(node.completions())
    with world.only_counts(Reason.UNSUPPORTED_MEDIA_TYPE):
        check_problem(world.submit(node.key, body, content_type), Reason.UNSUPPORTED_MEDIA_TYPE)


@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/leases"])
@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip", "identity, gzip"])
def test_a_compressed_body(world: World, node: Node, path: str, coding: str) -> None:
    body = gzip.compress(bytes(1 << 20))
    headers = {"content-type": "application/vnd.farflung.rollouts+msgpack", "content-encoding": coding}
    with world.only_counts(Reason.UNSUPPORTED_MEDIA_TYPE):
        response = world.signed(node.key, "POST", path, body, headers=headers)
    check_problem(response, Reason.UNSUPPORTED_MEDIA_TYPE)


def test_one_small_right_item_keeps_its_body_and_refused_ones_keep_none(world: World, node: Node) -> None:
    items = node.completions()
    large = replace(items[0], lease_id="none", commitment=bytes(1 << 20))
    with world.only_counts(Reason.LEASE_UNKNOWN):
        check_problem(node.submit(large), Reason.LEASE_UNKNOWN)
    before = len(world.snapshot()["store"])
    assert [ack.code for ack in acknowledged(world, node, large, items[0])] == [Reason.LEASE_UNKNOWN, None]
    assert len(world.snapshot()["store"]) == before + 1
