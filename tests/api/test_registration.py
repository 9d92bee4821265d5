"""Who may speak: the run's description, registration, signatures, clocks and nonces."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

import httpx
import pytest

from coordinator.ledger import nodes, tables
from protocol import identity, signatures
from protocol.canonical import canonical_json
from protocol.identity import Key
from protocol.messages import NodeAccount, RunInfo
from protocol.reasons import Reason, Refusal
from tests.api.world import ABOUT, Node, World, check_problem, check_signed

pytestmark = pytest.mark.network

BODY = canonical_json(ABOUT.model_dump(mode="json"))
WEAK = ["00" * 32, "01" + "00" * 31, "ec" + "ff" * 30 + "7f", "ff" * 32]


def register(world: World, key: Key, **options: object) -> httpx.Response:
    return world.signed(key, "POST", "/v1/nodes", BODY, **options)  # type: ignore[arg-type]


def test_the_run_is_signed_by_its_key_and_bound_to_the_question(world: World) -> None:
    response = world.http.get(f"{world.url}/v1/run?ask=1")
    check_signed(world, response)
    info = RunInfo.model_validate_json(response.content, strict=True)
    assert info.run_spec == world.run.spec and info.run_spec_digest == world.run.spec.digest
    assert info.newest == 0 and info.run_key == world.run.key.id
    replayed = signatures.ResponseParts(200, response.headers, httpx.Request("GET", f"{world.url}/v1/run?ask=2"))
    with pytest.raises(Refusal, match="run_key_changed"):
        signatures.verify_response(replayed, response.content, world.run.key.id, world.run.spec.run_id)
    for body, key in ((response.content + b" ", world.run.key.id), (response.content, Key.generate().id)):
        parts = signatures.ResponseParts(200, response.headers, response.request)
        with pytest.raises(Refusal, match="run_key_changed"):
            signatures.verify_response(parts, body, key, world.run.spec.run_id)


def test_a_node_of_the_allowlist_registers_as_often_as_it_likes(world: World, tmp_path: Path) -> None:
    node = world.node(tmp_path)
    first = node.client.account()
    assert first == node.client.register(ABOUT) == NodeAccount(
        node_id=node.key.id, status="active", accepted=0, rejected=0, pending=0, dropped=0, credit=0
    )
    check_signed(world, register(world, node.key))
    with world.run.ledger.read() as tx:
        assert len(tx.execute(tables.nodes.select().where(tables.nodes.c.id == node.key.id)).all()) == 1


def test_a_node_that_is_not_on_the_list_is_refused(world: World) -> None:
    key = world.key()
    with world.only_counts(Reason.NOT_ON_ALLOWLIST):
        response = register(world, key)
    check_problem(response, Reason.NOT_ON_ALLOWLIST)
    check_signed(world, response)
    with world.only_counts(Reason.UNKNOWN_NODE):
        check_problem(world.signed(key, "GET", "/v1/nodes/me"), Reason.UNKNOWN_NODE)


def test_a_banned_node_may_do_nothing(world: World, node: Node) -> None:
    with world.run.ledger.write() as tx:
        tx.execute(tables.allowlist.update().where(tables.allowlist.c.id == node.key.id).values(banned=True))
    calls = [("POST", "/v1/nodes", BODY), ("GET", "/v1/nodes/me", b""), ("GET", "/v1/receipts/1", b"")]
    calls += [("POST", "/v1/heartbeat", b"{}"), ("POST", "/v1/leases", b"{}")]
    for method, path, body in calls:
        with world.only_counts(Reason.NODE_BANNED):
            check_problem(world.signed(node.key, method, path, body), Reason.NODE_BANNED)
    with world.only_counts(Reason.NODE_BANNED):
        check_problem(world.submit(node.key, b"anything"), Reason.NODE_BANNED)


@pytest.mark.parametrize("node_id", WEAK)
def test_a_key_of_small_order_is_refused_although_any_signature_fits(world: World, node_id: str) -> None:
    """With these keys R = identity, S = 0 would verify for every message."""
    with world.run.ledger.write() as tx:
        nodes.allow(tx, node_id, "weak")

    def forge(request: httpx.Request) -> None:
        field = request.headers["signature-input"]
        request.headers["signature-input"] = field.replace(key.id, node_id)
        request.headers["signature"] = "farflung=:AQ" + "A" * 84 + "==:"

    key = world.key()
    with world.only_counts(Reason.WEAK_KEY):
        check_problem(register(world, key, change=forge), Reason.WEAK_KEY)
    with pytest.raises(Refusal, match="weak_key"):
        identity.public_key(node_id)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(ABOUT.model_dump() | {"admin": True}).encode(),
        json.dumps({"software": "x"}).encode(),
        json.dumps(ABOUT.model_dump() | {"device": 5}).encode(),
        json.dumps(ABOUT.model_dump() | {"device": "x" * 129}).encode(),
        json.dumps(ABOUT.model_dump() | {"device": "a\nb"}).encode(),
        json.dumps(ABOUT.model_dump() | {"device": "\ud800"}).encode(),
        b'{"software": "a", "software": "b", "engine": "c", "device": "d"}',
        b"\xef\xbb\xbf" + BODY,
        BODY + b"x",
        BODY[:-1],
        b"[" * 5000 + b"]" * 5000,
        b"null",
        b"",
        b"\xff\xfe",
        b"1e999",
        b"9" * 5000,
    ],
    ids=range(16),
)
def test_a_registration_of_another_form_is_refused(world: World, node: Node, body: bytes) -> None:
    with world.only_counts(Reason.MALFORMED_REQUEST):
        response = world.signed(node.key, "POST", "/v1/nodes", body)
    check_problem(response, Reason.MALFORMED_REQUEST)
    check_signed(world, response)


def test_a_nonce_serves_once(world: World, node: Node, other: Node) -> None:
    nonce = secrets.token_hex(16)
    assert world.signed(node.key, "GET", "/v1/nodes/me", nonce=nonce).status_code == 200
    for method, path, body in (("GET", "/v1/nodes/me", b""), ("POST", "/v1/nodes", BODY)):
        with world.only_counts(Reason.NONCE_REPLAYED):
            check_problem(world.signed(node.key, method, path, body, nonce=nonce), Reason.NONCE_REPLAYED)
    assert world.signed(other.key, "GET", "/v1/nodes/me", nonce=nonce).status_code == 200, "nonces belong to keys"


def test_a_whole_request_cannot_be_replayed(world: World, node: Node) -> None:
    first = register(world, node.key)
    with world.only_counts(Reason.NONCE_REPLAYED):
        check_problem(world.http.send(first.request), Reason.NONCE_REPLAYED)


def test_live_nonces_of_a_key_are_limited(world: World, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MAX_NONCES", 3)
    said = [world.signed(node.key, "GET", "/v1/nodes/me") for _ in range(4)]
    check_problem(said[-1], Reason.NONCE_LIMIT)
    assert int(said[-1].headers["retry-after"]) >= 1
    assert said[0].status_code == 200


@pytest.mark.parametrize("skew", [-120.0, -95.0, 35.0, 3600.0, -1e9, 1e9])
def test_a_clock_that_is_off_is_told_so(world: World, node: Node, skew: float) -> None:
    """The signature lives 60 s and 30 s of difference are forgiven: -90 s and +30 s are the edges."""
    with world.only_counts(Reason.CLOCK_SKEW):
        response = register(world, node.key, now=time.time() + skew)
    assert "server time" in check_problem(response, Reason.CLOCK_SKEW).detail


@pytest.mark.parametrize("skew", [-80.0, -25.0, 25.0])
def test_a_clock_that_is_a_little_off_is_forgiven(world: World, node: Node, skew: float) -> None:
    assert register(world, node.key, now=time.time() + skew).status_code == 200


def _other_path(request: httpx.Request) -> None:
    request.url = request.url.copy_with(path="/v1/relays")


def _other_query(request: httpx.Request) -> None:
    request.url = request.url.copy_with(query=b"a=1")


def _other_host(request: httpx.Request) -> None:
    request.headers["host"] = "other.example"


def _other_digest(request: httpx.Request) -> None:
    request.headers["content-digest"] = "sha-256=:" + "A" * 43 + "=:"


def _other_keyid(request: httpx.Request) -> None:
    head, _, tail = request.headers["signature-input"].partition('keyid="')
    request.headers["signature-input"] = f'{head}keyid="{Key.from_seed(bytes(32)).id}"{tail[64:]}'


def _later(request: httpx.Request) -> None:
    head, _, tail = request.headers["signature-input"].partition("expires=")
    request.headers["signature-input"] = f"{head}expires={int(tail[:10]) + 3600}{tail[10:]}"


def _fewer_components(request: httpx.Request) -> None:
    request.headers["signature-input"] = request.headers["signature-input"].replace('"@path" ', "")


def _two_signatures(request: httpx.Request) -> None:
    for name in ("signature", "signature-input"):
        value = request.headers[name]
        request.headers[name] = f"{value}, {value.replace('farflung=', 'second=', 1)}"


def _garbage_input(request: httpx.Request) -> None:
    request.headers["signature-input"] = 'farflung=((((;;"'


def _garbage_signature(request: httpx.Request) -> None:
    request.headers["signature"] = "farflung=:%%%:"


TAMPERINGS = [
    _other_path, _other_query, _other_host, _other_digest, _other_keyid, _later, _fewer_components, _two_signatures,
    _garbage_input, _garbage_signature,
]  # fmt: skip


@pytest.mark.parametrize("change", TAMPERINGS, ids=lambda change: change.__name__)
def test_a_signature_over_something_else_is_refused(world: World, node: Node, change: object) -> None:
    with world.only_counts(Reason.SIGNATURE_INVALID):
        check_problem(register(world, node.key, change=change), Reason.SIGNATURE_INVALID)


def test_a_signature_over_another_body_is_refused(world: World, node: Node) -> None:
    request = world.http.build_request("POST", f"{world.url}/v1/nodes", content=BODY)
    swapped = canonical_json(ABOUT.model_dump(mode="json") | {"device": "gpu"})
    run_id = world.run.spec.run_id
    signatures.sign_request(request, swapped, node.key, run_id, now=time.time(), nonce=secrets.token_hex(16))
    with world.only_counts(Reason.SIGNATURE_INVALID):
        check_problem(world.http.send(request), Reason.SIGNATURE_INVALID)


def test_a_signature_for_another_run_is_refused(world: World, node: Node) -> None:
    with world.only_counts(Reason.SIGNATURE_INVALID):
        check_problem(register(world, node.key, run_id="another"), Reason.SIGNATURE_INVALID)


@pytest.mark.parametrize("absent", ["signature", "signature-input", "content-digest"])
def test_a_request_without_a_signature_is_refused(world: World, node: Node, absent: str) -> None:
    with world.only_counts(Reason.SIGNATURE_MISSING):
        response = register(world, node.key, change=lambda request: request.headers.pop(absent))
    check_problem(response, Reason.SIGNATURE_MISSING)


@pytest.mark.parametrize("nonce", ["short", "n" * 65])
def test_a_nonce_of_another_length_is_refused(world: World, node: Node, nonce: str) -> None:
    with world.only_counts(Reason.SIGNATURE_INVALID):
        check_problem(register(world, node.key, nonce=nonce), Reason.SIGNATURE_INVALID)


def test_a_heartbeat_is_shown_and_believed_in_nothing(world: World, node: Node) -> None:
    beat = {"state": "waiting", "loaded_versions": [0, 9], "open_leases": 3, "spooled": 1, "tokens_per_second": 1.5}
    response = world.signed(node.key, "POST", "/v1/heartbeat", canonical_json(beat))
    check_signed(world, response)
    assert response.json()["newest"] == 0 and response.json()["drain"] is False
    account = node.client.account()
    assert (account.accepted, account.pending, account.credit) == (0, 0, 0)
    for wrong in ({"state": "root"}, {"open_leases": -1}, {"tokens_per_second": "fast"}, {"loaded_versions": [2**53]}):
        with world.only_counts(Reason.MALFORMED_REQUEST):
            response = world.signed(node.key, "POST", "/v1/heartbeat", canonical_json(beat | wrong))
        check_problem(response, Reason.MALFORMED_REQUEST)
